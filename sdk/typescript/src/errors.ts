// Errors of the SDK: what a failed call stands for. The classes and codes are the server's own table.
import { status as Status, type ServiceError } from "@grpc/grpc-js";
import { AtollError, type ErrorFacts } from "./error_base.js";
import { codeOfStatus, DaemonUnreachable, Internal, kinds, OutcomeUnknown, retryOf } from "./error_table.js";

export * from "./error_base.js";
export * from "./error_table.js";

const WIRE = "atoll-error-bin";
const NEVER_CONNECTED = /no connection established|ECONNREFUSED|ENOENT|EACCES|name resolution|handshake/i;
const LISTEN =
  "start a gateway there with `atoll serve`; without an endpoint the local daemon is used, and started when it does not run";

/** Return the error that a failed call stands for; the gateway sends its own in the trailers. */
export function fromGrpc(error: unknown, where = "the gateway"): AtollError {
  if (error instanceof AtollError) return error;
  const failure = error as Partial<ServiceError>;
  const sent = wireOf(failure);
  if (sent) return made(sent.code ?? "internal", sent.message ?? "unknown error", { ...sent, grpcCode: failure.code });
  const text = failure.details || failure.message || "unknown error";
  const grpcCode = failure.code;
  if (grpcCode === Status.UNAVAILABLE) {
    if (NEVER_CONNECTED.test(text)) {
      return new DaemonUnreachable(`${where} cannot be reached: ${text}`, {
        code: "daemon_unreachable",
        retry: "yes",
        hint: LISTEN,
        grpcCode,
      });
    }
    return lost(text, grpcCode);
  }
  if (grpcCode === Status.DEADLINE_EXCEEDED || grpcCode === Status.UNKNOWN) return lost(text, grpcCode);
  return made(codeOfStatus[grpcCode ?? -1] ?? "internal", text, { grpcCode });
}

/** Return the error that the body of a REST answer, or an error frame, stands for. */
export function fromWire(body: unknown, fallback = "internal"): AtollError {
  const outer = (body ?? {}) as { error?: unknown };
  const sent = (outer.error ?? body ?? {}) as ErrorFacts & { message?: string };
  return made(sent.code ?? fallback, sent.message ?? "unknown error", sent);
}

/** Return the error of a request that got no answer. Nothing happened when no connection was made. */
export function fromSocket(error: Error, where: string): AtollError {
  if (!NEVER_CONNECTED.test(error.message)) return lost(error.message, Status.UNAVAILABLE);
  const facts = { code: "daemon_unreachable", retry: "yes", hint: LISTEN };
  return new DaemonUnreachable(`${where} cannot be reached: ${error.message}`, facts);
}

function made(code: string, message: string, facts: ErrorFacts): AtollError {
  const kind = kinds[code] ?? Internal;
  return new kind(message, { ...facts, code, retry: facts.retry ?? retryOf[code] ?? "no" });
}

function lost(text: string, grpcCode: number): AtollError {
  return new OutcomeUnknown(`the answer was lost (${text}); the work may have been done`, {
    code: "outcome_unknown",
    retry: "never",
    grpcCode,
  });
}

function wireOf(failure: Partial<ServiceError>): (ErrorFacts & { message?: string }) | undefined {
  const packed = failure.metadata?.get(WIRE)[0];
  if (!packed) return undefined;
  try {
    return JSON.parse(packed.toString()) as ErrorFacts & { message?: string };
  } catch {
    return undefined;
  }
}
