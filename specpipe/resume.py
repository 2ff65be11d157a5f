"""One answer out of several tries: when a broken one is asked for again, and what of the next is new.

Owns: the comparison of a repeated answer with what was given out already; patience. Must not know: gRPC, addresses,
time.
"""

from __future__ import annotations

import random
from typing import Final

from specpipe.answers import AnswerEvent, Chunk, Finished, Started
from specpipe.errors import InvariantError, ModelMismatchError
from specpipe.types import Rule

ROUNDS: Final = 4
"""Times that every place is tried, one after the other, before a failure is final."""
PAUSE_S: Final = 0.5
"""Before the second round; before each later one twice as long."""
SPREAD_S: Final = 0.1
"""Within which those ask the next place whose place was lost at the same moment."""


class ResumedAnswer:
    """The events of one answer over any number of tries.

    `add` every event of a try and pass on what comes back: Started once, each token once, Finished once. `restart`
    before the first event of the next try.
    """

    def __init__(self, *, temperature: float | None = None) -> None:
        self.started: Started | None = None
        """The first try's."""
        self._is_greedy = temperature == 0
        self._token_ids: list[int] = []  # given out
        self._pieces: list[str] = []
        self._text = ""  # given out by earlier tries
        self._num_tokens_seen = 0  # of this try; of which the first were given out by earlier ones
        self._num_chars_seen = 0

    @property
    def num_tokens(self) -> int:
        """Given out so far."""
        return len(self._token_ids)

    @property
    def obstacle(self) -> str:
        """Why another try could not go on where this one ended; empty if it could."""
        is_drawn_anew = self.started is not None and self.started.rule is Rule.REJECTION and not self._is_greedy
        if is_drawn_anew and self._token_ids:
            return (
                f"{self.num_tokens} tokens were delivered, and under the rejection rule another try would draw others: "
                "ask again from the beginning"
            )
        return ""

    def restart(self) -> None:
        self._text = "".join(self._pieces)
        self._num_tokens_seen = self._num_chars_seen = 0

    def add(self, event: AnswerEvent) -> AnswerEvent | None:
        """What is new of it, if anything. Raises ModelMismatchError and InvariantError where a try differs."""
        match event:
            case Started():
                return self._add_started(event)
            case Chunk():
                return self._add_chunk(event)
            case Finished():
                self._require(self._num_tokens_seen == self.num_tokens)
                return event

    def _add_started(self, event: Started) -> Started | None:
        if self.started is None:
            self.started = event
            return event
        first, other = _asked(self.started), _asked(event)
        if first != other:
            raise ModelMismatchError(
                f"the answer cannot go on elsewhere: it began with {first}, and there it is {other}"
            )
        return None

    def _add_chunk(self, chunk: Chunk) -> Chunk | None:
        num_old = min(len(chunk.token_ids), self.num_tokens - self._num_tokens_seen)
        rest = self._without_known(chunk, num_old) if num_old else chunk
        self._num_tokens_seen += len(chunk.token_ids)
        self._num_chars_seen += len(chunk.text)
        self._token_ids += rest.token_ids
        self._pieces.append(rest.text)
        return rest if rest.token_ids or rest.text else None

    def _without_known(self, chunk: Chunk, num_tokens: int) -> Chunk:
        num_chars = sum(chunk.text_lengths[:num_tokens])
        start, first_char = self._num_tokens_seen, self._num_chars_seen
        self._require(chunk.token_ids[:num_tokens] == tuple(self._token_ids[start : start + num_tokens]))
        self._require(chunk.text[:num_chars] == self._text[first_char : first_char + num_chars])
        return Chunk(
            token_ids=chunk.token_ids[num_tokens:],
            text=chunk.text[num_chars:],
            origins=chunk.origins[num_tokens:],
            round=chunk.round,
            text_lengths=chunk.text_lengths[num_tokens:],
        )

    def _require(self, is_equal: bool) -> None:
        if not is_equal:
            raise InvariantError(
                f"the answer cannot go on elsewhere: there its first {self.num_tokens} tokens are not those that were "
                "delivered"
            )


class Patience:
    """How often a question is asked again, one place after the other, while nothing new comes."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_failed = 0

    def progress(self) -> None:
        """The last try brought something new."""
        self._num_failed = 0

    def pause_s(self) -> float | None:
        """After a failure: how long to wait before the next place; None: no more. A single place is not asked again."""
        self._num_failed += 1
        num_rounds, num_in_round = divmod(self._num_failed, self._num_places)
        if num_rounds == ROUNDS or self._num_places == 1:
            return None
        return 0.0 if num_in_round else PAUSE_S * 2 ** (num_rounds - 1)


def spread(pause_s: float) -> float:
    """A little more, and up to half of it: else all clients of a coordinator that is lost would ask the next one at the
    same moment, round after round. Never less, for in that time one may come back."""
    return pause_s + random.uniform(0.0, SPREAD_S + pause_s / 2)


def _asked(started: Started) -> str:
    return f"{started.prompt_tokens} prompt tokens for {started.model} with seed {started.seed}"
