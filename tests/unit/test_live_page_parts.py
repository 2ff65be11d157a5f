"""The live page's parts that need no server: its files, who may ask, where `serve` puts it."""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from waiting import wait_until

import coordinator.web
from coordinator.web.answers import COMMENT, EventStream
from coordinator.web.assets import Assets
from coordinator.web.guard import Guard, is_loopback
from coordinator.web.server import PageServer
from specpipe.cli.serve import DEFAULT_HTTP_PORT, ServeFlags, page_port, page_url
from specpipe.errors import CapacityError, ConfigError, WorkerUnavailableError

ROOT = Path(__file__).parents[2]
WEB = Path(coordinator.web.__file__).parent
VENDOR = WEB / "assets" / "vendor"


# Files


def test_libraries_are_as_their_packages_hold_them_and_have_their_licences() -> None:
    lines = [line.split() for line in (VENDOR / "VERSIONS.txt").read_text().splitlines() if not line.startswith("#")]
    for name, _, _, _, digest in lines:
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
    names = {name for name, *_ in lines}
    assert {path.name for path in VENDOR.iterdir()} == names | {"VERSIONS.txt"}
    licensed = {package for name, package, *_ in lines if name.endswith("LICENSE.txt")}
    assert licensed == {package for _, package, *_ in lines}


def test_a_changed_file_changes_the_version_of_all(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<script src="/ui/assets/{version}/main.js"></script>')
    (tmp_path / "main.js").write_text("1")
    first = Assets(tmp_path)
    (tmp_path / "main.js").write_text("2")
    second = Assets(tmp_path)
    assert first.version != second.version
    assert f"/ui/assets/{second.version}/main.js" in second.page
    asset = second.get(second.version, "main.js")
    assert asset is not None
    assert asset.body == b"2"
    assert second.get(first.version, "main.js") is None
    assert second.get(second.version, "index.html") is None


def test_the_page_s_policy_allows_its_import_map_and_nothing_else_inline() -> None:
    policy = dict(part.split(maxsplit=1) for part in Assets().policy.split("; "))
    own, *hashes = policy["script-src"].split()
    assert own == "'self'"
    assert len(hashes) == 1
    assert policy["default-src"] == "'none'"
    html = (WEB / "assets" / "index.html").read_text()
    assert json.loads(html.partition('importmap">')[2].partition("</script>")[0])["imports"]
    assert " style=" not in html
    assert " on" not in html.replace(" one", "")


def test_the_page_is_no_larger_than_pages_need_to_be() -> None:
    """It is sent as it is; without licences all of it is a small picture's worth."""
    files = [path for path in (WEB / "assets").rglob("*") if path.suffix in (".js", ".mjs", ".css", ".html", ".svg")]
    assert sum(path.stat().st_size for path in files) < 120_000


# Who may ask


@pytest.mark.parametrize(
    ("interface", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("pod-7", False),
    ],
)
def test_loopback_interfaces_are_known(interface: str, is_local: bool) -> None:
    assert is_loopback(interface) == is_local


async def test_a_public_interface_is_asked_by_any_name_but_only_by_its_own_page() -> None:
    statuses = []

    async def app(scope: object, receive: object, send: object) -> None:
        statuses.append(200)

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(int(str(message["status"])))

    guard = Guard(app, policy="", interface="0.0.0.0")
    for origin in (b"https://llm.example", b"http://elsewhere.example"):
        headers = [(b"host", b"llm.example"), (b"origin", origin)]
        await guard({"type": "http", "path": "/ui/api/state", "headers": headers}, None, send)  # type: ignore[arg-type]
    assert statuses == [200, 403]


# What keeps a stream open


class Told:
    """An ASGI server that keeps what it is to send, and a reader that stays until it is told to leave."""

    def __init__(self, frames: AsyncGenerator[bytes, None], *, comment_every_s: float = 0.001) -> None:
        self.messages: list[dict[str, Any]] = []
        self.leaves = asyncio.Event()
        stream = EventStream(frames)
        stream.comment_every_s = comment_every_s
        self.task = asyncio.ensure_future(stream({"type": "http"}, self._receive, self._send))  # type: ignore[arg-type]

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.messages if "body" in message]

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)


async def test_a_request_that_waits_is_told_comments_and_then_its_answer() -> None:
    turn = asyncio.Event()

    async def answer() -> AsyncGenerator[bytes, None]:
        await turn.wait()
        yield b"one"
        raise WorkerUnavailableError("it is gone")

    told = Told(answer())
    await wait_until(lambda: told.bodies[:2] == [COMMENT, COMMENT])
    assert told.messages[0]["status"] == 200
    turn.set()
    await told.task
    one, error, end = (body for body in told.bodies if body != COMMENT)
    assert (one, end) == (b"one", b"")
    assert error.startswith(b"event: error")


async def test_an_answer_that_comes_in_time_has_no_comments_and_a_refusal_is_a_status() -> None:
    async def answer() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    async def refusal() -> AsyncGenerator[bytes, None]:
        raise CapacityError("full")
        yield b""

    whole, refused = Told(answer(), comment_every_s=60.0), Told(refusal(), comment_every_s=60.0)
    await asyncio.wait({whole.task, refused.task})
    assert whole.bodies == [b"one", b"two", b""]
    assert refused.messages[0]["status"] == 429


async def test_a_reader_that_leaves_while_its_request_waits_ends_it() -> None:
    is_over = asyncio.Event()

    async def answer() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            is_over.set()

    told = Told(answer())
    await wait_until(lambda: len(told.bodies) > 1)
    told.leaves.set()
    await told.task
    assert is_over.is_set()


# The coordinator without a page


def test_http_is_imported_by_the_page_alone_and_the_page_only_where_it_is_served() -> None:
    for path in (ROOT / "coordinator").rglob("*.py"):
        at_top = {
            getattr(node, "module", None) or node.names[0].name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        is_page = "web" in path.parts
        assert is_page or not {name.partition(".")[0] for name in at_top} & {"starlette", "uvicorn"}, path
        assert is_page or not [name for name in at_top if name.startswith("coordinator.web")], path


# Where `serve` puts it


def test_a_page_can_be_forbidden() -> None:
    assert page_port(ServeFlags(no_http=True)) is None
    with pytest.raises(ConfigError, match="--no-http: --http-port asks for the page that it forbids"):
        page_port(ServeFlags(no_http=True, http_port=0))


def test_a_port_that_is_asked_for_is_had_or_refused() -> None:
    assert page_port(ServeFlags(http_port=0)) == 0
    with pytest.raises(ConfigError, match=r"^http_port must be in 0\.\.65535, got 70000$"):
        page_port(ServeFlags(http_port=70000))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use"):
            page_port(ServeFlags(http_port=port))


def test_by_default_it_is_at_8080() -> None:
    assert page_port(ServeFlags()) == DEFAULT_HTTP_PORT


async def test_a_free_port_does_where_the_preferred_one_is_taken_and_only_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = int(taken.getsockname()[1])
        server = PageServer(Starlette(), "127.0.0.1", port, is_preferred=True)
        assert int(server.address.rpartition(":")[2]) not in (0, port)
        server.close()
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is already in use"):
            PageServer(Starlette(), "127.0.0.1", port)
    server = PageServer(Starlette(), "127.0.0.1", port, is_preferred=True)
    assert server.address == f"127.0.0.1:{port}"
    server.close()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080/ui"),
        ("0.0.0.0:8080", "http://localhost:8080/ui"),
        ("[::]:8080", "http://localhost:8080/ui"),
        ("[::1]:81", "http://[::1]:81/ui"),
    ],
)
def test_the_page_s_address_is_one_that_a_browser_here_can_open(address: str, url: str) -> None:
    assert page_url(address) == url
