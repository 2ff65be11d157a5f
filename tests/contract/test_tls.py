"""Mutual TLS: who has the right certificate is served, everybody else is refused in one clear sentence."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority
from fake_step_loop import FakeWorker
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.service import App, check_config
from specpipe.config import CoordinatorConfig, ServerConfig, TlsConfig
from specpipe.errors import ConfigError, WorkerUnavailableError
from specpipe.server import Server, create_channel, create_server, status_errors
from specpipe.tls import NO_TLS, name_of_worker
from specpipe.worker_client import WorkerLink

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority.create(tmp_path_factory.mktemp("certificates") / "ours")
    authority.issue("server", "127.0.0.1", "target-worker")
    authority.issue("client", "client")
    return authority


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority.create(tmp_path_factory.mktemp("certificates") / "theirs")
    authority.issue("client", "client")
    return authority


@asynccontextmanager
async def serving(tls: TlsConfig) -> AsyncIterator[Server]:
    server = create_server(ServerConfig(tls=tls), [])
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop()


async def ask(server: Server, tls: TlsConfig, **options: Any) -> bool:
    """Whether the call is answered. Raises what a client of ours would."""
    async with create_channel(server.address, tls, **options) as channel, status_errors():
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return bool(response.status == SERVING)


async def test_both_sides_with_certificates_of_one_ca(ours: Authority) -> None:
    async with serving(ours.config("server")) as server:
        assert await ask(server, ours.config("client"))


async def test_a_live_page_beside_certificates_is_warned_of(ours: Authority, caplog: pytest.LogCaptureFixture) -> None:
    config = CoordinatorConfig(targets=("127.0.0.1:1",), http_port=0, server=ServerConfig(tls=ours.config("server")))
    app = App(config, create_server(config.server, []))
    async with app.running():
        assert f"the live page at {app.http_address} has no TLS and asks for no certificate" in caplog.messages


async def test_a_client_that_checks_by_another_ca_refuses_the_server(ours: Authority, theirs: Authority) -> None:
    async with serving(ours.config("server")) as server:
        with pytest.raises(WorkerUnavailableError, match=r"^its certificate is not signed by the CA that was named"):
            await ask(server, replace(ours.config("client"), ca=theirs.ca))


async def test_a_client_without_a_certificate_is_refused(ours: Authority) -> None:
    async with serving(ours.config("server")) as server:
        with pytest.raises(WorkerUnavailableError, match="or a certificate from who calls it"):
            await ask(server, TlsConfig(ca=ours.ca))


async def test_a_client_with_a_certificate_of_another_ca_is_refused(ours: Authority, theirs: Authority) -> None:
    async with serving(ours.config("server")) as server:
        with pytest.raises(WorkerUnavailableError, match="or a certificate from who calls it"):
            await ask(server, replace(theirs.config("client"), ca=ours.ca))


async def test_a_plain_client_is_refused(ours: Authority) -> None:
    async with serving(ours.config("server")) as server:
        with pytest.raises(WorkerUnavailableError, match="it may want TLS"):
            await ask(server, NO_TLS)


async def test_a_plain_server_is_told_from_one_with_a_wrong_certificate(ours: Authority) -> None:
    async with serving(NO_TLS) as server:
        with pytest.raises(WorkerUnavailableError, match=r"^it does not speak TLS"):
            await ask(server, ours.config("client"))


async def test_a_certificate_for_another_name_is_refused(ours: Authority) -> None:
    async with serving(ours.config("server")) as server:
        with pytest.raises(WorkerUnavailableError, match="is for another name"):
            await ask(server, ours.config("client"), name="draft-worker")


async def test_a_certificate_that_has_expired_is_told_from_one_of_another_ca(ours: Authority) -> None:
    async with serving(ours.issue("expired", "127.0.0.1", num_days=-1)) as server:
        with pytest.raises(WorkerUnavailableError, match="its certificate has expired"):
            await ask(server, ours.config("client"))


async def test_without_a_ca_a_server_asks_for_no_certificate(ours: Authority) -> None:
    async with serving(replace(ours.config("server"), ca="")) as server:
        assert await ask(server, TlsConfig(ca=ours.ca))


async def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """Files are exchanged under the server's feet, by those of another CA, as a rotation does at its worst."""
    old, new = Authority.create(tmp_path / "old"), Authority.create(tmp_path / "new")
    for authority in (old, new):
        authority.issue("server", "127.0.0.1")
        authority.issue("client", "client")
    async with serving(old.config("server")) as server:
        assert await ask(server, old.config("client"))
        for name in ("server.crt", "server.key", "ca.crt"):
            shutil.copy(new.folder / name, old.folder / name)
        assert await ask(server, new.config("client"))


async def test_files_that_do_not_fit_together_leave_the_old_certificate_in_use(tmp_path: Path) -> None:
    """As in the moment between the exchange of a certificate and that of its key."""
    authority = Authority.create(tmp_path / "authority")
    authority.issue("server", "127.0.0.1")
    authority.issue("other", "127.0.0.1")
    client = authority.issue("client", "client")
    async with serving(authority.config("server")) as server:
        shutil.copy(authority.folder / "other.key", authority.folder / "server.key")
        assert await ask(server, client)
        (authority.folder / "server.crt").unlink()
        assert await ask(server, client)


async def test_a_worker_found_by_address_is_checked_by_the_name_of_its_role(ours: Authority) -> None:
    """The server's certificate names a target worker: a coordinator takes it for nothing else."""
    async with FakeWorker(tls=ours.config("server")) as worker:
        async with WorkerLink.connect(worker.address, "target", 9, tls=ours.config("client")) as link:
            assert link.hello.model is not None
        with pytest.raises(WorkerUnavailableError, match="is for another name"):
            async with WorkerLink.connect(worker.address, "draft", 9, tls=ours.config("client")):
                raise AssertionError("a target worker passed for a draft worker")


def test_names_of_workers() -> None:
    assert name_of_worker("10.0.0.7:6001", "target") == "target-worker"
    assert name_of_worker("[fd00::7]:6002", "draft") == "draft-worker"
    assert name_of_worker("draft-worker-0.draft-worker:6002", "draft") == ""


async def test_files_are_checked_before_the_port_is_served(ours: Authority, theirs: Authority, tmp_path: Path) -> None:
    good = ours.config("server")
    (tmp_path / "text.pem").write_text("no certificate")
    for tls, words in (
        (replace(good, cert=str(tmp_path / "missing.crt")), "No such file"),
        (replace(good, key=theirs.config("client").key), "no certificate and its private key"),
        (replace(good, cert=str(tmp_path / "text.pem")), "no certificate and its private key"),
        (replace(good, ca=str(tmp_path / "text.pem")), "no certificate of a CA"),
        (TlsConfig(ca=good.ca), "needs a certificate of its own"),
    ):
        with pytest.raises(ConfigError, match=words):
            create_server(ServerConfig(tls=tls), [])


def test_a_coordinator_needs_a_ca_for_its_workers(ours: Authority) -> None:
    server = ServerConfig(tls=replace(ours.config("server"), ca=""))
    with pytest.raises(ConfigError, match="--tls-ca"):
        check_config(CoordinatorConfig(server=server, targets=("127.0.0.1:1",)))


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="together"):
        TlsConfig(cert="a.crt")
