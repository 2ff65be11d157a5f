"""200 prompts: questions of the prompt file that the project shares, and passages of sources no model was trained on.

Questions and passages take turns, so that any first part of the list has both. Without the shared folder (it is looked
for at SPECPIPE_SHARED, then beside the checkout) there are passages only.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oracle import Oracle
from slow_scale import scaled

from specpipe import demo
from specpipe.demo.training import corpus

NUM_OF_EACH = 100
MAX_TOKENS = scaled(128, least=16)
MAX_PROMPT_TOKENS = 1700  # the demo target's context is 2,048
PASSAGE_LINES = (2, 5, 12, 30, 60)
CHECKOUT = Path(__file__).parents[2]


Expectation = Callable[[tuple[int, ...]], list[int]]
"""Prompt ids -> what the target alone says after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPrompt:
    """What a user would send, its ids, and what the target alone says after it."""

    text: str
    ids: tuple[int, ...]
    expected: tuple[int, ...]  # MAX_TOKENS of them; the end of a text does not end it


class PromptSet:
    """The prompts in order; what the target says is computed when a prompt is first taken."""

    def __init__(
        self, texts: list[tuple[str, tuple[int, ...]]], expect: Callable[[tuple[int, ...]], list[int]]
    ) -> None:
        self._texts = texts
        self._create = functools.cache(
            lambda index: RealPrompt(text=texts[index][0], ids=texts[index][1], expected=tuple(expect(texts[index][1])))
        )

    @classmethod
    def create(cls, oracle: Oracle, expect: Expectation) -> PromptSet:
        kinds = [spread(encoded(oracle, texts), NUM_OF_EACH) for texts in (questions(), passages()) if texts]
        return cls([prompt for group in zip(*kinds, strict=True) for prompt in group], expect)

    def first(self, count: int) -> list[RealPrompt]:
        return [self._create(index) for index in range(min(count, len(self._texts)))]

    @property
    def all_ids(self) -> list[tuple[int, ...]]:
        """Ids of every prompt, for tests that need no reference."""
        return [ids for _, ids in self._texts]


def questions() -> list[str]:
    """The first turn of each question; empty without the shared folder."""
    folders = [Path(path) for path in (os.environ.get("SPECPIPE_SHARED"), CHECKOUT.parent / "shared") if path]
    folder = next((folder / "prompts" for folder in folders if (folder / "prompts").is_dir()), None)
    files = sorted(folder.glob("*.jsonl")) if folder is not None else []
    return [json.loads(line)["turns"][0] for file in files for line in file.read_text().splitlines()]


def passages() -> list[str]:
    """Passages of 2 to 60 lines of the held-out files that this Python has."""
    return list(dict.fromkeys(_passages()))


def _passages() -> Iterator[str]:
    sources = {path: read_lines(path) for path in demo.held_out_files()}
    for turn in range(5):
        for number, lines in enumerate(lines for lines in sources.values() if lines):
            start = turn * len(lines) // 5
            passage = "".join(lines[start : start + PASSAGE_LINES[(number + turn) % len(PASSAGE_LINES)]])
            if len(passage.strip()) > 20:
                yield passage


def read_lines(path: str) -> list[str]:
    is_there = (corpus.library_folder() / path).is_file()
    return (corpus.read_source(path) or "").splitlines(keepends=True) if is_there else []


def encoded(oracle: Oracle, texts: list[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Texts that leave room for an answer, with their ids."""
    pairs = [(text, tuple(oracle.encode(text))) for text in texts]
    return [(text, ids) for text, ids in pairs if 0 < len(ids) <= MAX_PROMPT_TOKENS]


def spread(prompts: list[tuple[str, tuple[int, ...]]], count: int) -> list[tuple[str, tuple[int, ...]]]:
    """`count` of them, evenly from the whole list. Raises AssertionError if there are fewer."""
    assert len(prompts) >= count
    return [prompts[index * len(prompts) // count] for index in range(count)]
