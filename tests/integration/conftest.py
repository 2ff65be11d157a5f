"""Services that integration tests share: one start each in a session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from oracle import Oracle
from running import RunningService, running_service
from tiny_models import TinyPair, make_self_pair

from specpipe.client import GenerateClient

TIMEOUT_S = 300  # of a test, the start of a service included


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def oracle(tiny_pair: TinyPair) -> Oracle:
    return Oracle(tiny_pair.target)


@pytest.fixture(scope="session")
def service(tiny_pair: TinyPair, log_folder: Path) -> Iterator[RunningService]:
    """Target and draft worker of the tiny pair; requests choose their mode."""
    flags = ("--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft), "--max-sessions", "8")
    with running_service(log_folder / "service.log", *flags) as running:
        yield running


@pytest.fixture(scope="session")
def self_service(tmp_path_factory: pytest.TempPathFactory, log_folder: Path) -> Iterator[RunningService]:
    """The draft is the target but for layers that say nothing: every guess is right, and comes in time."""
    pair = make_self_pair(tmp_path_factory.mktemp("self"))
    flags = ("--target", str(pair.target), "--draft", str(pair.draft))
    with running_service(log_folder / "self_service.log", *flags) as running:
        yield running


@pytest.fixture(scope="session")
def ngram_service(tiny_pair: TinyPair, log_folder: Path) -> Iterator[RunningService]:
    """No draft worker: the target looks its drafts up in the text."""
    with running_service(
        log_folder / "ngram_service.log", "--target", str(tiny_pair.target), "--draft", "ngram"
    ) as running:
        yield running


@pytest.fixture
async def client(service: RunningService) -> AsyncIterator[GenerateClient]:
    async with GenerateClient(service.address) as connected:
        yield connected
