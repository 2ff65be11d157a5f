"""Regenerates `specpipe/rpc/v1` from the .proto files beside this script.

Owns: the tool versions, the throw-away environment they live in (`.venv-proto`, made when missing) and the layout of
the generated package. Run by `make proto`; `--check` changes nothing and fails if the checked-in code is not what
these sources give.

The tools are the oldest supported on purpose: code made by grpcio-tools 1.81.1 loads on protobuf 6.33.5 to 7.x, newer
code does not load on older runtimes. The directory layout under `proto/` equals the import path, so imports in the
generated code are right as they come. Output is made in a temporary directory and moved only when all of it is there.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TOOLS = ("grpcio-tools==1.81.1", "mypy-protobuf==5.1.0")
PROTO_ROOT = Path(__file__).resolve().parent
REPOSITORY = PROTO_ROOT.parent
ENVIRONMENT = REPOSITORY / ".venv-proto"
STAMP = ENVIRONMENT / "tools.txt"
TOOLS_TEXT = "\n".join(TOOLS) + "\n"
PACKAGE = Path("specpipe/rpc/v1")
DIGESTS = "digests.sha256"
"""Beside the generated code: one line for each source and each generated file, so that drift is seen without tools."""
INIT_TEXT = '"""Generated from proto/specpipe/rpc/v1 by `make proto`; never edited."""\n'


def main() -> int:
    parser = argparse.ArgumentParser(description="regenerate specpipe/rpc/v1")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the code is out of date")
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory(prefix="specpipe-proto-") as folder:
        generated = generate(Path(folder), tools_python())
        changed = differences(generated, REPOSITORY / PACKAGE)
        if not is_check:
            move(generated, REPOSITORY / PACKAGE)
    for name in changed:
        sys.stderr.write(f"{PACKAGE / name}: {'out of date, run `make proto`' if is_check else 'updated'}\n")
    return 1 if is_check and changed else 0


def tools_python() -> Path:
    """The interpreter of the throw-away environment, which is made or replaced first if need be."""
    python = ENVIRONMENT / "bin" / "python"
    if not has_tools():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TOOLS], check=True)
        STAMP.write_text(TOOLS_TEXT)
    return python


def has_tools() -> bool:
    """The throw-away environment exists and has these versions."""
    return STAMP.exists() and STAMP.read_text() == TOOLS_TEXT


def generate(out: Path, python: Path) -> Path:
    """Make the whole package below `out` and return its folder. Raises CalledProcessError if a source is wrong."""
    sources = sorted(path.relative_to(PROTO_ROOT).as_posix() for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    services = [name for name in sources if "\nservice " in (PROTO_ROOT / name).read_text()]
    run_protoc(python, ["python", "mypy"], out, sources)
    run_protoc(python, ["grpc_python", "mypy_grpc"], out, services)
    folder = out / PACKAGE
    (folder / "__init__.py").write_text(INIT_TEXT)
    (folder / DIGESTS).write_text(digests(folder))
    return folder


def run_protoc(python: Path, plugins: list[str], out: Path, sources: list[str]) -> None:
    bin_folder = python.parent
    subprocess.run(
        [
            python,
            *("-m", "grpc_tools.protoc", "-I", "."),
            *(f"--plugin=protoc-gen-{name}={bin_folder / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")),
            *(f"--{plugin}_out={'quiet:' if plugin.startswith('mypy') else ''}{out}" for plugin in plugins),
            *sources,
        ],
        cwd=PROTO_ROOT,
        check=True,
    )


def digests(generated: Path) -> str:
    """One line `digest  path` for each .proto file and each file generated from them."""
    sources = {(PACKAGE / path.name).as_posix(): path for path in (PROTO_ROOT / PACKAGE).glob("*.proto")}
    results = {path.name: path for path in generated.glob("*.py*")}
    files = sorted((sources | results).items())
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in files)


def differences(generated: Path, current: Path) -> list[str]:
    """Names of files that are missing, different or no longer made."""
    new, old = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}
        for folder in (generated, current)
    )
    return sorted(name for name in new.keys() | old.keys() if new.get(name) != old.get(name))


def move(generated: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.is_file():
            path.unlink()
    for path in generated.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    sys.exit(main())
