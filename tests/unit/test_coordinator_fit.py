"""Which workers may serve together: by one rule, whoever asks, and in a sentence that says what is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.events import Kind
from coordinator.fit import Fit, check_target, check_tokenizer
from specpipe.engine.vocabulary import Vocabulary, check_same_vocabulary
from specpipe.errors import ModelMismatchError, WorkerUnavailableError
from specpipe.types import Hello, ModelInfo

TOKENS = {0: "<s>", 1: "</s>", 2: "a", 3: "b", 4: "ab"}


def info(tokens: dict[int, str], name: str = "m", **changes: Any) -> ModelInfo:
    vocabulary = Vocabulary(tokens)
    values: dict[str, Any] = {
        "name": name,
        "fingerprint": "f",
        "tokenizer_fingerprint": vocabulary.fingerprint,
        "vocab_size": vocabulary.size,
        "max_context": 50,
        "eos_token_ids": (1,),
    }
    return ModelInfo(**values | changes)


@dataclass
class FakeLink:
    """A worker with this tokenizer; `can_tell`: it is no older than the question."""

    tokens: dict[int, str]
    name: str = "m"
    can_tell: bool = True
    num_asked: int = 0

    @property
    def hello(self) -> Hello:
        return Hello(protocol_version=1, incarnation=1, model=info(self.tokens, self.name))

    async def read_vocabulary(self, num_ids: int) -> Vocabulary | None:
        self.num_asked += 1
        return Vocabulary({i: t for i, t in self.tokens.items() if i < num_ids}) if self.can_tell else None


def try_pair(target: FakeLink, draft: FakeLink) -> Fit:
    fit = Fit(lambda: target)

    async def check() -> None:
        await fit.check(Kind.TARGET, "t:1", target)
        await fit.check(Kind.DRAFT, "d:1", draft)

    asyncio.run(check())
    return fit


def test_the_same_tokenizer_is_not_looked_into() -> None:
    target, draft = FakeLink(TOKENS), FakeLink(TOKENS)
    try_pair(target, draft)
    assert target.num_asked == draft.num_asked == 0


def test_a_draft_may_know_more_tokens_than_the_target() -> None:
    try_pair(FakeLink(TOKENS), FakeLink({**TOKENS, 5: "<|extra|>", 900: "<|more|>"}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({3: "c"}, "id 3 is 'b' for the target and 'c' for the draft"),
        ({3: "ab", 4: "b"}, "id 3 is 'b' for the target and 'ab' for the draft"),
        ({2: None, 4: "x"}, "id 2 is 'a' for the target and no token for the draft"),
        ({4: None, 5: "y"}, "id 4 is 'ab' for the target and no token for the draft"),
    ],
)
def test_other_tokens_are_refused_and_the_first_id_that_differs_is_named(
    changes: dict[int, str | None], sentence: str
) -> None:
    other = {token_id: token for token_id, token in {**TOKENS, **changes}.items() if token is not None}
    with pytest.raises(ModelMismatchError, match=f"draft worker d:1 .small. cannot draft for big: .*{sentence}"):
        try_pair(FakeLink(TOKENS, "big"), FakeLink(other, "small"))


@given(
    st.dictionaries(st.integers(0, 12), st.sampled_from("abcdef"), min_size=1),
    st.dictionaries(st.integers(0, 12), st.sampled_from("abcdef"), min_size=1),
)
def test_the_command_line_and_the_coordinator_say_the_same(ours: dict[int, str], theirs: dict[int, str]) -> None:
    def verdict(check: Any) -> str:
        try:
            check()
        except ModelMismatchError as error:
            return str(error)
        return ""

    by_command_line = verdict(lambda: check_same_vocabulary(Vocabulary(ours), Vocabulary(theirs)))
    by_coordinator = verdict(lambda: try_pair(FakeLink(ours), FakeLink(theirs)))
    assert bool(by_command_line) is bool(by_coordinator)
    assert by_coordinator.endswith(by_command_line)


def test_each_tokenizer_is_compared_once() -> None:
    target, good, bad = FakeLink(TOKENS), FakeLink({**TOKENS, 9: "x"}), FakeLink({**TOKENS, 3: "x"})
    fit = Fit(lambda: target)

    async def check() -> None:
        await fit.check(Kind.TARGET, "t:1", target)
        for _ in range(3):
            await fit.check(Kind.DRAFT, "d:1", good)
            with pytest.raises(ModelMismatchError, match="id 3"):
                await fit.check(Kind.DRAFT, "d:2", bad)

    asyncio.run(check())
    assert (target.num_asked, good.num_asked, bad.num_asked) == (2, 1, 1)


def test_a_worker_that_cannot_tell_is_refused_and_asked_again_another_time() -> None:
    target, draft = FakeLink(TOKENS), FakeLink({**TOKENS, 5: "x"}, can_tell=False)
    fit = Fit(lambda: target)

    async def check() -> None:
        await fit.check(Kind.TARGET, "t:1", target)
        with pytest.raises(ModelMismatchError, match="cannot tell in what"):
            await fit.check(Kind.DRAFT, "d:1", draft)
        draft.can_tell = True
        await fit.check(Kind.DRAFT, "d:1", draft)

    asyncio.run(check())


def test_without_a_target_to_ask_the_draft_is_tried_again_later() -> None:
    fit = Fit(lambda: None)

    async def check() -> None:
        await fit.check(Kind.TARGET, "t:1", FakeLink(TOKENS))
        with pytest.raises(WorkerUnavailableError, match="no target worker"):
            await fit.check(Kind.DRAFT, "d:1", FakeLink({**TOKENS, 5: "x"}))

    asyncio.run(check())


def test_a_draft_waits_for_the_first_target() -> None:
    async def check() -> None:
        fit = Fit(lambda: None)
        checking = asyncio.ensure_future(fit.check(Kind.DRAFT, "d:1", FakeLink(TOKENS)))
        await asyncio.sleep(0)
        assert not checking.done()
        await fit.check(Kind.TARGET, "t:1", FakeLink(TOKENS))
        await checking

    asyncio.run(check())


MODEL = info(TOKENS)


def test_a_draft_may_be_another_model_with_another_context_and_other_ends() -> None:
    class OtherModel(FakeLink):
        hello = Hello(
            protocol_version=1,
            incarnation=1,
            model=replace(MODEL, fingerprint="g", max_context=9, eos_token_ids=(4,)),
        )

    try_pair(FakeLink(TOKENS), OtherModel(TOKENS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fingerprint": "g"}, "worker a serves another model or dtype: fingerprint g .* keeps the model of the first"),
        ({"max_context": 49}, "worker a has a context of 49 tokens, and the service promises 50"),
        ({"tokenizer_fingerprint": "u"}, "has another tokenizer than the service's target workers"),
    ],
)
def test_targets_must_be_interchangeable(changes: dict[str, Any], sentence: str) -> None:
    check_target(MODEL, MODEL, "a")
    check_target(replace(MODEL, max_context=99), MODEL, "a")
    with pytest.raises(ModelMismatchError, match=sentence):
        check_target(replace(MODEL, **changes), MODEL, "a")


@pytest.mark.parametrize("changes", [{4: None}, {3: None, 7: "<|extra|>"}, {}])
def test_a_tokenizer_may_lack_ids_of_the_target_or_have_others(changes: dict[int, str | None]) -> None:
    ours = Vocabulary({i: token for i, token in {**TOKENS, **changes}.items() if token is not None})
    check_tokenizer("folder", ours, Vocabulary(TOKENS), info(TOKENS))
    check_tokenizer("folder", Vocabulary(TOKENS), ours, info(TOKENS))


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        ({**TOKENS, 3: "ab", 4: "b"}, "id 3 is 'b' in it and 'ab' for the target; name a folder with the target's own"),
        (None, "fingerprint .* (5 ids), where the target has .* (5 ids), and its worker cannot tell in what"),
    ],
)
def test_a_tokenizer_with_another_token_for_an_id_is_refused(theirs: dict[int, str] | None, problem: str) -> None:
    told = None if theirs is None else Vocabulary(theirs)
    said = "the tokenizer of 'folder' does not fit the target model qwen: " + problem.replace("(", r"\(")
    with pytest.raises(ModelMismatchError, match=said.replace("ids)", r"ids\)")):
        check_tokenizer("folder", Vocabulary(TOKENS), told, info(TOKENS, "qwen"))
