"""One whole run that `make test-oldest` repeats on the oldest supported versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from oracle import Oracle
from running import run_command, write_lines
from tiny_models import TinyPair

MODES = ("off", "sync", "pipelined")


@pytest.mark.parametrize("prompt", ["def tokens(line):"])
def test_answers_of_every_mode_equal_generate(tiny_pair: TinyPair, oracle: Oracle, tmp_path: Path, prompt: str) -> None:
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"prompt": prompt, "mode": mode} for mode in MODES))
    done = run_command(
        "generate", "--prompts", prompts, *models, "--temperature", "0", "--max-tokens", "160", "--ignore-eos", "--json"
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["token_ids"] for answer in answers] == [oracle.greedy(oracle.encode(prompt), 160)] * len(MODES)
    assert answers[MODES.index("sync")]["speculation"]["accepted_tokens"] > 0
