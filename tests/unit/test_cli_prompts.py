"""The file of prompts: what a line may say, and that a bad one is named before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specpipe.answers import ChatMessage
from specpipe.cli.prompts import requests_of_file, requests_of_texts
from specpipe.client import GenerateRequest
from specpipe.errors import ConfigError, InvalidRequestError
from specpipe.types import Mode, Rule

FLAGS = GenerateRequest(prompt="?", temperature=0.5, max_tokens=9, stop=("END",), mode=Mode.SYNC)


def read(tmp_path: Path, text: str, *, is_chat: bool = False) -> list[GenerateRequest]:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return requests_of_file(path, FLAGS, is_chat=is_chat)


def test_fields_of_a_line_override_the_flags_and_the_rest_stays(tmp_path: Path) -> None:
    line = {"prompt": "a", "temperature": 0, "stop": "x", "mode": "off", "rule": "rejection", "seed": 2**64 - 1}
    first, second = read(tmp_path, json.dumps(line) + '\n\n{"prompt_token_ids": [1, 2], "stop_token_ids": [3]}\n')
    assert (first.prompt, first.temperature, first.max_tokens, first.mode) == ("a", 0, 9, Mode.OFF)
    assert (first.rule, first.stop, first.seed) == (Rule.REJECTION, ("x",), 2**64 - 1)
    assert (second.prompt, second.temperature, second.stop, second.mode) == ((1, 2), 0.5, ("END",), Mode.SYNC)
    assert (second.stop_token_ids, second.rule) == ((3,), None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ('"text"', "not an object"),
        ("{}", "needs either prompt or prompt_token_ids"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "needs either prompt or prompt_token_ids"),
        (
            '{"prompt": "a", "temprature": 1}',
            "unknown field 'temprature'; there are prompt, prompt_token_ids,",
        ),
        ('{"prompt": 5}', "prompt must be a text, got 5"),
        ('{"prompt": null}', "prompt must be a text, got null"),
        ('{"prompt_token_ids": [1, true]}', "prompt_token_ids must be a list of integers"),
        ('{"prompt_token_ids": [1.0]}', "prompt_token_ids must be a list of integers"),
        ('{"prompt": "a", "max_tokens": "9"}', "max_tokens must be an integer"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens must be an integer"),
        ('{"prompt": "a", "temperature": "hot"}', "temperature must be a number"),
        ('{"prompt": "a", "stop": ["x", 1]}', "stop must be a text or a list of texts"),
        ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos must be true or false"),
        ('{"prompt": "a", "mode": "fast"}', "mode must be off, sync or pipelined, got"),
        ('{"prompt": "a", "mode": ["off"]}', "mode must be off, sync or pipelined, got"),
        ('{"prompt": "a", "rule": "fast"}', "rule must be coupled or rejection, got"),
        ('{"prompt": "a", "rule": null}', "rule must be coupled or rejection, got"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, f'{{"prompt": "good"}}\n{line}\n')
    assert "line 2" in str(raised.value)
    assert reason in str(raised.value)


def test_a_file_that_is_missing_empty_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no prompts"):
        read(tmp_path, "\n \n")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        requests_of_file(tmp_path / "none", FLAGS, is_chat=False)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        requests_of_file(tmp_path / "bytes", FLAGS, is_chat=False)


def test_values_out_of_range_are_left_for_the_service_so_that_other_prompts_go_on(tmp_path: Path) -> None:
    (request,) = read(tmp_path, '{"prompt": "", "max_tokens": -1, "temperature": NaN}')
    assert request.max_tokens == -1


def test_with_chat_a_text_is_what_the_user_says(tmp_path: Path) -> None:
    said = (ChatMessage(role="user", content="hi"),)
    assert requests_of_texts(["hi"], FLAGS, is_chat=True)[0].prompt == said
    by_text, by_ids = read(tmp_path, '{"prompt": "hi"}\n{"prompt_token_ids": [4]}', is_chat=True)
    assert (by_text.prompt, by_ids.prompt) == (said, (4,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("num_speculative_tokens", 0),
        ("prompt", ""),
        ("prompt", ()),
    ],
)
def test_a_request_names_its_wrong_field(name: str, value: object) -> None:
    fields: dict[str, object] = {"prompt": "x", name: value}
    with pytest.raises(InvalidRequestError, match=name):
        GenerateRequest(**fields).check()  # type: ignore[arg-type]
