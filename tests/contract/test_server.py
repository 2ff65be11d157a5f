"""Servers and channels: statuses and errors, health, limits, ports, sizes, keepalive, proxies."""

import asyncio
import logging
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tcp_relay import TcpRelay, is_listening

from specpipe import server as server_module
from specpipe.config import ServerConfig
from specpipe.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceededError,
    ErrorCode,
    InvalidRequestError,
    SessionNotFoundError,
    SpecpipeError,
    WorkerUnavailableError,
)
from specpipe.server import (
    MAX_MESSAGE_BYTES,
    OF_SPECPIPE,
    channel_options,
    create_channel,
    create_server,
    error_from_status,
    server_options,
    status_errors,
    status_of,
)

SERVICE = "specpipe.rpc.v1.FakeService"


class FakeService:
    """`Unary` echoes, `Stream` sends three; both raise `error` (the stream after its first message)."""

    def __init__(self):
        self.error = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_running = 0
        self.most_running = 0

    async def unary(self, request, context):
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            return request
        finally:
            self.num_running -= 1

    async def stream(self, request, context):
        self.num_running += 1
        try:
            yield b"1"
            if self.error is not None:
                raise self.error
            await self.gate.wait()
            yield b"2"
        finally:
            self.num_running -= 1

    def add_to(self, server):
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary),
            "Stream": grpc.unary_stream_rpc_method_handler(self.stream),
        }
        server.grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Rig:
    def __init__(self, **options):
        self._options = options

    async def __aenter__(self):
        self.server = create_server(ServerConfig(), [SERVICE], **self._options)
        self.service = FakeService()
        self.service.add_to(self.server)
        await self.server.start()
        self.channel = create_channel(self.server.address)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        await self.server.stop()

    async def unary(self, request=b"x"):
        async with status_errors():
            return await self.channel.unary_unary(f"/{SERVICE}/Unary")(request, timeout=20)

    async def stream(self):
        received = []
        async with status_errors():
            async for message in self.channel.unary_stream(f"/{SERVICE}/Stream")(b"x", timeout=20):
                received.append(message)
        return received


async def test_calls_are_answered():
    async with Rig() as rig:
        assert await rig.unary() == b"x"
        assert await rig.stream() == [b"1", b"2"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("temperature is nan"), InvalidRequestError),
        (SessionNotFoundError("no session 5"), SessionNotFoundError),
        (CapacityError("full"), CapacityError),
        (WorkerUnavailableError("gone"), WorkerUnavailableError),
    ],
)
async def test_an_error_of_ours_comes_back_as_the_same_kind_with_its_message(error, kind):
    async with Rig() as rig:
        rig.service.error = error
        with pytest.raises(kind, match=str(error)):
            await rig.unary()
        with pytest.raises(kind, match=str(error)):
            await rig.stream()
        rig.service.error = None
        assert await rig.unary() == b"x"


@pytest.mark.parametrize("text", ["x", "\N{SNOWMAN}", "\x00", "\ud800"])
async def test_an_error_longer_than_a_status_can_be_is_cut_and_stays_what_it_is(text):
    async with Rig() as rig:
        rig.service.error = InvalidRequestError("model: " + 100_000 * text)
        for call in (rig.unary, rig.stream):
            with pytest.raises(InvalidRequestError, match=r"(?s)^model: .*\.\.\.$"):
                await call()


async def test_an_unknown_error_is_internal_logged_once_and_not_told(caplog):
    async with Rig() as rig:
        rig.service.error = ValueError("secret path")
        with caplog.at_level(logging.ERROR), pytest.raises(SpecpipeError) as caught:
            await rig.unary()
        assert caught.value.code is ErrorCode.INTERNAL
        assert "secret" not in str(caught.value)
        assert len([record for record in caplog.records if record.name.startswith("specpipe")]) == 1
        assert "secret path" in caplog.text


async def test_an_error_in_a_task_group_is_the_error():
    async with Rig() as rig:
        rig.service.error = ExceptionGroup("group", [ValueError("a"), ExceptionGroup("b", [CapacityError("full")])])
        with pytest.raises(CapacityError, match="full"):
            await rig.unary()


async def test_a_cancelled_call_leaves_nothing_running(caplog):
    async with Rig() as rig:
        rig.service.gate.clear()
        call = rig.channel.unary_unary(f"/{SERVICE}/Unary")(b"x")
        await until(lambda: rig.service.num_running == 1)
        call.cancel()
        await until(lambda: rig.service.num_running == 0)
        assert [record for record in caplog.records if record.name.startswith("specpipe")] == []


@pytest.mark.parametrize("limit", [None, 5])
async def test_a_cancelled_stream_leaves_nothing_running(limit):
    async with Rig(max_concurrent_calls=limit) as rig:
        rig.service.gate.clear()
        call = rig.channel.unary_stream(f"/{SERVICE}/Stream")(b"x")
        assert await call.read() == b"1"
        assert rig.service.num_running == 1
        call.cancel()
        await until(lambda: rig.service.num_running == 0)


async def test_every_code_of_ours_is_a_status_and_back():
    for code in ErrorCode:
        own = grpc.aio.Metadata(*OF_SPECPIPE)
        error = grpc.aio.AioRpcError(status_of(code), grpc.aio.Metadata(), own, details="d")
        assert error_from_status(error).code is code


async def test_a_call_that_a_stopping_server_cancels_finds_it_unavailable():
    """gRPC calls it CANCELLED, which its caller never asked for."""
    async with Rig() as rig:
        rig.service.gate.clear()
        call = asyncio.create_task(rig.unary())
        await until(lambda: rig.service.num_running == 1)
        await rig.server.stop(0.0)
        with pytest.raises(WorkerUnavailableError, match="it is stopping"):
            await call


async def test_a_server_that_closes_ends_its_calls_and_sends_the_next_to_whoever_listens_then():
    """A watcher of its health hears of it, and holds up nothing."""
    async with Rig() as leaving, Rig() as successor, TcpRelay(port_of(leaving)) as relay:
        await leaving.server.set_serving(True)
        leaving.service.gate.clear()
        async with create_channel(relay.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stream = channel.unary_stream(f"/{SERVICE}/Stream")(b"x", timeout=20)
            assert await stream.read() == b"1"
            relay.target_port = port_of(successor)
            await leaving.server.set_serving(False)
            closing = asyncio.create_task(leaving.server.close())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await until(lambda: not is_listening(leaving.server.address))
            for _ in range(3):
                assert await channel.unary_unary(f"/{SERVICE}/Unary")(b"y", timeout=20) == b"y"
            assert (leaving.service.most_running, successor.service.most_running) == (0, 1)
            assert relay.num_connections == 2
            assert not closing.done()
            leaving.service.gate.set()
            assert [await stream.read(), await stream.read()] == [b"2", grpc.aio.EOF]
            await asyncio.wait_for(closing, 20)
            assert not watch.done()
            watch.cancel()


async def test_a_server_that_is_stopped_while_it_closes_cancels_what_still_runs():
    async with Rig() as rig:
        rig.service.gate.clear()
        call = asyncio.create_task(rig.unary())
        await until(lambda: rig.service.num_running == 1)
        closing = asyncio.create_task(rig.server.close())
        await until(lambda: not is_listening(rig.server.address))
        await rig.server.stop(0.0)
        with pytest.raises(WorkerUnavailableError, match="it is stopping"):
            await call
        await asyncio.wait_for(closing, 20)


def port_of(rig):
    return int(rig.server.address.rpartition(":")[2])


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"])  # no protobuf; a string that is no UTF-8
async def test_a_request_that_is_no_message_is_invalid(message):
    async with Rig() as rig:
        with pytest.raises(InvalidRequestError, match="cannot be read"):
            async with status_errors():
                await rig.channel.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=20)
        assert await rig.unary() == b"x"


async def test_an_unknown_method_is_refused():
    async with Rig() as rig:
        with pytest.raises(SpecpipeError, match="no specpipe service of the kind"):
            async with status_errors():
                await rig.channel.unary_unary(f"/{SERVICE}/Nothing")(b"x", timeout=20)


async def test_time_that_runs_out_is_said_in_our_own_words():
    async with Rig() as rig:
        rig.service.gate.clear()
        with pytest.raises(DeadlineExceededError, match="no answer came within the time allowed"):
            async with status_errors():
                await rig.channel.unary_unary(f"/{SERVICE}/Unary")(b"x", timeout=0.2)
        rig.service.gate.set()


async def failure_at(address):
    """What a caller is told who finds no service of ours there."""
    async with create_channel(address) as channel:
        with pytest.raises(WorkerUnavailableError) as caught:
            async with status_errors():
                await channel.unary_unary(f"/{SERVICE}/Unary")(b"x", timeout=20)
    return str(caught.value)


async def test_nobody_there_is_unavailable(caplog):
    with caplog.at_level(logging.DEBUG, "specpipe.server"):
        assert await failure_at(f"127.0.0.1:{a_free_port()}") == (
            "nothing listens there: it is not started, or the address is wrong"
        )
    assert "failed to connect to all addresses" in caplog.text  # gRPC's own text is for the log


async def test_a_peer_that_accepts_and_says_nothing_may_still_be_starting(monkeypatch):
    monkeypatch.setattr(server_module, "CONNECT_TIMEOUT_MS", 200)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(5)
        assert "may still be starting" in await failure_at(f"127.0.0.1:{silent.getsockname()[1]}")


async def test_a_web_server_and_one_that_hangs_up_are_told_apart():
    async def web(reader, writer):
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def hangs_up(reader, writer):
        writer.close()

    for answer, words in ((web, "a web server is there"), (hangs_up, "closed the connection")):
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            assert words in await failure_at(f"127.0.0.1:{listener.sockets[0].getsockname()[1]}")


async def test_a_host_that_is_not_known():
    assert "host name is not known" in await failure_at("nobody.invalid:1")


async def test_more_calls_than_the_limit_are_refused_and_never_run():
    async with Rig(max_concurrent_calls=2) as rig:
        for _ in range(3):  # waves: a refusal must not free a place
            rig.service.gate.clear()
            calls = [asyncio.create_task(rig.unary()) for _ in range(10)]
            await until(lambda calls=calls: sum(call.done() for call in calls) == 8)
            rig.service.gate.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert sum(result == b"x" for result in results) == 2
            assert sum(isinstance(result, CapacityError) for result in results) == 8
        assert rig.service.most_running == 2


async def test_health_is_answered_beyond_the_limit():
    async with Rig(max_concurrent_calls=1) as rig:
        rig.service.gate.clear()
        call = asyncio.create_task(rig.unary())
        await until(lambda: rig.service.num_running == 1)
        assert await health_of(rig) == "NOT_SERVING"
        rig.service.gate.set()
        assert await call == b"x"


async def health_of(rig, service=""):
    stub = health_pb2_grpc.HealthStub(rig.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def test_health_follows_set_serving():
    async with Rig() as rig:
        assert await health_of(rig) == "NOT_SERVING"
        await rig.server.set_serving(True)
        assert (await health_of(rig), await health_of(rig, SERVICE)) == ("SERVING", "SERVING")
        await rig.server.set_serving(False)
        assert (await health_of(rig), await health_of(rig, SERVICE)) == ("NOT_SERVING", "NOT_SERVING")


async def test_reflection_lists_the_services():
    async with Rig() as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        call = stub.ServerReflectionInfo(timeout=20)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        await call.done_writing()
        names = {service.name for service in response.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_a_port_in_use_is_one_clear_sentence():
    async with Rig() as rig:
        port = int(rig.server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use"):
            create_server(ServerConfig(port=port), [])
        assert await rig.unary() == b"x"


async def test_a_port_held_by_another_program_is_in_use():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        with pytest.raises(ConfigError, match="already in use"):
            create_server(ServerConfig(port=holder.getsockname()[1]), [])


async def test_a_host_that_is_not_here_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:"):
        create_server(ServerConfig(host="192.0.2.1"), [])


async def test_a_port_can_be_taken_again_at_once():
    async with Rig() as rig:
        port = int(rig.server.address.rpartition(":")[2])
        assert await rig.unary() == b"x"
    again = create_server(ServerConfig(port=port), [])
    await again.start()
    await again.stop()


async def test_proxy_variables_do_not_touch_local_calls(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with Rig() as rig:
        assert await rig.unary() == b"x"


async def test_big_messages_pass_and_too_big_ones_are_invalid():
    async with Rig() as rig:
        big = b"x" * (MAX_MESSAGE_BYTES - 1024)
        assert await rig.unary(big) == big
        with pytest.raises(InvalidRequestError, match="larger than 64 MiB"):
            await rig.unary(b"x" * (MAX_MESSAGE_BYTES + 1))
        assert await rig.unary() == b"x"


def test_both_sides_have_the_same_sizes_and_agree_on_pings():
    server, channel = dict(server_options()), dict(channel_options())
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert server[name] == channel[name] == MAX_MESSAGE_BYTES
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == channel["grpc.keepalive_permit_without_calls"] == 1
    assert channel["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.so_reuseport"] == 0
    assert channel["grpc.enable_http_proxy"] == 0


async def test_an_idle_connection_outlives_many_pings(monkeypatch):
    """N3: the server tolerates the client's pings. The numbers are scaled down together."""
    monkeypatch.setattr(server_module, "MIN_PING_INTERVAL_MS", 50)
    monkeypatch.setattr(
        server_module,
        "_SHARED_OPTIONS",
        [(name, 100 if name == "grpc.keepalive_time_ms" else value) for name, value in server_module._SHARED_OPTIONS],
    )
    async with Rig() as rig:
        assert await rig.unary() == b"x"
        rig.service.gate.clear()
        call = asyncio.create_task(rig.unary())  # a long silent call, 15 pings
        done, _ = await asyncio.wait([call], timeout=1.5)
        assert not done
        rig.service.gate.set()
        assert await call == b"x"


def a_free_port():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
