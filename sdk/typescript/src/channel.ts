// Where the gateway is, how it is trusted, and who is calling: one gRPC channel for one client.
import { existsSync, readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import type { RequestOptions } from "node:https";
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";
import { fromGrpc } from "./errors.js";
import { ensureDaemon, homeDirectory, localTarget } from "./local_daemon.js";

export interface ConnectOptions {
  /** `host:port`, or `unix:/path`; default `ATOLL_ENDPOINT`, `K8E_SANDBOX_ENDPOINT`, then the local daemon. */
  endpoint?: string;
  /** API key; default `ATOLL_APIKEY`, then `K8E_SANDBOX_APIKEY`. */
  apiKey?: string;
  /** File with the CA's certificate; default `K8E_SANDBOX_CERT`, then atoll's own. */
  caFile?: string;
}

/** What a request to the daemon's REST interface needs. */
export interface RestTarget {
  where: string;
  options: RequestOptions;
  secure: boolean;
}

export type Fields = Record<string, unknown>;
type Methods = Record<string, grpc.MethodDefinition<object, object>>;

const SERVER_CAS = [
  "/var/lib/k8e/server/tls/sandbox-ca.crt",
  "/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
  "/etc/k8e/tls/serving-kube-apiserver.crt",
];

function env(name: string): string | undefined {
  return process.env[`ATOLL_${name}`] || process.env[`K8E_SANDBOX_${name}`] || undefined;
}

function findProto(): string {
  const named = process.env["ATOLL_PROTO_DIR"];
  const places = named ? [named] : [];
  // The package has the proto two levels above dist/esm and dist/cjs, a checkout has it at its top.
  for (let dir = ownDirectory(); dir !== dirname(dir); dir = dirname(dir)) places.push(join(dir, "proto"));
  const found = places.find((place) => existsSync(join(place, "sandbox/v1/sandbox.proto")));
  if (!found) throw new Error(`sandbox.proto is in none of ${places.join(", ")}; name its directory in ATOLL_PROTO_DIR`);
  return found;
}

/** Return the directory of this file: built as either kind of module, or run from its source. */
function ownDirectory(): string {
  if (typeof __dirname === "string") return __dirname;
  const line = new Error().stack?.match(/(file:\/\/\/[^\s()]*|\/[^():\n]*)\/channel\.[cm]?[jt]s/)?.[1];
  if (!line) return process.cwd();
  return line.startsWith("file:") ? fileURLToPath(line) : line;
}

function readCa(options: ConnectOptions, loopback: boolean): Buffer | null {
  const named = options.caFile ?? env("CERT");
  if (named) return readFileSync(named);
  const directory = env("CERT_DIR") ?? join(homeDirectory(), "sandbox");
  const own = loopback ? [join(homeDirectory(), "tls", "sandbox-ca.crt")] : [];
  const places = [...own, join(directory, "ca.crt"), ...(loopback ? SERVER_CAS : [])];
  const found = places.find((place) => existsSync(place));
  return found ? readFileSync(found) : null;
}

function isLoopback(endpoint: string): boolean {
  return /^(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?$/i.test(endpoint);
}

export class Channel {
  private readonly methods: Methods;
  private readonly metadata = new grpc.Metadata();
  private readonly where: string;
  private readonly local: boolean;
  private opened: Promise<grpc.Client> | undefined;

  constructor(
    private readonly options: ConnectOptions,
    tenant: string,
  ) {
    const wanted = options.endpoint ?? env("ENDPOINT");
    this.local = !wanted;
    this.where = wanted?.replace(/^https:\/\//, "").replace(/\/$/, "") ?? localTarget();
    if (this.where.startsWith("http://")) throw new Error(`${this.where}: the gateway is only reached over TLS`);
    const definition = loader.loadSync("sandbox/v1/sandbox.proto", {
      includeDirs: [findProto()],
      keepCase: true,
      longs: Number,
      enums: String,
      defaults: true,
      oneofs: true,
    });
    this.methods = definition["sandbox.v1.SandboxService"] as unknown as Methods;
    const key = options.apiKey ?? env("APIKEY");
    if (key) this.metadata.set("authorization", `Bearer ${key}`);
    if (tenant) this.metadata.set("x-sandbox-tenant", tenant);
  }

  async call<T>(name: string, request: Fields, deadlineMs = 300_000, user = ""): Promise<T> {
    const m = this.method(name);
    const metadata = this.metadata.clone();
    if (user) metadata.set("x-sandbox-user", user);
    const client = await this.open();
    return new Promise((resolve, reject) => {
      client.makeUnaryRequest(
        m.path,
        m.requestSerialize,
        m.responseDeserialize,
        request,
        metadata,
        { deadline: Date.now() + deadlineMs },
        (error, value) => (error ? reject(fromGrpc(error, this.where)) : resolve(value as T)),
      );
    });
  }

  async *stream<T>(name: string, request: Fields): AsyncGenerator<T> {
    const m = this.method(name);
    const client = await this.open();
    const call = client.makeServerStreamRequest(m.path, m.requestSerialize, m.responseDeserialize, request, this.metadata);
    try {
      for await (const message of call) yield message as T;
    } catch (error) {
      throw fromGrpc(error, this.where);
    } finally {
      call.cancel(); // leaving the loop early ends the command
    }
  }

  /** Start the local daemon again if it is gone, and connect anew. */
  async recover(): Promise<void> {
    await this.close();
    await this.open();
  }

  async close(): Promise<void> {
    const opened = this.opened;
    this.opened = undefined;
    (await opened?.catch(() => undefined))?.close();
  }

  /** The REST interface of the same daemon: its other socket, or the same TLS port. */
  async rest(): Promise<RestTarget> {
    if (this.local) await ensureDaemon();
    const key = this.options.apiKey ?? env("APIKEY");
    const headers: Record<string, string> = key ? { authorization: `Bearer ${key}` } : {};
    if (this.where.startsWith("unix:")) {
      const socketPath = this.where.slice("unix:".length).replace(/grpc\.sock$/, "daemon.sock");
      return { where: this.where, secure: false, options: { socketPath, headers, host: "localhost" } };
    }
    const url = new URL(`https://${this.where}`);
    const loopback = isLoopback(this.where);
    const options: RequestOptions = { host: url.hostname.replace(/^\[|\]$/g, ""), port: url.port || 443, headers };
    if (loopback) options.servername = "localhost";
    const ca = readCa(this.options, loopback);
    if (ca) options.ca = ca;
    return { where: this.where, secure: true, options };
  }

  private open(): Promise<grpc.Client> {
    this.opened ??= this.connect().catch((error: unknown) => {
      this.opened = undefined;
      throw error;
    });
    return this.opened;
  }

  private async connect(): Promise<grpc.Client> {
    if (this.local) await ensureDaemon();
    const loopback = isLoopback(this.where);
    const options: grpc.ClientOptions = {
      "grpc.max_receive_message_length": 64 << 20,
      "grpc.max_send_message_length": 64 << 20,
      "grpc.enable_retries": 0,
    };
    // On loopback there is nobody in between, and servers seldom have that name in their certificate.
    if (loopback) options["grpc.ssl_target_name_override"] = "localhost";
    // Over TCP keys travel over verified TLS only. The socket is one that only this user can open.
    const credentials = this.where.startsWith("unix:")
      ? grpc.credentials.createInsecure()
      : grpc.credentials.createSsl(readCa(this.options, loopback));
    return new grpc.Client(this.where, credentials, options);
  }

  private method(name: string): grpc.MethodDefinition<object, object> {
    const found = this.methods[name];
    if (!found) throw new Error(`no RPC ${name}`);
    return found;
  }
}
