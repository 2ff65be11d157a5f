"""The model thread: what reaches the step loop, when, and what happens when it fails."""

import asyncio
import inspect
import threading
import time

import pytest

from draft_worker.worker import DraftLoop
from specpipe.errors import CapacityError, InvalidRequestError, InvariantError
from specpipe.link import MAX_PENDING_EXTENSIONS
from specpipe.model_thread import ModelThread
from specpipe.types import (
    Close,
    Closed,
    Commit,
    Extension,
    Heartbeat,
    NeedTokens,
    Open,
    Origin,
    SamplingParams,
    SpeculationParams,
    StopRules,
)
from target_worker.worker import TargetLoop


class FakeLoop:
    """Records what it is told; `gate` holds a step, `raising` says what a session's messages raise."""

    def __init__(self, send):
        self.send = send
        self.thread = threading.current_thread()
        self.log = []
        self.gate = threading.Event()
        self.gate.set()
        self.raising = {}
        self.step_error = None
        self.waits = []
        self.mail_gate = threading.Event()
        self.mail_gate.set()

    def receive(self, link, message):
        assert threading.current_thread() is self.thread
        self.log.append((link, message))
        self.mail_gate.wait(20)
        if isinstance(message, Close):
            self.send(link, Closed(session=message.session, length=0))
        elif message.session in self.raising:
            raise self.raising[message.session]

    def link_lost(self, link):
        self.log.append((link, "lost"))

    def link_paused(self, link, is_paused):
        self.log.append((link, f"paused {is_paused}"))

    def run_once(self):
        assert threading.current_thread() is self.thread
        self.gate.wait(20)
        self.log.append("step")
        if self.step_error is not None:
            raise self.step_error
        return self.waits.pop(0) if self.waits else None

    def heartbeat(self):
        return Heartbeat(step=sum(entry == "step" for entry in self.log))


class Rig:
    """A started ModelThread with one link whose outbox is collected when it is woken."""

    def __init__(self):
        self.thread = ModelThread(self._create)
        self.received = []
        self.num_wakes = 0
        self.arrived = asyncio.Event()

    def _create(self, send):
        self.loop = FakeLoop(send)
        return self.loop

    async def __aenter__(self):
        self.thread.start()
        await self.thread.wait_ready()
        self.link, self.outbox = self.thread.attach(self._wake)
        return self

    async def __aexit__(self, *_):
        self.loop.gate.set()
        self.loop.mail_gate.set()
        self.thread.stop()
        await asyncio.wait([self.thread.failure])

    def _wake(self):
        self.num_wakes += 1
        while (batch := self.outbox.take()) is not None:
            self.received += [*batch.commits, *batch.failures, *batch.closed]
        self.arrived.set()

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)


def an_extension(session, base=1):
    return Extension(session=session, base=base, parents=(0,), tokens=(5,), confidences=(0.5,))


def an_open(session):
    return Open(
        session=session,
        request_id="r",
        tokens=(1,),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        stops=StopRules(max_length=9),
        speculation=SpeculationParams(),
    )


def a_commit(base):
    return Commit(session=1, round=1, base=base, tokens=(base,), origins=(Origin.PLAIN,))


async def test_messages_reach_the_step_loop_before_its_next_step():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.thread.post(rig.link, NeedTokens(session=1, have=2))
        await rig.until(lambda: len(rig.loop.log) == 3)
        assert rig.loop.log == ["step", (rig.link, NeedTokens(session=1, have=2)), "step"]
        assert rig.thread.heartbeat() == Heartbeat(step=2)


async def test_what_comes_during_a_step_says_when_it_came_by_the_clock_of_the_step_loops():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.loop.gate.clear()
        rig.thread.post(rig.link, NeedTokens(session=9, have=1))
        await rig.until(lambda: (rig.link, NeedTokens(session=9, have=1)) in rig.loop.log)
        before_s = time.perf_counter()
        rig.thread.post(rig.link, an_open(1))
        rig.thread.post(rig.link, an_extension(1))
        after_s = time.perf_counter()
        rig.loop.gate.set()
        await rig.until(lambda: any(isinstance(entry[1], Extension) for entry in rig.loop.log))
        came = [entry[1].arrived_s for entry in rig.loop.log if isinstance(entry[1], Open | Extension)]
        assert len(came) == 2
        assert all(before_s <= at_s <= after_s for at_s in came)
    for loop in (TargetLoop, DraftLoop):
        assert inspect.signature(loop).parameters["clock"].default is time.perf_counter


async def test_what_comes_during_a_step_is_merged_and_bounded():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.loop.gate.clear()
        rig.thread.post(rig.link, NeedTokens(session=9, have=1))  # enters the held step
        await rig.until(lambda: (rig.link, NeedTokens(session=9, have=1)) in rig.loop.log)
        for base in range(500):
            rig.thread.post(rig.link, an_extension(2, base))
            rig.thread.post(rig.link, a_commit(base))
        assert rig.thread.num_pending(rig.link) == 2
        rig.loop.gate.set()
        await rig.until(lambda: any(isinstance(entry[1], Commit) for entry in rig.loop.log))
        commits = [entry[1] for entry in rig.loop.log if isinstance(entry[1], Commit)]
        extensions = [entry[1] for entry in rig.loop.log if isinstance(entry[1], Extension)]
        assert [commit.tokens for commit in commits] == [tuple(range(500))]
        assert [extension.base for extension in extensions] == list(range(500 - MAX_PENDING_EXTENSIONS, 500))


async def test_mail_at_which_the_step_loop_hangs_counts_as_a_running_step_and_waiting_does_not():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        assert rig.thread.heartbeat() == Heartbeat(step=1)
        rig.loop.mail_gate.clear()
        rig.thread.post(rig.link, NeedTokens(session=1, have=2))
        await rig.until(lambda: rig.thread.heartbeat().step_running_ms > 5.0)
        assert rig.loop.log.count("step") == 1, "no step has begun"
        rig.loop.mail_gate.set()
        await rig.until(lambda: rig.thread.heartbeat() == Heartbeat(step=2))


async def test_zero_runs_again_at_once_and_seconds_wait_for_messages():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.loop.waits = [0.0, 0.0, 0.005, 1000.0]
        rig.thread.post(rig.link, NeedTokens(session=1, have=2))
        await rig.until(lambda: rig.loop.log.count("step") == 5)
        rig.thread.post(rig.link, NeedTokens(session=1, have=3))  # ends the wait of 1000 s
        await rig.until(lambda: rig.loop.log.count("step") == 6)


@pytest.mark.parametrize("wait_s", [1e10, 1e300])
async def test_a_wait_longer_than_a_lock_can_wait_is_ended_by_a_message_as_any_other(wait_s):
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.loop.waits = [wait_s]
        rig.thread.post(rig.link, NeedTokens(session=1, have=2))
        await rig.until(lambda: rig.loop.log.count("step") == 2)
        rig.thread.post(rig.link, NeedTokens(session=1, have=3))
        await rig.until(lambda: rig.loop.log.count("step") == 3)


async def test_the_event_loop_is_woken_once_for_many_messages():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        for base in range(1000):
            rig.thread.send(rig.link, a_commit(base))  # all before the event loop turns
        await rig.arrived.wait()
        assert rig.num_wakes == 1
        assert [message.tokens for message in rig.received] == [tuple(range(1000))]


@pytest.mark.parametrize("error", [InvalidRequestError("bad"), CapacityError("full")])
async def test_a_refused_message_fails_its_session_and_no_other(error):
    async with Rig() as rig:
        rig.loop.raising = {3: error}
        rig.thread.post(rig.link, NeedTokens(session=3, have=1))
        rig.thread.post(rig.link, NeedTokens(session=4, have=1))
        await rig.until(lambda: len(rig.received) == 2)
        failed, closed = rig.received
        assert (failed.session, failed.code, failed.message) == (3, error.code, str(error))
        assert failed.is_retryable == error.is_retryable
        assert closed == Closed(session=3, length=0)
        assert (rig.link, NeedTokens(session=4, have=1)) in rig.loop.log
        assert rig.thread.is_running


async def test_a_refused_extension_costs_nothing():
    async with Rig() as rig:
        rig.loop.raising = {3: InvalidRequestError("bad shape")}
        rig.thread.post(rig.link, an_extension(3))
        rig.thread.post(rig.link, NeedTokens(session=4, have=1))
        await rig.until(lambda: (rig.link, NeedTokens(session=4, have=1)) in rig.loop.log)
        assert rig.received == []


@pytest.mark.parametrize("error", [ValueError("a bug"), InvariantError("contradiction")])
async def test_an_error_that_escapes_ends_the_thread_and_is_its_failure(error):
    rig = Rig()
    async with rig:
        rig.loop.step_error = error
        rig.thread.post(rig.link, NeedTokens(session=1, have=1))
        with pytest.raises(type(error)):
            await rig.thread.failure
        assert not rig.thread.is_running


async def test_an_error_at_creation_is_raised_to_who_waits():
    def create(send):
        raise InvalidRequestError("no weights")

    thread = ModelThread(create)
    thread.start()
    with pytest.raises(InvalidRequestError, match="no weights"):
        await thread.wait_ready()
    with pytest.raises(InvalidRequestError):
        await thread.failure
    assert thread.heartbeat() == Heartbeat()


async def test_a_lost_link_is_told_once_and_hears_nothing_more():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.thread.post(rig.link, NeedTokens(session=1, have=1))
        await rig.until(lambda: len(rig.loop.log) == 3)
        rig.thread.detach(rig.link)
        rig.thread.detach(rig.link)
        rig.thread.post(rig.link, NeedTokens(session=1, have=2))
        rig.thread.send(rig.link, Closed(session=1, length=1))
        await rig.until(lambda: (rig.link, "lost") in rig.loop.log)
        other, _ = rig.thread.attach(lambda: None)
        rig.thread.post(other, NeedTokens(session=5, have=1))
        await rig.until(lambda: (other, NeedTokens(session=5, have=1)) in rig.loop.log)
        assert rig.loop.log.count((rig.link, "lost")) == 1
        assert (rig.link, NeedTokens(session=1, have=2)) not in rig.loop.log
        assert rig.received == []


async def test_a_pause_that_ended_before_the_step_did_is_never_told():
    async with Rig() as rig:
        await rig.until(lambda: rig.loop.log == ["step"])
        rig.loop.gate.clear()
        rig.thread.post(rig.link, NeedTokens(session=1, have=1))
        await rig.until(lambda: rig.loop.log[-1] == (rig.link, NeedTokens(session=1, have=1)))
        rig.thread.pause(rig.link, True)
        rig.thread.pause(rig.link, False)
        rig.loop.gate.set()
        await rig.until(lambda: rig.loop.log.count("step") == 3)
        rig.thread.pause(rig.link, True)
        await rig.until(lambda: (rig.link, "paused True") in rig.loop.log)
        rig.thread.pause(rig.link, False)
        await rig.until(lambda: (rig.link, "paused False") in rig.loop.log)
        assert rig.loop.log.count((rig.link, "paused True")) == 1


async def test_stop_ends_the_thread_without_a_failure():
    async with Rig() as rig:
        rig.thread.stop()
        assert await rig.thread.failure is None
        assert not rig.thread.is_running
