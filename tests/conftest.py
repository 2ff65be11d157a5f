"""Fixtures that several layers of tests share. Models are made once a session, in a temporary folder."""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import findings
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tiny_models import TinyPair

# On a busy machine an example may take any time: what takes for ever the test's own time limit ends.
settings.register_profile("busy machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

SHARING = {"test_answers", "test_bad_input", "test_drafters", "test_faults", "test_answers_shown"}
"""Files of `integration` whose tests use one another's services; those of `observability` do too."""
LONGEST = ("tests/chaos/test_chaos.py", "tests/ray/test_ray_local.py", "tests/observability/")
"""Begun first, so that nobody waits for them in the end."""


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets up logging; the next test must not write to stderr for that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A random target and a draft that is sometimes right; both with one tokenizer."""
    from tiny_models import make_pair

    return make_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def random_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with the tiny target's tokenizer that is nearly always wrong."""
    from tiny_models import make_random_draft

    return make_random_draft(tmp_path_factory.mktemp("random") / "draft")


@pytest.fixture(scope="session")
def tiny_folders(tiny_pair: TinyPair) -> tuple[Path, Path]:
    """Target and draft folder of the tiny pair."""
    return tiny_pair.target, tiny_pair.draft


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where services of the run write their logs."""
    return tmp_path_factory.mktemp("logs")


# Tests in several processes


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nearly all that is imported and collected stays: to look through it for unused cycles again and again, now and
    later, took 12 s and more of each process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `--dist loadscope` tests are dealt out by files, and files that share a service stay together."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByServices(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            shares = file.stem in SHARING or file.parent.name == "observability"
            return file.parent.name if shares else str(file)

    return ByServices(config, log)


# What a test found out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.findings = findings.lines[:]  # type: ignore[attr-defined]
    findings.lines.clear()
    return report


_found: list[str] = []  # by all tests of the run


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _found.extend(getattr(report, "findings", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _found:
        terminalreporter.section("findings")
        for line in _found:
            terminalreporter.write_line(line)
