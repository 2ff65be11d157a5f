"""Joined pieces equal one decode of everything, whatever the tokenizer and wherever the pieces are cut."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import coordinator_tokenizers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.detokenizer import AnswerText, StopScanner, WindowDecoder
from coordinator.tokenization import Tokenization, load_tokenization

EMOJI = "😀👨‍👩‍👧‍👦ď中한🇺🇦"
EXACT = ["byte_level", "byte_fallback", "unigram", "without_decoder"]


@cache
def tokenization(kind: str) -> Tokenization:
    folder = Path(mkdtemp(prefix="specpipe-test-"))
    return load_tokenization(str(coordinator_tokenizers.save_folder(coordinator_tokenizers.KINDS[kind](), folder)))


def stream(tokens: Tokenization, ids: list[int]) -> list[str]:
    detokenizer = tokens.create_detokenizer()
    return [*map(detokenizer.push, ids), detokenizer.pending()]


def byte_ids(tokens: Tokenization, data: bytes) -> list[int]:
    """One token for each byte, by either convention."""
    from coordinator.detokenizer import create_byte_table

    vocabulary = {token: token_id for token_id, token in tokens.vocabulary().tokens.items()}
    if "<0x00>" in vocabulary:
        return [vocabulary[f"<0x{byte:02X}>"] for byte in data]
    char_of = {byte: char for char, byte in create_byte_table().items()}
    return [vocabulary[char_of[byte]] for byte in data]


@pytest.mark.parametrize("kind", EXACT)
def test_an_exact_decoder_is_chosen(kind: str) -> None:
    assert not isinstance(tokenization(kind).create_decoder(), WindowDecoder)


@pytest.mark.parametrize("kind", coordinator_tokenizers.KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_joined_pieces_equal_one_decode(kind: str, data: st.DataObject) -> None:
    tokens = tokenization(kind)
    ids = data.draw(st.lists(st.integers(0, tokens.num_tokens - 1), max_size=40))
    assert "".join(stream(tokens, ids)) == tokens.decode(ids)


@pytest.mark.parametrize("kind", EXACT)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_pending_is_what_would_follow_if_the_answer_ended(kind: str, data: st.DataObject) -> None:
    tokens = tokenization(kind)
    ids = data.draw(st.lists(st.integers(0, tokens.num_tokens - 1), max_size=15))
    detokenizer = tokens.create_detokenizer()
    given_out = ""
    for count, token_id in enumerate(ids, start=1):
        given_out += detokenizer.push(token_id)
        assert given_out + detokenizer.pending() == tokens.decode(ids[:count])


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.binary(max_size=30))
@settings(max_examples=150, deadline=None)
def test_any_bytes(kind: str, data: bytes) -> None:
    tokens = tokenization(kind)
    ids = byte_ids(tokens, data)
    assert "".join(stream(tokens, ids)) == tokens.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_of_several_tokens_never_appear_broken(kind: str) -> None:
    tokens = tokenization(kind)
    ids = byte_ids(tokens, EMOJI.encode())
    pieces = stream(tokens, ids)
    assert "".join(pieces) == EMOJI
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("num_bytes", range(len("ď中😀".encode()) + 1))
def test_an_answer_may_end_inside_a_character(kind: str, num_bytes: int) -> None:
    tokens = tokenization(kind)
    ids = byte_ids(tokens, "ď中😀".encode()[:num_bytes])
    assert "".join(stream(tokens, ids)) == tokens.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("byte", [0xFF, 0x80, 0xF0, 0xC3])
def test_a_long_run_of_a_lone_byte_flows_in_linear_time(kind: str, byte: int) -> None:
    tokens = tokenization(kind)
    ids = byte_ids(tokens, bytes([byte]) * 2000)
    answer = tokens.create_answer(["never"])
    started = time.perf_counter()
    pieces = [answer.push([token_id]).text for token_id in ids]
    assert time.perf_counter() - started < 1.0
    assert len("".join(pieces)) >= 1996, "text must not be blocked by broken bytes"
    assert "".join(pieces) + answer.finish() == tokens.decode(ids)


def test_a_long_valid_run_of_byte_entries_is_linear_too() -> None:
    tokens = tokenization("byte_fallback")
    ids = byte_ids(tokens, "中".encode() * 1000)
    answer = tokens.create_answer(["never"])
    started = time.perf_counter()
    text = "".join(answer.push([token_id]).text for token_id in ids) + answer.finish()
    assert time.perf_counter() - started < 2.0
    assert text == "中" * 1000


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_special_and_unknown_ids_have_no_text(kind: str) -> None:
    tokens = tokenization(kind)
    ids = [1, *tokens.encode("the dog"), 3, 2, tokens.num_tokens + 7]
    assert "".join(stream(tokens, ids)) == tokens.decode(ids)


@pytest.mark.parametrize("text", ["the dog", " the dog", "  the dog", " ", ""])
def test_the_leading_space_of_sentencepiece(text: str) -> None:
    tokens = tokenization("byte_fallback")
    ids = tokens.encode(text)
    assert "".join(stream(tokens, ids)) == tokens.decode(ids) == text


# Stop strings


def scan(stops: list[str], pieces: list[str]) -> tuple[str, bool, int]:
    scanner = StopScanner(stops)
    text = ""
    for used, piece in enumerate(pieces, start=1):
        given_out, is_stopped = scanner.push(piece)
        text += given_out
        if is_stopped:
            return text, True, used
    return text + scanner.finish(), False, len(pieces)


def oracle(stops: list[str], pieces: list[str]) -> tuple[str, bool, int]:
    """The plain reading: after each piece look for the stop string in everything so far."""
    for used in range(1, len(pieces) + 1):
        text = "".join(pieces[:used])
        ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        if ends:
            return text[: min(ends)[1]], True, used
    return "".join(pieces), False, len(pieces)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=3), max_size=12),
)
@settings(max_examples=400)
def test_stop_strings_equal_the_plain_reading(stops: list[str], pieces: list[str]) -> None:
    assert scan(stops, pieces) == oracle(stops, pieces)


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["STOP"], ["a S", "TO", "Px"], ("a ", True, 3)),
        (["STOP"], ["a S", "TO", "Q"], ("a STOQ", False, 3)),
        (["STOP"], ["a STO"], ("a STO", False, 1)),
        (["b", "ab"], ["xab"], ("x", True, 1)),
        (["abc", "b"], ["abc"], ("a", True, 1)),
        ([], ["a"], ("a", False, 1)),
    ],
)
def test_stop_string_cases(stops: list[str], pieces: list[str], expected: tuple[str, bool, int]) -> None:
    assert scan(stops, pieces) == expected


def test_no_piece_of_a_stop_string_is_given_out() -> None:
    scanner = StopScanner(["\n\nEND"])
    assert [scanner.push(piece)[0] for piece in ["one\n", "\nEN", "O\n", "\nEND more"]] == ["one", "", "\n\nENO", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("stop", ["中", "ď中", "x", "中x"])
def test_a_stop_string_inside_multi_byte_characters(kind: str, stop: str) -> None:
    tokens = tokenization(kind)
    ids = byte_ids(tokens, "aď中xyz".encode())
    answer = AnswerText(tokens.create_detokenizer(), [stop])
    text, used = "", 0
    for token_id in ids:
        piece = answer.push([token_id])
        text, used = text + piece.text, used + piece.num_tokens
        if piece.is_stopped:
            break
    smallest = next(count for count in range(len(ids) + 1) if stop in tokens.decode(ids[:count]))
    assert (text, used) == (tokens.decode(ids[:smallest]).split(stop)[0], smallest)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("stop", ["\N{REPLACEMENT CHARACTER}", "a\N{REPLACEMENT CHARACTER}"])
@pytest.mark.parametrize("data", ["aď中x".encode(), b"a\xffx", b"a\xe4x"])
def test_a_character_of_which_bytes_are_missing_completes_no_stop_string(kind: str, stop: str, data: bytes) -> None:
    """It reads as U+FFFD until the next token; what is broken for good is one."""
    tokens = tokenization(kind)
    ids = byte_ids(tokens, data)
    answer = tokens.create_answer([stop])
    piece = answer.push(ids)
    whole = tokens.decode(ids)
    assert piece.is_stopped is (stop in whole)
    assert piece.text + ("" if piece.is_stopped else answer.finish()) == whole.split(stop)[0]


@given(
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40), stop=st.sampled_from(["dog", "the", "z", "brown fox"])
)
@settings(max_examples=60, deadline=None)
def test_blocks_of_any_size_give_the_same_answer(cuts: list[int], stop: str) -> None:
    tokens = tokenization("byte_level")
    ids = tokens.encode("Over the quick brown fox jumps the lazy dog")
    expected = next((n for n in range(len(ids) + 1) if stop in tokens.decode(ids[:n])), len(ids))
    answer = tokens.create_answer([stop])
    text, used, position = "", 0, 0
    for size in [*cuts, len(ids)]:
        piece = answer.push(ids[position : position + size])
        position += size
        text, used = text + piece.text, used + piece.num_tokens
        if piece.is_stopped:
            assert (used, text) == (expected, tokens.decode(ids).split(stop)[0])
            return
    assert (used, text + answer.finish()) == (len(ids), tokens.decode(ids))
    assert stop not in tokens.decode(ids)
