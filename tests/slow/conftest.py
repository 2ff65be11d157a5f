"""What the slow tests share: the demo pair's reference answers, other drafts for it, and their own time limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from oracle import Oracle
from real_prompts import MAX_TOKENS, PromptSet
from references import References

from specpipe import demo

for layer in ("contract", "distribution"):  # the service that runs in one process; chi-square tests
    sys.path.append(str(Path(__file__).parents[1] / layer))

TIMEOUT_S = 7200  # of a test, services and references included, on a machine that does other work as well


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def demo_oracle() -> Oracle:
    """The demo target as transformers runs it."""
    return Oracle(demo.target_folder())


@pytest.fixture(scope="session")
def references(demo_oracle: Oracle) -> References:
    return References(demo_oracle, demo.target_folder())


@pytest.fixture(scope="session")
def prompts(demo_oracle: Oracle, references: References) -> PromptSet:
    """Real prompts, each with what the target alone says after it."""
    return PromptSet.create(demo_oracle, lambda ids: references.greedy(ids, MAX_TOKENS))


@pytest.fixture(scope="session")
def random_demo_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the demo pair's tokenizer that has learnt nothing."""
    import shutil

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("random_demo") / "draft"
    torch.manual_seed(99)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo.draft_folder())).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.draft_folder() / name, folder)
    return folder
