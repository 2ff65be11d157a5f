"""Bytes of every kind of message as earlier versions wrote them: read as they were meant, and written as they were.

`python tests/unit/test_wire_golden.py` writes those that are missing. What is there stays: peers of other minor
versions count on it. A field that is added gets a message of its own here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.codec import event_to_pb, question_from_pb
from specpipe import codec, codec_hello
from specpipe.answers import Chunk, Finished, SpeculationStats, Started, Timing
from specpipe.client import GenerateRequest, event_from_pb, request_to_pb
from specpipe.errors import ErrorCode
from specpipe.reports import Outcome, Report, SessionEvent, SessionEventKind, StepKind, StepRecord
from specpipe.rpc.v1 import generate_pb2, worker_pb2
from specpipe.types import (
    Batch,
    Close,
    Closed,
    Commit,
    Extension,
    Failed,
    FinishReason,
    Heartbeat,
    Hello,
    Mode,
    ModelInfo,
    NeedTokens,
    Open,
    Origin,
    ProcessInfo,
    Proposal,
    RoundStats,
    Rule,
    SamplingParams,
    SpeculationParams,
    StopRules,
)

FOLDER = Path(__file__).parent / "golden" / "wire"
UNKNOWN = b"\xfa\x3f\x05newer"  # field 1023, length-delimited: from a newer minor version
SESSION = 2**40 + 1

MODEL = ModelInfo(
    name="m", fingerprint="f", tokenizer_fingerprint="t", vocab_size=1000, max_context=200, eos_token_ids=(1, 2)
)
HELLO = Hello(
    protocol_version=1,
    minor_version=1,
    incarnation=2**63 + 5,
    model=MODEL,
    num_slots=64,
    max_sessions=8,
    process=ProcessInfo(host="host", pid=77, version="0.1.0"),
)
OPEN = Open(
    session=SESSION,
    request_id="gen-1",
    tokens=(7, 8, 999),
    num_prompt_tokens=2,
    sampling=SamplingParams(temperature=0.5, top_p=0.75, top_k=40, min_p=0.125, seed=2**64 - 1, choice=3),
    stops=StopRules(eos_token_ids=(1, 2), stop_token_ids=(9,), ignore_eos=True, min_length=4, max_length=100),
    speculation=SpeculationParams(mode=Mode.SYNC, rule=Rule.REJECTION, num_speculative_tokens=5, drafter="model"),
    remaining_ms=1500.5,
    priority=-2,
    trace_context="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    adapter="a",
    vocab_size=1000,
    wants_reports=True,
)
EXTENSION = Extension(
    session=SESSION,
    base=3,
    parents=(0, 1, 0),
    tokens=(5, 6, 8),
    confidences=(0.5, 0.25, 0.125),
    is_exhausted=True,
    drafter="model",
    draft_step=12,
    draft_step_ms=2.5,
    draft_share_ms=1.25,
    proposals=(Proposal(parent=1, tokens=(8, 6), probs=(0.25, 0.75), index=1),),
)
STATS = RoundStats(
    **{name: 1 + index for index, name in enumerate(RoundStats.__slots__) if name.startswith("num_")},
    **{name: 0.5 + index for index, name in enumerate(RoundStats.__slots__) if name.endswith("_ms")},
)
COMMIT = Commit(
    session=SESSION,
    round=4,
    base=3,
    tokens=(5, 6),
    origins=(Origin.ACCEPTED, Origin.BONUS),
    next_budget=7,
    finish_reason=FinishReason.STOP,
    verified_draft_steps=(11, 12),
    stats=STATS,
)
STEP = StepRecord(
    kind=StepKind.VERIFY,
    outcome=Outcome.LOOKUP,
    draft_steps=(11, 12),
    rank_ms=(1.5, 1.75),
    **{
        name: 2 + index
        for index, name in enumerate(StepRecord.__slots__)
        if name.startswith(("num_", "batch_")) or name in ("step", "round", "base")
    },
    **{
        name: 0.25 + index
        for index, name in enumerate(StepRecord.__slots__)
        if name.endswith("_ms") and name != "rank_ms"
    },
)
REPORT = Report(
    session=SESSION,
    since_open_ms=99.5,
    steps=(STEP,),
    events=(SessionEvent(kind=SessionEventKind.RESYNC, since_open_ms=3.5, base=3),),
    num_lost=2,
)
BATCHES = {
    "open": Batch(sequence=1, opens=(OPEN,)),
    "extension": Batch(sequence=2, extensions=(EXTENSION,)),
    "commit": Batch(sequence=3, commits=(COMMIT,)),
    "need_tokens": Batch(sequence=4, need_tokens=(NeedTokens(session=SESSION, have=3),)),
    "failed": Batch(
        sequence=5,
        failures=(Failed(session=SESSION, code=ErrorCode.UNAVAILABLE, message="gone", is_retryable=True),),
    ),
    "close": Batch(sequence=6, closes=(Close(session=SESSION, reason="done"),)),
    "closed": Batch(sequence=7, closed=(Closed(session=SESSION, length=5),)),
    "heartbeat": Batch(
        sequence=8,
        heartbeat=Heartbeat(step=9, step_running_ms=1.5, num_sessions=2, num_free_slots=60, is_draining=True),
    ),
    "report": Batch(sequence=9, reports=(REPORT,)),
}
REQUEST = GenerateRequest(
    prompt="def f():",
    request_id="mine",
    model="m",
    temperature=0.5,
    top_p=0.75,
    top_k=40,
    min_p=0.125,
    seed=2**64 - 1,
    max_tokens=20,
    stop=("\n\n",),
    stop_token_ids=(9,),
    ignore_eos=True,
    mode=Mode.PIPELINED,
    rule=Rule.COUPLED,
    num_speculative_tokens=5,
    trace=True,
)
COUNTS: dict[str, Any] = {
    name: 0.5 if name.endswith(("_ms", "_rate", "_length")) else 3 for name in SpeculationStats.__slots__
}
EVENTS = {
    "started": Started(request_id="mine", model="m", prompt_tokens=3, seed=2**64 - 1, rule=Rule.REJECTION),
    "chunk": Chunk(token_ids=(5, 6), text="añ", origins=(Origin.RECOVERED, Origin.PLAIN), round=2, text_lengths=(1, 1)),
    "finished": Finished(
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=3,
        completion_tokens=20,
        timing=Timing(ttft_ms=1.5, tpot_ms=0.5, total_ms=11.5),
        speculation=SpeculationStats(**COUNTS | {"mode": Mode.SYNC, "rule": Rule.COUPLED}),
        cached_prompt_tokens=2,
    ),
}
MESSAGES: dict[str, Any] = {
    "hello": codec_hello.hello_to_pb(HELLO),
    "request": request_to_pb(REQUEST),
    **{name: codec.batch_to_pb(batch) for name, batch in BATCHES.items()},
    **{name: event_to_pb(event) for name, event in EVENTS.items()},
}


def golden(name: str) -> bytes:
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def test_every_message_kept_is_one_that_is_known_here() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(MESSAGES)


@pytest.mark.parametrize("name", list(MESSAGES))
def test_messages_are_written_as_they_were(name: str) -> None:
    assert MESSAGES[name].SerializeToString(deterministic=True) == golden(name)


newer_too = pytest.mark.parametrize("tail", [b"", UNKNOWN], ids=["same", "newer"])
"""A message with fields that we do not know is read as if they were not there."""


@newer_too
@pytest.mark.parametrize("name", list(BATCHES))
def test_batches_are_read_as_they_were_meant(name: str, tail: bytes) -> None:
    batch_pb = worker_pb2.Batch.FromString(golden(name) + tail)
    limits = codec.Limits(vocab_size=1000, max_context=200)
    assert codec.batch_from_pb(batch_pb, limits) == (BATCHES[name], [])


@newer_too
def test_a_hello_is_read_as_it_was_meant(tail: bytes) -> None:
    assert codec_hello.hello_from_pb(worker_pb2.Hello.FromString(golden("hello") + tail)) == HELLO


@newer_too
@pytest.mark.parametrize("name", list(EVENTS))
def test_events_are_read_as_they_were_meant(name: str, tail: bytes) -> None:
    assert event_from_pb(generate_pb2.GenerateResponse.FromString(golden(name) + tail)) == EVENTS[name]


@newer_too
def test_a_request_is_read_as_it_was_meant(tail: bytes) -> None:
    question = question_from_pb(generate_pb2.GenerateRequest.FromString(golden("request") + tail))
    for field in GenerateRequest.__dataclass_fields__:
        assert getattr(question, field) == getattr(REQUEST, field), field


def test_every_batch_kind_has_a_message_and_none_of_its_fields_is_left_at_nothing() -> None:
    """Else a field could change its number unseen."""
    kinds = {field.name for name in BATCHES for field, _ in MESSAGES[name].ListFields()}
    assert kinds == {field.name for field in worker_pb2.Batch.DESCRIPTOR.fields}
    for name, message in MESSAGES.items():
        assert list(unset_fields(message)) == [], name


def unset_fields(message: Any) -> Any:
    """Of the messages inside it; a batch and a oneof have one thing each."""
    is_outermost = isinstance(message, worker_pb2.Batch | generate_pb2.GenerateResponse | generate_pb2.GenerateRequest)
    present = {field.name for field, _ in message.ListFields()}
    if not is_outermost:
        yield from (
            f"{message.DESCRIPTOR.name}.{name}"
            for name in {field.name for field in message.DESCRIPTOR.fields} - present
        )
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else [value]:
                yield from unset_fields(part)


if __name__ == "__main__":
    for kind, written in MESSAGES.items():
        path = FOLDER / f"{kind}.hex"
        if not path.exists():
            path.write_text(written.SerializeToString(deterministic=True).hex() + "\n")
