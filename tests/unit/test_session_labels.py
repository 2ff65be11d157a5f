"""What workers log of a session names the request that it is of, so that the logs of all processes go together."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from draft_harness import Harness, commit_message, open_message
from target_simulator import Simulator, create_open

from specpipe.testing import TableModel
from specpipe.types import MAX_LABEL_CHARS


def test_a_label_names_the_request_where_there_is_one_and_is_one_line_of_bounded_length() -> None:
    opened = open_message(7)
    assert replace(opened, request_id="").label == "session 7"
    assert replace(opened, request_id="chat-1").label == "session 7 of request 'chat-1'"
    nasty = replace(opened, request_id="a\nERROR \x1b[31m\u2028" + "x" * 1000).label
    assert nasty.isprintable()
    assert nasty.startswith("session 7 of request 'a\\nERROR ")
    assert len(nasty) < 2 * MAX_LABEL_CHARS


def test_a_draft_worker_names_the_request_of_a_session_that_it_refuses_or_that_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness, opened = Harness(TableModel(seed=3)), replace(open_message(7), request_id="chat-1")
    with caplog.at_level(logging.INFO):
        harness.receive(replace(opened, tokens=()))
        harness.receive(replace(opened, session=8))
        harness.receive(commit_message(8, 0, [opened.tokens[0] + 1]))
    assert [message.split(" of request ")[0] for message in caplog.messages] == ["session 7", "session 8"]
    assert all(" of request 'chat-1' " in message for message in caplog.messages)


def test_a_target_worker_names_the_request_of_a_session_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    simulator = Simulator(TableModel(seed=3))
    with caplog.at_level(logging.INFO):
        simulator.open(replace(create_open(7, remaining_ms=0.0), request_id="chat-1"))
        simulator.run()
    assert any(message.startswith("session 7 of request 'chat-1' failed: ") for message in caplog.messages)
