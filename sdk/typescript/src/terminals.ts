// A terminal in the background of a sandbox: left without ending it, and joined again by its id.
import type { Rest } from "./rest.js";

export interface TerminalOptions {
  rows?: number;
  cols?: number;
  /** Whether the terminal writes back what is typed; default true. */
  echo?: boolean;
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
}

export interface TerminalEnd {
  exitCode: number | null;
  signal: number | null;
}

export class Terminal {
  /** Where its output goes on after what was read. */
  offset = 0;
  /** Bytes before that which were no longer kept. */
  lost = 0;
  /** Set when its output has been read to its end. */
  end: TerminalEnd | undefined;

  constructor(
    private readonly rest: Rest,
    readonly id: string,
  ) {}

  static async open(rest: Rest, command: string | string[], options: TerminalOptions): Promise<Terminal> {
    const { rows = 24, cols = 80, echo = true, ...others } = options;
    const what = typeof command === "string" ? { command } : { argv: command };
    const body = { ...what, ...others, pty: { rows, cols, echo }, background: true, timeout_ms: 0 };
    const made = await rest.call<{ command_id: string }>("POST", "/exec", body);
    return new Terminal(rest, made.command_id);
  }

  static async list(rest: Rest): Promise<Terminal[]> {
    type Command = { command_id: string; pty: boolean; status: string };
    const { commands } = await rest.call<{ commands: Command[] }>("GET", "/commands");
    return commands.filter((one) => one.pty && one.status === "running").map((one) => new Terminal(rest, one.command_id));
  }

  /** Its output from an offset on (-1: from now on). Leaving the loop leaves the terminal running. */
  async *output(offset = this.offset): AsyncGenerator<Uint8Array> {
    for await (const frame of this.rest.frames("GET", `${this.path}/stream?stdout=${offset}&stderr=-1`)) {
      if ("stream" in frame) {
        this.offset += frame.data.length;
        yield frame.data;
      } else if ("result" in frame) {
        const { exit_code, signal } = frame.result as { exit_code: number | null; signal: number | null };
        this.end = { exitCode: exit_code, signal };
      } else {
        this.note(frame.event);
      }
    }
  }

  /** Read on to the end. */
  async wait(): Promise<TerminalEnd> {
    for await (const _ of this.output());
    return this.end ?? { exitCode: null, signal: null };
  }

  /** Type something. */
  async write(data: string | Uint8Array): Promise<void> {
    await this.rest.call("POST", `${this.path}/stdin`, typeof data === "string" ? Buffer.from(data) : data);
  }

  async resize(rows: number, cols: number): Promise<void> {
    await this.rest.call("POST", `${this.path}/resize`, { rows, cols });
  }

  /** Send a signal, by its number, to what runs in front. */
  async signal(number: number): Promise<void> {
    await this.rest.call("POST", `${this.path}/signal`, { signal: number, group: "foreground" });
  }

  /** End it with everything that runs on it. */
  async kill(): Promise<void> {
    await this.rest.call("POST", `${this.path}/kill`, {});
  }

  private note(event: Record<string, unknown>): void {
    const started = event["started"] as { stdout_start?: number } | undefined;
    const gap = event["gap"] as { stream: string; offset: number; bytes: number } | undefined;
    if (started) this.offset = started.stdout_start ?? this.offset;
    if (gap?.stream !== "stdout") return;
    this.lost += gap.bytes;
    this.offset = gap.offset + gap.bytes;
  }

  private get path(): string {
    return `/commands/${encodeURIComponent(this.id)}`;
  }
}
