"""Worker streams between a real client and a real server: what flows, and what ends them."""

import asyncio
import dataclasses
import logging
import socket
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from fake_step_loop import HELLO, FakeWorker, Reader, a_commit, an_extension, an_open, until

from specpipe import codec, codec_hello
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError, ErrorCode, ModelMismatchError, WorkerUnavailableError
from specpipe.server import create_channel
from specpipe.types import Batch, Close, Closed, Heartbeat, NeedTokens
from specpipe.worker_client import WorkerLink
from specpipe.worker_stream import MINOR_VERSION, PROTOCOL_VERSION, WIRES, Timing

REFUSED = "shutting down|connection broke"
"""What a worker that ends says to a hello; gRPC forgets it if it comes while the hello is being written."""


@pytest.mark.parametrize("kind", ["draft", "target"])
async def test_hellos_go_both_ways_and_a_session_runs(kind):
    async with FakeWorker(kind) as worker, worker.connect() as link, Reader(link) as reader:
        assert link.hello == HELLO
        link.send(an_open(1, (1, 2, 3)))
        await until(lambda: reader.all("commits"))
        assert reader.all("commits") == [a_commit(1, 3, (7,))]
        link.send(Close(session=1))
        await until(lambda: reader.all("closed"))
        assert reader.all("closed") == [Closed(session=1, length=3)]


async def test_get_info_says_hello_and_heartbeat():
    async with FakeWorker() as worker, create_channel(worker.address) as channel:
        wire = WIRES["target"]
        response = await wire.stub(channel).GetInfo(wire.info_request(), timeout=20)
        assert codec_hello.hello_from_pb(response.hello) == HELLO
        assert codec_hello.heartbeat_from_pb(response.heartbeat).num_free_slots == 9


VOCABULARY = Vocabulary({0: "<s>", 2: "a", 3: "\ud83d", 900: "late"})


async def test_a_link_reads_as_much_of_the_workers_vocabulary_as_it_asks_for():
    async with FakeWorker() as worker, worker.connect() as link:
        assert await link.read_vocabulary(900) is None, "this worker cannot tell"
        worker.service._read_vocabulary = lambda: VOCABULARY
        told = await link.read_vocabulary(900)
        assert told.tokens == {0: "<s>", 2: "a", 3: "\\ud83d"}
        assert (await link.read_vocabulary(901)).tokens[900] == "late"


async def test_a_vocabulary_that_cannot_be_read_leaves_the_link_as_it_was():
    def fail():
        raise ConfigError("the folder is gone")

    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        worker.service._read_vocabulary = fail
        with pytest.raises(WorkerUnavailableError, match="the folder is gone"):
            await link.read_vocabulary(900)
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))


async def test_every_kind_of_message_reaches_the_worker_and_the_coordinator():
    async with FakeWorker("draft") as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        link.send(a_commit(1, 2, (3, 4)))
        link.send(NeedTokens(session=1, have=2))
        await until(lambda: len(worker.loop.received) == 3)
        assert [message for _, message in worker.loop.received] == [
            an_open(1),
            a_commit(1, 2, (3, 4)),
            NeedTokens(session=1, have=2),
        ]
        worker.thread.send(worker.loop.received[0][0], an_extension(1))
        await until(lambda: reader.all("extensions"))
        assert [relayed.read() for relayed in reader.all("extensions")] == [an_extension(1)]


async def test_heartbeats_go_both_ways():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link):
        await until(lambda: link.heartbeat.num_free_slots == 9)
        worker.loop.step_running_ms = 17.0
        await until(lambda: link.heartbeat.step_running_ms == 17.0)
        assert link.heartbeat == Heartbeat(step=worker.loop.num_steps, step_running_ms=17.0, num_free_slots=9)


async def test_messages_for_unknown_sessions_change_nothing():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_extension(99))
        link.send(NeedTokens(session=98, have=4))
        link.send(Close(session=97))
        link.send(an_open(1))
        await until(lambda: reader.all("commits") and reader.all("closed"))
        assert reader.all("closed") == [Closed(session=97, length=0)]
        assert reader.all("failures") == []


# The start of a stream


async def test_another_protocol_version_is_refused_with_both_named():
    async with FakeWorker() as worker, worker.raw_call() as call:
        await call.write(WIRES["target"].request(hello={"protocol_version": 99}))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "version 99" in caught.value.details()
        assert "speaks 1" in caught.value.details()


async def test_a_client_refuses_a_worker_of_another_version():
    hello = codec_hello.hello_from_pb(codec_hello.hello_to_pb(HELLO))
    other = type(hello)(protocol_version=2, incarnation=1, model=hello.model)
    async with FakeWorker(hello=other) as worker:
        with pytest.raises(ModelMismatchError, match="version 2"):
            async with worker.connect():
                pass


@pytest.mark.parametrize("minor_version", [0, MINOR_VERSION + 1])
async def test_a_worker_of_an_older_or_newer_minor_version_is_used(minor_version):
    hello = dataclasses.replace(HELLO, minor_version=minor_version)
    async with FakeWorker(hello=hello) as worker, worker.connect() as link, Reader(link) as reader:
        assert link.hello.minor_version == minor_version
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))


@pytest.mark.parametrize("minor_version", [0, MINOR_VERSION + 1])
async def test_a_coordinator_of_an_older_or_newer_minor_version_is_served(minor_version):
    """A newer one says things that this worker has no fields for."""

    def newer(message_pb):
        return type(message_pb).FromString(message_pb.SerializeToString() + unknown)

    unknown = b"\xfa\x3f\x05newer"  # field 1023
    async with FakeWorker() as worker, worker.raw_call() as call:
        hello_pb = codec_hello.hello_to_pb(dataclasses.replace(HELLO, model=None, minor_version=minor_version))
        await call.write(WIRES["target"].request(hello=newer(hello_pb)))
        assert (await call.read()).hello.protocol_version == PROTOCOL_VERSION
        batch_pb = codec.batch_to_pb(Batch(sequence=1, opens=(an_open(1),)))
        await call.write(WIRES["target"].request(batch=newer(batch_pb)))
        while not (await call.read()).batch.commits:
            pass


@pytest.mark.parametrize("first", [{}, {"batch": {"sequence": 1}}])
async def test_a_first_message_that_is_no_hello_is_invalid(first):
    async with FakeWorker() as worker, worker.raw_call() as call:
        await call.write(WIRES["target"].request(**first))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "hello" in caught.value.details()


async def test_a_second_hello_is_invalid():
    async with FakeWorker() as worker, worker.raw_call() as call:
        hello_pb = WIRES["target"].request(hello=codec_hello.hello_to_pb(HELLO))
        await call.write(hello_pb)
        await call.read()
        await call.write(hello_pb)
        assert await end_of(call) is grpc.StatusCode.INVALID_ARGUMENT


async def test_bytes_that_are_no_message_end_only_their_own_stream(caplog):
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        async with create_channel(worker.address) as channel:
            call = channel.stream_stream(f"/{WIRES['target'].service_name}/Connect")()
            await call.write(b"\xff\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))
    assert "was destroyed" not in caplog.text


async def test_a_silent_caller_loses_the_stream():
    async with FakeWorker(timing=Timing(hello_timeout_s=0.05)) as worker, worker.raw_call() as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no hello" in caught.value.details()


async def test_a_loading_worker_is_unavailable():
    async with FakeWorker(hello=None) as worker:
        with pytest.raises(WorkerUnavailableError, match="loading"):
            async with worker.connect():
                pass


async def test_nobody_there_is_unavailable():
    async with FakeWorker() as worker:
        pass
    with pytest.raises(WorkerUnavailableError):
        async with worker.connect():
            pass


async def test_a_server_that_never_answers_is_unavailable_in_time():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(1)
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(WorkerUnavailableError, match="does not answer"):
            async with WorkerLink.connect(address, "target", 9, timing=Timing(hello_timeout_s=0.1)):
                pass


# The end of a stream


async def test_a_client_that_leaves_ends_its_sessions_and_no_others(caplog):
    async with FakeWorker() as worker, worker.connect() as stays, Reader(stays) as reader:
        stays.send(an_open(1))
        await until(lambda: len(worker.loop.sessions) == 1)
        async with worker.connect() as leaves:
            leaves.send(an_open(1))  # the same number from another coordinator
            await until(lambda: len(worker.loop.sessions) == 2)
        await until(lambda: len(worker.loop.sessions) == 1)
        assert len([event for event in worker.loop.events if event[1] == "lost"]) == 1
        stays.send(Close(session=1))
        await until(lambda: reader.all("closed"))
        assert worker.service.num_links == 1
    assert [record for record in caplog.records if is_ours(record) and record.levelno >= logging.WARNING] == []


def is_ours(record):
    """grpc.aio logs about event loops of earlier tests; a process has one."""
    return record.name.startswith("specpipe")


async def test_a_half_closed_stream_ends():
    async with FakeWorker() as worker, worker.raw_call() as call:
        await call.write(WIRES["target"].request(hello=codec_hello.hello_to_pb(HELLO)))
        await call.read()
        await until(lambda: worker.service.num_links == 1)
        await call.done_writing()
        assert await end_of(call) is grpc.StatusCode.OK
        await until(lambda: worker.loop.events == [(1, "lost")])


async def test_a_connection_that_is_cut_ends_its_sessions_on_both_sides():
    async with (
        FakeWorker() as worker,
        cable(worker.address) as (address, cut),
        WorkerLink.connect(address, "target", 9) as link,
        Reader(link) as reader,
    ):
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))
        cut()
        await until(lambda: reader.error)
        await until(lambda: worker.loop.events == [(1, "lost")])
        assert worker.loop.sessions == {}


@asynccontextmanager
async def cable(address):
    """A TCP relay to `address` and a function that resets both of its ends."""
    host, _, port = address.rpartition(":")
    writers, pumps = [], []

    async def pump(reader, writer):
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)

    async def accept(reader, writer):
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, far_writer))
        pumps.extend((asyncio.create_task(pump(reader, far_writer)), asyncio.create_task(pump(far_reader, writer))))

    def cut():
        for writer in writers:
            writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", cut
    finally:
        server.close()
        cut()
        await asyncio.gather(*pumps)


async def test_a_worker_that_shuts_down_says_so():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        worker.service.close()
        await until(lambda: reader.error)
        assert "shutting down" in str(reader.error)
        with pytest.raises(WorkerUnavailableError, match=REFUSED):
            await link.__anext__()
        link.send(an_open(1))  # vanishes


async def test_a_model_thread_that_fails_ends_streams_and_health():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        assert worker.service.is_healthy
        worker.loop.step_error = ValueError("a bug")
        link.send(an_open(1))
        await until(lambda: reader.error)
        assert not worker.service.is_healthy
        with pytest.raises(WorkerUnavailableError):
            async with worker.connect():
                pass


async def test_an_owner_may_stop_waiting_without_losing_a_batch():
    async with FakeWorker() as worker, worker.connect() as link:
        numbers = []
        for _ in range(30):
            try:
                async with asyncio.timeout(0.01):
                    numbers.append((await link.__anext__()).sequence)
            except TimeoutError:
                link.send(an_open(len(numbers)))
        assert numbers == list(range(1, len(numbers) + 1))
        assert link.num_holes == 0


# Health and drain


async def test_health_tells_the_truth():
    async with FakeWorker(timing=Timing(interval_s=0.01)) as worker:
        health = asyncio.create_task(worker.service.watch_health(worker.server))
        await until(lambda: worker.server.is_serving)
        worker.loop.step_running_ms = 31_000.0
        await until(lambda: not worker.server.is_serving)
        worker.loop.step_running_ms = 5.0
        await until(lambda: worker.server.is_serving)
        worker.loop.step_error = ValueError("a bug")
        worker.thread.post(worker.thread.attach(lambda: None)[0], Close(session=1))
        await until(lambda: not worker.server.is_serving)
        health.cancel()
        await asyncio.wait([health])


async def test_a_stream_that_breaks_as_our_hello_is_written_is_a_worker_that_is_not_there(monkeypatch):
    async def breaks(call, _request):
        call._cython_call.set_internal_error("execute_batch failed")
        await call._raise_for_status()

    monkeypatch.setattr("grpc.aio._call.StreamStreamCall.write", breaks)
    async with FakeWorker() as worker:
        with pytest.raises(WorkerUnavailableError, match="connection broke"):
            async with worker.connect():
                pass


async def test_a_draining_worker_refuses_new_sessions_and_waits_for_running_ones():
    async with FakeWorker() as worker, worker.connect() as link, Reader(link) as reader:
        link.send(an_open(1))
        await until(lambda: reader.all("commits"))
        drained = asyncio.create_task(worker.service.drain(worker.server))
        await until(lambda: not worker.service.is_healthy)
        link.send(an_open(2))
        await until(lambda: reader.all("closed"))
        [failed] = reader.all("failures")
        assert (failed.session, failed.code, failed.is_retryable) == (2, ErrorCode.UNAVAILABLE, True)
        assert reader.all("closed") == [Closed(session=2, length=0)]
        assert not drained.done()
        link.send(Close(session=1))
        await drained
        with pytest.raises(WorkerUnavailableError, match=REFUSED):
            async with worker.connect():
                pass


async def end_of(call):
    """The status of a stream, after all of its messages (a status does not overtake them)."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()
