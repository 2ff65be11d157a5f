"""Lookups in the draft tree: where text repeats itself the tree grows by many levels a step, and only faster."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from draft_harness import Harness, commit_message, open_message, received_tree

from draft_worker.lookups import is_lookup
from draft_worker.scheduler import StepRules, plan_step
from specpipe.step_costs import StepCosts
from specpipe.testing import TableModel
from specpipe.types import Mode

CYCLE = 9


class Cyclic(TableModel):
    """After t comes t + 1, most likely."""

    def _compute(self, key: tuple[int, ...]) -> npt.NDArray[np.float32]:
        logits = 0.5 * super()._compute(key)
        logits[(key[-1] + 1) % CYCLE] += 4.0
        return logits.astype(np.float32)


def depth_after(steps: int, mode: Mode, *, text: list[int]) -> int:
    harness = Harness(Cyclic(32, 512, 5, spread=1.0), max_nodes=256, max_depth=64)
    harness.receive(open_message(1, text, mode=mode, num_speculative_tokens=40))
    for _ in range(steps):
        harness.step()
    return max((node.depth for node in harness.session(1).tree.nodes() if not is_lookup(node)), default=0)


def test_text_that_repeats_itself_is_drafted_many_levels_a_step() -> None:
    assert depth_after(2, Mode.PIPELINED, text=[i % CYCLE for i in range(24)]) >= 12
    assert depth_after(2, Mode.PIPELINED, text=list(range(CYCLE))) == 2
    assert depth_after(2, Mode.SYNC, text=[i % CYCLE for i in range(24)]) == 2


def test_only_what_the_model_ranked_is_told() -> None:
    harness = Harness(TableModel(8, 512, 5, spread=2.0), max_nodes=256, max_depth=64)
    text = [i % 7 for i in range(30)]
    opened = open_message(1, text)
    harness.receive(opened)
    for _ in range(4):
        harness.step()
    session = harness.session(1)
    told = received_tree(opened, text, harness.take_extensions())
    lookups = [node for node in session.tree.nodes() if is_lookup(node)]
    assert all(told.find([above.token for above in node.path()]) is None for node in lookups)
    known = {tuple(above.token for above in node.path()) for node in told.nodes()}
    ranked = {tuple(above.token for above in node.path()) for node in session.tree.nodes() if not is_lookup(node)}
    assert known == ranked


def test_a_commit_along_lookups_that_were_never_ranked_is_followed() -> None:
    harness = Harness(Cyclic(32, 512, 5, spread=1.0), max_nodes=256, max_depth=64)
    text = [i % CYCLE for i in range(24)]
    harness.receive(open_message(1, text))
    harness.step()
    tokens = [(text[-1] + 1 + i) % CYCLE for i in range(14)]
    harness.receive(commit_message(1, len(text), tokens))
    harness.run()
    session = harness.session(1)
    assert session.tokens == text + tokens
    assert len(session.slots) == len(session.tokens)
    assert session.tree.find([(tokens[-1] + 1) % CYCLE]) is not None


@pytest.mark.parametrize(("flat_rows", "least", "most"), [(1, 1, 3), (6, 4, 6), (64, 12, 24)])
def test_a_step_expands_what_its_rows_are_worth(flat_rows: int, least: int, most: int) -> None:
    """Steps of up to `flat_rows` rows cost the same, and in proportion beyond."""
    costs = StepCosts(64)
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        costs.observe(rows, 0, 10.0 * -(-rows // flat_rows))
    harness = Harness(TableModel(32, 512, 5, spread=3.0), max_nodes=256, max_depth=64)
    harness.receive(open_message(1, [1, 2, 3]))
    for _ in range(2):
        harness.step()
    (work,) = plan_step([harness.session(1)], StepRules(), num_free_slots=256, costs=costs)
    assert least <= len(work.nodes) <= most
