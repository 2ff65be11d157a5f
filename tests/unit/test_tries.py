"""What a failed call means to whoever asked: once more, there or elsewhere, or not at all."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from specpipe.answers import Started
from specpipe.errors import DeadlineExceededError, InvalidRequestError, RequestCancelledError, WorkerUnavailableError
from specpipe.resume import PAUSE_S, ROUNDS, ResumedAnswer
from specpipe.server import OF_SPECPIPE
from specpipe.tries import Tries

ONE = ("coordinator:1",)
TWO = ("coordinator:1", "coordinator:2")
STARTED = Started(request_id="r", model="m", prompt_tokens=3, seed=1)


def failed(code: grpc.StatusCode, *, is_ours: bool = False, details: str = "") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*OF_SPECPIPE) if is_ours else grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


DROPPED = failed(grpc.StatusCode.CANCELLED)


def test_a_call_that_a_server_drops_as_it_begins_to_end_is_made_again_at_the_only_address() -> None:
    tries, answer = Tries(ONE, 0), ResumedAnswer()
    pauses = [tries.pause_after(DROPPED, answer) for _ in range(2 * ROUNDS - 1)]
    assert pauses[:4] == [0.0, PAUSE_S, 0.0, 2 * PAUSE_S]
    assert tries.index == 0
    with pytest.raises(WorkerUnavailableError, match="no coordinator answers: coordinator:1: it ended the call"):
        tries.pause_after(DROPPED, answer)


def test_an_answer_that_has_begun_ends_with_the_only_coordinator() -> None:
    answer = ResumedAnswer()
    answer.add(STARTED)
    with pytest.raises(WorkerUnavailableError, match="coordinator:1: it ended the call"):
        Tries(ONE, 0).pause_after(DROPPED, answer)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (failed(grpc.StatusCode.UNAVAILABLE, details="connection refused"), WorkerUnavailableError),
        (failed(grpc.StatusCode.UNAVAILABLE, is_ours=True), WorkerUnavailableError),
        (failed(grpc.StatusCode.CANCELLED, is_ours=True), RequestCancelledError),
        (failed(grpc.StatusCode.DEADLINE_EXCEEDED), DeadlineExceededError),
    ],
)
def test_whatever_else_fails_at_the_only_address_is_told_at_once(
    error: grpc.aio.AioRpcError, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        Tries(ONE, 0).pause_after(error, ResumedAnswer())


@pytest.mark.parametrize("error", [DROPPED, failed(grpc.StatusCode.UNAVAILABLE), failed(grpc.StatusCode.INTERNAL)])
def test_with_two_addresses_the_other_one_is_asked_whether_or_not_the_answer_has_begun(
    error: grpc.aio.AioRpcError,
) -> None:
    tries, answer = Tries(TWO, 1), ResumedAnswer()
    answer.add(STARTED)
    assert tries.pause_after(error, answer) == 0.0
    assert tries.index == 0


def test_what_the_question_itself_is_refused_for_is_refused_everywhere() -> None:
    with pytest.raises(InvalidRequestError):
        Tries(TWO, 0).pause_after(failed(grpc.StatusCode.INVALID_ARGUMENT, is_ours=True), ResumedAnswer())
