// Errors of the SDK. Each carries atoll's stable code and whether the same request may be sent again.
import { status as Status, type ServiceError } from "@grpc/grpc-js";

export class AtollError extends Error {
  constructor(
    readonly code: string,
    message: string,
    readonly grpcCode?: number,
    readonly hint: string = "",
  ) {
    super(message);
    this.name = new.target.name;
  }
  /** True when nothing happened and the request may be repeated as it is. */
  get retryable(): boolean {
    return this.code === "unavailable" || this.code === "rate_limited" || this.code === "exhausted";
  }
}

export class InvalidArgument extends AtollError {}
export class NotFound extends AtollError {}
export class FailedPrecondition extends AtollError {}
export class PermissionDenied extends AtollError {}
export class Unauthenticated extends AtollError {}
export class Exhausted extends AtollError {}
export class Unavailable extends AtollError {}
export class Cancelled extends AtollError {}
export class OutcomeUnknown extends AtollError {}
export class Internal extends AtollError {}

type Kind = new (code: string, message: string, grpcCode?: number, hint?: string) => AtollError;

const byStatus: Partial<Record<Status, [Kind, string]>> = {
  [Status.INVALID_ARGUMENT]: [InvalidArgument, "invalid_argument"],
  [Status.NOT_FOUND]: [NotFound, "not_found"],
  [Status.FAILED_PRECONDITION]: [FailedPrecondition, "failed_precondition"],
  [Status.ALREADY_EXISTS]: [FailedPrecondition, "already_exists"],
  [Status.PERMISSION_DENIED]: [PermissionDenied, "permission_denied"],
  [Status.UNAUTHENTICATED]: [Unauthenticated, "unauthenticated"],
  [Status.RESOURCE_EXHAUSTED]: [Exhausted, "exhausted"],
  [Status.UNAVAILABLE]: [Unavailable, "unavailable"],
  [Status.CANCELLED]: [Cancelled, "cancelled"],
  [Status.DEADLINE_EXCEEDED]: [OutcomeUnknown, "outcome_unknown"],
};

/** Turn what grpc-js threw into one of ours; the gateway names its own code in the trailers. */
export function fromGrpc(error: unknown): AtollError {
  if (error instanceof AtollError) return error;
  const e = error as Partial<ServiceError>;
  const [kind, fallback] = byStatus[e.code as Status] ?? [Internal, "internal"];
  const sent = e.metadata?.get("atoll-code")[0];
  const hint = e.metadata?.get("atoll-hint")[0];
  return new kind(sent ? String(sent) : fallback, e.details || e.message || "unknown error", e.code, hint ? String(hint) : "");
}
