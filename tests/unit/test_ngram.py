"""The n-gram drafter finds what followed before, in time proportional to new tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specpipe.ngram import DRAFTER, NgramDrafter
from specpipe.tree import DraftTree, GraftOutcome
from specpipe.types import Extension

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def opened(*tokens: int, **options: int) -> NgramDrafter:
    drafter = NgramDrafter(**options)
    drafter.open(tokens)
    return drafter


def test_a_text_without_repetition_drafts_nothing() -> None:
    assert opened(1, 2, 3, 4, 5).grow(8) == ([], [], [])
    assert opened().grow(8) == ([], [], [])
    assert opened(1).grow(8) == ([], [], [])


def test_what_followed_before_is_drafted_as_a_chain() -> None:
    parents, tokens, confidences = opened(1, 2, 3, 4, 5, 6, 1, 2).grow(4)
    assert (parents, tokens) == ([0, 1, 2, 3], [3, 4, 5, 6])
    assert all(0.0 < confidence < 1.0 for confidence in confidences)


def test_a_loop_goes_on_beyond_the_end_of_the_text() -> None:
    _, tokens, _ = opened(7, 8, 9, 7, 8, 9, 7, 8, max_depth=6).grow(6)
    assert tokens == [9, 7, 8, 9, 7, 8]


def test_a_longer_match_is_trusted_more() -> None:
    drafter = opened(1, 2, 3, 50, 8, 2, 3, 60, 9, 1, 2, 3)
    parents, tokens, confidences = drafter.grow(100)
    first = [(c, t) for p, t, c in zip(parents, tokens, confidences, strict=True) if p == 0]
    assert [token for _, token in first] == [50, 60]
    assert first[0][0] > first[1][0]


def test_commits_are_part_of_the_text() -> None:
    drafter = opened(1, 2, 3)
    drafter.commit([1])
    assert drafter.grow(3) == ([], [], [])
    drafter.commit([2])
    assert drafter.grow(1)[1] == [3]


def test_limit_keeps_the_likeliest() -> None:
    drafter = opened(1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2)
    assert drafter.grow(1)[1] == [3]
    assert drafter.grow(0) == ([], [], [])


def test_close_forgets_and_open_begins_anew() -> None:
    drafter = opened(1, 2, 3, 1, 2)
    drafter.close()
    drafter.commit([1, 2])
    assert drafter.grow(4) == ([], [], [])
    drafter.open([1, 2, 3, 1, 2])
    assert drafter.grow(1)[1] == [3]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="min_n"):
        NgramDrafter(min_n=3, max_n=2)


@given(TEXTS, TEXTS, st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_drafts_are_sound_extensions_and_commits_equal_one_open(
    first: list[int], second: list[int], limit: int
) -> None:
    drafter = opened(*first)
    drafter.grow(limit)
    drafter.commit(second)
    parents, tokens, confidences = drafter.grow(limit)
    assert (parents, tokens, confidences) == opened(*first, *second).grow(limit)
    assert len(tokens) <= limit
    text = [0, *first, *second]
    tree = DraftTree(base=len(text), vocab_size=4)
    draft = Extension(
        session=1,
        base=len(text),
        parents=tuple(parents),
        tokens=tuple(tokens),
        confidences=tuple(confidences),
        drafter=DRAFTER,
    )
    assert tree.graft(draft, text).outcome is GraftOutcome.GRAFTED
    tree.check()
    assert tree.num_nodes == len(tokens)


@given(st.lists(st.integers(0, 3), min_size=3, max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_surest_first_token_followed_the_last_two_before(text: list[int]) -> None:
    seen = {text[i] for i in range(2, len(text)) if text[i - 2 : i] == text[-2:]}
    parents, tokens, _ = opened(*text).grow(1000)
    roots = {token for parent, token in zip(parents, tokens, strict=True) if parent == 0}
    assert roots <= seen
    assert bool(roots) == bool(seen)
