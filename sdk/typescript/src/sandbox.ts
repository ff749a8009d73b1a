// One sandbox as an object, like the Python SDK's Sandbox.
import type { ConnectOptions } from "./channel.js";
import { SandboxClient, type ExecResult, type FileEntry, type OutputEvent, type SessionOptions, type StreamEnd } from "./client.js";
import { Shell, type ShellOptions } from "./shells.js";
import { Terminal, type TerminalOptions } from "./terminals.js";

export interface SandboxOptions extends SessionOptions, ConnectOptions {}

export class Files {
  constructor(
    private readonly client: SandboxClient,
    private readonly id: string,
  ) {}
  read(path: string): Promise<Uint8Array> {
    return this.client.readBytes(this.id, path);
  }
  readText(path: string): Promise<string> {
    return this.client.readFile(this.id, path);
  }
  write(path: string, content: string | Uint8Array): Promise<void> {
    return this.client.writeFile(this.id, path, content);
  }
  list(since = 0): Promise<FileEntry[]> {
    return this.client.listFiles(this.id, since);
  }
}

export class Sandbox {
  readonly files: Files;

  private constructor(
    private readonly client: SandboxClient,
    readonly id: string,
  ) {
    this.files = new Files(client, id);
  }

  static async create(options: SandboxOptions = {}): Promise<Sandbox> {
    const client = new SandboxClient(options, options.tenantId ?? "");
    try {
      return new Sandbox(client, await client.createSession(options));
    } catch (error) {
      await client.close();
      throw error;
    }
  }

  /** An existing sandbox by its id. */
  static connect(id: string, options: ConnectOptions = {}): Sandbox {
    return new Sandbox(new SandboxClient(options), id);
  }

  run(code: string, language = "python", timeout = 30): Promise<ExecResult> {
    return this.client.code(this.id, code, language, timeout);
  }
  exec(command: string, timeout = 30): Promise<ExecResult> {
    return this.client.exec(this.id, command, timeout);
  }
  stream(command: string, timeout = 300): AsyncIterable<OutputEvent | StreamEnd> {
    return this.client.execEvents(this.id, command, timeout);
  }
  /** Open a session in bash, python or node: directory, environment and names stay from command to command. */
  shell(language = "bash", options: ShellOptions = {}): Promise<Shell> {
    return Shell.open(this.client.rest(this.id), language, options);
  }
  /** The sessions that are open; each can be used, whoever opened it. */
  shells(): Promise<Shell[]> {
    return Shell.list(this.client.rest(this.id));
  }
  /** A command on a terminal, in the background: it goes on without this program. */
  terminal(command: string | string[] = ["bash", "-l"], options: TerminalOptions = {}): Promise<Terminal> {
    return Terminal.open(this.client.rest(this.id), command, options);
  }
  /** The terminal with this id; read its output with `output(offset)`. */
  joinTerminal(id: string): Terminal {
    return new Terminal(this.client.rest(this.id), id);
  }
  /** The terminals that run, whoever opened them. */
  terminals(): Promise<Terminal[]> {
    return Terminal.list(this.client.rest(this.id));
  }
  pipInstall(...packages: string[]): Promise<ExecResult> {
    return this.client.pipInstall(this.id, packages);
  }
  async destroy(): Promise<void> {
    try {
      await this.client.destroySession(this.id);
    } finally {
      await this.client.close();
    }
  }
  /** Leave the sandbox running and end only this connection. */
  disconnect(): Promise<void> {
    return this.client.close();
  }
  async [Symbol.asyncDispose](): Promise<void> {
    await this.destroy();
  }
}
