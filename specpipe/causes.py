"""Which one of the errors of a TaskGroup counts.

Owns: that choice, and that nothing outlives it. Must not know: what failed.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from specpipe.errors import SpecpipeError


def cause_of(error: BaseException) -> BaseException:
    """The one error that counts in a (nested) exception group: the first of ours, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [cause_of(part) for part in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, SpecpipeError)), causes[0])


class one_cause:  # noqa: N801 - used like a function
    """`with one_cause():` around a TaskGroup: of what it raises only the one error that counts comes out.

    It comes out free of reference cycles. A group's error and its cancellation are in some (CPython 3.11, 3.12), and
    what their frames hold, gRPC calls with their file descriptors among it, would live until those are collected.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            error.__traceback__ = None
        if not isinstance(error, BaseExceptionGroup):
            return
        cause = cause_of(error)
        try:
            raise cause from None
        finally:
            error.__traceback__ = cause.__context__ = None
            del cause, error, trace
