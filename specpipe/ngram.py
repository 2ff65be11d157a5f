"""Drafts without a model: what followed the last few tokens when they stood in the text before.

Owns: one session's index of its own text. Must not know: models, sessions, trees, gRPC. Runs inside both workers.
Work is proportional to new tokens, not to the text.
"""

from __future__ import annotations

from collections.abc import Sequence

DRAFTER = "ngram"

_MAX_LOOKED_AT = 64  # earlier places that are compared
_MAX_FOLLOWED = 8  # earlier places whose continuation is drafted


class NgramDrafter:
    """Drafts continuations seen before after the last `min_n` to `max_n` tokens; a longer match weighs more.

    `open`, then `commit` and `grow` in any order, then `close`.
    """

    def __init__(self, min_n: int = 2, max_n: int = 4, max_depth: int = 16) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n must be in 1..max_n, got {min_n} and {max_n}")
        self._min_n = min_n
        self._max_n = max_n
        self._max_depth = max_depth
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # min_n tokens -> index of what followed them last
        self._earlier: list[int] = []  # per index: the one before it that followed the same min_n tokens; -1: none

    def open(self, tokens: Sequence[int]) -> None:
        """Begin with a text (prompt and committed tokens)."""
        self.close()
        self.commit(tokens)

    def commit(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            index = len(self._tokens)
            gram = self._last_gram()
            self._earlier.append(-1 if gram is None else self._latest.get(gram, -1))
            if gram is not None:
                self._latest[gram] = index
            self._tokens.append(token)

    def grow(self, limit: int, path: Sequence[int] = ()) -> tuple[list[int], list[int], list[float]]:
        """At most `limit` nodes below the last token, the likeliest: parents, tokens, confidences as in Extension.

        With a `path`, below that, as if its tokens had been committed.
        """
        context = [*self._tokens[-self._max_n :], *path][-self._max_n :] if path else self._tokens[-self._max_n :]
        trie = _Trie()
        for start, length in self._places(context):
            trie.add(self._continuation(start, path), float(length + 1 - self._min_n))
        return trie.best(limit)

    def close(self) -> None:
        self._tokens = []
        self._latest = {}
        self._earlier = []

    def _last_gram(self) -> tuple[int, ...] | None:
        return tuple(self._tokens[-self._min_n :]) if len(self._tokens) >= self._min_n else None

    def _places(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """(index of what followed, tokens that match before it) of earlier places: longest first, then latest."""
        place = self._latest.get(tuple(context[-self._min_n :]), -1) if len(context) >= self._min_n else -1
        found: list[tuple[int, int]] = []
        while place >= 0 and len(found) < _MAX_LOOKED_AT:
            found.append((place, self._match_length(place, context)))
            place = self._earlier[place]
        return sorted(found, key=lambda item: (-item[1], -item[0]))[:_MAX_FOLLOWED]

    def _match_length(self, place: int, context: Sequence[int]) -> int:
        tokens, length = self._tokens, self._min_n
        while length < min(len(context), place) and tokens[place - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def _continuation(self, start: int, path: Sequence[int]) -> list[int]:
        """What stood from `start` on; beyond the end of the text it repeats what it gave, as a loop in the text."""
        text = [*self._tokens[start : start + self._max_depth], *path]
        while len(text) < self._max_depth:
            text += text
        return text[: self._max_depth]


class _Trie:
    """Continuations with weights. Node 0 is the root; confidence is a child's share of its parent's weights, one kept
    back for what was never seen."""

    def __init__(self) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._weights: list[float] = [0.0]

    def add(self, path: Sequence[int], weight: float) -> None:
        node = 0
        for token in path:
            child = self._children[node].get(token)
            if child is None:
                child = self._children[node][token] = len(self._weights)
                self._children.append({})
                self._weights.append(0.0)
            self._weights[child] += weight
            node = child

    def best(self, limit: int) -> tuple[list[int], list[int], list[float]]:
        """The `limit` nodes of largest reach, parents first, siblings by falling confidence, then token."""
        nodes = sorted(self._walk(), key=lambda item: (-item[3], item[4]))[:limit]
        number = {0: 0} | {node: 1 + i for i, (node, *_) in enumerate(nodes)}
        parents = [number[parent] for _, parent, *_ in nodes]
        confidences = [reach / parent_reach for _, _, _, reach, _, parent_reach in nodes]
        return parents, [token for _, _, token, *_ in nodes], confidences

    def _walk(self) -> list[tuple[int, int, int, float, tuple[int, int], float]]:
        """(node, parent, token, reach, (depth, token), the parent's reach) of every node."""
        found = []
        stack = [(0, 1.0, 1)]
        while stack:
            parent, parent_reach, depth = stack.pop()
            children = self._children[parent]
            total = 1.0 + sum(self._weights[child] for child in children.values())
            for token, child in children.items():
                reach = parent_reach * self._weights[child] / total
                found.append((child, parent, token, reach, (depth, token), parent_reach))
                stack.append((child, reach, depth + 1))
        return found
