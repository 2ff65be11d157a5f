"""What names stand for: coordinator.discovery."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.discovery import Change, Name, difference, is_name, resolve_name


class Resolver:
    """Says what it is told to say."""

    def __init__(self, *answers: Sequence[str] | OSError) -> None:
        self.asked: list[tuple[str, int]] = []
        self._answers = list(answers)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        answer = self._answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("before", "now", "added", "removed"),
    [
        ((), (), (), ()),
        ((), ("a:1", "b:1"), ("a:1", "b:1"), ()),
        (("a:1", "b:1"), ("b:1", "c:1"), ("c:1",), ("a:1",)),
        (("a:1", "b:1"), ("b:1", "a:1"), (), ()),
    ],
)
def test_a_change_is_what_came_and_what_went(
    before: Sequence[str], now: Sequence[str], added: Sequence[str], removed: Sequence[str]
) -> None:
    assert difference(before, now) == Change(added=tuple(added), removed=tuple(removed))


async def test_a_name_is_asked_for_its_host_and_tells_what_changed() -> None:
    resolver = Resolver(["10.0.0.1:6001", "10.0.0.1:6001", "10.0.0.2:6001"], ["10.0.0.2:6001"], [])
    name = Name("dns:target-worker.specpipe:6001")
    assert (await name.ask(resolver)).added == ("10.0.0.1:6001", "10.0.0.2:6001")
    assert await name.ask(resolver) == Change(removed=("10.0.0.1:6001",))
    assert await name.ask(resolver) == Change(removed=("10.0.0.2:6001",))
    assert resolver.asked == [("target-worker.specpipe", 6001)] * 3


async def test_a_resolver_that_fails_changes_nothing_and_is_heard_of_once(caplog: pytest.LogCaptureFixture) -> None:
    failure = OSError(-3, "Temporary failure in name resolution")
    resolver = Resolver(["10.0.0.1:6001"], failure, failure, ["10.0.0.1:6001"], failure)
    name = Name("dns:workers:6001")
    changes = [await name.ask(resolver) for _ in range(5)]
    assert changes == [Change(added=("10.0.0.1:6001",)), Change(), Change(), Change(), Change()]
    assert name.addresses == ("10.0.0.1:6001",)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2, "once for each time that it began to fail"
    assert all("workers" in line and "Temporary failure" in line for line in told)


async def test_a_name_without_addresses_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    name = Name("dns:workers:6001")
    resolver = Resolver([], [])
    assert [await name.ask(resolver) for _ in range(2)] == [Change(), Change()]
    assert [record.message for record in caplog.records] == ["workers stands for no address now; it is asked for again"]


async def test_the_systems_resolver_gives_addresses_as_they_are_dialled() -> None:
    assert "127.0.0.1:6001" in await resolve_name("127.0.0.1", 6001)
    assert await resolve_name("::1", 6001) == ["[::1]:6001"]


def test_what_begins_with_dns_is_a_name() -> None:
    assert is_name("dns:workers:6001")
    assert not is_name("workers:6001")
    assert is_name("file:/run/workers")


async def test_a_host_in_brackets_is_asked_for_without_them() -> None:
    resolver = Resolver(["[::1]:6001"])
    await Name("dns:[::1]:6001").ask(resolver)
    assert resolver.asked == [("::1", 6001)]


async def test_a_file_stands_for_a_worker_in_each_line_and_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("10.0.0.1:6001\n\n10.0.0.2:6001\n")
    name = Name(f"file:{path}")
    assert (await name.ask(Resolver())).added == ("10.0.0.1:6001", "10.0.0.2:6001")
    path.write_text("10.0.0.2:6001\n")
    assert await name.ask(Resolver()) == Change(removed=("10.0.0.1:6001",))
    assert name.next_ask_s(5.0) < 5.0, "a file is read more often than a name is resolved"


WRONG_FILES = {
    "gone": None,
    "a word": b"no address\n",
    "no text": b"\xff\xfe",
    "a line cut before its port": b"10.0.0.2:6001\n10.0.0.3:",
    "a port that there is not": b"10.0.0.2:99999\n",
    "port 0": b"10.0.0.2:0\n",
    "a port in other digits": "10.0.0.2:٣\n".encode(),
    "a URL": b"http://10.0.0.2:6001\n",
    "two on a line": b"10.0.0.2:6001 10.0.0.3:6001\n",
    "IPv6 without brackets": b"fd00::7:6001\n",
    "too many": b"".join(b"10.0.%d.%d:6001\n" % (i // 256, i % 256) for i in range(10_000)),
    "too large": b"10.0.0.2:6001\n" * 100_000,
}


@pytest.mark.parametrize("content", WRONG_FILES.values(), ids=WRONG_FILES)
async def test_a_file_that_lists_no_workers_takes_none_away(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    path.write_text("10.0.0.1:6001\n")
    name = Name(f"file:{path}")
    await name.ask(Resolver())
    path.unlink() if content is None else path.write_bytes(content)
    assert [await name.ask(Resolver()) for _ in range(2)] == [Change(), Change()]
    assert name.addresses == ("10.0.0.1:6001",)
    assert len(caplog.records) == 1
    assert "what it stood for before is kept" in caplog.text


async def test_a_pipe_is_no_list_of_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody writes to it: who opens it waits for ever, and holds up the end of the process."""
    os.mkfifo(tmp_path / "pipe")
    assert await Name(f"file:{tmp_path / 'pipe'}").ask(Resolver()) == Change()
    assert await Name(f"file:{tmp_path}").ask(Resolver()) == Change()
    assert [record.message.count("it is no file") for record in caplog.records] == [1, 1]


async def test_addresses_of_all_kinds_are_taken_once_each(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    path.write_text("[fd00::7]:6001\r\n  host.example.:6001\n[fe80::1%eth0]:6001\n[fd00::7]:6001\nworker-0:1\n")
    added = (await Name(f"file:{path}").ask(Resolver())).added
    assert added == ("[fd00::7]:6001", "host.example.:6001", "[fe80::1%eth0]:6001", "worker-0:1")


@pytest.mark.parametrize("host", ["a..b", "a" * 70, "."])
async def test_what_can_be_no_host_is_not_resolved_and_nothing_more(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert await Name(f"dns:{host}:6001").ask(resolve_name) == Change()
    assert "cannot be the name of a host" in caplog.text


def test_a_resolver_that_says_nothing_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended = threading.Event()

    def look_up(*_: object, **__: object) -> list[object]:
        has_ended.wait()
        return []

    async def give_up() -> None:
        asking = asyncio.ensure_future(resolve_name("workers", 6001))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.run(give_up())
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "resolve workers")
    has_ended.set()
    thread.join()
