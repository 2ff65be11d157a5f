"""What a question must be like, and the defaults of what it leaves open.

Owns: every check of a request and the sentence that refuses it; defaults. Must not know: protobuf, workers, threads.
A question is checked in two steps because tokenizing lies between: `check_question`, then `create_request`.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.requests import Question, Request
from specpipe.answers import ChatMessage
from specpipe.config import DEFAULT_SYNC_K, MAX_SPECULATIVE_TOKENS
from specpipe.errors import InvalidRequestError, ModelNotFoundError
from specpipe.types import Mode, ModelInfo, Rule, SamplingParams, SpeculationParams, StopRules

DEFAULT_TEMPERATURE = 1.0
DEFAULT_MAX_TOKENS = 256
MAX_REQUEST_ID_CHARS = 256
MAX_BYTES_PER_POSITION = 1024  # of a prompt's text, for each position of the context
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
SEED_KEY = b"specpipe request seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """What the service is and what it does by default."""

    model: ModelInfo  # of the target
    model_name: str  # that clients use
    drafter: str = "model"  # model | ngram | none
    mode: Mode = Mode.PIPELINED
    rule: Rule = Rule.COUPLED
    num_speculative_tokens: int | None = None
    least_tokens: Callable[[int], int] = lambda _: 1  # no prompt of so many bytes has fewer


def check_question(question: Question, facts: ServiceFacts) -> None:
    """All that can be said before tokenizing. Raises InvalidRequestError naming the field, or ModelNotFoundError."""
    if question.model not in ("", facts.model_name, facts.model.name):
        raise ModelNotFoundError(f"model: {question.model!r} is not served here; {facts.model_name!r} is")
    _check_length("request_id", question.request_id, MAX_REQUEST_ID_CHARS)
    _check_prompt(question, facts)
    _check_sampling(question)
    _check_stops(question, facts.model.vocab_size)
    _check_speculation(question)


def create_request(
    question: Question,
    prompt: Sequence[int],
    facts: ServiceFacts,
    *,
    received_ms: float = 0.0,
    deadline_ms: float | None = None,
) -> Request:
    """The request with every default resolved. Raises InvalidRequestError if its prompt leaves no room to answer."""
    check_prompt_length(len(prompt), facts)
    _check_ids("prompt tokens", prompt, facts.model.vocab_size)
    max_tokens = DEFAULT_MAX_TOKENS if question.max_tokens is None else question.max_tokens
    return Request(
        request_id=question.request_id or f"gen-{secrets.token_hex(12)}",
        model=facts.model_name,
        prompt=tuple(prompt),
        sampling=SamplingParams(
            temperature=DEFAULT_TEMPERATURE if question.temperature is None else question.temperature,
            top_p=1.0 if question.top_p is None else question.top_p,
            top_k=question.top_k or 0,
            min_p=question.min_p or 0.0,
            seed=_resolve_seed(question),
        ),
        stops=StopRules(
            eos_token_ids=facts.model.eos_token_ids,
            stop_token_ids=tuple(dict.fromkeys(question.stop_token_ids)),
            ignore_eos=question.ignore_eos,
            max_length=min(len(prompt) + max_tokens, facts.model.max_context),
        ),
        speculation=_resolve_speculation(question, facts),
        stop_strings=tuple(dict.fromkeys(question.stop)),
        received_ms=received_ms,
        deadline_ms=deadline_ms,
        vocab_size=facts.model.vocab_size,
    )


def check_prompt_length(num_tokens: int, facts: ServiceFacts) -> None:
    if num_tokens == 0:
        raise InvalidRequestError("prompt: it has no tokens")
    if num_tokens >= facts.model.max_context:
        raise InvalidRequestError(
            f"prompt: it has {num_tokens} tokens, and the context of {facts.model.max_context} "
            "must leave room for one more"
        )


def _resolve_seed(question: Question) -> int:
    """A client's own request id stands for a seed, so that another coordinator gives the same answer to it."""
    if question.seed is not None:
        return question.seed
    return seed_of(question.request_id) if question.request_id else secrets.randbits(64)


def seed_of(request_id: str) -> int:
    """The same in every coordinator of every version: clients count on it."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8, key=SEED_KEY).digest(), "little")


def _resolve_speculation(question: Question, facts: ServiceFacts) -> SpeculationParams:
    """The mode in force is off where nothing drafts, whatever was asked for."""
    asked = question.mode or facts.mode
    drafter = "none" if asked is Mode.OFF else facts.drafter
    mode = Mode.OFF if drafter == "none" else asked
    k = facts.num_speculative_tokens if question.num_speculative_tokens is None else question.num_speculative_tokens
    return SpeculationParams(
        mode=mode,
        rule=question.rule or facts.rule,
        num_speculative_tokens=DEFAULT_SYNC_K if k is None and mode is Mode.SYNC else k,
        drafter=drafter,
    )


def _check_prompt(question: Question, facts: ServiceFacts) -> None:
    prompt = question.prompt
    if prompt is None:
        raise InvalidRequestError("input: one of prompt, prompt_token_ids and chat must be given")
    if not len(prompt):
        raise InvalidRequestError("prompt: it must have at least one character, token id or message")
    if isinstance(prompt, str):
        check_prompt_bytes(len(prompt.encode()), facts)
    elif isinstance(prompt[0], int):
        check_prompt_length(len(prompt), facts)
        _check_ids("prompt_token_ids", [token for token in prompt if isinstance(token, int)], facts.model.vocab_size)
    elif len(prompt) >= facts.model.max_context:
        raise InvalidRequestError(f"chat: {len(prompt)} messages do not fit a context of {facts.model.max_context}")
    else:
        contents = [message.content for message in prompt if isinstance(message, ChatMessage)]
        _check_prompt_size(sum(len(content.encode()) for content in contents), facts)


def check_prompt_bytes(num_bytes: int, facts: ServiceFacts) -> None:
    """Tokenizing takes long, so what its bytes alone show to be too long is refused before."""
    least = facts.least_tokens(num_bytes)
    if least >= facts.model.max_context:
        raise InvalidRequestError(
            f"prompt: its {num_bytes} bytes are at least {least} tokens, and the context of {facts.model.max_context} "
            "must leave room for one more"
        )
    _check_prompt_size(num_bytes, facts)


def _check_prompt_size(num_bytes: int, facts: ServiceFacts) -> None:
    """Where bytes do not tell how many tokens there are, a limit of ours bounds what is tokenized."""
    limit = MAX_BYTES_PER_POSITION * facts.model.max_context
    if num_bytes > limit:
        raise InvalidRequestError(
            f"prompt: it has {num_bytes} bytes, and the limit is {limit}: {MAX_BYTES_PER_POSITION} for each position "
            f"of the context of {facts.model.max_context}"
        )


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):  # most are right, and there may be many
        return
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"{field}[{index}]: {token_id} is not a token id (0 to {vocab_size - 1})")


def _check_sampling(question: Question) -> None:
    _check("temperature", question.temperature, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
    _check("top_p", question.top_p, lambda value: 0 < value <= 1, "above 0 and at most 1")
    _check("top_k", question.top_k, lambda value: value >= 0, "at least 0 (0: off)")
    _check("min_p", question.min_p, lambda value: 0 <= value <= 1, "from 0 to 1")
    _check("seed", question.seed, lambda value: 0 <= value < 2**64, "an unsigned 64-bit number")
    _check("max_tokens", question.max_tokens, lambda value: value >= 1, "at least 1")


def _check_stops(question: Question, vocab_size: int) -> None:
    if len(question.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(question.stop)}")
    for index, stop in enumerate(question.stop):
        if not stop:
            raise InvalidRequestError(f"stop[{index}]: a stop string must have at least one character")
        _check_length(f"stop[{index}]", stop, MAX_STOP_CHARS)
    if len(question.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids: at most {MAX_STOP_TOKEN_IDS}, got {len(question.stop_token_ids)}")
    _check_ids("stop_token_ids", question.stop_token_ids, vocab_size)


def _check_speculation(question: Question) -> None:
    k = question.num_speculative_tokens
    _check(
        "num_speculative_tokens", k, lambda v: 1 <= v <= MAX_SPECULATIVE_TOKENS, f"from 1 to {MAX_SPECULATIVE_TOKENS}"
    )


def _check(field: str, value: float | None, holds: Callable[[float], bool], wanted: str) -> None:
    if value is not None and not holds(value):
        raise InvalidRequestError(f"{field} must be {wanted}, got {value!r}")


def _check_length(field: str, text: str, max_chars: int) -> None:
    if len(text) > max_chars:
        raise InvalidRequestError(f"{field}: at most {max_chars} characters, got {len(text)}")
