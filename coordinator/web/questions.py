"""A question as JSON.

Owns: which fields there are and of which kind; their names are those of GenerateRequest and of `generate --json`. Must
not know: what is valid beyond that (`coordinator.validation`), HTTP.

What JSON could say and the wire could not is refused here, so that both ask the same: numbers are rounded as the wire
rounds them, and one that does not fit there is refused by its field's name.
"""

from __future__ import annotations

import enum
import json
import re
import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn, TypeVar

from coordinator.requests import Question
from specpipe.answers import ChatMessage, Prompt
from specpipe.errors import InvalidRequestError
from specpipe.types import Mode, Rule

_E = TypeVar("_E", bound=enum.Enum)
_DIGITS: Final = re.compile(r"[0-9]{1,100}")  # int() refuses thousands
INPUTS: Final = ("prompt", "prompt_token_ids", "chat")


def question_from_json(body: bytes) -> Question:
    """Raises InvalidRequestError, naming the field."""
    try:
        given = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the request cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise InvalidRequestError("the request must be a JSON object")
    unknown = sorted(given.keys() - _READERS.keys() - set(INPUTS))
    if unknown:
        raise InvalidRequestError(f"{ascii(unknown[0][:80])[1:-1]}: there is no such field")
    values = {name: read(name, given[name]) for name, read in _READERS.items() if given.get(name) is not None}
    return Question(prompt=_prompt(given), **values)


def _prompt(given: dict[str, Any]) -> Prompt | None:
    inputs = [name for name in INPUTS if given.get(name) is not None]
    if len(inputs) > 1:
        raise InvalidRequestError(f"input: {inputs[0]} and {inputs[1]} are given; one may be")
    match inputs:
        case ["prompt"]:
            return _text("prompt", given["prompt"])
        case ["prompt_token_ids"]:
            return _ids("prompt_token_ids", given["prompt_token_ids"])
        case ["chat"]:
            return tuple(_message(part) for part in _list("chat", given["chat"]))
    return None


def _message(value: Any) -> ChatMessage:
    if not isinstance(value, dict) or value.keys() != {"role", "content"}:
        raise InvalidRequestError("chat: each message must be an object with role and content")
    return ChatMessage(role=_text("role", value["role"]), content=_text("content", value["content"]))


def _refuse(name: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value)
    raise InvalidRequestError(f"{name} must be {wanted}, got {shown if len(shown) <= 80 else shown[:80] + ' ...'}")


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the request cannot be read: {name} is no JSON number")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _refuse(name, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name}: half of a surrogate pair is no character") from None
    return value


def _number(name: str, value: Any) -> float:
    """Rounded to the wire's float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(name, "a number", value)
    try:
        return float(struct.unpack("<f", struct.pack("<f", float(value)))[0])
    except OverflowError:
        _refuse(name, "a finite number", value)


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        """Digits in a text are one too: JavaScript has no integers beyond 2^53."""
        number = int(value) if isinstance(value, str) and _DIGITS.fullmatch(value) else value
        if isinstance(number, bool) or not isinstance(number, int):
            _refuse(name, "an integer", value)
        if not low <= number < high:
            _refuse(name, f"from {low} to {high - 1}", value)
        return number

    return read


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        _refuse(name, "a list", value)
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    return tuple(_text(f"{name}[{index}]", part) for index, part in enumerate(_list(name, value)))


def _ids(name: str, value: Any) -> tuple[int, ...]:
    return tuple(_INT64(f"{name}[{index}]", part) for index, part in enumerate(_list(name, value)))


def _truth(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(name, "true or false", value)
    return value


def _one_of(kind: type[_E]) -> Callable[[str, Any], _E]:
    def read(name: str, value: Any) -> _E:
        for member in kind:
            if member.value == value:
                return member
        _refuse(name, f"one of {', '.join(str(member.value) for member in kind)}", value)

    return read


_INT32: Final = _integer(-(2**31), 2**31)
_INT64: Final = _integer(-(2**63), 2**63)
_READERS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "request_id": _text,
    "model": _text,
    "temperature": _number,
    "top_p": _number,
    "top_k": _INT32,
    "min_p": _number,
    "seed": _integer(0, 2**64),
    "max_tokens": _INT64,
    "stop": _texts,
    "stop_token_ids": _ids,
    "ignore_eos": _truth,
    "mode": _one_of(Mode),
    "rule": _one_of(Rule),
    "num_speculative_tokens": _INT32,
}
