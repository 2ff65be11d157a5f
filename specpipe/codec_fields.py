"""What all codecs do with single fields: read them by name, check texts and durations.

Owns: the bounds of names. Must not know: messages.
"""

from __future__ import annotations

from typing import Any, Final

from specpipe.errors import InvalidRequestError

MAX_NAME_LENGTH: Final = 1024
"""Characters of a request id, a drafter, an adapter, a trace context, a host."""

MAX_DURATION_MS: Final = 1e11
"""Three years. So sums of durations that a peer tells stay finite, and fit into the nanoseconds of a trace."""


def values_of(message: Any, kind: Any = None) -> dict[str, Any]:
    """Fields by name, for messages whose fields are the same in types (`kind`, if `message` is not one) and wire."""
    return {name: getattr(message, name) for name in (kind or message).__slots__}


def check_length(name: str, text: str) -> None:
    """Raises InvalidRequestError for a text that is too long for a name."""
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidRequestError(f"{name} has {len(text)} characters, more than {MAX_NAME_LENGTH}")


def check_duration(name: str, value: float) -> None:
    """Raises InvalidRequestError unless it is one: not negative, no NaN, and not beyond all measure."""
    if not is_duration(value):
        raise InvalidRequestError(f"{name} is {value}")


def is_duration(value_ms: float) -> bool:
    return 0.0 <= value_ms <= MAX_DURATION_MS
