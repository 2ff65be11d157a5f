"""What the commands show of a real answer: its text and a line; every round, and sums that its statistics have too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import RunningService, run_command

FLAGS = ("--temperature", "0", "--max-tokens", "40", "--ignore-eos")


def test_plain_output_is_the_text_and_one_line_of_statistics_beside_it(service: RunningService) -> None:
    flags = ("--temperature", "0", "--max-tokens", "20", "--ignore-eos")
    plain = run_command("generate", "def", "--connect", service.address, *flags)
    as_json = run_command("generate", "def", "--connect", service.address, *flags, "--json")
    assert plain.returncode == as_json.returncode == 0
    text = json.loads(as_json.stdout)["text"]
    assert plain.stdout == (text if text.endswith("\n") else text + "\n")
    assert plain.stderr.startswith("20 tokens in ")
    assert "tokens a round" in plain.stderr
    assert plain.stderr.count("\n") == 1


def test_the_trace_of_an_answer_has_every_round_and_agrees_with_its_statistics(
    service: RunningService, tmp_path: Path
) -> None:
    page = tmp_path / "answer.html"
    shown = ("--trace", "--trace-file", str(page))
    answered = run_command("generate", "def index(", "--connect", service.address, *FLAGS, "--json", *shown)
    assert answered.returncode == 0, answered.stderr
    answer = json.loads(answered.stdout)
    request_id, statistics = answer["request_id"], answer["speculation"]
    assert f"request {request_id} · " in answered.stderr
    assert "draft step" in answered.stderr
    assert f'data-round="{statistics["rounds"]}"' in page.read_text(encoding="utf-8")

    asked = run_command("trace", request_id, "--connect", service.address, "--json")
    assert asked.returncode == 0, asked.stderr
    told = json.loads(asked.stdout)
    assert (told["request_id"], told["is_complete"]) == (request_id, True)
    by_trace = run_command("trace", told["trace_id"], "--connect", service.address, "--json")
    assert json.loads(by_trace.stdout) == told
    assert [one["number"] for one in told["rounds"]] == list(range(1, len(told["rounds"]) + 1))
    totals = told["totals"]
    assert totals["num_rounds"] == statistics["rounds"]
    assert totals["num_accepted"] >= statistics["accepted_tokens"]  # what was cut off at the end is drawn too
    assert totals["draft_ms"] == pytest.approx(statistics["draft_ms"], abs=0.001)
    assert totals["exposed_ms"] == pytest.approx(statistics["exposed_draft_ms"], abs=0.001)
    assert {span["process"]["role"] for span in told["spans"]} == {"coordinator", "target-worker", "draft-worker"}


def test_of_a_request_that_did_not_ask_to_be_traced_it_is_said_how_to_have_a_trace(service: RunningService) -> None:
    answered = run_command("generate", "def index(", "--connect", service.address, *FLAGS, "--json")
    request_id = json.loads(answered.stdout)["request_id"]
    done = run_command("trace", request_id, "--connect", service.address)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: no trace is kept of {request_id!r}")
    assert "specpipe generate --trace" in done.stderr
    assert "--trace-sample 1" in done.stderr
