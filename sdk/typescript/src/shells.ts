// A shell session: directory, environment and names stay from command to command.
import { randomBytes } from "node:crypto";
import { NotFound, OutcomeUnknown } from "./errors.js";
import type { Rest } from "./rest.js";

export interface ShellOptions {
  cwd?: string;
  env?: Record<string, string>;
  /** Name or number of the user inside; default root. */
  user?: string;
}

export interface ShellResult {
  commandId: string;
  stdout: string;
  stderr: string;
  exitCode: number | null;
  timedOut: boolean;
  truncated: boolean;
  /** The session ended with this command, as after `exit`. */
  shellEnded: boolean;
}

interface WireResult {
  command_id: string;
  stdout: string;
  stderr: string;
  exit_code: number | null;
  timed_out: boolean;
  truncated: boolean;
  shell_ended: boolean;
}

export class Shell {
  private constructor(
    private readonly rest: Rest,
    readonly id: string,
    readonly language: string,
  ) {}

  static async open(rest: Rest, language: string, options: ShellOptions): Promise<Shell> {
    const made = await rest.call<{ shell_id: string }>("POST", "/shells", { language, ...options });
    return new Shell(rest, made.shell_id, language);
  }

  static async list(rest: Rest): Promise<Shell[]> {
    const found = await rest.call<{ shells: { shell_id: string; language: string }[] }>("GET", "/shells");
    return found.shells.map((one) => new Shell(rest, one.shell_id, one.language));
  }

  /** Run a command and wait, at most so many seconds. It goes on when the connection is lost, and is not started twice. */
  async run(command: string, options: { stdin?: string; timeout?: number } = {}): Promise<ShellResult> {
    const id = randomBytes(12).toString("hex");
    const body: Record<string, unknown> = { command, id, timeout_ms: Math.round((options.timeout ?? 30) * 1000) };
    if (options.stdin !== undefined) body["stdin"] = options.stdin;
    const ask = (): Promise<WireResult> => this.rest.call<WireResult>("POST", `${this.path}/run`, body);
    const r = await ask().catch((error: unknown) => {
      if (error instanceof OutcomeUnknown) return ask(); // the same id: the first run is waited for
      throw error;
    });
    return {
      commandId: r.command_id,
      stdout: r.stdout,
      stderr: r.stderr,
      exitCode: r.exit_code,
      timedOut: r.timed_out,
      truncated: r.truncated,
      shellEnded: r.shell_ended,
    };
  }

  /** SIGINT to what runs in it; the session lives. */
  async interrupt(): Promise<void> {
    await this.rest.call("POST", `${this.path}/interrupt`, {});
  }

  /** End it with everything it started. Doing so twice is harmless. */
  async close(): Promise<void> {
    try {
      await this.rest.call("DELETE", this.path);
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  private get path(): string {
    return `/shells/${encodeURIComponent(this.id)}`;
  }
}
