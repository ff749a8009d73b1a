// The client of the K8E contract: SandboxClient and sandboxRun.
import { randomBytes } from "node:crypto";
import { Channel, type ConnectOptions } from "./channel.js";
import { NotFound, OutcomeUnknown } from "./errors.js";
import { Rest } from "./rest.js";

export interface ExecResult {
  stdout: string;
  stderr: string;
  exitCode: number;
  /** The exact bytes; `stdout` and `stderr` show invalid UTF-8 with replacement characters. */
  stdoutBytes: Uint8Array;
  stderrBytes: Uint8Array;
  /** completed, timed_out, failed or cancelled. */
  status: string;
  truncated: boolean;
  durationMs: number;
  /** The default session before this run was gone. */
  sessionReplaced?: SessionReplaced;
}

/** A default session that is gone: why it ended, and what is lost with it. */
export interface SessionReplaced {
  sessionId: string;
  reason: string;
  lost: string;
}

interface WireSession {
  session_id: string;
  replaced: { session_id: string; reason: string; lost: string } | null;
}

export interface FileEntry {
  path: string;
  modified: number;
  type: string;
  size: number;
}

export interface SessionOptions {
  runtimeClass?: string;
  allowedHosts?: string[];
  tenantId?: string;
  sessionId?: string;
  env?: Record<string, string>;
  image?: string;
  cpus?: number;
  memoryMb?: number;
}

/** Whose rights a call has inside: a name or number, with `:group`. Without it, root's. */
export interface UserOption {
  user?: string;
}

interface WireExec {
  stdout: string;
  stderr: string;
  exit_code: number;
  status: string;
  truncated: boolean;
  duration_ms: number;
  stdout_bytes: Uint8Array;
  stderr_bytes: Uint8Array;
}

export interface OutputEvent {
  stream: "stdout" | "stderr";
  data: Uint8Array;
}

export interface StreamEnd {
  exitCode: number;
  status: string;
}

interface WireChunk {
  chunk: string;
  data: Uint8Array;
  stream: string;
  done: boolean;
  exit_code: number;
  status: string;
}

const SLACK_MS = 15_000;

function result(r: WireExec): ExecResult {
  return {
    stdout: r.stdout,
    stderr: r.stderr,
    exitCode: r.exit_code,
    stdoutBytes: r.stdout_bytes,
    stderrBytes: r.stderr_bytes,
    status: r.status,
    truncated: r.truncated,
    durationMs: r.duration_ms,
  };
}

export class SandboxClient {
  private readonly channel: Channel;
  private session: Promise<string> | undefined;
  private before = "";
  private replaced: SessionReplaced | undefined;

  constructor(
    endpoint?: string | ConnectOptions,
    private readonly tenantId = "",
  ) {
    const options = typeof endpoint === "string" ? { endpoint } : (endpoint ?? {});
    this.channel = new Channel(options, tenantId);
  }

  /** Run code in this client's own session, which is created at the first call. */
  async run(code: string, language = "bash", timeout = 30): Promise<ExecResult> {
    const session = await this.defaultSession();
    let done: ExecResult;
    try {
      done = await this.code(session, code, language, timeout);
    } catch (error) {
      if (!(error instanceof NotFound)) throw error;
      [this.session, this.before] = [undefined, session]; // provably gone: nothing ran
      done = await this.code(await this.defaultSession(), code, language, timeout);
    }
    const replaced = this.replaced;
    this.replaced = undefined;
    return replaced ? { ...done, sessionReplaced: replaced } : done;
  }

  /** Run code of a language in a given session. */
  async code(sessionId: string, code: string, language: string, timeout = 30): Promise<ExecResult> {
    const request = { session_id: sessionId, code, language, timeout };
    return result(await this.channel.call<WireExec>("Exec", request, timeout * 1000 + SLACK_MS));
  }

  async exec(sessionId: string, command: string, timeout = 30, { user = "" }: UserOption = {}): Promise<ExecResult> {
    const request = { session_id: sessionId, command, timeout, user };
    return result(await this.channel.call<WireExec>("Exec", request, timeout * 1000 + SLACK_MS));
  }

  /** The command's output as text, while it runs. Leaving the loop ends the command. */
  async *execStream(sessionId: string, command: string, timeout = 300, as: UserOption = {}): AsyncIterable<string> {
    const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
    for await (const event of this.execEvents(sessionId, command, timeout, as)) {
      if ("data" in event) {
        const text = decoders[event.stream].decode(event.data, { stream: true });
        if (text) yield text;
      }
    }
    const rest = decoders.stdout.decode() + decoders.stderr.decode();
    if (rest) yield rest;
  }

  /** Like execStream, with both streams apart, exact bytes, and the exit code as the last event. */
  async *execEvents(
    sessionId: string,
    command: string,
    timeout = 300,
    { user = "" }: UserOption = {},
  ): AsyncIterable<OutputEvent | StreamEnd> {
    const request = { session_id: sessionId, command, timeout, user };
    for await (const m of this.channel.stream<WireChunk>("ExecStream", request)) {
      if (m.done) yield { exitCode: m.exit_code, status: m.status };
      else if (m.data.length) yield { stream: m.stream === "stderr" ? "stderr" : "stdout", data: m.data };
    }
  }

  async createSession(options: SessionOptions = {}): Promise<string> {
    return (await this.create(options, {})).session_id;
  }

  /** Make or obtain a session. When the answer is lost it is asked for again: the request id makes it the same one. */
  private async create(options: SessionOptions, more: Record<string, unknown>): Promise<WireSession> {
    const request = {
      session_id: options.sessionId ?? "",
      tenant_id: options.tenantId ?? this.tenantId,
      allowed_hosts: options.allowedHosts ?? [],
      runtime_class: options.runtimeClass ?? "",
      env: options.env ?? {},
      image: options.image ?? "",
      cpus: options.cpus ?? 0,
      memory_mb: options.memoryMb ?? 0,
      request_id: randomBytes(16).toString("hex"),
      ...more,
    };
    try {
      return await this.channel.call<WireSession>("CreateSession", request);
    } catch (error) {
      if (!(error instanceof OutcomeUnknown)) throw error;
      await this.channel.recover();
      return this.channel.call<WireSession>("CreateSession", request);
    }
  }

  async destroySession(sessionId: string): Promise<void> {
    await this.channel.call("DestroySession", { session_id: sessionId });
  }

  async writeFile(sessionId: string, path: string, content: string | Uint8Array, as: UserOption = {}): Promise<void> {
    const body = typeof content === "string" ? { content } : { content_bytes: content };
    await this.files("WriteFile", { session_id: sessionId, path, ...body }, as);
  }

  async readFile(sessionId: string, path: string, as: UserOption = {}): Promise<string> {
    return (await this.files<{ content: string }>("ReadFile", { session_id: sessionId, path }, as)).content;
  }

  async readBytes(sessionId: string, path: string, as: UserOption = {}): Promise<Uint8Array> {
    const request = { session_id: sessionId, path };
    return (await this.files<{ content_bytes: Uint8Array }>("ReadFile", request, as)).content_bytes;
  }

  async listFiles(sessionId: string, since = 0, as: UserOption = {}): Promise<FileEntry[]> {
    return (await this.files<{ files: FileEntry[] }>("ListFiles", { session_id: sessionId, since }, as)).files;
  }

  private files<T>(name: string, request: Record<string, unknown>, { user = "" }: UserOption): Promise<T> {
    return this.channel.call<T>(name, request, undefined, user);
  }

  async pipInstall(sessionId: string, packages: string[]): Promise<ExecResult> {
    const request = { session_id: sessionId, packages };
    const r = await this.channel.call<{ output: string; exit_code: number }>("PipInstall", request);
    const bytes = new TextEncoder().encode(r.output);
    return {
      stdout: r.output,
      stderr: "",
      exitCode: r.exit_code,
      stdoutBytes: bytes,
      stderrBytes: new Uint8Array(),
      status: "completed",
      truncated: false,
      durationMs: 0,
    };
  }

  /** The daemon's REST interface for one session. */
  rest(sessionId: string): Rest {
    return new Rest(this.channel, sessionId);
  }

  /** Ends the default session, unless a tenant keeps it, and the connection. */
  async close(): Promise<void> {
    const session = this.session;
    this.session = undefined;
    try {
      if (session && !this.tenantId) await this.destroySession(await session);
    } finally {
      await this.channel.close();
    }
  }

  /** The tenant's own session, which every client of the tenant gets, or one of this client's. */
  private async obtain(): Promise<string> {
    const found = await this.create({}, { obtain: true, before: this.before });
    this.before = "";
    if (found.replaced) {
      this.replaced = { sessionId: found.replaced.session_id, reason: found.replaced.reason, lost: found.replaced.lost };
    }
    return found.session_id;
  }

  private defaultSession(): Promise<string> {
    this.session ??= this.obtain().catch((error: unknown) => {
      this.session = undefined;
      throw error;
    });
    return this.session;
  }
}

/** One snippet in a session of its own, which is gone afterwards. */
export async function sandboxRun(code: string, language = "bash", endpoint?: string | ConnectOptions): Promise<ExecResult> {
  const client = new SandboxClient(endpoint);
  try {
    return await client.run(code, language);
  } finally {
    await client.close();
  }
}
