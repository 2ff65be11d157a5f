"""From what is written after a flag to the value that the flag is declared with, or one sentence that says what fits.

Owns: the reading of integers, numbers and choices. Typer is given texts only: its own sentences differ from version to
version and leak its validator's words. Must not know: which flags there are, what ranges they have.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin

from specpipe.errors import ConfigError

MAX_SHOWN_CHARS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """One way of reading a flag's text."""

    read: Callable[[str], Any]  # raises ValueError for a text that is none
    wanted: str  # as in "must be ..."
    metavar: str  # as in the list of options


INTEGER: Final = ValueKind(read=int, wanted="an integer", metavar="N")
NUMBER: Final = ValueKind(read=float, wanted="a number", metavar="X")
FILE: Final = ValueKind(read=Path, wanted="a path", metavar="FILE")


def kind_of(annotation: Any) -> ValueKind | None:
    """How to read a flag declared as `annotation` (Annotated apart); None for texts and switches.

    Of `T | None` and `list[T]` it is T that is read.
    """
    declared = scalar_of(annotation)
    if get_origin(declared) is Literal:
        return _choice({choice: choice for choice in get_args(declared)})
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return _choice({member.value: member for member in declared})
    return {int: INTEGER, float: NUMBER, Path: FILE}.get(declared)


def as_text(annotation: Any) -> Any:
    """The same annotation for texts: what typer is told."""
    return list[str] if is_list(annotation) else str | None


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list


def scalar_of(annotation: Any) -> Any:
    if is_list(annotation):
        return get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not NoneType)
    return annotation


def read_value(flag: str, kind: ValueKind, text: str) -> Any:
    """Raises ConfigError that names the flag and what it takes."""
    try:
        return kind.read(text)
    except (ValueError, KeyError):
        shown = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
        raise ConfigError(f"{flag} must be {kind.wanted}, got {shown!r}") from None


def one_of(choices: Sequence[str]) -> str:
    """("a", "b", "c") -> "a, b or c"."""
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last


def _choice(values: dict[str, Any]) -> ValueKind:
    return ValueKind(read=values.__getitem__, wanted=one_of(list(values)), metavar="|".join(values))
