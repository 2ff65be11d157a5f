"""Who may import what: read from the sources, so that a rule holds also where no test runs the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "draft_worker", "target_worker")
SOURCES = sorted(path for package in (*SERVICES, "specpipe") for path in (ROOT / package).rglob("*.py"))
SEES_PROTOBUF = {
    "client",
    "codec",
    "codec_enums",
    "codec_hello",
    "codec_otlp",
    "codec_reports",
    "codec_trace",
    "codec_vocabulary",
    "server",
    "service",
    "trace_service",
} | {
    "health_client",
    "worker_client",
    "worker_service",
    "worker_stream",
}
PURE = (
    "coordinator/draft_side.py",
    "coordinator/events.py",
    "coordinator/phases.py",
    "coordinator/pools.py",
    "coordinator/request_trace.py",
    "coordinator/state.py",
    "coordinator/statistics.py",
    "coordinator/target_wait.py",
    "coordinator/trace_generate.py",
    "coordinator/trace_layout.py",
    "coordinator/trace_rounds.py",
    "coordinator/trace_sessions.py",
    "coordinator/trace_spans.py",
    "coordinator/transcript.py",
    "draft_worker/scheduler.py",
    "draft_worker/session.py",
    "specpipe/cluster/autoscale.py",
    "specpipe/cluster/plan.py",
    "specpipe/launcher/restarts.py",
    "specpipe/link.py",
    "specpipe/tree.py",
    "target_worker/scheduler.py",
    "target_worker/verification.py",
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Full names of the modules imported, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def packages_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


def test_the_sources_are_found() -> None:
    assert {path.parts[len(ROOT.parts)] for path in SOURCES} == {*SERVICES, "specpipe"}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parts[len(ROOT.parts)] in SERVICES], ids=name_of)
def test_services_never_import_one_another(path: Path) -> None:
    own = path.parts[len(ROOT.parts)]
    assert not packages_of(path) & set(SERVICES) - {own}


def test_only_the_command_line_of_the_library_names_services() -> None:
    """`specpipe.cli` starts them, each in a process of its own."""
    naming = {name_of(path) for path in SOURCES if "specpipe" in path.parts and packages_of(path) & set(SERVICES)}
    assert {name for name in naming if not name.startswith("specpipe/cli/")} == set()


def test_only_codec_service_and_client_modules_see_protobuf() -> None:
    for path in SOURCES:
        sees = {name for name in imports_of(path) if name.endswith("_pb2") or name.startswith("google.protobuf")}
        assert not sees or path.stem in SEES_PROTOBUF or "rpc" in path.parts, f"{name_of(path)} sees {sees}"


def test_the_coordinator_never_imports_torch() -> None:
    for path in SOURCES:
        if path.parts[len(ROOT.parts)] == "coordinator":
            assert "torch" not in packages_of(path), name_of(path)


@pytest.mark.parametrize("name", PURE)
def test_pure_parts_have_no_clock_and_no_io(name: str) -> None:
    banned = {"asyncio", "grpc", "google", "multiprocessing", "selectors", "socket", "subprocess", "time", "torch"}
    assert not packages_of(ROOT / name) & banned


def test_opentelemetry_is_loaded_only_where_it_is_asked_for() -> None:
    """It takes a fifth of a second, of every start and of every client."""
    code = "import coordinator.service, specpipe.client, sys; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60).returncode == 0
