"""What the Dockerfile's pip commands make of a coordinator: no torch, small, and it answers. Needs pip's index."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import findings
import pytest
from running import READY_TIMEOUT_S, end_process_tree, environment, running_part
from tiny_models import TinyPair

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "k8s/docker/Dockerfile").read_text()
MAX_MEGABYTES = 450  # of all packages; transformers alone has 130

pytestmark = pytest.mark.slow


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment of the stage `without-torch`, made by its own commands."""
    source = tmp_path_factory.mktemp("src")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("coordinator", "draft_worker", "specpipe", "target_worker"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = tmp_path_factory.mktemp("opt") / "specpipe"
    run(source, sys.executable, "-m", "venv", str(environment))
    pip = (str(environment / "bin/python"), "-m", "pip", "install", "-q")
    program = re.search(r"RUN python -c '(.+)' > requirements", DOCKERFILE)
    assert program is not None
    (source / "requirements.txt").write_text(run(source, sys.executable, "-c", program.group(1)))
    run(source, *pip, "--requirement", "requirements.txt")
    run(source, *pip, "--no-deps", ".")
    return environment


@pytest.mark.timeout(1800)
def test_a_coordinator_is_installed_without_torch_and_small(installed: Path) -> None:
    (packages,) = installed.glob("lib/python*/site-packages")
    assert not list(packages.glob("torch*"))
    num_bytes = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    findings.lines.append(f"a coordinator's packages: {num_bytes / 2**20:.0f} MiB")
    assert num_bytes < MAX_MEGABYTES * 2**20


@pytest.mark.timeout(600)
def test_it_starts_answers_and_ends(installed: Path, tiny_pair: TinyPair, log_folder: Path) -> None:
    """The worker is the checkout's; the coordinator and the client see nothing but what was installed."""
    command = str(installed / "bin/specpipe")
    clean = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    with running_part(log_folder / "image_target.log", "target-worker", "--model", str(tiny_pair.target)) as worker:
        coordinator = subprocess.Popen(
            [command, "coordinator", "--target", f"dns:{worker}", "--tokenizer", str(tiny_pair.target)],
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
            cwd=log_folder,
        )
        try:
            assert coordinator.stdout is not None
            address = coordinator.stdout.readline().strip()
            answered = subprocess.run(
                [command, "generate", "Once", "--max-tokens", "4", "--connect", address],
                capture_output=True,
                text=True,
                timeout=READY_TIMEOUT_S,
                env=clean,
                cwd=log_folder,
                check=False,
            )
            assert answered.returncode == 0, answered.stderr
            maps = Path(f"/proc/{coordinator.pid}/maps").read_text()
            assert "torch" not in maps
        finally:
            end_process_tree(coordinator)
    assert coordinator.returncode == 0
