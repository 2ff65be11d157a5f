"""The questions that `generate` asks: from arguments, or from a file of JSON lines whose fields override the flags.

Owns: the format of that file. Raises ConfigError, naming the line, before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from specpipe.answers import ChatMessage, Prompt
from specpipe.cli.values import one_of
from specpipe.client import GenerateRequest
from specpipe.errors import ConfigError
from specpipe.types import Mode, Rule

Check = Callable[[Any], bool]


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return is_integer(value) or isinstance(value, float)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_list_of(is_item: Check) -> Check:
    return lambda value: isinstance(value, list) and all(is_item(item) for item in value)


INTEGER: Final = (is_integer, "an integer")
NUMBER: Final = (is_number, "a number")
INTEGERS: Final = (is_list_of(is_integer), "a list of integers")
MODES: Final = tuple(mode.value for mode in Mode)
RULES: Final = tuple(rule.value for rule in Rule)

FIELDS: Final[dict[str, tuple[Check, str]]] = {
    "prompt": (is_text, "a text"),
    "prompt_token_ids": INTEGERS,
    "max_tokens": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "seed": INTEGER,
    "stop": (lambda value: is_text(value) or is_list_of(is_text)(value), "a text or a list of texts"),
    "stop_token_ids": INTEGERS,
    "ignore_eos": (lambda value: isinstance(value, bool), "true or false"),
    "mode": (lambda value: value in MODES, one_of(MODES)),
    "rule": (lambda value: value in RULES, one_of(RULES)),
    "num_speculative_tokens": INTEGER,
}


def requests_of_texts(texts: Sequence[str], flags: GenerateRequest, *, is_chat: bool) -> list[GenerateRequest]:
    return [replace(flags, prompt=as_prompt(text, is_chat)) for text in texts]


def requests_of_file(path: Path, flags: GenerateRequest, *, is_chat: bool) -> list[GenerateRequest]:
    """One request a line; empty lines are skipped. Raises ConfigError for the first line that is not understood."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the prompts file {path} cannot be read: {reason}") from error
    requests = [_request_of_line(path, n, line, flags, is_chat) for n, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"the prompts file {path} holds no prompts")
    return requests


def as_prompt(text: str, is_chat: bool) -> Prompt:
    """With --chat, a text is what the user says."""
    return (ChatMessage(role="user", content=text),) if is_chat and text else text


def _request_of_line(path: Path, number: int, line: str, flags: GenerateRequest, is_chat: bool) -> GenerateRequest:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
    problem = _problem_of(values)
    if problem:
        raise ConfigError(f"{path}, line {number}: {problem}")
    return _override(flags, values, is_chat)


def _problem_of(values: Any) -> str:
    """What is wrong with the fields of a line; "" if nothing is."""
    if not isinstance(values, dict):
        return "not an object"
    for name, value in values.items():
        if name not in FIELDS:
            return f"unknown field {name!r}; there are {', '.join(FIELDS)}"
        is_right, wanted = FIELDS[name]
        if not is_right(value):
            return f"{name} must be {wanted}, got {json.dumps(value)[:80]}"
    if ("prompt" in values) == ("prompt_token_ids" in values):
        return "needs either prompt or prompt_token_ids"
    return ""


def _override(flags: GenerateRequest, values: dict[str, Any], is_chat: bool) -> GenerateRequest:
    changes = dict(values)
    if "prompt" in changes:
        changes["prompt"] = as_prompt(changes["prompt"], is_chat)
    else:
        changes["prompt"] = tuple(changes.pop("prompt_token_ids"))
    if "stop" in changes:
        changes["stop"] = (changes["stop"],) if isinstance(changes["stop"], str) else tuple(changes["stop"])
    if "stop_token_ids" in changes:
        changes["stop_token_ids"] = tuple(changes["stop_token_ids"])
    if "mode" in changes:
        changes["mode"] = Mode(changes["mode"])
    if "rule" in changes:
        changes["rule"] = Rule(changes["rule"])
    return replace(flags, **changes)
