export * from "./client.js";
export * from "./errors.js";
export { Files, Sandbox, type SandboxOptions } from "./sandbox.js";
export { Shell, type ShellOptions, type ShellResult } from "./shells.js";
export { Terminal, type TerminalEnd, type TerminalOptions } from "./terminals.js";
export type { ConnectOptions } from "./channel.js";
