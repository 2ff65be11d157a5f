"""What `generate` says of a request as a whole: OpenTelemetry's GenAI conventions and our own sums.

Owns: those attributes. Must not know: times, workers. Prompts and answers are told only when asked.
"""

from __future__ import annotations

import json
from typing import Any

from coordinator.requests import Question, Request
from coordinator.state import RequestMachine
from coordinator.trace_spans import Attributes
from specpipe.answers import ChatMessage, Chunk, Finished, Prompt
from specpipe.errors import SpecpipeError
from specpipe.telemetry.resources import PROVIDER


class GenerateAttributes:
    """Grows with the request."""

    def __init__(self, question: Question, *, has_content: bool) -> None:
        is_chat = any(isinstance(part, ChatMessage) for part in question.prompt or ())
        self._attributes: Attributes = {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": PROVIDER,
            **_asked(question),
        }
        self._has_content = has_content
        self._texts: list[str] = []
        self._reason = ""
        if has_content and question.prompt is not None:
            self._attributes["gen_ai.input.messages"] = json.dumps(_messages(question.prompt))

    def add_request(self, request: Request) -> None:
        """It is valid: what was left open is known."""
        self._attributes |= {
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "specpipe.request_id": request.request_id,
            "specpipe.mode": request.speculation.mode.value,
            "specpipe.rule": request.speculation.rule.value,
        }

    def add_chunk(self, chunk: Chunk) -> None:
        if self._has_content:
            self._texts.append(chunk.text)

    def add_finished(self, finished: Finished) -> None:
        self._reason = finished.finish_reason.value
        self._attributes |= {
            "gen_ai.response.finish_reasons": (self._reason,),
            "gen_ai.response.time_to_first_chunk": finished.timing.ttft_ms / 1000,
        }

    def of(self, machine: RequestMachine | None, error: SpecpipeError | None) -> Attributes:
        """All of them, once the request is over."""
        attributes = dict(self._attributes)
        if error is not None:
            attributes["error.type"] = error.code.name
        if machine is not None:
            attributes |= _sums(machine)
        if self._has_content and self._texts:
            attributes["gen_ai.output.messages"] = json.dumps([self._answer()])
        return attributes

    def _answer(self) -> dict[str, Any]:
        return {**_message("assistant", "".join(self._texts)), "finish_reason": self._reason or "error"}


def _asked(question: Question) -> Attributes:
    """What the caller decided; the conventions leave out what is unset."""
    asked = {
        "gen_ai.request.model": question.model or None,
        "gen_ai.request.temperature": question.temperature,
        "gen_ai.request.top_p": question.top_p,
        "gen_ai.request.top_k": question.top_k,
        "gen_ai.request.max_tokens": question.max_tokens,
        "gen_ai.request.seed": question.seed if question.seed is None or question.seed < 2**63 else str(question.seed),
        "gen_ai.request.stop_sequences": question.stop or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _sums(machine: RequestMachine) -> Attributes:
    """docs/statistics.md defines them."""
    statistics = machine.transcript.statistics.report()
    return {
        "gen_ai.usage.output_tokens": machine.transcript.num_committed,
        "specpipe.num_rounds": statistics.rounds,
        "specpipe.num_drafted": statistics.drafted_tokens,
        "specpipe.num_verified": statistics.verified_tokens,
        "specpipe.num_accepted": statistics.accepted_tokens,
        "specpipe.draft_ms": statistics.draft_ms,
        "specpipe.hidden_ms": statistics.hidden_draft_ms,
        "specpipe.exposed_ms": statistics.exposed_draft_ms,
    }


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [_message("user", prompt)]
    messages = [_message(part.role, part.content) for part in prompt if isinstance(part, ChatMessage)]
    return messages or [{"role": "user", "parts": [{"type": "token_ids", "content": list(prompt)}]}]


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}
