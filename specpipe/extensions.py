"""What an extension must be before anything of it is used.

Owns: the checks of its shape and of its proposals. Must not know: trees, protobuf, what becomes of an extension.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from specpipe.errors import InvalidRequestError
from specpipe.types import Extension, Proposal

MAX_EXTENSION_NODES = 4096
"""More nodes than this in one extension are refused unread: no honest drafter sends them."""
MAX_PROPOSAL_TOKENS = 64
"""Tokens that a sampled child may be drawn from."""
_SUM_TOLERANCE = 1e-4


def validate_extension(extension: Extension, vocab_size: int | None = None) -> None:
    """Raise InvalidRequestError unless the extension is a trie of `vocab_size` ids with finite confidences in 0..1 and
    proposals that fit it."""
    size = len(extension.tokens)
    name = f"extension of session {extension.session}"
    if not size == len(extension.parents) == len(extension.confidences):
        raise InvalidRequestError(f"{name}: tokens, parents and confidences differ in number")
    if size > MAX_EXTENSION_NODES:
        raise InvalidRequestError(f"{name}: {size} nodes, at most {MAX_EXTENSION_NODES} are taken")
    if extension.base < 1:
        raise InvalidRequestError(f"{name}: base must be at least 1, got {extension.base}")
    try:
        check_trie(extension.parents, extension.confidences)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    _check_ids(name, extension.tokens, vocab_size)
    check_proposals(extension, vocab_size)


def check_trie(parents: Sequence[int], confidences: Sequence[float]) -> None:
    """Raise InvalidRequestError unless parents come before their nodes and confidences are in 0..1.

    An extension has up to some hundred nodes and comes every few milliseconds, so that the usual case is one pass in C.
    """
    if parents and not (min(parents) >= 0 and all(map(operator.le, parents, range(len(parents))))):
        i, parent = next((i, parent) for i, parent in enumerate(parents) if not 0 <= parent <= i)
        raise InvalidRequestError(f"parents[{i}] is {parent}: a parent comes before its node")
    # NOTE: min and max say nothing where there is a NaN, but the sum does.
    if confidences and not (min(confidences) >= 0.0 and max(confidences) <= 1.0 and math.isfinite(sum(confidences))):
        wrong = next(confidence for confidence in confidences if not 0.0 <= confidence <= 1.0)
        raise InvalidRequestError(f"a confidence is {wrong}, not in 0..1")


def check_proposals(extension: Extension, vocab_size: int | None = None) -> None:
    """Raise InvalidRequestError unless each proposal is a distribution and its sampled child one of the nodes.

    Of an honest drafter nothing is refused because of which token was drawn: that would bend the answer.
    """
    if not extension.proposals:
        return
    name = f"extension of session {extension.session}"
    nodes = set(zip(extension.parents, extension.tokens, strict=True))
    parents: set[int] = set()
    for proposal in extension.proposals:
        where = f"{name}: proposal below {proposal.parent}"
        _check_distribution(where, proposal)
        _check_ids(where, proposal.tokens, vocab_size)
        if proposal.parent in parents:
            raise InvalidRequestError(f"{where}: a second one")
        if (proposal.parent, proposal.token) not in nodes:
            raise InvalidRequestError(f"{where}: its sampled child {proposal.token} is not a node of the extension")
        parents.add(proposal.parent)


def _check_distribution(where: str, proposal: Proposal) -> None:
    size = len(proposal.tokens)
    if not 1 <= size == len(proposal.probs) <= MAX_PROPOSAL_TOKENS:
        raise InvalidRequestError(
            f"{where}: {size} tokens and {len(proposal.probs)} probabilities, 1 to {MAX_PROPOSAL_TOKENS} are taken"
        )
    if not 0 <= proposal.index < size:
        raise InvalidRequestError(f"{where}: index {proposal.index} of {size} tokens")
    if len(set(proposal.tokens)) < size:
        raise InvalidRequestError(f"{where}: a token twice")
    if not all(0.0 <= prob <= 1.0 for prob in proposal.probs):  # NaN is not
        raise InvalidRequestError(f"{where}: a probability is outside 0..1")
    if abs(math.fsum(proposal.probs) - 1.0) > _SUM_TOLERANCE:
        raise InvalidRequestError(f"{where}: probabilities sum to {math.fsum(proposal.probs)}")


def _check_ids(where: str, tokens: Sequence[int], vocab_size: int | None) -> None:
    if tokens and (min(tokens) < 0 or (vocab_size is not None and max(tokens) >= vocab_size)):
        wrong = next(token for token in tokens if token < 0 or (vocab_size is not None and token >= vocab_size))
        raise InvalidRequestError(f"{where}: token id {wrong} is outside the vocabulary of {vocab_size}")
