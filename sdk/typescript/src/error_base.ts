// The base of every error of the SDK.

/** What the server says of an error beside its message. */
export interface ErrorFacts {
  code?: string;
  /** `yes`: nothing happened, the request may be repeated. `never`: it may have happened. */
  retry?: string;
  /** What to do about it. */
  hint?: string;
  details?: Record<string, unknown>;
  grpcCode?: number | undefined;
}

export class AtollError extends Error {
  readonly code: string;
  readonly retry: string;
  readonly hint: string;
  readonly details: Record<string, unknown>;
  readonly grpcCode: number | undefined;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(facts.hint ? `${message} (${facts.hint})` : message);
    this.name = new.target.name;
    this.code = facts.code ?? "internal";
    this.retry = facts.retry ?? "no";
    this.hint = facts.hint ?? "";
    this.details = facts.details ?? {};
    this.grpcCode = facts.grpcCode;
  }

  /** True when nothing happened and the request may be repeated as it is. */
  get retryable(): boolean {
    return this.retry === "yes";
  }
}
