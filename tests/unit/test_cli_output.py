"""What answers look like: JSON objects or streamed text on stdout, and what is said about them on stderr."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from specpipe.answers import AnswerEvent, ChatMessage, Chunk, Finished, SpeculationStats, Started, Timing
from specpipe.cli.demo import comparison
from specpipe.cli.output import JsonOutput, PlainOutput
from specpipe.client import Answer, GenerateRequest
from specpipe.errors import CapacityError
from specpipe.types import FinishReason, Mode, Origin, Rule

STATS = SpeculationStats(
    mode=Mode.PIPELINED,
    rule=Rule.COUPLED,
    rounds=2,
    drafted_tokens=9,
    verified_tokens=4,
    accepted_tokens=1,
    mean_acceptance_length=1.5,
    acceptance_rate=0.5,
    hit_rate=None,
    lookup_rate=None,
    draft_ms=4.0,
    exposed_draft_ms=1.0,
    hidden_draft_ms=3.0,
    wasted_draft_ms=0.0,
    target_step_ms=2.0,
    draft_step_ms=1.0,
    step_gap_ms=0.1,
)
EVENTS: tuple[AnswerEvent, ...] = (
    Started(request_id="r", model="m", prompt_tokens=2, seed=7),
    Chunk(token_ids=(5, 6), text="[b]one", origins=(Origin.ACCEPTED, Origin.BONUS), round=1, text_lengths=(4, 2)),
    Chunk(token_ids=(7,), text=" two", origins=(Origin.PLAIN,), round=2, text_lengths=(4,)),
    Finished(
        finish_reason=FinishReason.STOP,
        prompt_tokens=2,
        completion_tokens=3,
        timing=Timing(ttft_ms=10.0, tpot_ms=5.0, total_ms=20.0),
        speculation=STATS,
    ),
)


async def stream(*items: AnswerEvent | Exception) -> AsyncIterator[AnswerEvent]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


async def test_json_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert await JsonOutput().show(GenerateRequest(prompt="p"), stream(*EVENTS))
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == [
        "prompt", "request_id", "seed", "token_ids", "text", "finish_reason", "usage", "timing", "speculation",
    ]  # fmt: skip
    assert shown["token_ids"] == [5, 6, 7]
    assert shown["text"] == "[b]one two"
    assert shown["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert shown["timing"] == {"ttft_ms": 10.0, "tpot_ms": 5.0, "total_ms": 20.0}
    assert shown["speculation"]["hit_rate"] is None
    assert len(shown["speculation"]) == 17


async def test_an_answer_cut_off_is_an_error_and_never_a_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert not await JsonOutput().show(GenerateRequest(prompt=(1, 2)), stream(*EVENTS[:2], CapacityError("full")))
    assert not await JsonOutput().show(GenerateRequest(prompt="p"), stream(*EVENTS[:2]))
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {"prompt": [1, 2], "error": {"code": "RESOURCE_EXHAUSTED", "message": "full"}}
    assert second["error"]["code"] == "INTERNAL"


async def test_plain_output_is_the_text_as_it_is_and_one_line_of_statistics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await PlainOutput(1).show(GenerateRequest(prompt="p"), stream(*EVENTS))
    text, statistics = capsys.readouterr()
    assert text == "[b]one two\n"  # the answer alone, whoever reads it
    assert statistics.count("\n") == 1
    for part in ("3 tokens in 0.02 s (stop)", "200.0 tokens/s", "pipelined", "2 rounds, 1.50 tokens a round", "seed 7"):
        assert part in statistics
    assert "1 of 3 tokens guessed ahead · acceptance rate 0.50 (of first guesses)" in statistics
    assert "drafting 4 ms, target waited 1 ms" in statistics


async def test_a_terminal_shows_drafted_tokens_in_another_colour_than_the_targets_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    await PlainOutput(1).show(GenerateRequest(prompt="p\x1b q"), stream(*EVENTS))
    shown = capsys.readouterr().out
    answer = "\x1b[32m[b]o\x1b[0m\x1b[1mne\x1b[0m\x1b[1m two\x1b[0m\n"
    assert shown.startswith(f"\x1b[2mp␛ q\x1b[0m{answer}")  # the prompt is dim


async def test_an_echo_is_what_the_answer_goes_on_from(capsys: pytest.CaptureFixture[str]) -> None:
    chat = (ChatMessage(role="user", content="hi"),)
    for prompt, echo in (("p", "p"), ((1, 2), "[1, 2]\n"), (chat, "hi\n"), ("x" * 9000, "…" + "x" * 2000)):
        await PlainOutput(1, is_echoing=True).show(GenerateRequest(prompt=prompt), stream(*EVENTS))
        assert capsys.readouterr().out.startswith(echo + "[b]one two\n")


async def test_a_prompt_that_was_refused_is_not_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    refused = stream(CapacityError("full"))
    assert not await PlainOutput(1, is_echoing=True).show(GenerateRequest(prompt="p"), refused)
    assert capsys.readouterr() == ("", "error: full\n")


async def test_a_terminal_is_left_at_the_start_of_a_line_when_an_answer_is_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")

    async def interrupted() -> AsyncIterator[AnswerEvent]:
        for event in EVENTS[:2]:
            yield event
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await PlainOutput(1).show(GenerateRequest(prompt="p"), interrupted())
    assert capsys.readouterr().out == "p[b]one\n"


async def test_a_terminal_without_colours_gets_no_control_characters_either(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    text = "a\x1b]0;x\x07\x9b1m\x7f"
    chunk = Chunk(token_ids=(5,), text=text, origins=(Origin.PLAIN,), round=1, text_lengths=(len(text),))
    await PlainOutput(1).show(GenerateRequest(prompt="p"), stream(EVENTS[0], chunk, EVENTS[-1]))
    assert capsys.readouterr().out.splitlines()[0] == "pa␛]0;x␇\ufffd1m␡"


async def test_an_answer_that_ends_at_once_is_no_empty_line_and_counted_in_english(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end = Chunk(token_ids=(2,), text="", origins=(Origin.PLAIN,), round=1, text_lengths=(0,))
    stats = replace(STATS, rounds=1, mean_acceptance_length=1.0, accepted_tokens=0)
    await PlainOutput(1).show(GenerateRequest(prompt="p"), stream(EVENTS[0], end, finished(stats, num_tokens=1)))
    text, statistics = capsys.readouterr()
    assert text == ""
    assert statistics.startswith("1 token in 0.02 s (stop, no text) · ")
    assert " · 1 round, 1.00 tokens a round · 0 of 1 token guessed ahead · " in statistics


async def test_drafts_that_never_came_are_told_and_no_drafts_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    none = replace(STATS, drafted_tokens=0, accepted_tokens=0, acceptance_rate=None, hit_rate=0.0, lookup_rate=0.0)
    for mode in (Mode.PIPELINED, Mode.OFF):
        await PlainOutput(1).show(GenerateRequest(prompt="p"), stream(*EVENTS[:-1], finished(replace(none, mode=mode))))
    pipelined, off = capsys.readouterr().err.splitlines()
    assert " · 0 of 3 tokens guessed ahead · hit rate 0.00 · drafting " in pipelined
    assert "guessed" not in off


async def test_text_that_ends_a_line_ends_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    chunk = Chunk(token_ids=(5,), text="one\n", origins=(Origin.PLAIN,), round=1, text_lengths=(4,))
    await PlainOutput(1).show(GenerateRequest(prompt="p"), stream(EVENTS[0], chunk, EVENTS[-1]))
    assert capsys.readouterr().out == "one\n"


async def test_what_is_said_of_one_of_several_prompts_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    output = PlainOutput(3)
    await output.show(GenerateRequest(prompt="a"), stream(*EVENTS))
    await output.show(GenerateRequest(prompt="b\n"), stream(CapacityError("full")))
    await output.show(GenerateRequest(prompt="c" * 900), stream(*EVENTS[:2], CapacityError("full")))
    out, err = capsys.readouterr()
    assert out.splitlines()[:3] == ["[1/3] 'a'", "[b]one two", "[2/3] 'b\\n'"]
    statistics, second, third = err.splitlines()
    assert statistics.startswith("[1/3] 3 tokens in ")
    assert second == "error: prompt 2 of 3 ('b\\n'): full"
    assert third == f"error: prompt 3 of 3 ('{'c' * 59}…): full"


@pytest.mark.parametrize("output", [JsonOutput(), PlainOutput(2)])
async def test_a_mode_that_was_asked_for_in_vain_is_told_once(
    output: JsonOutput | PlainOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (*EVENTS[:-1], finished(replace(STATS, mode=Mode.OFF, drafted_tokens=0)))
    for mode in (None, Mode.OFF):
        await output.show(GenerateRequest(prompt="p", mode=mode), stream(*events))
    assert "note:" not in capsys.readouterr().err
    for _ in range(2):
        await output.show(GenerateRequest(prompt="p", mode=Mode.SYNC), stream(*events))
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note:")]
    assert notes == ["note: mode sync was asked for, but nothing drafts in this service: it decodes plainly (mode off)"]


async def test_json_has_no_digits_that_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stats = replace(STATS, acceptance_rate=1 / 3, mean_acceptance_length=2 / 3, draft_ms=1 / 3)
    await JsonOutput().show(GenerateRequest(prompt="p"), stream(*EVENTS[:-1], finished(stats, total_ms=20 / 3)))
    shown = json.loads(capsys.readouterr().out)
    assert shown["timing"]["total_ms"] == 6.667
    values = shown["speculation"]
    assert (values["acceptance_rate"], values["mean_acceptance_length"]) == (0.3333, 0.6667)
    assert (values["draft_ms"], values["rounds"], values["hit_rate"]) == (0.333, 2, None)


def finished(stats: SpeculationStats, *, num_tokens: int = 3, total_ms: float = 20.0) -> Finished:
    return Finished(
        finish_reason=FinishReason.STOP,
        prompt_tokens=2,
        completion_tokens=num_tokens,
        timing=Timing(ttft_ms=10.0, tpot_ms=5.0 if num_tokens > 1 else None, total_ms=total_ms),
        speculation=stats,
    )


def answer(token_ids: list[int], tpot_ms: float | None) -> Answer:
    timing = Timing(ttft_ms=1.0, tpot_ms=tpot_ms, total_ms=9.0)
    return Answer(token_ids=token_ids, finished=replace(finished(STATS), timing=timing))


@pytest.mark.parametrize(
    ("pipelined", "plain", "line"),
    [
        (([1, 2], 4.0), ([1, 2], 10.0), ": 100.0 tokens/s; with them 2.50 times as fast, and the same 2 tokens"),
        (
            ([1, 2, 3], 4.0),
            ([1, 5, 3], 4.0),
            ": 250.0 tokens/s; with them 1.00 times as fast, and the same first 1 token: ",
        ),
        (([1], None), ([1], None), " (mode off), and the same 1 token"),
    ],
)
def test_the_demo_says_what_drafting_was_good_for(pipelined: Any, plain: Any, line: str) -> None:
    assert line in comparison(answer(*pipelined), answer(*plain))
