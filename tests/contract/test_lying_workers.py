"""Workers that lie: a draft worker changes no answer whatever it says; a target worker ends requests with one clear
error, and takes nobody else with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from coordinator_cluster import Cluster, Worker, ask, cluster, draft_model, plain, target_model
from lying_worker import LyingWorker
from waiting import wait_until

from coordinator.events import Kind
from specpipe.answers import Finished
from specpipe.client import Answer
from specpipe.errors import DeadlineExceededError, SpecpipeError
from specpipe.rpc.v1 import worker_pb2
from specpipe.types import Mode

Pb = worker_pb2
MAX_TOLD = 3
MAX32, MAX64 = 2**32 - 1, 2**64 - 1
NAN, INF = float("nan"), float("inf")


def extension(session: int, base: int, **fields: Any) -> Pb.Extension:
    return Pb.Extension(
        **{"session": session, "base": base, "parents": [0], "tokens": [1], "confidences": [0.5]} | fields
    )


def unknown_field(size: int) -> bytes:
    """A field that no version knows, of `size` bytes: a receiver keeps it, and whoever passes a message on sends it."""
    tag, length = (1000 << 3 | 2), size
    varint = b""
    for number in (tag, length):
        while number >= 0x80:
            varint += bytes([number & 0x7F | 0x80])
            number >>= 7
        varint += bytes([number])
    return varint + bytes(size)


def heavy(session: int, base: int) -> Pb.Extension:
    return Pb.Extension.FromString(extension(session, base).SerializeToString() + unknown_field(6 * 2**20))


def many_proposals(session: int, base: int, count: int, size: int) -> Pb.Extension:
    proposals = [Pb.Proposal(parent=0, tokens=range(size), probs=[1 / size] * size, index=0) for _ in range(count)]
    return extension(session, base, proposals=proposals)


def chain(session: int, base: int, size: int, **fields: Any) -> Pb.Extension:
    return extension(
        session, base, **{"parents": range(size), "tokens": [1] * size, "confidences": [0.5] * size} | fields
    )


class Heard:
    """What a liar knows of its sessions."""

    def __init__(self) -> None:
        self.bases: dict[int, int] = {}

    def note(self, batch: Pb.Batch) -> None:
        for opened in batch.opens:
            self.bases[opened.session] = len(opened.tokens)
        for commit in batch.commits:
            self.bases[commit.session] = commit.base + len(commit.tokens)
        for close in batch.closes:
            self.bases.pop(close.session, None)


def draft_lies(name: str, session: int, base: int) -> Iterator[Pb.Batch]:
    match name:
        case "heavy":
            for _ in range(6):
                yield Pb.Batch(extensions=[heavy(session, base)])
        case "proposals":
            yield Pb.Batch(extensions=[many_proposals(session, base, 1, 500_000)])
        case "many proposals":
            yield Pb.Batch(extensions=[many_proposals(session, base, 4096, 64)])
        case "wide":
            yield Pb.Batch(extensions=[chain(session, base, 4096, parents=[0] * 4096) for _ in range(6)])
        case "deep":
            yield Pb.Batch(extensions=[chain(session, base, 4096) for _ in range(6)])
        case "malformed":
            yield Pb.Batch(
                extensions=[
                    extension(session, base, confidences=[c]) for c in (NAN, INF, -INF, -0.5, 1.5, -0.0, 5e-324)
                ]
                + [extension(session, base, tokens=[t]) for t in (4096, 2**31, MAX32)]
                + [extension(session, b) for b in (0, 1, base - 1, base + 1, MAX32)]
                + [extension(session, base, parents=[p]) for p in (1, 2, MAX32)]
                + [extension(session, base, parents=[], tokens=[], confidences=[])]
                + [extension(session, base, parents=[0, 0], tokens=[1, 1], confidences=[0.9, 0.1])]
                + [extension(session, base, draft_step_ms=v) for v in (NAN, INF, -1.0, 1.7e308)]
                + [extension(session, base, draft_share_ms=v) for v in (NAN, INF, -1.0, 1.7e308)]
                + [extension(session, base, draft_step=v) for v in (0, MAX64)]
                + [extension(session, base, drafter=d) for d in ("ngram", "lookup", "x" * 1024, "x" * 1025, "\0")]
                + [extension(session, base, proposals=[Pb.Proposal(parent=0, tokens=[1], probs=[1.0], index=0)])]
                + [extension(session, base, proposals=[Pb.Proposal(parent=9, tokens=[1], probs=[NAN], index=7)])]
            )
        case "drafters":
            yield Pb.Batch(
                extensions=[
                    extension(session, base, drafter=f"{base} {i}", tokens=[(base * 7 + i) % 4096]) for i in range(32)
                ]
            )
        case "durations":
            yield Pb.Batch(extensions=[extension(session, base, draft_step=base, draft_share_ms=1.7e308)])
        case "others":
            yield Pb.Batch(extensions=[extension(s, base) for s in (0, session - 1, session + 1, MAX64)])
        case "needs":
            yield Pb.Batch(need_tokens=[Pb.NeedTokens(session=session, have=0)] * 2_000)
        case "failed":
            for code in (0, 1, 5, 6, 9, 99):  # final ones among them
                yield Pb.Batch(failures=[Pb.Failed(session=session, code=code, message="x" * 10_000)] * 50)
        case "retryable":
            yield Pb.Batch(failures=[Pb.Failed(session=session, code=9, is_retryable=True)] * 50)
        case "closed":
            yield Pb.Batch(closed=[Pb.Closed(session=session, length=MAX32)] * 50)
        case "foreign":
            yield Pb.Batch(
                opens=[Pb.Open(session=session, tokens=[1], num_prompt_tokens=1)],
                commits=[Pb.Commit(session=session, base=base, tokens=[5], origins=[1], finish_reason=1)],
                closes=[Pb.Close(session=session)],
            )
        case "reports":
            long = 1e11  # as long as a duration may be
            step = Pb.StepRecord(kind=3, step=MAX64, round=MAX32, forward_ms=long, since_open_ms=long, base=MAX32)
            steps = [Pb.StepRecord(kind=i % 4, step=i, round=i, forward_ms=long, base=MAX32) for i in range(512)]
            event = Pb.SessionEvent(kind=1, since_open_ms=long, base=MAX32)
            yield Pb.Batch(
                reports=[
                    Pb.Report(session=session, since_open_ms=1.7e308, steps=steps),
                    Pb.Report(session=session, since_open_ms=long, steps=steps, events=[event]),
                    Pb.Report(session=session, since_open_ms=NAN),
                    Pb.Report(session=session, steps=[step] * 513),
                    Pb.Report(session=session, steps=[Pb.StepRecord(kind=77)], events=[Pb.SessionEvent(kind=9)]),
                    Pb.Report(session=session, steps=[Pb.StepRecord(kind=1, rank_ms=[-1.0])]),
                    Pb.Report(session=session, steps=[step] * 512, events=[event] * 512, num_lost=MAX32),
                    *[Pb.Report(session=session, steps=steps, num_lost=MAX32)] * 4,
                    Pb.Report(session=MAX64, steps=[step]),
                ]
            )
        case "heartbeats":
            for value in (NAN, INF, -INF, -1e308, 1e308):
                yield Pb.Batch(heartbeat=Pb.Heartbeat(step=MAX64, step_running_ms=value, num_sessions=MAX32))
        case "sequences":
            for number in (1, 1, 0, 5, 4, 3):
                yield Pb.Batch(sequence=number, extensions=[extension(session, base)])
        case _:
            raise AssertionError(name)


DRAFT_LIES = [
    "heavy", "proposals", "many proposals", "wide", "deep", "malformed", "drafters", "durations", "others", "needs",
    "failed", "retryable", "closed", "foreign", "reports", "heartbeats", "sequences",
]  # fmt: skip


class Telling:
    """Tells the lie of the moment: a draft worker a few times a session, a target worker once."""

    def __init__(self) -> None:
        self.name = ""
        self.num_told = 0
        self._heard = Heard()
        self._num_told_of: Counter[int] = Counter()

    def draft_lie(self, batch: Pb.Batch) -> Iterator[Pb.Batch]:
        self._heard.note(batch)
        for session in {message.session for message in (*batch.opens, *batch.commits)} & self._heard.bases.keys():
            self._num_told_of[session] += 1
            if self._num_told_of[session] > MAX_TOLD:
                continue
            self.num_told += 1
            yield from draft_lies(self.name, session, self._heard.bases[session])

    def target_lie(self, batch: Pb.Batch) -> Iterator[Pb.Batch]:
        for opened in batch.opens:
            self.num_told += 1
            yield from target_lies(self.name, opened)


@pytest.fixture(autouse=True)
def soon_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that failed a session for now is asked again soon: liars fail every one."""
    monkeypatch.setattr("coordinator.pools.AVOID_MS", 20.0)
    monkeypatch.setattr("coordinator.pools.AVOID_ENDING_MS", 20.0)


@pytest.mark.timeout(300)  # the liar does much work to lie, on the same core
async def test_no_lie_of_a_draft_worker_changes_an_answer_or_costs_the_target_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telling = Telling()
    drafts: list[Any] = [LyingWorker("draft", draft_model().info, telling.draft_lie)]
    async with cluster(drafts=drafts) as service:
        expected = await plain(service)
        (target,) = service.coordinator.pools[Kind.TARGET]
        for telling.name in DRAFT_LIES:
            await wait_until(
                lambda: service.coordinator.pools[Kind.DRAFT].can_place(1000 * time.monotonic()), timeout_s=40
            )
            requests = [
                ask(mode=mode, trace=True, request_id=f"{telling.name} {mode.value}")
                for mode in (Mode.SYNC, Mode.PIPELINED)
            ]
            answers = await asyncio.gather(*(service.client.answer(r, timeout_s=60) for r in requests))
            assert [answer.token_ids for answer in answers] == [expected] * 2, telling.name
            for request, answer in zip(requests, answers, strict=True):
                check_sums(answer.finished)
                assert 0 < len((await service.client.get_trace(request.request_id)).spans) < 10_000, telling.name
            assert telling.num_told > 0, f"{telling.name}: nobody listened"
            telling.num_told = 0
            assert target in service.coordinator.pools[Kind.TARGET], f"{telling.name}: the target was lost"
            await wait_until(lambda: is_idle(service))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def check_sums(finished: Finished | None) -> None:
    assert finished is not None
    values = [getattr(finished.speculation, name) for name in finished.speculation.__slots__]
    assert all(abs(value) < 1e15 for value in values if isinstance(value, int | float))


def is_idle(service: Cluster) -> bool:
    """Nothing of any request is left. A liar never says Closed: its sessions are forgotten later."""
    coordinator = service.coordinator
    books = (coordinator._streams, coordinator._live, coordinator._queue, coordinator._running)
    return not any(books) and not any(worker.num_sessions for worker in service.workers)


def commit(opened: Pb.Open, base: int, tokens: list[int], **fields: Any) -> Pb.Commit:
    return Pb.Commit(
        **{"session": opened.session, "round": 1, "base": base, "tokens": tokens, "origins": [4] * len(tokens)} | fields
    )


def target_lies(name: str, opened: Pb.Open) -> Iterator[Pb.Batch]:
    session, base, end = opened.session, len(opened.tokens), opened.stops.max_length
    whole = [300 + i for i in range(end - base)]
    match name:
        case "hole":
            yield Pb.Batch(commits=[commit(opened, base + 5, [5, 6])])
            yield Pb.Batch(failures=[Pb.Failed(session=session, code=9, message="enough")])
        case "contradiction":
            yield Pb.Batch(commits=[commit(opened, base, [5, 6])])
            yield Pb.Batch(commits=[commit(opened, base, [7, 8, 9])])
        case "beyond":
            yield Pb.Batch(commits=[commit(opened, base, [*whole, 5, 5, 5])])
        case "endless":
            yield Pb.Batch(commits=[commit(opened, base, whole)])
        case "empty end":
            yield Pb.Batch(commits=[commit(opened, base, [], finish_reason=1)])
        case "vocabulary":
            yield Pb.Batch(commits=[commit(opened, base, [4096])])
        case "origins":
            yield Pb.Batch(commits=[commit(opened, base, [5, 6], origins=[1])])
        case "unknown origin":
            yield Pb.Batch(commits=[commit(opened, base, [5], origins=[99])])
        case "no origin":
            yield Pb.Batch(commits=[commit(opened, base, [5], origins=[0])])
        case "unknown end":
            yield Pb.Batch(commits=[commit(opened, base, [5], finish_reason=77)])
        case "sums":
            stats = Pb.RoundStats(
                **{
                    f.name: MAX32 if f.cpp_type == f.CPPTYPE_UINT32 else 1.7e308
                    for f in Pb.RoundStats.DESCRIPTOR.fields
                }
            )
            half = len(whole) // 2
            for start, part in ((0, whole[:half]), (half, whole[half:])):
                last = {"finish_reason": 2} if start else {}
                yield Pb.Batch(
                    commits=[
                        commit(opened, base + start + i, [t], stats=stats, round=MAX32) for i, t in enumerate(part[:-1])
                    ]
                )
                yield Pb.Batch(
                    commits=[commit(opened, base + start + len(part) - 1, part[-1:], stats=stats, round=MAX32, **last)]
                )
        case "rounds":
            yield Pb.Batch(commits=[commit(opened, base, whole[:1], round=MAX32)])
            yield Pb.Batch(failures=[Pb.Failed(session=session, code=6, message="on", is_retryable=True)])
        case "steps":
            yield Pb.Batch(
                commits=[commit(opened, base, whole, finish_reason=2, verified_draft_steps=[MAX64] * 10_000)]
            )
        case "needs":
            yield Pb.Batch(commits=[commit(opened, base, whole[:30])])
            yield Pb.Batch(need_tokens=[Pb.NeedTokens(session=session, have=h) for h in (0, 1, base, MAX32)] * 500)
            yield Pb.Batch(commits=[commit(opened, base, whole, finish_reason=2)])
        case "twice":
            yield Pb.Batch(commits=[commit(opened, base, whole[:5], finish_reason=1)] * 3)
        case "codes":
            code = (session % 12) if session % 12 != 7 else 99  # 7 is the deadline's
            yield Pb.Batch(failures=[Pb.Failed(session=session, code=code, message="\n\0\u202e" + "ü" * 9000)])
        case "closed":
            yield Pb.Batch(closed=[Pb.Closed(session=session)])
        case "foreign":
            yield Pb.Batch(
                opens=[opened],
                extensions=[extension(session, base)],
                closes=[Pb.Close(session=session)],
                commits=[commit(opened, base, whole, finish_reason=2)],
            )
        case "reports":
            steps = [
                Pb.StepRecord(kind=k, step=i, round=i, base=MAX32, forward_ms=1e11, since_open_ms=1e11, rank_ms=[1e11])
                for i in range(1, 256)
                for k in (2, 3)
            ]
            yield Pb.Batch(reports=[Pb.Report(session=session, since_open_ms=1e11, steps=steps)] * 20)
            yield Pb.Batch(commits=[commit(opened, base, whole, finish_reason=2)])
        case "many extensions":
            yield Pb.Batch(
                extensions=[extension(session, base)] * 2_000, commits=[commit(opened, base, whole, finish_reason=2)]
            )
        case _:
            raise AssertionError(name)


TARGET_LIES = [
    "hole", "contradiction", "beyond", "endless", "empty end", "vocabulary", "origins", "unknown origin", "no origin",
    "unknown end", "sums", "rounds", "steps", "needs", "twice", "codes", "closed", "foreign", "reports",
    "many extensions",
]  # fmt: skip


@pytest.mark.timeout(300)
async def test_a_lie_of_a_target_worker_ends_its_requests_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    telling = Telling()
    targets: list[Any] = [LyingWorker("target", target_model().info, telling.target_lie)]
    async with cluster(targets, [Worker("draft", draft_model())]) as service:
        pools = list(service.coordinator.pools.values())
        before = [connection.number for pool in pools for connection in pool]
        for telling.name in TARGET_LIES:
            outcomes = await asyncio.gather(
                *(
                    service.client.answer(
                        ask(mode=mode, trace=True, request_id=f"{telling.name} {mode.value}"), timeout_s=20
                    )
                    for mode in (Mode.PIPELINED, Mode.OFF)
                ),
                return_exceptions=True,
            )
            trace = await service.client.get_trace(f"{telling.name} {Mode.OFF.value}")
            assert 0 < len(trace.spans) < 10_000, telling.name
            for outcome in outcomes:
                check_outcome(telling.name, outcome)
            await wait_until(lambda: is_idle(service))
            assert [connection.number for pool in pools for connection in pool] == before, telling.name
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def check_outcome(name: str, outcome: Answer | BaseException) -> None:
    """It is an answer, or one sentence that somebody meant."""
    if isinstance(outcome, Answer):
        check_sums(outcome.finished)
        return
    assert isinstance(outcome, SpecpipeError), (name, outcome)
    assert "internal error" not in str(outcome), name
    assert not isinstance(outcome, DeadlineExceededError), f"{name}: nobody noticed"


@pytest.mark.parametrize(
    "hello",
    [
        {"num_slots": MAX32, "max_sessions": MAX32},
        {"num_slots": 0, "max_sessions": 0},
        {"incarnation": MAX64},
        {"incarnation": 0},
    ],
)
@pytest.mark.parametrize("kind", ["draft", "target"])
async def test_absurd_numbers_in_a_hello_harm_nobody(kind: str, hello: dict[str, Any]) -> None:
    def lie(batch: Pb.Batch) -> Iterator[Pb.Batch]:
        for opened in batch.opens:
            whole = [5] * (opened.stops.max_length - len(opened.tokens))
            yield Pb.Batch(commits=[commit(opened, len(opened.tokens), whole, finish_reason=2)])

    model = target_model() if kind == "target" else draft_model()
    lying: list[Any] = [LyingWorker(kind, model.info, lie, hello=hello)]
    async with cluster(**{f"{kind}s": lying}) as service:
        answer = await service.client.answer(ask(), timeout_s=20)
        assert len(answer.token_ids) == 60
