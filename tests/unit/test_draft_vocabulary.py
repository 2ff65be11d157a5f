"""A draft whose vocabulary goes on where the target's ends proposes none of the ids beyond."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draft_harness import open_message

from draft_worker.worker import DraftLoop
from specpipe.config import DraftWorkerConfig, EngineConfig
from specpipe.testing import TableModel
from specpipe.types import Extension, Mode, Open, Rule, SessionMessage

PROMPT = (1, 2, 3)


def drafted(opened: Open, num_steps: int = 12) -> set[int]:
    sent: list[SessionMessage] = []
    config = DraftWorkerConfig(engine=EngineConfig(model="table"))
    loop = DraftLoop(TableModel(32, 800, 1, spread=0.5), config, lambda _, message: sent.append(message))
    loop.receive(1, opened)
    for _ in range(num_steps):
        loop.run_once()
    extensions = [message for message in sent if isinstance(message, Extension)]
    proposed = [token for extension in extensions for p in extension.proposals for token in p.tokens]
    return {token for extension in extensions for token in extension.tokens} | set(proposed)


@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.PIPELINED])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_id_from_the_targets_size_on_is_drafted(rule: Rule, mode: Mode, temperature: float) -> None:
    opened = open_message(1, PROMPT, mode=mode, temperature=temperature, max_length=60)
    opened = replace(opened, speculation=replace(opened.speculation, rule=rule))
    bounded = drafted(replace(opened, vocab_size=8))
    assert bounded
    assert max(bounded) < 8
    assert max(drafted(opened)) >= 8, "unbounded it would draft such ids"


def test_a_draft_with_a_smaller_vocabulary_than_the_target_keeps_to_its_own() -> None:
    opened = open_message(1, PROMPT, temperature=1.0, max_length=60)
    assert max(drafted(replace(opened, vocab_size=1000))) < 32
