"""Text to token ids and back, as the target model's tokenizer does it, in a process without torch.

Owns: loading a tokenizer, encoding prompts and chats, the choice of an incremental decoder, what can be told about a
prompt from its bytes alone. Must not know: requests, workers, protobuf.

Tokenizers are loaded by transformers' `AutoTokenizer`, so ids and text are its by construction. Importing that class
imports torch where torch is installed; `hide_torch` keeps it out of a process that is a coordinator and nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from coordinator.detokenizer import (
    AnswerText,
    ByteFallbackDecoder,
    ByteLevelDecoder,
    Detokenizer,
    MetaspaceDecoder,
    PieceDecoder,
    SpacedDecoder,
    StripDecoder,
    WindowDecoder,
    create_byte_table,
)
from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import ConfigError, InvalidRequestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
Chat = Sequence[Mapping[str, str]]  # role and content of each message

NUM_CHECKED_TOKENS = 2000  # random tokens on which an incremental decoder must agree with the tokenizer
UNDECIDED = sys.maxsize
STUCK_JOB_S = 120.0  # the longest text that a message holds takes less than a minute on a slow core

# How many times fewer bytes a text can have after a normalizer, rounded up. NFD makes a K of the Kelvin sign, 3 bytes;
# NFC makes U+0390, 2 bytes, of U+1FBE, U+0308 and U+0301, which are 7.
SHRINK_BY_NORMALIZER = {"Prepend": 1, "ByteLevel": 1, "NFD": 3, "NFC": 4}

# A text that is long for the tokens that it may have is judged by beginnings of it before it is tokenized whole.
FIRST_BEGINNING = 16  # characters of the first one, for each such token
NEXT_BEGINNING = 4  # how many times longer each further one is
SURE_EXCESS = 2  # one that has so many times the tokens is not made to fit by what follows it,
LONGEST_WORD = 100  # ... but for its last word: WordPiece makes one unknown token of one that has more characters


def hide_torch() -> None:
    """Make transformers believe, for the life of this process, that torch is not installed.

    To be called before transformers is imported, by a process that never wants a model. Does nothing where torch or
    transformers is loaded already: there it would come too late, or break its neighbours.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would recommend to install torch
    with _absent("torch"):
        from transformers import AutoTokenizer  # noqa: F401
        from transformers.utils import chat_template_utils, is_torch_available  # noqa: F401

        is_torch_available()  # remembered by transformers from here on


@contextmanager
def _absent(module: str) -> Iterator[None]:
    """While open, `import module` fails and `find_spec(module)` is None (None in sys.modules means just that)."""
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


class Tokenization:
    """A loaded tokenizer. Blocking; `TokenizerThread` is its face for coroutines."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        """`tokenizer`: a PreTrainedTokenizerFast."""
        self.name = name
        self.tokenizer = tokenizer
        self.num_tokens: int = len(tokenizer)  # ids are 0 .. num_tokens - 1
        vocabulary = self.vocabulary()
        self.fingerprint = vocabulary.fingerprint
        entries = frozenset(vocabulary.tokens.values())
        self.max_bytes_per_token = _bound_bytes_per_token(tokenizer, entries)  # UNDECIDED where bytes say nothing
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._longest_added = max((len(token.content) for token in added.values()), default=0)
        self.create_decoder = self._choose_decoder()

    def encode_within(self, text: str, max_tokens: int, *, is_rendered: bool = False) -> list[int]:
        """As `encode`, or as `encode_rendered`; but a text that is far too long costs no more than a long one.

        Raises InvalidRequestError where a beginning shows that there are more than `max_tokens`; else there may still
        be. A beginning counts for the whole if it has twice as many: splits, merges and normalizers look a few tokens
        ahead, and none takes back half of what it has made.
        """
        num_chars = FIRST_BEGINNING * max_tokens
        while num_chars < len(text):
            if self._tokens_of_beginning(text, num_chars) > SURE_EXCESS * max_tokens + LONGEST_WORD:
                raise InvalidRequestError(
                    f"prompt: its first {num_chars} characters of {len(text)} are more than {max_tokens} tokens, which "
                    "is all that the context holds"
                )
            num_chars *= NEXT_BEGINNING
        return self.encode_rendered(text) if is_rendered else self.encode(text)

    def _tokens_of_beginning(self, text: str, num_chars: int) -> int:
        """Tokens of a beginning, without those that an added token at the cut could swallow.

        NOTE: one may strip the white space before it, however much that is, and it may begin before the cut.
        """
        end = len(text[: max(0, num_chars - self._longest_added)].rstrip())
        encoded = self.tokenizer(text[:num_chars], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return sum(stop <= end for _, stop in encoded["offset_mapping"])

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds by itself."""
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def encode_chat(self, messages: Chat) -> list[int]:
        """Ids of a conversation: of what `render_chat` makes of it. Raises InvalidRequestError as that does."""
        return self.encode_rendered(self.render_chat(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation, which holds its special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def render_chat(self, messages: Chat) -> str:
        """A conversation by the model's own template, up to where the assistant's answer begins.

        Raises InvalidRequestError if there is no template, or the template refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            raise InvalidRequestError(f"chat: the template of {self.name} cannot render this: {error}") from error
        return str(rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def create_detokenizer(self) -> Detokenizer:
        return Detokenizer(self._token_of, self.create_decoder())

    def create_answer(self, stops: Sequence[str] = ()) -> AnswerText:
        return AnswerText(self.create_detokenizer(), stops)

    def least_tokens(self, num_bytes: int) -> int:
        """No prompt of so many bytes has fewer tokens than this."""
        return -(-num_bytes // self.max_bytes_per_token)

    def vocabulary(self) -> Vocabulary:
        """Of what was loaded. A token that has several ids in a file is there with one of them."""
        return Vocabulary({token_id: token for token, token_id in self.tokenizer.get_vocab().items()})

    def _token_of(self, token_id: int) -> str | None:
        if token_id in self._special_ids:
            return None
        token: str | None = self.tokenizer.backend_tokenizer.id_to_token(token_id)
        return token

    def _choose_decoder(self) -> Callable[[], PieceDecoder]:
        """An exact decoder for this tokenizer if there is one and it agrees on random tokens, else a window."""
        exact = exact_decoder(_decoder_spec(self.tokenizer))
        if exact is not None and self._agrees(exact):
            return exact
        backend = self.tokenizer.backend_tokenizer
        decode = backend.decoder.decode if backend.decoder is not None else " ".join
        return lambda: WindowDecoder(decode)

    def _agrees(self, create: Callable[[], PieceDecoder]) -> bool:
        draw = random.Random(0)
        ids = [draw.randrange(self.num_tokens) for _ in range(min(NUM_CHECKED_TOKENS, 4 * self.num_tokens))]
        detokenizer = Detokenizer(self._token_of, create())
        return "".join(map(detokenizer.push, ids)) + detokenizer.pending() == self.decode(ids)


def load_tokenization(name: str) -> Tokenization:
    """The tokenizer of a local folder, a .gguf file or a hub name. Takes a second or two, or minutes with a slow hub.

    Raises ConfigError if there is none.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers import AutoTokenizer

    hub_logging.set_verbosity(logging.ERROR)  # its tries are many, and the error says what came of them
    logger.info("loading the tokenizer of %s", name)
    folder, arguments = _split_gguf(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    except Exception as error:  # files of others, read by libraries of others: anything may be raised
        raise ConfigError(_reason(name, error)) from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"the tokenizer of {name!r} has no fast (tokenizer.json) form")
    return Tokenization(name, tokenizer)


def _reason(name: str, error: Exception) -> str:
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    file = Path(name) / "tokenizer.json"
    if type(error) is not Exception or not file.is_file():  # the tokenizers library has no class of its own
        return f"no tokenizer could be loaded from {name!r}: {first_line}"
    return (
        f"no tokenizer could be loaded from {str(file)!r}: {first_line} (it is broken, or made by a newer version of "
        f"tokenizers than {version('tokenizers')})"
    )


def _split_gguf(name: str) -> tuple[str, dict[str, str]]:
    """Folder and further arguments: transformers wants a .gguf file by its folder and its name."""
    path = Path(name)
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if len(files) != 1 or (path / "tokenizer.json").exists():
        return name, {}
    return str(files[0].parent), {"gguf_file": files[0].name}


class TokenizerThread:
    """One thread of its own for a tokenizer: it may take long, and is not to be called from two threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._clock = clock
        self._job_since_s: float | None = None  # beginning of the running job; None: none runs, or it is a `load`

    @property
    def is_stuck(self) -> bool:
        """A job has run for longer than any text takes, so that all later ones wait for nothing."""
        since_s = self._job_since_s
        return since_s is not None and self._clock() - since_s > STUCK_JOB_S

    async def load(self, name: str) -> Tokenization:
        """`load_tokenization` on the thread. However long that takes, it is not stuck."""
        return await self._submit(load_tokenization, name)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await self._submit(self._measured, function, *args)

    async def _submit(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, functools.partial(function, *args))

    def _measured(self, function: Callable[..., T], *args: Any) -> T:
        self._job_since_s = self._clock()
        try:
            return function(*args)
        finally:
            self._job_since_s = None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def exact_decoder(spec: Mapping[str, Any] | None) -> Callable[[], PieceDecoder] | None:
    """The incremental twin of a decoder of the `tokenizers` library, given as its JSON. None: there is none."""
    if spec is None:
        return SpacedDecoder
    if spec["type"] == "ByteLevel":
        return ByteLevelDecoder
    if spec["type"] == "Metaspace":
        drops_first = spec.get("prepend_scheme", "always") != "never"
        return lambda: MetaspaceDecoder(mark=spec["replacement"], drops_first=drops_first)
    if spec["type"] == "Sequence":
        return _exact_sequence(spec["decoders"])
    return None


def _exact_sequence(steps: Sequence[Mapping[str, Any]]) -> Callable[[], PieceDecoder] | None:
    """Replace..., ByteFallback?, Fuse, Strip?: what sentencepiece models are converted to."""
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] or kinds == ["Metaspace"]:
        return exact_decoder(steps[0])
    replacements = [_replacement(step) for step in steps if step["type"] == "Replace"]
    num_replaced = len(replacements)
    if None in replacements or kinds[:num_replaced] != ["Replace"] * num_replaced:
        return None
    rest = kinds[num_replaced:]
    if rest not in (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"], ["Fuse"], ["Fuse", "Strip"]):
        return None

    def create() -> PieceDecoder:
        return ByteFallbackDecoder(
            replacements=[pair for pair in replacements if pair is not None],
            has_byte_fallback="ByteFallback" in rest,
        )

    strip = steps[-1]
    if strip["type"] != "Strip":
        return create
    if strip["stop"]:
        return None
    return lambda: StripDecoder(create(), char=strip["content"], num_left=strip["start"])


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    pattern = step["pattern"].get("String")
    return None if pattern is None else (pattern, step["content"])


def _decoder_spec(tokenizer: Any) -> dict[str, Any] | None:
    decoder = tokenizer.backend_tokenizer.decoder
    spec: dict[str, Any] | None = None if decoder is None else json.loads(decoder.__getstate__())
    return spec


def _bound_bytes_per_token(tokenizer: Any, entries: Set[str]) -> int:
    """Most bytes of a prompt that one token can stand for, or UNDECIDED where text may vanish without a token."""
    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    shrink = _shrink_by_normalizer(backend.normalizer)
    if shrink is None or any(token.lstrip or token.rstrip for token in added) or not _is_lossless(backend, entries):
        return UNDECIDED
    return shrink * max(len(token.encode()) for token in entries)


def _shrink_by_normalizer(normalizer: Any) -> int | None:
    """How many times shorter a text can become by normalizing. None: without bound."""
    if normalizer is None:
        return 1
    spec = json.loads(normalizer.__getstate__())
    steps = spec["normalizers"] if spec["type"] == "Sequence" else [spec]
    factors = [_shrink_by_step(step) for step in steps]
    return None if None in factors else math.prod(factor for factor in factors if factor is not None)


def _shrink_by_step(step: Mapping[str, Any]) -> int | None:
    if step["type"] == "Replace":
        return 1 if step["pattern"].get("String") == " " and step["content"] else None
    return SHRINK_BY_NORMALIZER.get(step["type"])


def _is_lossless(backend: Any, entries: Set[str]) -> bool:
    """Every byte of a text is in some token: byte-level entries or byte fallback, and nothing removed on the way."""
    pre_tokenizer = "" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__().decode()
    if '"Removed"' in pre_tokenizer or '"Whitespace' in pre_tokenizer:
        return False
    if '"ByteLevel"' in pre_tokenizer:
        return all(char in entries for char in create_byte_table())
    has_fallback = bool(getattr(backend.model, "byte_fallback", False))
    return has_fallback and all(f"<0x{byte:02X}>" in entries for byte in range(256))
