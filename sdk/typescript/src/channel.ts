// Where the gateway is, how it is trusted, and who is calling: one gRPC channel for one client.
import { existsSync, readFileSync } from "node:fs";
import { homedir } from "node:os";
import { dirname, join } from "node:path";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import { fromGrpc } from "./errors.js";

export interface ConnectOptions {
  /** `host:port`; default `ATOLL_ENDPOINT`, `K8E_SANDBOX_ENDPOINT`, then the local gateway. */
  endpoint?: string;
  /** API key; default `ATOLL_APIKEY`, then `K8E_SANDBOX_APIKEY`. */
  apiKey?: string;
  /** File with the CA's certificate; default `K8E_SANDBOX_CERT`, then atoll's own. */
  caFile?: string;
}

export type Fields = Record<string, unknown>;

function env(name: string): string | undefined {
  return process.env[`ATOLL_${name}`] || process.env[`K8E_SANDBOX_${name}`] || undefined;
}

function findProto(): string {
  // dist/esm and dist/cjs lie two levels below the package; a checkout has the proto at its top.
  const here = process.env["ATOLL_PROTO_DIR"];
  const starts = [here, ...protoStarts()].filter((p): p is string => Boolean(p));
  for (const start of starts) {
    if (existsSync(join(start, "sandbox/v1/sandbox.proto"))) return start;
  }
  throw new Error("sandbox.proto is missing from the package");
}

function protoStarts(): string[] {
  const entry = new Error().stack?.match(/(?:file:\/\/)?(\/[^\s():]*)\/channel\.[cm]?js/)?.[1];
  const found: string[] = [];
  for (let dir = entry; dir && dir !== dirname(dir); dir = dirname(dir)) found.push(join(dir, "proto"));
  return found;
}

function readCa(options: ConnectOptions): Buffer | null {
  const home = process.env["ATOLL_HOME"] ?? join(homedir(), ".atoll");
  const dir = env("CERT_DIR");
  const candidates = [options.caFile, env("CERT"), dir && join(dir, "ca.crt"), join(home, "tls", "ca.crt")];
  for (const file of candidates) {
    if (file && existsSync(file)) return readFileSync(file);
  }
  return null;
}

export class Channel {
  private readonly client: grpc.Client;
  private readonly methods: Record<string, grpc.MethodDefinition<object, object>>;
  private readonly metadata = new grpc.Metadata();

  constructor(options: ConnectOptions, tenant: string) {
    const endpoint = options.endpoint ?? env("ENDPOINT") ?? "127.0.0.1:50051";
    const definition = loader.loadSync("sandbox/v1/sandbox.proto", {
      includeDirs: [findProto()],
      keepCase: true,
      longs: Number,
      enums: String,
      defaults: true,
      oneofs: true,
    });
    this.methods = definition["sandbox.v1.SandboxService"] as unknown as Record<string, grpc.MethodDefinition<object, object>>;
    // Keys travel over verified TLS only; there is no plaintext mode.
    const credentials = grpc.credentials.createSsl(readCa(options));
    this.client = new grpc.Client(endpoint, credentials, {
      "grpc.max_receive_message_length": 64 << 20,
      "grpc.max_send_message_length": 64 << 20,
    });
    const key = options.apiKey ?? env("APIKEY");
    if (key) this.metadata.set("authorization", `Bearer ${key}`);
    if (tenant) this.metadata.set("x-sandbox-tenant", tenant);
  }

  call<T>(name: string, request: Fields, deadlineMs = 300_000): Promise<T> {
    const m = this.method(name);
    return new Promise((resolve, reject) => {
      this.client.makeUnaryRequest(
        m.path,
        m.requestSerialize,
        m.responseDeserialize,
        request,
        this.metadata,
        { deadline: Date.now() + deadlineMs },
        (error, value) => (error ? reject(fromGrpc(error)) : resolve(value as T)),
      );
    });
  }

  async *stream<T>(name: string, request: Fields): AsyncGenerator<T> {
    const m = this.method(name);
    const call = this.client.makeServerStreamRequest(m.path, m.requestSerialize, m.responseDeserialize, request, this.metadata);
    try {
      for await (const message of call) yield message as T;
    } catch (error) {
      throw fromGrpc(error);
    } finally {
      call.cancel(); // leaving the loop early ends the command
    }
  }

  close(): void {
    this.client.close();
  }

  private method(name: string): grpc.MethodDefinition<object, object> {
    const found = this.methods[name];
    if (!found) throw new Error(`no RPC ${name}`);
    return found;
  }
}
