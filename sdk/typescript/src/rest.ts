// REST of the daemon: shells and terminals, for which K8E's gRPC service has no words.
import { request as plain, type IncomingMessage } from "node:http";
import { request as secure } from "node:https";
import type { Channel, Fields } from "./channel.js";
import { fromSocket, fromWire, OutcomeUnknown } from "./errors.js";

const FRAMES = "application/x-atoll-frames";
// A session's id, or a sub-agent's, ends with the sandbox's own; any other word is a name.
const OWN_ID = /^(?:sess-)?(?:[a-z0-9]{20}-sub-)?([a-z0-9]{20})$/;
const enum Kind {
  Stdout = 1,
  Stderr = 2,
  Event = 3,
  Result = 4,
  Error = 5,
}

export type Frame =
  | { stream: "stdout" | "stderr"; data: Uint8Array }
  | { event: Record<string, unknown> }
  | { result: Record<string, unknown> };

export class Rest {
  private readonly prefix: string;

  constructor(
    private readonly channel: Channel,
    sessionId: string,
  ) {
    this.prefix = `/v1/sandboxes/${encodeURIComponent(OWN_ID.exec(sessionId)?.[1] ?? sessionId)}`;
  }

  /** One request with a JSON answer. */
  async call<T>(method: string, path: string, body?: Fields | Uint8Array): Promise<T> {
    const answer = await this.send(method, path, body);
    const pieces: Uint8Array[] = [];
    try {
      for await (const piece of answer) pieces.push(piece as Uint8Array);
    } catch (error) {
      throw fromSocket(error as Error, "the gateway");
    }
    return parsed(Buffer.concat(pieces)) as T;
  }

  /** A stream of frames, ended by its result. Leaving the loop closes the connection. */
  async *frames(method: string, path: string, body?: Fields): AsyncGenerator<Frame> {
    const answer = await this.send(method, path, body, FRAMES);
    let kept = Buffer.alloc(0);
    try {
      for await (const piece of answer) {
        kept = Buffer.concat([kept, piece as Buffer]);
        while (kept.length >= 5 && kept.length >= 5 + kept.readUInt32BE(1)) {
          const end = 5 + kept.readUInt32BE(1);
          const frame = decode(kept[0] ?? 0, kept.subarray(5, end));
          kept = kept.subarray(end);
          if (frame) yield frame;
          if (frame && "result" in frame) return;
        }
      }
    } catch (error) {
      throw error instanceof Error && "syscall" in error ? fromSocket(error, "the gateway") : error;
    } finally {
      answer.destroy();
    }
    throw new OutcomeUnknown("the answer was lost; the work may have been done", { code: "outcome_unknown", retry: "never" });
  }

  private async send(method: string, path: string, body?: Fields | Uint8Array, accept?: string): Promise<IncomingMessage> {
    const target = await this.channel.rest();
    const raw = body instanceof Uint8Array;
    const data = body === undefined ? undefined : raw ? body : Buffer.from(JSON.stringify(body));
    const headers: Record<string, string | number> = { ...(target.options.headers as Record<string, string>) };
    if (data) headers["content-type"] = raw ? "application/octet-stream" : "application/json";
    if (data) headers["content-length"] = data.length;
    if (accept) headers["accept"] = accept;
    const options = { ...target.options, method, path: this.prefix + path, headers, agent: false as const };
    const answer = await new Promise<IncomingMessage>((resolve, reject) => {
      const request = (target.secure ? secure : plain)(options, resolve);
      request.on("error", (error) => reject(fromSocket(error, target.where)));
      request.end(data);
    });
    if ((answer.statusCode ?? 500) < 400) return answer;
    const pieces: Uint8Array[] = [];
    for await (const piece of answer) pieces.push(piece as Uint8Array);
    throw fromWire(parsed(Buffer.concat(pieces)));
  }
}

function parsed(data: Buffer): unknown {
  try {
    return data.length ? JSON.parse(data.toString()) : {};
  } catch {
    return { error: { code: "internal", message: "the answer is not JSON" } };
  }
}

function decode(kind: number, payload: Buffer): Frame | undefined {
  if (kind === Kind.Stdout || kind === Kind.Stderr) {
    return { stream: kind === Kind.Stdout ? "stdout" : "stderr", data: new Uint8Array(payload) };
  }
  if (kind === Kind.Error) throw fromWire(parsed(payload));
  const value = parsed(payload) as Record<string, unknown>;
  if (kind === Kind.Result) return { result: value };
  return kind === Kind.Event ? { event: value } : undefined;
}
