"""Fetch the live page's front-end libraries again: `make vendor`. Needs npm.

Owns: coordinator/web/assets/vendor. VERSIONS.txt there says what is wanted: change a version in it, run this, look at
the difference and at the page's tests, commit. The checksums are written anew.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

VENDOR: Final = Path(__file__).parents[1] / "coordinator" / "web" / "assets" / "vendor"
WIDTHS: Final = (33, 22, 8, 25, 0)


def main() -> None:
    lines = (VENDOR / "VERSIONS.txt").read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder:
        written = [line if line.startswith("#") else fetched(line, Path(folder)) for line in lines]
    (VENDOR / "VERSIONS.txt").write_text("".join(f"{line}\n" for line in written))


def fetched(line: str, folder: Path) -> str:
    """Put the file where the page finds it. Returns its line with the checksum that it has."""
    name, package, version, path, _ = line.split()
    with tarfile.open(archive(package, version, folder)) as opened:
        content = opened.extractfile(f"package/{path}")
        assert content is not None, f"{package} {version} has no {path}"
        body = content.read()
    (VENDOR / name).write_bytes(body)
    columns = (name, package, version, path, hashlib.sha256(body).hexdigest())
    return " ".join(f"{column:<{width}}" for column, width in zip(columns, WIDTHS, strict=True))


def archive(package: str, version: str, folder: Path) -> Path:
    """Fetched once."""
    path = folder / f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not path.exists():
        subprocess.run(["npm", "pack", "--silent", f"{package}@{version}"], cwd=folder, check=True, capture_output=True)
    return path


if __name__ == "__main__":
    main()
