"""Which KV slots hold a prefix that was computed before: a radix tree from token ids to slots.

Owns: the tree, and in which order it forgets. Must not know: torch, sessions, who holds a slot (`slots.py` does).

A path from the root spells a sequence of tokens, and each token on it has the slot with its keys and values, so that a
slot stands for a whole prefix. Tokens of a run that nothing branches off lie in one node. Trees of different adapters
are apart; a worker serves one model, so models are apart by themselves.

Why a tree at token granularity, and not blocks of tokens under chained hashes: slots are single tokens here, so a match
may end anywhere and costs no padding, where blocks lose up to one block at each end; ids are compared, so that no
collision can hand one request the text of another; and a comparison of two runs is one slice comparison, whatever their
length. What blocks buy, a page table of fixed width, the engine does not have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from specpipe.errors import InvariantError


class _Node:
    """A run of tokens. The root of a tree has none."""

    __slots__ = ("children", "parent", "slots", "tokens")

    def __init__(self, tokens: list[int], slots: list[int], parent: _Node | None) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, _Node] = {}  # by the first token of their run


class PrefixCache:
    """What is put in stays until `evict` takes it, the ends of least recently used paths first."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._roots: dict[str, _Node] = {}  # by adapter
        # Least recently used first. Whoever uses a node uses all above it, which are put after it: so a node always
        # comes before its parent, and the first one has no children.
        self._by_age: OrderedDict[_Node, None] = OrderedDict()

    def match(self, tokens: list[int], adapter: str = "") -> list[int]:
        """Slots of the longest prefix of `tokens` that is here; it counts as used now."""
        root = self._roots.get(adapter)
        path = self._descend(root, tokens) if root is not None else []
        self._touch(path)
        return [slot for node in path for slot in node.slots]

    def insert(self, tokens: list[int], slots: list[int], adapter: str = "") -> list[int]:
        """Put in `slots[i]`, which holds `tokens[i]` computed after `tokens[:i]`, for each i that is not here yet.

        Returns the slots that were put in: those of the end of `tokens`. Where a prefix is here with other slots, these
        stay, as they may be in use.
        """
        if not tokens:
            return []
        root = self._roots.setdefault(adapter, _Node([], [], None))
        path = self._descend(root, tokens)
        num_known = sum(len(node.slots) for node in path)
        if num_known < len(tokens):
            parent = path[-1] if path else root
            node = _Node(tokens[num_known:], slots[num_known:], parent)
            parent.children[tokens[num_known]] = node
            self._by_age[node] = None
            self.num_slots += len(node.slots)
        self._touch(path)
        return slots[num_known:]

    def evict(self, count: int, is_held: Callable[[int], bool]) -> list[int]:
        """Forget ends of paths, least recently used first, until `count` slots that nobody holds are forgotten.

        There must be as many here. Returns all slots that were forgotten. There may be held ones among them: a path
        may lead on from a part that nobody holds to one that somebody does, and cannot lose its beginning alone.
        """
        forgotten: list[int] = []
        emptied: list[_Node] = []
        num_left = count
        for node in self._by_age:
            if num_left == 0:
                break
            if not node.children:
                end = _take_end(node, num_left, is_held)
                num_left -= len(end)
                forgotten += end
                if not node.slots:
                    emptied.append(node)
        for node in emptied:
            del self._by_age[node]
        while num_left > 0 and self._by_age:  # what is left ends in held slots
            node, _ = self._by_age.popitem(last=False)
            num_left -= sum(not is_held(slot) for slot in node.slots)
            forgotten += node.slots
            _detach(node)
        self._roots = {adapter: root for adapter, root in self._roots.items() if root.children}
        self.num_slots -= len(forgotten)
        return forgotten

    def check(self) -> set[int]:
        """Raise InvariantError if the tree contradicts itself; return the slots in it."""
        ages = {node: age for age, node in enumerate(self._by_age)}
        nodes = [child for root in self._roots.values() for child in root.children.values()]
        for node in nodes:  # grows
            nodes += node.children.values()
            is_run = 0 < len(node.tokens) == len(node.slots)
            is_linked = node.parent is not None and node.parent.children.get(node.tokens[0]) is node
            if not (is_run and is_linked and node in ages):
                raise InvariantError(f"a node of the prefix cache is broken: {node.tokens} in slots {node.slots}")
            if node.parent is not None and ages[node] > ages.get(node.parent, len(ages)):
                raise InvariantError(f"the prefix cache would forget {node.tokens} after what leads to it")
        slots = [slot for node in nodes for slot in node.slots]
        if len(nodes) != len(ages) or len(set(slots)) != len(slots) or len(slots) != self.num_slots:
            raise InvariantError(f"the prefix cache counts {self.num_slots} slots in {len(ages)} nodes: {slots}")
        return set(slots)

    def _descend(self, node: _Node, tokens: list[int]) -> list[_Node]:
        """Nodes that spell the longest known prefix of `tokens`, below `node`; one that agrees in part is split."""
        path: list[_Node] = []
        start = 0
        while start < len(tokens) and (child := node.children.get(tokens[start])) is not None:
            run = tokens[start : start + len(child.tokens)]
            node = child if run == child.tokens else self._split(child, _common_length(run, child.tokens))
            path.append(node)
            start += len(node.tokens)
        return path

    def _split(self, node: _Node, length: int) -> _Node:
        """Move the first `length` tokens of a node to one above it, which is returned and must be touched."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.slots[:length], node.parent)
        node.parent.children[node.tokens[0]] = upper
        upper.children[node.tokens[length]] = node
        node.tokens, node.slots, node.parent = node.tokens[length:], node.slots[length:], upper
        self._by_age[upper] = None
        return upper

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_age.move_to_end(node)


def _take_end(node: _Node, most: int, is_held: Callable[[int], bool]) -> list[int]:
    """Cut off and return up to `most` slots at the end of a run, as far as nobody holds them."""
    start = len(node.slots)
    while start > 0 and len(node.slots) - start < most and not is_held(node.slots[start - 1]):
        start -= 1
    end = node.slots[start:]
    if start == 0:
        _detach(node)
    del node.slots[start:]
    del node.tokens[start:]
    return end


def _detach(node: _Node) -> None:
    assert node.parent is not None
    del node.parent.children[node.tokens[0]]


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens at the beginning are equal."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
