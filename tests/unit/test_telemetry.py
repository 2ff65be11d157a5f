"""The log: one line a record, to whatever stderr is at that moment; lines of children go out as they are."""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import time
from collections.abc import Iterator

import pytest

from specpipe.errors import ConfigError
from specpipe.telemetry.logs import FORWARDED, configure_logging


@pytest.fixture(autouse=True)
def _own_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_lines_go_to_the_stderr_of_the_moment() -> None:
    configure_logging("info", role="draft-worker")
    with contextlib.redirect_stderr(io.StringIO()) as later:
        logging.getLogger("a.b").info("%d nodes", 3)
    assert later.getvalue().endswith(" [draft-worker] INFO a.b: 3 nodes\n")


def test_a_line_says_its_moment_with_date_and_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "XYZ-5:30")
    time.tzset()
    try:
        configure_logging("info")
        before = time.time()
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            logging.getLogger("a.b").info("x")
    finally:
        monkeypatch.undo()
        time.tzset()
    moment, rest = stderr.getvalue().split(" ", 1)
    assert rest == "INFO a.b: x\n"
    assert moment.endswith("+05:30")
    assert before - 0.001 <= datetime.datetime.fromisoformat(moment).timestamp() <= time.time()


def test_a_forwarded_line_has_one_time_and_one_name() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        configure_logging("info")
        logging.getLogger("parent").info("[%s %d] %s", "draft-worker", 7, "12:00:00 INFO x: y", extra=FORWARDED)
    assert stderr.getvalue() == "[draft-worker 7] 12:00:00 INFO x: y\n"


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="debug, info, warning, error, got 'loud'"):
        configure_logging("loud")


@pytest.mark.parametrize("extra", [None, FORWARDED])
def test_what_a_client_sent_is_part_of_one_line_and_moves_no_cursor(extra: dict[str, bool] | None) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        configure_logging("info")
        sent = "x\nerror: no \x1b[2J\r\u202egnp\u2028 but\tthis, é and 中 stay"
        logging.getLogger("service").info("request %s ends", sent, extra=extra)
    [line] = stderr.getvalue().splitlines()
    assert line.endswith("x\\nerror: no \\x1b[2J\\r\\u202egnp\\u2028 but\tthis, é and 中 stay ends")


def test_no_line_of_a_trace_passes_for_one_of_the_log() -> None:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        configure_logging("info")
        try:
            raise RuntimeError("bad\nerror: forged\r12:00:00 INFO a: forged \x1b[2J")
        except RuntimeError:
            logging.getLogger("service").exception("it failed")
    first, *trace = stderr.getvalue().splitlines()
    assert first.endswith("ERROR service: it failed")
    assert all(line.startswith("    ") for line in trace)
    assert trace[-3:] == ["    RuntimeError: bad", "    error: forged", r"    12:00:00 INFO a: forged \x1b[2J"]
