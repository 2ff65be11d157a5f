"""TableModel answers like an oracle and refuses batches that a real engine would answer wrongly in silence."""

from __future__ import annotations

import numpy as np
import pytest

from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.errors import InvalidRequestError
from specpipe.testing import TableModel

PROMPT = [3, 1, 4, 1]


def prefill(session: int = 1, slots: tuple[int, ...] = (5, 6, 7, 8), tokens: list[int] = PROMPT) -> SessionRows:
    return SessionRows(
        session=session,
        context_slots=slots,
        num_computed=0,
        tokens=tokens,
        num_committed_rows=len(tokens),
        wants_logits=[False] * (len(tokens) - 1) + [True],
    )


def tree_step(**changes: object) -> SessionRows:
    """Committed token 9 at position 4, then children 2 and 7 of it and 5 below 2."""
    fields: dict[str, object] = {
        "session": 1,
        "context_slots": [5, 6, 7, 8, 9],
        "num_computed": 4,
        "tokens": [9, 2, 7, 5],
        "num_committed_rows": 1,
        "tree_slots": [20, 21, 22],
        "tree_rows": [0, 1, 2],
        "tree_positions": [5, 5, 6],
        "tree_visible": [0b001, 0b010, 0b101],
        "wants_logits": [True] * 4,
    }
    return SessionRows(**(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def model() -> TableModel:
    model = TableModel(16, 64, seed=3)
    model.forward(StepBatch(sessions=[prefill()]))
    return model


def test_rows_see_exactly_their_own_path(model: TableModel) -> None:
    logits = model.forward(StepBatch(sessions=[tree_step()]))
    paths = [[], [2], [7], [2, 5]]
    np.testing.assert_array_equal(logits, [model.logits_of([*PROMPT, 9, *path]) for path in paths])


def test_nodes_of_earlier_steps_are_read_from_their_slots(model: TableModel) -> None:
    model.forward(StepBatch(sessions=[tree_step()]))
    below = tree_step(
        num_computed=5,
        tokens=[6],
        num_committed_rows=0,
        tree_slots=[20, 22, 30],
        tree_rows=[2],
        tree_positions=[5, 6, 7],
        tree_visible=[0b111],
        wants_logits=[True],
    )
    logits = model.forward(StepBatch(sessions=[below]))
    np.testing.assert_array_equal(logits[0], model.logits_of([*PROMPT, 9, 2, 5, 6]))


def test_accepted_slots_become_context(model: TableModel) -> None:
    model.forward(StepBatch(sessions=[tree_step()]))
    after = SessionRows(
        session=1,
        context_slots=[5, 6, 7, 8, 9, 20, 22, 31],
        num_computed=7,
        tokens=[11],
        num_committed_rows=1,
        wants_logits=[True],
    )
    logits = model.forward(StepBatch(sessions=[after]))
    np.testing.assert_array_equal(logits[0], model.logits_of([*PROMPT, 9, 2, 5, 11]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tree_positions": [5, 6, 6]}, "sees positions"),
        ({"tree_visible": [0b001, 0b010, 0b001]}, "does not see itself"),
        ({"context_slots": [5, 6, 8, 7, 9]}, "holds position"),
        ({"context_slots": [5, 6, 7, 40, 9]}, "before it was written"),
        ({"context_slots": [0, 6, 7, 8, 9]}, "slot 0"),
        ({"tree_slots": [20, 20, 22]}, "twice"),
        ({"tree_slots": [20, 21, 6]}, "drafted"),
        ({"tokens": [9, 2, 16, 5]}, "vocabulary"),
    ],
)
def test_wrong_batches_are_refused(model: TableModel, changes: dict[str, object], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        model.forward(StepBatch(sessions=[tree_step(**changes)]))


def test_a_node_computed_below_another_parent_is_refused(model: TableModel) -> None:
    model.forward(StepBatch(sessions=[tree_step()]))  # 5 in slot 22 was computed below 2 in slot 20
    below = {"tree_slots": [21, 22, 30], "tree_rows": [2], "tree_positions": [5, 6, 7], "tree_visible": [0b111]}
    rows = tree_step(num_computed=5, num_committed_rows=0, tokens=[4], wants_logits=[True], **below)
    with pytest.raises(AssertionError, match="another path"):
        model.forward(StepBatch(sessions=[rows]))


def test_slot_computed_under_another_prefix_is_refused(model: TableModel) -> None:
    model.forward(StepBatch(sessions=[prefill(2, (10, 11, 12, 13), [3, 2, 4, 1])]))
    with pytest.raises(AssertionError, match="another prefix"):
        model.forward(StepBatch(sessions=[tree_step(context_slots=[5, 6, 7, 13, 9])]))


def test_positions_beyond_the_context_are_a_refusal_not_a_crash() -> None:
    with pytest.raises(InvalidRequestError):
        TableModel(16, 64, max_context=3).forward(StepBatch(sessions=[prefill()]))


def test_nan_fails_one_session_and_its_slot_must_be_cleared(model: TableModel) -> None:
    model.poison([*PROMPT, 9, 2])
    logits = model.forward(StepBatch(sessions=[tree_step()]))
    assert np.isnan(logits).any(axis=1).tolist() == [False, True, False, True]
    with pytest.raises(AssertionError, match="not cleared"):
        model.forward(StepBatch(sessions=[prefill(2, (20, 21, 23, 24))]))
    model.clear_slots([20, 21, 22])
    model.forward(StepBatch(sessions=[prefill(2, (20, 21, 23, 24))]))


@pytest.mark.parametrize("agreement", [0.0, 0.5, 0.8, 1.0])
def test_a_draft_agrees_as_often_as_it_is_told(agreement: float) -> None:
    target = TableModel(64, seed=1)
    draft = TableModel.like(target, agreement)
    sequences = [[i, i * 7 % 64] for i in range(64)] * 10
    sequences = [[*s, i % 64, i // 64] for i, s in enumerate(sequences)]
    same = np.mean([np.argmax(target.logits_of(s)) == np.argmax(draft.logits_of(s)) for s in sequences])
    assert abs(same - agreement) < 0.08


def test_order_makes_text_depend_on_the_last_tokens_only() -> None:
    model = TableModel(16, order=2)
    np.testing.assert_array_equal(model.logits_of([1, 2, 3]), model.logits_of([9, 9, 2, 3]))
    assert (TableModel(16).logits_of([1, 2, 3]) != TableModel(16).logits_of([9, 9, 2, 3])).any()
