"""A tokenizer's vocabulary as protobuf and back: what GetInfo tells of it.

Owns: that message. Must not know: who compares it with what.
"""

from __future__ import annotations

from specpipe.engine.vocabulary import Vocabulary
from specpipe.errors import InvalidRequestError
from specpipe.rpc.v1 import worker_pb2


def vocabulary_to_pb(vocabulary: Vocabulary, num_ids: int) -> worker_pb2.Vocabulary:
    """Of the ids below `num_ids`. Half a surrogate pair, which is no UTF-8, goes as a backslash and its number."""
    ids = sorted(token_id for token_id in vocabulary.tokens if token_id < num_ids)
    tokens = (vocabulary.tokens[token_id].encode(errors="backslashreplace").decode() for token_id in ids)
    return worker_pb2.Vocabulary(ids=ids, tokens=tokens)


def vocabulary_from_pb(vocabulary_pb: worker_pb2.Vocabulary) -> Vocabulary:
    """Raises InvalidRequestError unless there is one token for each id."""
    ids, tokens = vocabulary_pb.ids, vocabulary_pb.tokens
    if len(ids) != len(tokens):
        raise InvalidRequestError(f"a vocabulary of {len(ids)} ids and {len(tokens)} tokens")
    return Vocabulary(dict(zip(ids, tokens, strict=True)))
