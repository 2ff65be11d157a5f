"""Which coordinator is asked for an answer, and when another one, or the same, is asked once more.

Owns: what a failed call means to whoever asked, the order of addresses. Must not know: channels, what was asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from specpipe.errors import ErrorCode, ModelNotFoundError, SpecpipeError, WorkerUnavailableError
from specpipe.resume import PAUSE_S, Patience, ResumedAnswer
from specpipe.server import error_from_status, is_of_transport


class Tries:
    """Where one answer is asked for, and whether once more."""

    def __init__(self, addresses: Sequence[str], first: int) -> None:
        self.index = first
        """Of the address that is asked now."""
        self._addresses = addresses
        self._patience = Patience(max(2, len(addresses)))
        self._num_tokens = 0  # had before this try
        self._failures: dict[str, SpecpipeError] = {}  # by address, the newest

    def pause_after(self, error: grpc.aio.AioRpcError, answer: ResumedAnswer) -> float:
        """The next one is to be asked, after so many seconds. Raises the error that the caller gets instead."""
        address = self._addresses[self.index]
        own = own_error(error, address)
        may_go_on = self._is_lost(error) if len(self._addresses) > 1 else _is_dropped(error, answer)
        if not may_go_on:
            raise own from error
        if answer.obstacle:
            raise type(own)(f"{own}; {answer.obstacle}") from error
        self._failures[address] = own
        if answer.num_tokens > self._num_tokens:
            self._patience.progress()
        pause_s = self._patience.pause_s()
        if pause_s is None:
            raise self._no_more() from error
        self._num_tokens = answer.num_tokens
        answer.restart()
        self.index = (self.index + 1) % len(self._addresses)
        return max(pause_s, PAUSE_S) if own.code is ErrorCode.ALREADY_EXISTS else pause_s

    def _is_lost(self, error: grpc.aio.AioRpcError) -> bool:
        """A live request with our id, after the first try, is what the first try has left there for a moment."""
        if error.code() is grpc.StatusCode.ALREADY_EXISTS:
            return bool(self._failures)
        is_broken = error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED) and is_of_transport(error)
        return error.code() is grpc.StatusCode.UNAVAILABLE or is_broken

    def _no_more(self) -> SpecpipeError:
        causes = "; ".join(map(str, self._failures.values()))
        return WorkerUnavailableError(f"no coordinator answers: {causes}")


def own_error(error: grpc.aio.AioRpcError, address: str) -> SpecpipeError:
    """The error that the status stands for; where the trouble is on the way, it says who was asked."""
    own = error_from_status(error)
    if is_of_transport(error) or isinstance(own, WorkerUnavailableError):
        return type(own)(f"{address}: {own}")
    return ModelNotFoundError(str(own)) if own.code is ErrorCode.NOT_FOUND else own


def _is_dropped(error: grpc.aio.AioRpcError, answer: ResumedAnswer) -> bool:
    """A server that begins to end drops a call that arrives just then: the next connection leads to its successor.

    Nothing was begun for it, so that nothing speaks against asking once more, whoever answers.
    """
    return error.code() is grpc.StatusCode.CANCELLED and is_of_transport(error) and answer.started is None
