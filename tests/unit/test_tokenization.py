"""Ids and text are AutoTokenizer's; torch stays out; bytes decide only where they may."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import unicodedata
from pathlib import Path

import coordinator_tokenizers
import pytest
from tokenizers import AddedToken, normalizers, pre_tokenizers

from coordinator.tokenization import (
    FIRST_BEGINNING,
    LONGEST_WORD,
    SHRINK_BY_NORMALIZER,
    STUCK_JOB_S,
    UNDECIDED,
    Tokenization,
    TokenizerThread,
    load_tokenization,
)
from specpipe.errors import ConfigError, InvalidRequestError

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "specpipe" / "demo" / "models" / "target"
TEXTS = [
    "",
    " ",
    "\n",
    "def add(left, right):\n    return left + right",
    "  Ďáblice 中文 😀👨‍👩‍👧‍👦🇺🇦\u0000\u0301",
    "<|user|>hello</s> two words <think>",
]
TORCH_FREE_PROCESS = """
import sys
from coordinator.tokenization import hide_torch, load_tokenization
hide_torch()
tokens = load_tokenization(sys.argv[1])
ids = tokens.encode("def add(left, right):") + tokens.encode_chat([{"role": "user", "content": "Hello"}])
answer = tokens.create_answer(["stop"])
assert answer.push(ids).text + answer.finish() == tokens.decode(ids)
print(*ids)
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "torchgen", "functorch")]
assert "libtorch" not in open("/proc/self/maps").read()
"""


@pytest.fixture(scope="module", params=coordinator_tokenizers.KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = coordinator_tokenizers.KINDS[request.param]()
    return coordinator_tokenizers.save_folder(tokenizer, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_auto_tokenizer(folder: Path, text: str) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    tokens = load_tokenization(str(folder))
    assert tokens.encode(text) == reference(text)["input_ids"]
    assert tokens.decode(tokens.encode(text)) == reference.decode(
        reference(text)["input_ids"], skip_special_tokens=True
    )


@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
def test_a_class_named_by_the_folder_is_honoured(tmp_path: Path, tokenizer_class: str) -> None:
    from transformers import AutoTokenizer

    is_llama = tokenizer_class.startswith("Llama")
    tokenizer = coordinator_tokenizers.byte_fallback() if is_llama else coordinator_tokenizers.byte_level()
    folder = coordinator_tokenizers.save_folder(tokenizer, tmp_path, tokenizer_class=tokenizer_class)
    reference, tokens = AutoTokenizer.from_pretrained(folder), load_tokenization(str(folder))
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        detokenizer = tokens.create_detokenizer()
        assert tokens.encode(text) == ids
        assert "".join(map(detokenizer.push, ids)) + detokenizer.pending() == reference.decode(
            ids, skip_special_tokens=True
        )


def test_special_tokens_of_the_tokenizer_are_added(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = coordinator_tokenizers.byte_level()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokens = load_tokenization(str(coordinator_tokenizers.save_folder(tokenizer, tmp_path)))
    assert tokens.encode("")[0] == tokens.encode("the")[0] == 1
    chat = tokens.encode_chat([{"role": "user", "content": "Hello"}])
    assert chat.count(1) == 1, "the template writes the special tokens itself"


def test_chat_equals_apply_chat_template() -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    expected = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert load_tokenization(str(DEMO)).encode_chat(messages) == expected


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ oops", None])
def test_a_template_that_refuses_is_an_invalid_request(tmp_path: Path, template: str | None) -> None:
    tokenizer = coordinator_tokenizers.byte_level()
    tokens = load_tokenization(str(coordinator_tokenizers.save_folder(tokenizer, tmp_path, chat_template=template)))
    with pytest.raises(InvalidRequestError, match="chat: the template"):
        tokens.encode_chat([{"role": "user", "content": "Hello"}])


def test_a_missing_tokenizer_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenization(str(tmp_path))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            '"ByteLevel"',
            '"ByteLevelOfTomorrow"',
            r"tokenizer\.json': data did not match .* newer version of tokenizers than",
        ),
        ("{", "[", "no tokenizer could be loaded from '[^']*broken': "),
        ("{", "[] //", "no tokenizer could be loaded from '[^']*broken': "),
    ],
)
def test_a_broken_tokenizer_is_a_config_error(tmp_path: Path, before: str, after: str, said: str) -> None:
    folder = coordinator_tokenizers.save_folder(coordinator_tokenizers.byte_level(), tmp_path / "broken")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(ConfigError, match=said) as raised:
        load_tokenization(str(folder))
    assert "\n" not in str(raised.value)


def test_a_config_that_is_no_table_is_a_config_error(tmp_path: Path) -> None:
    folder = coordinator_tokenizers.save_folder(coordinator_tokenizers.byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenization(str(folder))


def test_a_coordinator_process_has_no_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        [sys.executable, "-c", TORCH_FREE_PROCESS, str(DEMO)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    tokens = load_tokenization(str(DEMO))
    expected = tokens.encode("def add(left, right):") + tokens.encode_chat([{"role": "user", "content": "Hello"}])
    assert result.stdout.split() == [str(token_id) for token_id in expected]
    assert result.stderr == ""


def test_bytes_bound_tokens_of_byte_level_tokenizers() -> None:
    tokens = load_tokenization(str(DEMO))
    for text in [" " * 500, "=" * 500, "def f():\n    pass\n" * 30, "中" * 100]:
        assert tokens.least_tokens(len(text.encode())) <= len(tokens.encode(text))
    assert tokens.least_tokens(10**7) > 4096


def test_no_text_shrinks_more_by_a_normal_form_than_is_reckoned_with() -> None:
    """Over all characters but those of Hangul, where three of 3 bytes make one of 3."""
    characters = map(chr, range(sys.maxunicode + 1))
    decomposed = {c: unicodedata.normalize("NFD", c) for c in characters if unicodedata.decomposition(c)}
    longest: dict[str, int] = {}  # bytes of the longest character that stands for this one
    for character, parts in decomposed.items():
        assert num_bytes(character) <= SHRINK_BY_NORMALIZER["NFD"] * num_bytes(parts)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, num_bytes(parts)), num_bytes(character))
    for character, parts in decomposed.items():
        if unicodedata.normalize("NFC", character) == character:
            most = sum(longest.get(part, num_bytes(part)) for part in parts)
            assert most <= SHRINK_BY_NORMALIZER["NFC"] * num_bytes(character), f"U+{ord(character):04X}"


@pytest.mark.parametrize(
    ("form", "text", "normal"),
    [("NFD", "\N{KELVIN SIGN}", "K"), ("NFC", "\u1fbe\u0308\u0301", "\u0390"), ("NFC", "\u1112\u1161\u11ab", "\ud55c")],
)
def test_the_normalizers_shrink_texts_as_python_does(form: str, text: str, normal: str) -> None:
    assert getattr(normalizers, form)().normalize_str(text) == unicodedata.normalize(form, text) == normal
    assert num_bytes(text) <= SHRINK_BY_NORMALIZER[form] * num_bytes(normal)


def num_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


@pytest.mark.parametrize("change", ["strip", "lowercase", "rstrip token", "removing split"])
def test_bytes_decide_nothing_where_text_may_vanish(tmp_path: Path, change: str) -> None:
    tokenizer = coordinator_tokenizers.byte_level()
    if change == "strip":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Strip()])
    elif change == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    elif change == "rstrip token":
        tokenizer.add_special_tokens([AddedToken("<sep>", rstrip=True)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
        )
    tokens = load_tokenization(str(coordinator_tokenizers.save_folder(tokenizer, tmp_path)))
    assert tokens.max_bytes_per_token == UNDECIDED
    assert tokens.least_tokens(10**9) == 1


LONG_TEXTS = [
    "the quick brown fox " * 200,
    "x" * 5_000,
    " " * 5_000,
    " " * 1_000 + "the quick brown fox " * 200,
    "the quick" + " " * 5_000,
    "中文字" * 1_500,
    "<|user|>" * 600,
    "the dog",
]


def test_only_a_text_that_does_not_fit_is_refused_by_its_beginning(folder: Path) -> None:
    tokens = load_tokenization(str(folder))
    for text in LONG_TEXTS:
        ids = tokens.encode(text)
        for max_tokens in (1, 50, 200):
            said = refusal(tokens, text, max_tokens)
            assert said == "" or len(ids) > max_tokens
            assert said == "" or f"characters of {len(text)} are more than {max_tokens} tokens" in said


def refusal(tokens: Tokenization, text: str, max_tokens: int) -> str:
    """What is said where it is refused; empty where it is tokenized as ever."""
    try:
        ids = tokens.encode_within(text, max_tokens)
    except InvalidRequestError as error:
        return str(error)
    assert ids == tokens.encode(text)
    return ""


@pytest.mark.parametrize("text", ["the quick brown fox " * 20_000, " " * 5_000 + "the quick brown fox " * 20_000])
def test_a_text_that_is_far_too_long_is_not_tokenized_whole(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = coordinator_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken("<sep>", rstrip=True)])
    tokens = load_tokenization(str(coordinator_tokenizers.save_folder(tokenizer, tmp_path)))
    assert tokens.max_bytes_per_token == UNDECIDED
    monkeypatch.setattr(tokens, "encode", lambda text: pytest.fail("tokenized whole"))
    monkeypatch.setattr(tokens, "encode_rendered", lambda text: pytest.fail("tokenized whole"))
    for is_rendered in (False, True):
        with pytest.raises(InvalidRequestError, match=r"its first \d{3,5} characters of \d+ are more than 64 tokens"):
            tokens.encode_within(text, 64, is_rendered=is_rendered)


@pytest.mark.parametrize("added", ["<sep>", "two words"])
def test_white_space_that_a_token_at_the_cut_swallows_is_not_counted(tmp_path: Path, added: str) -> None:
    tokenizer = coordinator_tokenizers.byte_level()
    tokenizer.add_special_tokens([AddedToken(added, lstrip=True)])
    tokens = load_tokenization(str(coordinator_tokenizers.save_folder(tokenizer, tmp_path)))
    for num_cut in range(1, len(added)):
        beginning = (" \t" * 800)[num_cut : FIRST_BEGINNING * 50] + added[:num_cut]
        assert len(tokens.encode(beginning)) > 2 * 50 + LONGEST_WORD, "by itself it does not fit at all"
        text = beginning + added[num_cut:] + " the end" * 4
        assert tokens.encode_within(text, 50) == tokens.encode(text)


async def test_the_thread_runs_calls_in_order() -> None:
    thread = TokenizerThread()
    assert await thread.run(sorted, [3, 1, 2]) == [1, 2, 3]
    thread.close()


@pytest.mark.parametrize("error", [None, ValueError("no text")])
async def test_the_thread_is_stuck_while_one_job_takes_too_long_and_not_while_many_do(error: Exception | None) -> None:
    now_s = 100.0
    thread = TokenizerThread(lambda: now_s)
    has_begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        has_begun.set()
        assert may_end.wait(20)
        if error is not None:
            raise error

    waiting = [asyncio.ensure_future(thread.run(job)) for _ in range(3)]
    assert await asyncio.to_thread(has_begun.wait, 20)
    now_s += STUCK_JOB_S
    assert not thread.is_stuck
    now_s += 1.0
    assert thread.is_stuck
    may_end.set()
    assert await asyncio.gather(*waiting, return_exceptions=True) == [error] * 3
    now_s += STUCK_JOB_S + 1.0
    assert not thread.is_stuck, "nothing runs"
    thread.close()


async def test_loading_a_tokenizer_may_take_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    thread = TokenizerThread(lambda: now_s)

    def load_slowly(name: str) -> bool:
        nonlocal now_s
        now_s += STUCK_JOB_S + 1.0
        return thread.is_stuck

    monkeypatch.setattr("coordinator.tokenization.load_tokenization", load_slowly)
    assert await thread.load("a hub's") is False
    thread.close()
