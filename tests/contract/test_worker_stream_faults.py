"""Worker streams under bad weather: silence, nonsense, floods, sizes; batches lost, doubled or reordered."""

import asyncio
import itertools
import random
from dataclasses import replace

import grpc.aio
import pytest
from fake_step_loop import (
    HELLO,
    MODEL,
    FakeWorker,
    Reader,
    Ticks,
    a_commit,
    an_extension,
    an_open,
    until,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe import codec, codec_hello
from specpipe.errors import ErrorCode, WorkerUnavailableError
from specpipe.link import MAX_PENDING_EXTENSIONS, Outbox
from specpipe.reports import Report
from specpipe.rpc.v1 import worker_pb2
from specpipe.types import Batch, Close, Closed, Commit, Extension, Heartbeat, Origin
from specpipe.worker_stream import END, WIRES, Ends, Timing, WorkerStream

# Silence. One tick is one second.


async def ticking(ticks, count):
    for _ in range(count):
        await until(lambda: ticks.num_waiting == 1)
        ticks.tick()
    await until(lambda: ticks.num_waiting == 1)


async def greeted(call):
    await call.write(WIRES["target"].request(hello=codec_hello.hello_to_pb(HELLO)))
    assert (await call.read()).WhichOneof("event") == "hello"


async def test_a_silent_coordinator_is_paused_at_5_s_resumed_when_it_speaks_and_closed_at_15_s():
    ticks = Ticks()
    async with FakeWorker(timing=Timing(sleep=ticks.sleep)) as worker, worker.raw_call() as call:
        await greeted(call)
        await ticking(ticks, 4)
        assert worker.loop.events == []
        await ticking(ticks, 1)
        await until(lambda: worker.loop.events == [(1, "paused")])
        await call.write(WIRES["target"].request(batch=worker_pb2.Batch(sequence=1, heartbeat={})))
        await until(lambda: worker.loop.events == [(1, "paused"), (1, "resumed")])
        await ticking(ticks, 14)
        assert worker.loop.events == [(1, "paused"), (1, "resumed"), (1, "paused")]
        assert worker.service.num_links == 1
        ticks.tick()
        await until(lambda: worker.loop.events[-1] == (1, "lost"))
        assert worker.service.num_links == 0


async def test_a_silent_worker_is_gone_after_15_s():
    ticks, mute = Ticks(), Ticks()
    async with (
        FakeWorker(timing=Timing(sleep=mute.sleep)) as worker,
        worker.connect(timing=Timing(sleep=ticks.sleep)) as link,
        Reader(link) as reader,
    ):
        await until(lambda: len(reader.batches) == 1)  # its first heartbeat, and its last
        await ticking(ticks, 14)
        assert reader.error is None
        ticks.tick()
        await until(lambda: reader.error)
        assert "no heartbeat for 15 s" in str(reader.error)


async def test_heartbeats_keep_an_idle_stream_alive():
    ticks = Ticks()
    timing = Timing(sleep=ticks.sleep)
    async with FakeWorker(timing=timing) as worker, worker.connect(timing=timing) as link, Reader(link) as reader:
        for second in range(1, 40):
            await until(lambda: ticks.num_waiting == 2)
            ticks.tick()
            await until(lambda second=second: len(reader.batches) > second)
        assert reader.error is None
        assert worker.loop.events == []


async def test_a_slow_owner_is_not_taken_for_a_silent_worker():
    """What is blocked is our own reading: the worker waits, its outbox merges, and nothing is lost."""
    ticks = Ticks()
    async with FakeWorker() as worker, worker.connect(timing=Timing(sleep=ticks.sleep)) as link:
        await until(lambda: ticks.num_waiting == 1)
        link.send(an_open(1))
        await until(lambda: worker.loop.received)
        for base in range(3, 3003):
            worker.thread.send(1, a_commit(1, base, (base % 1000,)))
            if base % 10 == 0:
                await asyncio.sleep(0)
        await until(lambda: link._unread.full())
        await ticking(ticks, 30)
        async with Reader(link) as reader:
            await until(lambda: total(reader) == 3001)
        assert reader.error is None
        assert len(reader.batches) < 1000


def total(reader):
    return sum(len(commit.tokens) for commit in reader.all("commits"))


# Nonsense


async def test_a_malformed_open_fails_alone():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1, (1, MODEL.vocab_size)))
        link.send(an_open(2))
        await until(lambda: reader.all("commits") and reader.all("closed"))
        [failed] = reader.all("failures")
        assert (failed.session, failed.code) == (1, ErrorCode.INVALID_ARGUMENT)
        assert "id 1000 is not below 1000" in failed.message
        assert reader.all("closed") == [Closed(session=1, length=0)]
        assert [commit.session for commit in reader.all("commits")] == [2]


async def test_a_malformed_message_ends_its_running_session_on_the_worker():
    async with FakeWorker("draft") as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        link.send(an_open(2))
        await until(lambda: len(reader.all("commits")) == 2)
        link.send(replace(a_commit(1, 2, (3, 4)), origins=(Origin.PLAIN,)))
        await until(lambda: reader.all("closed"))
        assert [failed.session for failed in reader.all("failures")] == [1]
        assert list(worker.loop.sessions) == [(1, 2)]


async def test_texts_that_a_draft_model_cannot_follow_are_no_malformed_messages():
    """Beyond its context or vocabulary a draft worker stops drafting; the session lives on (cases.md, E2)."""
    async with FakeWorker("draft") as worker, worker.connect() as link, Reader(link):
        link.send(an_open(1, (1, MODEL.vocab_size)))
        link.send(an_open(2, (1,) * (MODEL.max_context + 1)))
        await until(lambda: len(worker.loop.received) >= 2)
        link.send(a_commit(1, 2, (MODEL.vocab_size,)))
        await until(lambda: any(isinstance(message, Commit) for _, message in worker.loop.received))


async def test_a_malformed_extension_is_dropped_and_counted():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        link.send(an_extension(1, tokens=(MODEL.vocab_size,)))
        link.send(an_extension(1, base=77))
        await until(lambda: any(isinstance(message, Extension) for _, message in worker.loop.received))
        extensions = [message for _, message in worker.loop.received if isinstance(message, Extension)]
        assert [extension.base for extension in extensions] == [77]
        assert worker.service.num_rejected == 1
        assert reader.all("failures") == []


async def test_a_worker_that_talks_nonsense_fails_that_session_and_is_told_to_close_it():
    async with FakeWorker("draft") as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        link.send(an_open(2))
        await until(lambda: len(worker.loop.sessions) == 2)
        worker.thread.send(1, replace(an_extension(1), parents=(0, 1)))  # of other nodes than it has
        worker.thread.send(1, an_extension(2))
        await until(lambda: reader.all("closed") and reader.all("extensions"))
        [failed] = reader.all("failures")
        assert failed.session == 1
        assert failed.is_retryable
        assert [extension.session for extension in reader.all("extensions")] == [2]
        assert list(worker.loop.sessions) == [(1, 2)]
        assert link.num_rejected == 1


async def test_a_malformed_report_is_dropped_and_counted_by_either_end():
    wrong = Report(session=1, since_open_ms=-1.0)
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))
        worker.thread.send(1, wrong)
        worker.thread.send(1, Report(session=2))
        link.send(wrong)
        link.send(an_extension(1, base=77))
        await until(lambda: link.num_rejected and worker.service.num_rejected and reader.all("reports"))
        await until(lambda: any(isinstance(message, Extension) for _, message in worker.loop.received))
        assert reader.all("reports") == [Report(session=2)]
        assert (link.num_rejected, worker.service.num_rejected) == (1, 1)
        assert reader.all("failures") == []
        assert list(worker.loop.sessions) == [(1, 1)]


async def test_a_flood_of_extensions_is_bounded_and_counted():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))
        worker.loop.gate.clear()
        for base in range(20_000):
            link.send(an_extension(1, base))
        assert link.num_dropped_extensions >= 20_000 - MAX_PENDING_EXTENSIONS
        link.send(an_open(2))
        await until(lambda: worker.thread.num_pending(1) == 2 or len(reader.all("commits")) == 2)
        worker.loop.gate.set()
        await until(lambda: len(reader.all("commits")) == 2)
        assert sum(isinstance(message, Extension) for _, message in worker.loop.received) <= 3 * MAX_PENDING_EXTENSIONS


async def test_a_flood_of_sessions_waits_in_the_client(monkeypatch):
    monkeypatch.setattr("specpipe.worker_service.MAX_PENDING_SESSIONS", 100)
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        await until(lambda: worker.loop.num_steps > 0)
        worker.loop.gate.clear()
        for session in range(2000):
            link.send(Close(session=session))
            if session % 50 == 0:
                await asyncio.sleep(0.001)
        most = worker.thread.num_pending(1)
        worker.loop.gate.set()
        await until(lambda: len(reader.all("closed")) == 2000)
        assert most < 2000


# Sizes


async def test_a_long_prompt_passes_and_one_beyond_the_context_is_refused_by_name():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        longest = 0.0

        async def watch():
            nonlocal longest
            clock = asyncio.get_running_loop().time
            while True:
                before = clock()
                await asyncio.sleep(0.005)
                longest = max(longest, clock() - before)

        watcher = asyncio.create_task(watch())
        link.send(an_open(1, itertools.islice(itertools.cycle(range(1000)), 99_000)))  # 200 KB of text and more
        link.send(an_open(2, [1] * 1_000_000))
        link.send(an_open(3))
        await until(lambda: len(reader.all("commits")) == 2 and reader.all("closed"))
        [failed] = reader.all("failures")
        assert (failed.session, failed.code) == (2, ErrorCode.INVALID_ARGUMENT)
        assert "1000000 ids are more than the context of 100000" in failed.message
        assert {commit.session for commit in reader.all("commits")} == {1, 3}
        watcher.cancel()
        assert longest < 1.0  # nobody stalls for long; a tight bound would measure the machine


async def test_many_long_prompts_at_once_pass_in_pieces():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        tokens = tuple(itertools.islice(itertools.cycle(range(1000)), 90_000))
        for session in range(12):
            link.send(an_open(session, tokens))
        await until(lambda: len(reader.all("commits")) == 12)
        assert reader.error is None
        assert link.num_holes == 0


# Lost, doubled, reordered batches: one WorkerStream fed by hand


class FedStream:
    """A WorkerStream that reads what the test gives it."""

    def __init__(self, *, limits=None):
        self.received = []
        self.incoming = asyncio.Queue()
        self.written = []
        self.ends = Ends(
            read=self.incoming.get,
            write=self._write,
            wrap=WIRES["target"].request,
            heartbeat=Heartbeat,
            on_batch=self._receive,
            on_silence=lambda _: None,
        )
        self.stream = WorkerStream(limits=limits or codec.Limits(), timing=Timing(sleep=Ticks().sleep))

    async def _write(self, message):
        self.written.append(message)

    async def _receive(self, batch, rejected):
        assert rejected == []
        self.received.append(batch)

    async def feed(self, batches):
        for batch in batches:
            self.incoming.put_nowait(WIRES["target"].response(batch=codec.batch_to_pb(batch)))
        self.incoming.put_nowait(END)
        await self.stream.run(self.ends, Outbox())


async def test_a_doubled_batch_is_applied_once_and_a_hole_is_counted():
    fed = FedStream()
    batches = [Batch(sequence=number, commits=(a_commit(1, number, (number,)),)) for number in (1, 1, 2, 4, 3, 3, 4)]
    await fed.feed(batches)
    assert [batch.sequence for batch in fed.received] == [1, 2, 4, 3]
    assert fed.stream.inbox.num_holes == 1
    assert fed.stream.inbox.num_duplicates == 3


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_every_batch_that_comes_is_applied_exactly_once_in_whatever_order(rng: random.Random, count):
    async def run():
        fed = FedStream()
        sent = [Batch(sequence=number) for number in range(1, count + 1)]
        relayed = [batch for batch in sent for _ in range(rng.choice((0, 1, 1, 2)))]
        rng.shuffle(relayed)
        await fed.feed(relayed)
        numbers = [batch.sequence for batch in fed.received]
        assert sorted(numbers) == sorted({batch.sequence for batch in relayed})

    asyncio.run(run())


async def test_a_peer_that_leaves_while_we_write_ends_the_stream_quietly():
    async with FakeWorker() as worker:
        for _ in range(20):
            async with worker.connect() as link:
                for session in range(50):
                    link.send(an_open(session))
        await until(lambda: worker.service.num_links == 0)
        await until(lambda: worker.loop.sessions == {})


@pytest.mark.parametrize("kind", [grpc.aio.BaseError, grpc.aio.InternalError, grpc.aio.UsageError])
async def test_a_write_that_fails_leaves_it_to_the_reader_to_say_why(kind):
    """gRPC raises InternalError (ExecuteBatchError) where the connection breaks under a write."""
    has_written = asyncio.Event()

    async def read_end():
        await has_written.wait()
        return END

    async def write(_):
        has_written.set()
        raise kind("broken")

    ends = Ends(
        read=read_end,
        write=write,
        wrap=WIRES["draft"].request,
        heartbeat=Heartbeat,
        on_batch=None,
        on_silence=None,
    )
    async with asyncio.timeout(10):
        await WorkerStream(limits=codec.Limits(), timing=Timing()).run(ends, Outbox())


async def exhaust(link):
    async for _ in link:
        pass


async def test_a_closed_server_ends_all_links_with_a_reason():
    worker = FakeWorker()
    async with worker:
        links = [worker.connect(number) for number in (1, 2)]
        opened = [await link.__aenter__() for link in links]
    for link in opened:
        with pytest.raises(WorkerUnavailableError, match=r"shutting down|gone"):
            await exhaust(link)
    for link in links:
        await link.__aexit__(None, None, None)
