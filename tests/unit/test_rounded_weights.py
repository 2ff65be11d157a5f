"""Weights of 8 bits: near the truth row by row, for drafts alone, and never by surprise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import Driver, create_info, create_model
from engine_folders import save_model

from specpipe.config import ROUNDED, EngineConfig, TargetWorkerConfig
from specpipe.engine import linear, loader
from specpipe.engine.folder import check_folder
from specpipe.engine.linear import Linear
from specpipe.engine.loader import load_model
from specpipe.engine.prepared import PreparedModel
from specpipe.engine.runner import ModelRunner
from specpipe.errors import ConfigError
from specpipe.launcher.plan import ServiceConfig, plan_workers

needs_products = pytest.mark.skipif(
    not linear.can_round(torch.ones(1)), reason="this torch has no products of 8 bits for this CPU"
)
MAX_ERROR = 0.02  # of the largest result of a row


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def is_rounded(runner: ModelRunner, folder: Path) -> bool:
    return runner.info.fingerprint == check_folder(folder).fingerprint(ROUNDED)


@needs_products
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_each_row_is_near_the_truth_whatever_stands_beside_it(num_rows: int) -> None:
    weight, bias = random(48, 64) * torch.logspace(-3, 3, 48).unsqueeze(1), random(48, seed=2)
    x = random(num_rows, 64, seed=3) * torch.logspace(-4, 4, num_rows).unsqueeze(1)
    truth = x @ weight.T
    rounded = Linear(weight, is_rounded=True)(x)
    errors = (rounded - truth).abs() / weight.norm(dim=1) / x.norm(dim=1, keepdim=True)
    assert errors.max() < MAX_ERROR
    assert torch.equal(Linear(weight, bias, is_rounded=True)(x), rounded + bias)


@needs_products
def test_rows_and_outputs_of_zeros_stay_zeros() -> None:
    weight = random(8, 16)
    weight[3] = 0.0
    product = Linear(weight, is_rounded=True)(torch.stack((torch.zeros(16), random(16))))
    assert product[0].eq(0).all()
    assert product[1, 3] == 0
    assert product.isfinite().all()


@needs_products
def test_a_weight_that_is_not_finite_is_not_rounded() -> None:
    weight = random(8, 16)
    weight[2, 5] = torch.inf
    assert Linear(weight, is_rounded=True).rounded is None


@needs_products
def test_a_weight_whose_rounded_products_are_wrong_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(8, 16)
    round_packed = linear._round_packed
    monkeypatch.setattr(linear, "_round_packed", lambda weight: round_packed(weight.flip(0)))
    assert Linear(weight, is_rounded=True).rounded is None


@needs_products
def test_one_huge_activation_keeps_no_model_from_being_rounded() -> None:
    model = create_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3] *= 1e4
    driver = Driver(ModelRunner(PreparedModel(model, is_rounded=True), create_info(), num_slots=64), seed=3)
    driver.step(driver.rows(driver.open(21)))
    assert torch.tensor(driver.seen[-1].logits).isfinite().all()


@needs_products
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "opt", "phi3"])
def test_a_rounded_model_says_nearly_the_same(family: str) -> None:
    exact, near = (
        Driver(ModelRunner(PreparedModel(create_model(family), is_rounded=rounds), create_info(), num_slots=64), seed=3)
        for rounds in (False, True)
    )
    logits = []
    for driver in (exact, near):
        driver.step(driver.rows(driver.open(21)))
        logits.append(torch.tensor(driver.seen[-1].logits))
    assert 0 < (logits[1] - logits[0]).abs().max() < 0.2 * logits[0].abs().max()


@needs_products
@pytest.mark.parametrize(
    ("stored", "dtype", "is_hint", "rounds"),
    [
        (torch.bfloat16, "auto", True, True),
        (torch.bfloat16, "auto", False, False),
        (torch.bfloat16, "bfloat16", True, False),
        (torch.float32, "auto", True, False),
        (torch.float32, ROUNDED, True, True),
    ],
)
def test_hints_that_came_with_16_bits_are_rounded_unless_told_otherwise(
    tmp_path: Path, stored: torch.dtype, dtype: str, is_hint: bool, rounds: bool
) -> None:
    save_model(tmp_path, "llama", dtype=stored)
    runner = load_model(EngineConfig(model=str(tmp_path), num_slots=64, dtype=dtype), is_hint=is_hint)
    assert is_rounded(runner, tmp_path) is rounds


def test_without_such_products_only_who_asks_for_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "can_round", lambda weight: False)
    save_model(tmp_path, "llama", dtype=torch.bfloat16)
    runner = load_model(EngineConfig(model=str(tmp_path), num_slots=64), is_hint=True)
    assert not is_rounded(runner, tmp_path)
    with pytest.raises(ConfigError, match=r"int8 needs an x86 CPU with AVX2 .*: use auto"):
        load_model(EngineConfig(model=str(tmp_path), num_slots=64, dtype=ROUNDED), is_hint=True)


def test_a_target_is_never_rounded() -> None:
    with pytest.raises(ConfigError, match=r"^dtype int8 is for draft workers"):
        TargetWorkerConfig(engine=EngineConfig(model="t", dtype=ROUNDED))


@pytest.mark.parametrize(("draft_dtype", "expected"), [(None, ["float32"] * 2), (ROUNDED, ["float32", ROUNDED])])
def test_a_service_may_say_the_dtype_of_its_draft(draft_dtype: str | None, expected: list[str]) -> None:
    specs = plan_workers(ServiceConfig(target="t", draft="d", dtype="float32", draft_dtype=draft_dtype), [0, 1])
    assert [spec.arguments[spec.arguments.index("--dtype") + 1] for spec in specs] == expected
