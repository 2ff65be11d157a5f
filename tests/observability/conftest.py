"""One service for all tests here: started once in a session, if one of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from observed import Observed, observed_service
from tiny_models import TinyPair

TIMEOUT_S = 300  # of a test, the start of a service included


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def observed(tiny_pair: TinyPair, log_folder: Path) -> Iterator[Observed]:
    with observed_service(tiny_pair, log_folder) as service:
        yield service
