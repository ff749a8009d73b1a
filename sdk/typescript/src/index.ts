export * from "./client.js";
export * from "./errors.js";
export { Files, Sandbox, type SandboxOptions } from "./sandbox.js";
export type { ConnectOptions } from "./channel.js";
