"""Reading attributes of spans that may be missing, of another kind than expected, or hostile.

Owns: nothing. Must not know: what an attribute means.
"""

from __future__ import annotations

import math

from specpipe.spans import Span, SpanEvent


def number_of(span: Span, name: str) -> float:
    """Of `specpipe.NAME`; 0.0 if it is no finite number of at least 0."""
    value = span.attributes.get(f"specpipe.{name}")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0.0 <= value < math.inf else 0.0  # type: ignore[operator, arg-type]


def count_of(span: Span, name: str) -> int:
    return int(number_of(span, name))


def text_of(span: Span | SpanEvent, name: str) -> str:
    """Of the attribute NAME; empty if there is none."""
    value = span.attributes.get(name, "")
    return printable(", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value))


def printable(text: str) -> str:
    """Without what would move a terminal's cursor or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
