"""The corpus: sources of the standard library this Python came with, split into training and held-out files.

Pure text: knows nothing of tokens or models. Every function is deterministic.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HELD_OUT_PER_MILLE = 25

# Character tables, generated documentation and broken-on-purpose sources: large, and nothing to learn from.
_SKIPPED_PREFIXES = ("site-packages/", "encodings/", "pydoc_data/", "lib2to3/tests/data/", "test/encoded_modules/")

_MAX_REPLY_LINES = 30
_CONTINUED_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One chat sample: what the user asks and what the assistant answers."""

    question: str
    answer: str


def library_folder() -> Path:
    """The standard library's folder of the running Python."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(path: str) -> bool:
    """Whether the file at `path` (POSIX, relative to the library's folder) is kept from training: by its hash alone."""
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 1000 < _HELD_OUT_PER_MILLE


def library_files() -> list[str]:
    """All corpus files, sorted, as POSIX paths relative to the library's folder."""
    folder = library_folder()
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return [path for path in paths if not path.startswith(_SKIPPED_PREFIXES) and read_source(path)]


def read_source(path: str) -> str | None:
    """The text of a corpus file with plain line ends; None if it is empty or not UTF-8."""
    try:
        text = (library_folder() / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return text.strip("\n") + "\n" if text.strip() else None


def training_files() -> list[str]:
    return [path for path in library_files() if not is_held_out(path)]


def held_out_library_files() -> list[str]:
    return [path for path in library_files() if is_held_out(path)]


def chat_samples(path: str, source: str) -> Iterator[Exchange]:
    """Exchanges made from one file: write a named function, go on with a file.

    Only one function in three is used (by hash), so that chats stay a small share of the corpus.
    """
    yield from _continuations(path, source)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _one_in(3, f"{path}:{node.name}:{node.lineno}"):
            yield from _function_sample(node, source)


def _continuations(path: str, source: str) -> Iterator[Exchange]:
    lines = source.splitlines()
    if len(lines) < 2 * _CONTINUED_LINES:
        return
    head, tail = lines[: _CONTINUED_LINES // 2], lines[_CONTINUED_LINES // 2 : 2 * _CONTINUED_LINES]
    yield Exchange(question=f"Continue the file {path}:\n\n" + "\n".join(head), answer="\n".join(tail))


def _function_sample(node: ast.FunctionDef, source: str) -> Iterator[Exchange]:
    code = ast.get_source_segment(source, node, padded=True)
    if code is None or not 3 <= code.count("\n") + 1 <= _MAX_REPLY_LINES:
        return
    summary = (ast.get_docstring(node) or "").split("\n\n")[0]
    question = f"Write a Python function {node.name}" + (f": {summary}" if summary else ".")
    yield Exchange(question=question, answer=textwrap.dedent(code))


def _one_in(num_parts: int, key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % num_parts == 0
