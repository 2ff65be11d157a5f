"""One whole run that `make test-oldest` repeats on the oldest supported versions."""

from __future__ import annotations

import json

import pytest
from oracle import Oracle
from running import run_command
from tiny_models import TinyPair


@pytest.mark.parametrize("prompt", ["def tokens(line):"])
def test_a_pipelined_answer_equals_generate(tiny_pair: TinyPair, oracle: Oracle, prompt: str) -> None:
    models = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft))
    done = run_command(
        "generate", prompt, *models, "--temperature", "0", "--max-tokens", "40", "--ignore-eos", "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == oracle.greedy(oracle.encode(prompt), 40)
    assert answer["speculation"]["accepted_tokens"] > 0
