"""For any interleaving of events the committed tokens are the plain run's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from target_simulator import Drafter, Simulator, create_open, plain_run

from specpipe.sampling.coupled import Chooser
from specpipe.testing import TableModel
from specpipe.tree import DraftTree
from specpipe.types import Close, Extension, Mode, Open

MODES = [Mode.PIPELINED, Mode.SYNC, Mode.OFF]


def tree_drafter(draft: TableModel, chance: random.Random) -> Drafter:
    """Guesses of `draft` as random trees, in pieces, from the newest base or an older one; some of it nonsense."""

    def one(tokens: Sequence[int], opened: Open) -> Extension:
        chooser = Chooser(opened.sampling, draft.info.vocab_size)
        base = max(1, len(tokens) - chance.choice([0, 0, 0, 1, 2, 5]))
        tree = DraftTree(base=base, vocab_size=draft.info.vocab_size)
        for _ in range(chance.randint(1, 10)):
            node = chance.choice([tree.root, *tree.nodes()])
            path = [*tokens[:base], *(below.token for below in node.path())]
            if chance.random() < 0.1:
                tree.add_child(node, chance.randrange(draft.info.vocab_size), chance.random())
                continue
            for token, confidence in chooser.rank(draft.logits_of(path), len(path), chance.randint(1, 3)):
                tree.add_child(node, token, min(1.0, max(0.0, confidence)))
        nodes = [node for node in tree.nodes() if chance.random() < 0.8]
        return tree.extension_of(
            nodes,
            session=opened.session,
            is_exhausted=chance.random() < 0.3,
            draft_step=chance.randint(0, 50),
            draft_step_ms=chance.choice([0.0, 1.0, 50.0]),
        )

    return lambda tokens, opened: [one(tokens, opened) for _ in range(chance.randint(0, 3))]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_slots=st.sampled_from([48, 80, 400]), max_rows=st.sampled_from([5, 16, 64]))
def test_whatever_the_network_does_the_answers_are_the_plain_ones(
    temperature: float, seed: int, num_slots: int, max_rows: int
) -> None:
    chance = random.Random(seed)
    table = TableModel(vocab_size=20, num_slots=num_slots, seed=seed % 7, spread=chance.choice([0.5, 2.0, 6.0]))
    draft = TableModel.like(table, chance.choice([0.0, 0.5, 0.9, 1.0]))
    sim = Simulator(
        table,
        drafter=tree_drafter(draft, chance),
        delay_ms=lambda: None if chance.random() < 0.2 else chance.choice([0.0, 1.0, 7.0, 40.0, 300.0]),
        copies=lambda: chance.choice([1, 1, 1, 2]),
        max_batch_tokens=max_rows,
    )
    opens = [
        create_open(
            number,
            [chance.randrange(20) for _ in range(chance.randint(1, 12))],
            max_tokens=chance.randint(1, 30),
            mode=chance.choice(MODES),
            k=chance.choice([None, 1, 3, 8]),
            temperature=temperature,
            seed=chance.randrange(2**64),
            eos=(3,) if chance.random() < 0.5 else (),
            drafter=chance.choice(["model", "model", "ngram", "none"]),
            wants_reports=chance.random() < 0.7,
        )
        for number in range(1, chance.randint(2, 7))
    ]
    cancelled = set()
    for opened in opens:
        start = chance.choice([0.0, 5.0, 60.0])
        sim.at(start, lambda opened=opened: sim.open(opened))  # type: ignore[misc]
        if chance.random() < 0.2:
            cancelled.add(opened.session)
            sim.post(Close(session=opened.session), after_ms=start + chance.uniform(0.0, 100.0))
        if chance.random() < 0.1:
            sim.at(start + 20.0, lambda: sim.loop.link_paused(1, True))
            sim.at(start + 90.0, lambda: sim.loop.link_paused(1, False))
    sim.run()
    for opened in opens:
        answer = sim.answers[opened.session]
        expected, reason = plain_run(table, opened)
        assert answer.failed is None
        assert answer.closed is not None
        assert answer.new_tokens == expected[: len(answer.new_tokens)]
        if opened.session not in cancelled:
            assert (answer.new_tokens, answer.finish_reason) == (expected, reason)
        stats = answer.stats
        assert stats.num_accepted <= stats.num_verified <= stats.num_drafted
        assert stats.num_first_ranked <= stats.num_judged
        assert len(answer.book.rounds) == (stats.num_rounds if opened.wants_reports else 0)
        assert sum(step.exposed_ms for step in answer.book.rounds) == (
            sum(commit.stats.exposed_ms for commit in answer.commits) if opened.wants_reports else 0
        )
    assert sim.loop.heartbeat().num_sessions == 0
    assert sim.loop.heartbeat().num_free_slots == num_slots - 1
