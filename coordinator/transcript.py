"""The answer as it grows: committed tokens, their text, and what they cost.

Owns: the tokens of one request, its text and stop strings, its statistics and timing. Must not know: workers, sessions.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.detokenizer import AnswerText
from coordinator.requests import Request
from coordinator.statistics import RequestStatistics, cut_commit, told_rounds
from specpipe.answers import Chunk, Finished, Timing
from specpipe.errors import InvariantError
from specpipe.types import Commit, FinishReason


class Transcript:
    """Grows by commits until one of them ends the answer."""

    def __init__(self, request: Request, answer: AnswerText) -> None:
        self.tokens: list[int] = list(request.prompt)  # prompt and committed
        self.statistics = RequestStatistics(request.speculation)
        self._request = request
        self._answer = answer
        self._first_token_ms: float | None = None
        self._rounds_before = 0  # of target sessions that were lost
        self._rounds_here = 0

    @property
    def num_committed(self) -> int:
        return len(self.tokens) - len(self._request.prompt)

    def target_moved(self) -> None:
        """The next commit comes from another session, which counts its rounds from 1."""
        self._rounds_before += self._rounds_here
        self._rounds_here = 0

    def new_part(self, commit: Commit) -> Commit | None:
        """What of a commit is not held yet; None if nothing. Its base must not be beyond the tokens held.

        Raises InvariantError if it contradicts them.
        """
        num_known = len(self.tokens) - commit.base
        overlap = list(commit.tokens[:num_known])
        if overlap != self.tokens[commit.base : commit.base + len(overlap)]:
            raise InvariantError(f"the target's tokens at {commit.base} are not those it committed before")
        if num_known >= len(commit.tokens):
            if commit.finish_reason is not None:
                raise InvariantError("the target ends the answer at tokens that it has gone beyond")
            return None
        tokens, origins = commit.tokens[num_known:], commit.origins[num_known:]
        return replace(commit, base=len(self.tokens), tokens=tokens, origins=origins)

    def add(self, commit: Commit, now_ms: float) -> tuple[Commit, Chunk]:
        """Append a commit that starts where the tokens end.

        Returns it as far as it belongs to the answer (its finish_reason says whether it ends there) and the client's
        piece. Raises InvariantError if it is too long.
        """
        commit, texts = self._read(told_rounds(commit))
        left = self._request.stops.max_length - len(self.tokens) - len(commit.tokens)
        if left < 0 or (left == 0 and commit.finish_reason is None):
            raise InvariantError("the target committed tokens beyond max_length, or has no end there")
        self.tokens += commit.tokens
        self._first_token_ms = now_ms if self._first_token_ms is None else self._first_token_ms
        self._rounds_here = max(self._rounds_here, commit.round)
        commit = self.statistics.add_commit(commit)
        chunk = Chunk(
            token_ids=commit.tokens,
            text="".join(texts),
            origins=commit.origins,
            round=self._rounds_before + self._rounds_here,
            text_lengths=tuple(len(text) for text in texts),
        )
        return commit, chunk

    def finished(self, reason: FinishReason, now_ms: float) -> Finished:
        total_ms = now_ms - self._request.received_ms
        first_ms = now_ms if self._first_token_ms is None else self._first_token_ms
        ttft_ms = first_ms - self._request.received_ms
        num_tokens = self.num_committed
        return Finished(
            finish_reason=reason,
            prompt_tokens=len(self._request.prompt),
            completion_tokens=num_tokens,
            timing=Timing(
                ttft_ms=ttft_ms,
                tpot_ms=(total_ms - ttft_ms) / (num_tokens - 1) if num_tokens > 1 else None,
                total_ms=total_ms,
            ),
            speculation=self.statistics.report(),
            cached_prompt_tokens=self.statistics.num_cached,
        )

    def _read(self, commit: Commit) -> tuple[Commit, list[str]]:
        """The commit up to where the answer ends, and the text that each of its tokens makes certain."""
        is_stop_token = commit.finish_reason is FinishReason.STOP  # the last token is one: it has no text
        piece = self._answer.push(commit.tokens[:-1] if is_stop_token else commit.tokens)
        if piece.is_stopped:
            cut = replace(cut_commit(commit, piece.num_tokens), finish_reason=FinishReason.STOP)
            return cut, list(piece.texts)
        texts = [*piece.texts, ""] if is_stop_token else list(piece.texts)
        if commit.finish_reason is not None:
            texts[-1] += self._answer.finish()  # what was held back
        return commit, texts
