"""Measures a pair of folders on the held-out files: loss, and what speculation at temperature 0 would accept.

The draft's guesses along the target's greedy text decide everything sync mode does: a round's drafted chain equals
that text up to the first wrong guess. So one pass of each model gives the acceptance rate exactly.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as functional
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specpipe import demo
from specpipe.demo.training import corpus
from specpipe.demo.training.generation import continue_texts
from specpipe.demo.training.paths import replace_file, start_logging, work_path
from specpipe.demo.training.tokenizer import format_exchange

_log = logging.getLogger(__name__)

_PROMPTS_A_FILE = 3
_NUM_CHATS = 12
_BATCH_SIZE = 32
_LOSS_WINDOW = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What sync mode would do on some texts."""

    num_tokens: int  # committed
    num_rounds: int
    num_walked: int  # nodes that had a verified child
    num_accepted: int
    num_agreeing: int  # tokens that the draft ranks first, whether a round asked or not

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_walked

    @property
    def agreement(self) -> float:
        return self.num_agreeing / self.num_tokens

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_tokens / self.num_rounds


def simulate_sync(hits: Sequence[Sequence[bool]], num_speculative_tokens: int) -> Speculation:
    """Sync mode over texts given, for each generated token, whether the draft ranks it first after those before it."""
    num_rounds = num_walked = num_accepted = 0
    for text in hits:
        position = 0
        while position < len(text):
            drafted = text[position : position + num_speculative_tokens]
            accepted = next((index for index, is_hit in enumerate(drafted) if not is_hit), len(drafted))
            num_rounds += 1
            num_accepted += accepted
            num_walked += min(accepted + 1, len(drafted))
            position += accepted + 1
    return Speculation(
        num_tokens=sum(len(text) for text in hits),
        num_rounds=num_rounds,
        num_walked=num_walked,
        num_accepted=num_accepted,
        num_agreeing=sum(sum(text) for text in hits),
    )


def file_prompts(tokenizer: Tokenizer, length: int) -> Iterator[list[int]]:
    """Up to three beginnings of `length` tokens a held-out file: at its start, and after a third and two thirds."""
    for path in demo.held_out_files():
        lines = (corpus.read_source(path) or "").splitlines(keepends=True)
        for part in range(_PROMPTS_A_FILE):
            ids = tokenizer.encode("".join(lines[part * len(lines) // _PROMPTS_A_FILE :])).ids
            if len(ids) >= 2 * length:
                yield ids[:length]


def chat_prompts(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """A chat about one function of each held-out file that has one, up to where the assistant begins."""
    for path in demo.held_out_files():
        samples = corpus.chat_samples(path, corpus.read_source(path) or "")
        question = next((sample for sample in samples if sample.question.startswith("Write")), None)
        if question is not None:
            text = format_exchange(corpus.Exchange(question=question.question, answer=""))
            yield tokenizer.encode(text.removesuffix("<|end|>")).ids


class Pair:
    """A target and a draft loaded from their folders."""

    def __init__(self, folder: Path) -> None:
        self.target = _load(folder / "target")
        self.draft = _load(folder / "draft")
        self.tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
        self._end_ids = torch.tensor(self.target.config.eos_token_id)

    def measure(self, prompts: Sequence[list[int]], num_tokens: int) -> list[list[bool]]:
        """For each prompt, whether the draft ranks first each token of the target's greedy answer, its end included."""
        hits: list[list[bool]] = []
        for batch in _batches_of_one_length(prompts):
            texts = continue_texts(self.target, batch, num_tokens)
            start = batch.size(1)
            with torch.no_grad():
                guesses = self.draft(input_ids=texts, use_cache=False).logits.argmax(dim=-1)
            is_hit = guesses[:, start - 1 : -1] == texts[:, start:]
            hits += [
                row[: self._answer_length(answer)].tolist()
                for row, answer in zip(is_hit, texts[:, start:], strict=True)
            ]
        return hits

    def _answer_length(self, answer: torch.Tensor) -> int:
        ends = torch.isin(answer, self._end_ids).nonzero()
        return int(ends[0]) + 1 if len(ends) else len(answer)

    def answer(self, prompt: str, num_tokens: int) -> str:
        """The target's greedy continuation, special tokens included."""
        ids = self.tokenizer.encode(prompt).ids
        text = continue_texts(self.target, torch.tensor([ids]), num_tokens)[0, len(ids) :]
        decoded: str = self.tokenizer.decode(text[: self._answer_length(text)].tolist(), skip_special_tokens=False)
        return decoded


def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """Mean cross-entropy, in nats a token, over all held-out files in windows of 512 tokens."""
    total, count = 0.0, 0
    for path in demo.held_out_files():
        ids = torch.tensor(tokenizer.encode(corpus.read_source(path) or "").ids)
        for window in ids.split(_LOSS_WINDOW):
            if len(window) > 1:
                with torch.no_grad():
                    logits = model(input_ids=window[None], use_cache=False).logits[0, :-1]
                total += functional.cross_entropy(logits, window[1:], reduction="sum").item()
                count += len(window) - 1
    return total / count


def _load(folder: Path) -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def _batches_of_one_length(prompts: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """[batch, length] each, at most `_BATCH_SIZE` prompts of equal length"""
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [prompt for prompt in prompts if len(prompt) == length]
        for start in range(0, len(rows), _BATCH_SIZE):
            yield torch.tensor(rows[start : start + _BATCH_SIZE])


def evaluate(pair: Pair, prompt_length: int, num_tokens: int, num_speculative_tokens: int) -> dict[str, float]:
    """All figures of the model card's table."""
    prompts = {
        "files": list(file_prompts(pair.tokenizer, prompt_length)),
        "chats": list(islice(chat_prompts(pair.tokenizer), _NUM_CHATS)),
    }
    figures = {}
    for name, part in prompts.items():
        result = simulate_sync(pair.measure(part, num_tokens), num_speculative_tokens)
        figures[f"{name}_prompts"] = float(len(part))
        figures[f"{name}_tokens"] = float(result.num_tokens)
        figures[f"{name}_acceptance_rate"] = result.acceptance_rate
        figures[f"{name}_agreement"] = result.agreement
        figures[f"{name}_mean_acceptance_length"] = result.mean_acceptance_length
    figures["target_held_out_loss"] = held_out_loss(pair.target, pair.tokenizer)
    figures["draft_held_out_loss"] = held_out_loss(pair.draft, pair.tokenizer)
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=demo.target_folder().parent)
    parser.add_argument("--prompt-length", type=int, default=192)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = evaluate(Pair(args.folder), args.prompt_length, args.num_tokens, args.num_speculative_tokens)
    replace_file(work_path("evaluation.json"), (json.dumps(figures, indent=2) + "\n").encode())
    _log.info("%s", json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
