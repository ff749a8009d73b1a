// Made by scripts/gen_typescript_errors.py from src/atoll/errors.py; not edited by hand.
import { AtollError, type ErrorFacts } from "./error_base.js";

/** The request itself is wrong; sending it again cannot help. */
export class InvalidArgument extends AtollError {}

/** No credential, or one that is wrong, expired or revoked. */
export class Unauthenticated extends AtollError {}

/** The caller is known and may not do this. */
export class PermissionDenied extends AtollError {}

/** No such thing, or it belongs to somebody else: the two answers are the same. */
export class NotFound extends AtollError {}

/** The request clashes with the present state. */
export class Conflict extends AtollError {}

/** The sandbox's own file system refused; `details["errno"]` names why. */
export class FileError extends AtollError {}

/** A limit was reached; it may pass. */
export class Exhausted extends AtollError {}

/** This host, runtime or image cannot do or enforce what was asked. */
export class Unsupported extends AtollError {}

/** An image could not be pulled, verified, unpacked or built. */
export class ImageError extends AtollError {}

/** A deadline of atoll's own passed. A command's timeout is a normal result, never this. */
export class Timeout extends AtollError {}

/** A part is not there right now; nothing was run. */
export class Unavailable extends AtollError {}

/** The caller went away or asked to stop. */
export class Cancelled extends AtollError {}

/** The answer was lost after the work may have begun. Look before doing it again; atoll never repeats it by itself. */
export class OutcomeUnknown extends AtollError {}

/** A bug in atoll. */
export class Internal extends AtollError {}

/** More bytes or entries than are accepted in one request. */
export class TooLarge extends InvalidArgument {}

/** The sandbox has no user or group of this name. */
export class UserNotFound extends InvalidArgument {}

/** A step of an image build ended with an error of its own; the details have its line. */
export class BuildFailed extends InvalidArgument {}

/** The operator's allowlist does not name this image. */
export class ImageNotAllowed extends InvalidArgument {}

/** The sandbox existed and has ended; `details["reason"]` says how. */
export class SandboxGone extends NotFound {}

/** No such file or directory inside the sandbox. */
export class FileNotFound extends NotFound {}

/** The name is taken. */
export class AlreadyExists extends Conflict {}

/** The thing is not in the state this operation needs. */
export class FailedPrecondition extends Conflict {}

/** A directory was needed. */
export class NotADirectory extends FileError {}

/** A file was needed. */
export class IsADirectory extends FileError {}

/** A directory with entries needs `recursive`. */
export class NotEmpty extends FileError {}

/** Permission denied by the sandbox's file system. */
export class FilePermission extends FileError {}

/** Too many requests from this principal. */
export class RateLimited extends Exhausted {}

/** The sandbox's disk, or the host's, is full. */
export class DiskFull extends Exhausted {}

/** The daemon does not answer and could not be started. */
export class DaemonUnreachable extends Unavailable {}

/** The path exists inside the sandbox and may not be replaced. */
export class FileExists extends AlreadyExists {}

export const kinds: Record<string, new (message: string, facts?: ErrorFacts) => AtollError> = {
  invalid_argument: InvalidArgument,
  unauthenticated: Unauthenticated,
  permission_denied: PermissionDenied,
  not_found: NotFound,
  conflict: Conflict,
  file_error: FileError,
  exhausted: Exhausted,
  unsupported: Unsupported,
  image_error: ImageError,
  timeout: Timeout,
  unavailable: Unavailable,
  cancelled: Cancelled,
  outcome_unknown: OutcomeUnknown,
  internal: Internal,
  too_large: TooLarge,
  user_not_found: UserNotFound,
  build_failed: BuildFailed,
  image_not_allowed: ImageNotAllowed,
  sandbox_gone: SandboxGone,
  file_not_found: FileNotFound,
  already_exists: AlreadyExists,
  failed_precondition: FailedPrecondition,
  not_a_directory: NotADirectory,
  is_a_directory: IsADirectory,
  not_empty: NotEmpty,
  file_permission: FilePermission,
  rate_limited: RateLimited,
  disk_full: DiskFull,
  daemon_unreachable: DaemonUnreachable,
  file_exists: FileExists,
};

export const retryOf: Record<string, string> = {
  invalid_argument: "no",
  unauthenticated: "no",
  permission_denied: "no",
  not_found: "no",
  conflict: "no",
  file_error: "no",
  exhausted: "yes",
  unsupported: "no",
  image_error: "no",
  timeout: "no",
  unavailable: "yes",
  cancelled: "no",
  outcome_unknown: "never",
  internal: "no",
  too_large: "no",
  user_not_found: "no",
  build_failed: "no",
  image_not_allowed: "no",
  sandbox_gone: "no",
  file_not_found: "no",
  already_exists: "no",
  failed_precondition: "no",
  not_a_directory: "no",
  is_a_directory: "no",
  not_empty: "no",
  file_permission: "no",
  rate_limited: "yes",
  disk_full: "no",
  daemon_unreachable: "yes",
  file_exists: "no",
};

/** What a status means when the peer did not say. */
export const codeOfStatus: Record<number, string> = {
  1: "cancelled",  // CANCELLED
  3: "invalid_argument",  // INVALID_ARGUMENT
  4: "timeout",  // DEADLINE_EXCEEDED
  5: "not_found",  // NOT_FOUND
  6: "already_exists",  // ALREADY_EXISTS
  7: "permission_denied",  // PERMISSION_DENIED
  8: "exhausted",  // RESOURCE_EXHAUSTED
  9: "failed_precondition",  // FAILED_PRECONDITION
  10: "conflict",  // ABORTED
  11: "invalid_argument",  // OUT_OF_RANGE
  12: "unsupported",  // UNIMPLEMENTED
  13: "internal",  // INTERNAL
  16: "unauthenticated",  // UNAUTHENTICATED
};
