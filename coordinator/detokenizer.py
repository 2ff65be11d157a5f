"""Token ids to text, one token at a time, and the search for stop strings in that text.

Owns: exact incremental decoding for the decoders that language models use, and hold-back of what may still change.
Must not know: transformers, requests, statistics. `coordinator.tokenization` says which decoder a tokenizer has.

The promise: the joined pieces equal `decode(all ids, skip_special_tokens=True)`, no piece is ever taken back, and the
cost is linear in the number of tokens. So text is given out as soon as no later token can change it, and not before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class PieceDecoder(Protocol):
    """Turns vocabulary entries into text, holding back what the next entry may change."""

    def feed(self, token: str) -> str:
        """Text that is certain now and was not given out before."""
        ...

    def peek(self) -> str:
        """Text that would still come if the answer ended here. Changes nothing."""
        ...


def create_byte_table() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevelDecoder:
    """GPT-2 style: every character of an entry is a byte; the bytes of all entries are one UTF-8 stream.

    An entry with a character outside the table (an added token with a space, say) stands for its own UTF-8 bytes.
    Wrong bytes become one U+FFFD per maximal ill-formed part, as the Unicode standard recommends (3.9).
    """

    _table = create_byte_table()

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: str) -> str:
        return self._utf8.decode(self._to_bytes(token))

    def peek(self) -> str:
        pending, _ = self._utf8.getstate()
        return pending.decode("utf-8", errors="replace")

    def _to_bytes(self, token: str) -> bytes:
        try:
            return bytes([self._table[char] for char in token])
        except KeyError:
            return token.encode()


class ByteFallbackDecoder:
    """Sentencepiece style: entries are text, and `<0xXX>` entries are bytes of characters outside the vocabulary.

    A run of byte entries is text if the *whole* run is valid UTF-8, else one U+FFFD for each of its bytes. So a run is
    held back while it is valid, and given out byte by byte from where it is known to be wrong.
    """

    def __init__(self, *, replacements: Sequence[tuple[str, str]] = (), has_byte_fallback: bool = True) -> None:
        self._replacements = tuple(replacements)
        self._has_byte_fallback = has_byte_fallback
        self._start_run()

    def feed(self, token: str) -> str:
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        byte = parse_byte_entry(token) if self._has_byte_fallback else None
        if byte is not None:
            return self._feed_byte(byte)
        run = self.peek()
        self._start_run()
        return run + token

    def peek(self) -> str:
        if self._is_wrong or not self._num_bytes:
            return ""
        is_complete = not self._utf8.getstate()[0]
        return "".join(self._chars) if is_complete else REPLACEMENT * self._num_bytes

    def _start_run(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._chars: list[str] = []
        self._num_bytes = 0
        self._is_wrong = False

    def _feed_byte(self, byte: int) -> str:
        if self._is_wrong:
            return REPLACEMENT
        self._num_bytes += 1
        try:
            char = self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._is_wrong = True
            return REPLACEMENT * self._num_bytes
        if char:
            self._chars.append(char)
        return ""


class MetaspaceDecoder:
    """Unigram style: a mark stands for a space; in the first entry it is a dummy and vanishes."""

    def __init__(self, *, mark: str = "▁", drops_first: bool = True) -> None:
        self._mark = mark
        self._is_first = drops_first

    def feed(self, token: str) -> str:
        text = token.replace(self._mark, "" if self._is_first else " ")
        self._is_first = False
        return text

    def peek(self) -> str:
        return ""


class SpacedDecoder:
    """A tokenizer without a decoder: entries joined by spaces."""

    def __init__(self) -> None:
        self._separator = ""

    def feed(self, token: str) -> str:
        text = self._separator + token
        self._separator = " "
        return text

    def peek(self) -> str:
        return ""


class StripDecoder:
    """Takes up to `num_left` leading characters `char` off the text of another decoder."""

    def __init__(self, inner: PieceDecoder, *, char: str, num_left: int) -> None:
        self._inner = inner
        self._char = char
        self._num_left = num_left

    def feed(self, token: str) -> str:
        text = self._inner.feed(token)
        stripped = self._strip(text)
        self._num_left = 0 if stripped else self._num_left - len(text)
        return stripped

    def peek(self) -> str:
        return self._strip(self._inner.peek())

    def _strip(self, text: str) -> str:
        num_leading = len(text) - len(text.lstrip(self._char)) if self._num_left else 0
        return text[min(num_leading, self._num_left) :]


class WindowDecoder:
    """For decoders of other kinds: decodes a window that starts one entry back, and gives out what it adds.

    Exact where an entry's text depends on nothing but its left neighbour (WordPiece, say).
    """

    max_window = 32  # entries held back at most, so that a run of broken bytes cannot make the cost square

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._window: list[str] = []
        self._num_given = 0  # characters of the window's text given out

    def feed(self, token: str) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) < self.max_window:
            return ""
        piece = text[self._num_given :]
        self._window = [token]
        self._num_given = len(self._decode(self._window))
        return piece

    def peek(self) -> str:
        return self._decode(self._window)[self._num_given :] if self._window else ""


def parse_byte_entry(token: str) -> int | None:
    """The byte of an entry of the form `<0xXX>`, else None."""
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None


class Detokenizer:
    """The text of one answer, token by token.

    `token_of(id)` is the vocabulary entry, None for ids that decode to nothing: special or unknown ones.
    """

    def __init__(self, token_of: Callable[[int], str | None], decoder: PieceDecoder) -> None:
        self._token_of = token_of
        self._decoder = decoder

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        token = self._token_of(token_id)
        return "" if token is None else self._decoder.feed(token)

    def pending(self) -> str:
        """Text held back, as it reads if no token follows."""
        return self._decoder.peek()


class StopScanner:
    """Finds the stop string that is complete first, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def is_idle(self) -> bool:
        """No stop strings: text passes through."""
        return not self._stops

    def push(self, text: str, pending: str = "") -> tuple[str, bool]:
        """(text to give out, whether a stop string is complete). Then the text ends before it.

        `pending` follows `text` if the answer ends here; what the next token may turn into a character completes none.
        Of stop strings complete in one push the one that ends first counts, and of those the longest. After True the
        scanner is at its end.
        """
        if self.is_idle:
            return text, False
        view = self._held + text + pending.rstrip(REPLACEMENT)
        matches = [(start + len(stop), start) for stop in self._stops if (start := view.find(stop)) >= 0]
        if matches:
            self._held = ""
            return view[: min(matches)[1]], True
        self._held += text
        split = len(self._held) - self._num_matching()
        given, self._held = self._held[:split], self._held[split:]
        return given, False

    def finish(self, pending: str = "") -> str:
        """What was held back, now that nothing follows."""
        rest, self._held = self._held + pending, ""
        return rest

    def _num_matching(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(self._num_matching_stop(stop) for stop in self._stops)

    def _num_matching_stop(self, stop: str) -> int:
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What some new tokens add to an answer."""

    texts: tuple[str, ...]  # what each token that belongs to the answer made certain
    is_stopped: bool  # the last of them completed a stop string

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def num_tokens(self) -> int:
        return len(self.texts)


class AnswerText:
    """Text of one answer with its stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Iterable[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._scanner = StopScanner(stops)

    def push(self, token_ids: Sequence[int]) -> AnswerPiece:
        """Add tokens up to the one that completes a stop string."""
        texts: list[str] = []
        for token_id in token_ids:
            text, is_stopped = self._push_one(token_id)
            texts.append(text)
            if is_stopped:
                return AnswerPiece(tuple(texts), True)
        return AnswerPiece(tuple(texts), False)

    def finish(self) -> str:
        """The text held back, once no token follows. Not after a stop string."""
        return self._scanner.finish(self._detokenizer.pending())

    def _push_one(self, token_id: int) -> tuple[str, bool]:
        text = self._detokenizer.push(token_id)
        return self._scanner.push(text, "" if self._scanner.is_idle else self._detokenizer.pending())
