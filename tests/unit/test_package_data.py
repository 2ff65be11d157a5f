"""What pyproject.toml puts into the distribution: every module, every file that modules need, and no test."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).parents[2]
SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
TOP = ("coordinator", "draft_worker", "specpipe", "target_worker")
STAY_AT_HOME: Final = ("specpipe/rpc/v1/digests.sha256", "specpipe/demo/training/logs/*")  # for the checkout's tools


def files() -> list[Path]:
    """Of the packages, relative to the checkout."""
    found = [path.relative_to(ROOT) for top in TOP for path in (ROOT / top).rglob("*") if path.is_file()]
    return [path for path in found if "__pycache__" not in path.parts]


def test_every_folder_with_code_is_a_package_of_the_distribution() -> None:
    folders = {".".join(path.parent.parts) for path in files() if path.suffix == ".py"}
    assert folders - set(SETUPTOOLS["packages"]) == set()


def test_every_file_that_is_no_module_is_package_data() -> None:
    needed = {path for path in files() if path.suffix != ".py" and not any(map(path.match, STAY_AT_HOME))}
    declared = {
        path.relative_to(ROOT)
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    assert needed - declared == set()
    for path in ("py.typed", "rpc/v1/generate_pb2.pyi", "demo/models/target/model.safetensors"):
        assert Path("specpipe", path) in declared


def test_the_licence_that_is_declared_goes_with_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    (name,) = project["license-files"]
    assert "Apache License\n                           Version 2.0" in (ROOT / name).read_text(encoding="utf-8")


def test_tests_are_not_distributed() -> None:
    assert {package.partition(".")[0] for package in SETUPTOOLS["packages"]} == set(TOP)
