"""A step is refused before it can harm, one session's NaN stays its own, and masks are as the rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import CONFIGS, VOCAB, Driver, create_info, create_model, create_runner, stock_copy

from specpipe.engine import rope, self_check
from specpipe.engine.attention import attention_forward
from specpipe.engine.interface import SessionRows, StepBatch
from specpipe.engine.plan import Group, group_parts, plan_step
from specpipe.engine.prepared import PreparedModel
from specpipe.engine.runner import ModelRunner
from specpipe.errors import InvalidRequestError, InvariantError, UnsupportedModelError


def rows_of(tokens: list[int], slots: list[int], *, session: int = 1, **fields: Any) -> SessionRows:
    fields = {"num_computed": 0, "num_committed_rows": len(tokens), "wants_logits": [True] * len(tokens), **fields}
    return SessionRows(session=session, context_slots=slots, tokens=tokens, **fields)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return create_runner(create_model("llama"), num_slots=200, max_context=64)


def test_only_wanted_rows_return_logits(runner: ModelRunner) -> None:
    every = runner.forward(StepBatch(sessions=[rows_of([3, 4, 5], [1, 2, 3])]))
    some = runner.forward(StepBatch(sessions=[rows_of([3, 4, 5], [1, 2, 3], wants_logits=[True, False, True])]))
    none = runner.forward(StepBatch(sessions=[rows_of([3, 4, 5], [1, 2, 3], wants_logits=())]))
    np.testing.assert_allclose(some, every[[0, 2]], atol=1e-5)
    assert none.shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (rows_of([VOCAB], [1]), InvalidRequestError),
        (rows_of([-1], [1]), InvalidRequestError),
        (rows_of([1], [0]), InvariantError),
        (rows_of([1], [200]), InvariantError),
        (rows_of([1, 2], [1]), InvalidRequestError),
        (rows_of([1], [1, 2], num_computed=1, num_committed_rows=2), InvalidRequestError),
        (rows_of([1], list(range(1, 66)), num_computed=64), InvalidRequestError),
        (rows_of([], []), InvalidRequestError),
        (rows_of([1, 2], [1, 2], num_committed_rows=1, tree_slots=[3], tree_rows=[0]), InvalidRequestError),
    ],
)
def test_a_step_that_breaks_a_limit_is_refused(runner: ModelRunner, rows: SessionRows, error: type[Exception]) -> None:
    with pytest.raises(error):
        runner.forward(StepBatch(sessions=[rows]))


def test_an_empty_step_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(InvalidRequestError):
        runner.forward(StepBatch())


def test_the_last_position_is_used_and_no_further() -> None:
    model = create_model("gpt2", n_positions=16)
    stock = stock_copy(model)
    runner = create_runner(model, max_context=16)
    driver = Driver(runner)
    session = driver.open(16)
    driver.step(driver.rows(session, 15))
    driver.step(driver.rows(session))
    assert driver.worst_error(stock) < 1e-5
    with pytest.raises(InvalidRequestError, match="context limit of 16"):
        runner.forward(StepBatch(sessions=[rows_of([1], list(range(1, 18)), num_computed=16)]))


def test_nan_stays_in_its_session_and_cleared_slots_are_clean() -> None:
    runner = create_runner(create_model("llama"), num_slots=64)
    clean = rows_of([9, 8, 7], [1, 2, 3], session=1)
    expected = runner.forward(StepBatch(sessions=[clean]))
    ill_slots = list(range(10, 15))
    for layer in runner.cache.layers:
        layer[ill_slots] = float("nan")
    ill = rows_of([1], [*ill_slots, 15], session=2, num_computed=5)
    both = runner.forward(StepBatch(sessions=[clean, ill]))
    np.testing.assert_allclose(both[:3], expected, atol=1e-5)
    assert np.isnan(both[3]).all()
    runner.clear_slots([*ill_slots, 15])
    reused = rows_of([9, 8, 7], ill_slots[:3], session=3)
    np.testing.assert_allclose(runner.forward(StepBatch(sessions=[reused])), expected, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "gemma3"])
def test_neighbouring_slots_take_the_view_and_agree(family: str) -> None:
    model = create_model(family)
    stock = stock_copy(model)
    driver = Driver(create_runner(model))
    driver.take_slots(1)
    driver.shuffled.sort(reverse=True)
    session = driver.open(40)
    for count in (20, 1, 3, 16):
        driver.step(driver.rows(session, count))
    assert driver.worst_error(stock) < 1e-5


def test_many_sessions_of_mixed_lengths_equal_the_stock_forward() -> None:
    model = create_model("mistral")
    stock = stock_copy(model)
    driver = Driver(create_runner(model, num_slots=900), seed=3)
    sessions = [driver.open(length) for length in (1, 2, 3, 20, 21, 22, 40, 41, 90, 100)]
    driver.step(*(driver.rows(session) for session in sessions))
    for session in sessions:
        session.tokens += driver.random_tokens(1)
        driver.grow_tree(session, 1 + session.name % 4)
    driver.step(*(driver.rows(session) for session in sessions))
    assert driver.worst_error(stock) < 1e-5


def test_a_tree_of_more_than_a_word_of_nodes_is_seen_right() -> None:
    model = create_model("llama")
    stock = stock_copy(model)
    driver = Driver(create_runner(model))
    session = driver.open(10)
    driver.step(driver.rows(session))
    for _ in range(3):
        driver.grow_tree(session, 50)
        driver.step(driver.rows(session))
    assert driver.worst_error(stock) < 1e-5


def test_groups_pad_only_where_it_pays() -> None:
    def parts(*shapes: tuple[int, int]) -> list[Group]:
        sessions = [
            rows_of([0] * rows, list(range(1, keys + 1)), session=i, num_computed=keys - rows)
            for i, (rows, keys) in enumerate(shapes)
        ]
        arrays = plan_step(StepBatch(sessions=sessions))
        return group_parts([part for group in arrays.groups for part in group.parts])

    assert len(parts((1, 300), (1, 290), (1, 310))) == 1
    assert len(parts((1, 20), (1, 4000))) == 2
    assert len(parts((100, 300), (1, 300))) == 2


@pytest.mark.parametrize(
    "argument",
    [
        {"softcap": 50.0},
        {"s_aux": torch.zeros(4)},
        {"head_mask": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"attention_mask": torch.zeros(1)},
        {"something_new": 1},
    ],
)
def test_an_argument_that_would_change_attention_is_refused(argument: dict[str, Any]) -> None:
    tensor = torch.zeros(1, 2, 3, 4)
    mask = argument.pop("attention_mask", None)
    with pytest.raises(UnsupportedModelError):
        attention_forward(torch.nn.Linear(1, 1), tensor, tensor, tensor, mask, specpipe_plan=object(), **argument)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("max_context", [32, 128])
def test_rotary_frequencies_are_fixed_as_for_a_full_context(kind: str, max_context: int) -> None:
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "dynamic":
        parameters["factor"] = 4.0
    else:
        parameters |= {
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 64,
        }
    model = create_model("llama", rope_parameters=parameters, max_position_embeddings=64)
    stock = stock_copy(model)
    assert set(rope.fix_frequencies(model, max_context)) == {kind}
    driver = Driver(create_runner(model, max_context=max_context))
    sessions = [driver.open(length) for length in (max_context, 5, 20)]
    driver.step(driver.rows(sessions[0]), driver.rows(sessions[1]))
    driver.step(driver.rows(sessions[2]))
    assert rope.fix_frequencies(model, max_context) == []
    got = iter(driver.seen)
    for session in sessions:  # each is the beginning of a sequence that fills the context
        filled = session.tokens + [0] * (max_context - len(session.tokens))
        with torch.inference_mode():
            expected = stock(input_ids=torch.tensor([filled]), use_cache=False).logits[0].numpy()
        for end in range(len(session.tokens)):
            np.testing.assert_allclose(next(got).logits, expected[end], atol=2e-5)


def test_the_self_check_admits_what_agrees() -> None:
    for family in ("gpt_neox", "mixtral_window", "gemma3", "phi3_window"):
        self_check.check_model(PreparedModel(create_model(family)), 128)


def test_the_self_check_refuses_a_model_whose_masks_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PreparedModel(create_model("gpt_neox"))
    monkeypatch.setattr(Group, "visible", lambda self, window: np.ones_like(VISIBLE(self, window)))
    with pytest.raises(UnsupportedModelError, match="differ from the stock forward"):
        self_check.check_model(model, 128)


VISIBLE = Group.visible


def test_the_self_check_refuses_a_window_that_attention_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = PreparedModel(create_model("mistral"))
    model.windows = [None] * len(model.windows)
    with pytest.raises(UnsupportedModelError, match="sliding window"):
        self_check.check_model(model, 128)


def test_every_family_writes_each_layer_once() -> None:
    for family in CONFIGS:
        prepared = PreparedModel(create_model(family))
        assert prepared.bytes_per_slot > 0
        assert ModelRunner(prepared, create_info(), num_slots=8).num_slots == 8
