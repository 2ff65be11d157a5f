"""One error tree and one table between it and gRPC status codes.

Owns: every error that crosses a module or a wire. Must not know: grpc (the table holds status *names*).
The table is used forwards by the server interceptor and backwards by clients, so that callers see the same tree in
process and over the wire. Messages say what was wrong, where, and what to do.
"""

from __future__ import annotations

import enum
import logging

logger = logging.getLogger(__name__)


class ErrorCode(enum.Enum):
    """Names of gRPC status codes that specpipe uses."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class SpecpipeError(Exception):
    """Root of all errors that specpipe raises on purpose."""

    code: ErrorCode = ErrorCode.INTERNAL
    is_retryable: bool = False


class InvalidRequestError(SpecpipeError):
    """The caller asked for something that can never work; asking again will not help."""

    code = ErrorCode.INVALID_ARGUMENT


class ConfigError(InvalidRequestError):
    """A flag, folder or file given at start is wrong."""


class ModelNotFoundError(SpecpipeError):
    """The service does not serve the model that was named."""

    code = ErrorCode.NOT_FOUND


class SessionNotFoundError(SpecpipeError):
    """The session is not open on this worker."""

    code = ErrorCode.NOT_FOUND


class DuplicateRequestError(SpecpipeError):
    """A live request has this request id."""

    code = ErrorCode.ALREADY_EXISTS


class TraceNotFoundError(SpecpipeError):
    """Nothing was kept of what was done for this request."""

    code = ErrorCode.NOT_FOUND


class ModelMismatchError(SpecpipeError):
    """Draft and target, or two workers of one pool, do not fit together."""

    code = ErrorCode.FAILED_PRECONDITION


class UnsupportedModelError(SpecpipeError):
    """The engine cannot serve this model; the message says why."""

    code = ErrorCode.FAILED_PRECONDITION


class CapacityError(SpecpipeError):
    """No room now (slots, sessions, queue); the same request may succeed later."""

    code = ErrorCode.RESOURCE_EXHAUSTED
    is_retryable = True


class WorkerUnavailableError(SpecpipeError):
    """No worker can answer, or the one that did is gone."""

    code = ErrorCode.UNAVAILABLE
    is_retryable = True


class DeadlineExceededError(SpecpipeError):
    """The request's time ran out."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelledError(SpecpipeError):
    """The client left, or the service ended the request for it."""

    code = ErrorCode.CANCELLED


class InvariantError(SpecpipeError):
    """Specpipe contradicted itself. Carries the session's story so that the report is enough to find out why."""

    code = ErrorCode.INTERNAL

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        super().__init__(message if not story else message + "; story: " + " > ".join(story))
        self.story = story


def own_error(error: Exception, doing: str) -> SpecpipeError:
    """`error` if it is one of ours; else one that says what was tried, and the log has the rest."""
    if isinstance(error, SpecpipeError):
        return error
    logger.error("%s: a fault of specpipe", doing, exc_info=error)
    return SpecpipeError(f"{doing}: internal error; the worker's log has the details")


ERROR_BY_CODE: dict[ErrorCode, type[SpecpipeError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidRequestError,
    ErrorCode.NOT_FOUND: SessionNotFoundError,
    ErrorCode.ALREADY_EXISTS: DuplicateRequestError,
    ErrorCode.FAILED_PRECONDITION: ModelMismatchError,
    ErrorCode.RESOURCE_EXHAUSTED: CapacityError,
    ErrorCode.UNAVAILABLE: WorkerUnavailableError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorCode.CANCELLED: RequestCancelledError,
    ErrorCode.INTERNAL: SpecpipeError,
}
"""Backwards: what a client raises for a status it received."""
