"""The files of the page, read once and kept in memory.

Owns: their types, the version in their URLs, the page's Content-Security-Policy. Must not know: routes.

A file's URL holds a digest of all files, so that browsers may keep it for ever and never mix two versions.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "assets"
VERSION_MARK: Final = "{version}"  # in the page: the digest takes its place
_INLINE: Final = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str


class Assets:
    """`page` is the HTML, `policy` the Content-Security-Policy that lets it run and nothing else."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._assets = {
            path.relative_to(folder).as_posix(): Asset(path.read_bytes(), _TYPES[path.suffix])
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }
        html = (folder / "index.html").read_text()
        self.version = _digest(html, self._assets)
        self.page = html.replace(VERSION_MARK, self.version)
        self.policy = _policy(self.page)

    def get(self, version: str, path: str) -> Asset | None:
        """None for what is not there, and for files of another version."""
        return self._assets.get(path) if version == self.version else None


def _digest(html: str, assets: dict[str, Asset]) -> str:
    digest = hashlib.sha256(html.encode())
    for name, asset in assets.items():
        digest.update(f"\0{name}\0{len(asset.body)}\0".encode() + asset.body)
    return digest.hexdigest()[:16]


def _policy(page: str) -> str:
    """Everything from this server, nothing inline but the import map, which is named by its hash."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in _INLINE.findall(page)]
    scripts = " ".join(["'self'", *(f"'sha256-{value}'" for value in hashes)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
