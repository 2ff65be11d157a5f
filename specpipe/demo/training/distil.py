"""Trains the draft to answer as the target does, on the corpus and on the target's own text.

The loss of a position is the Kullback-Leibler divergence from the target's distribution to the draft's, which serves
every temperature, plus the cross-entropy of the target's likeliest token, which is what counts at temperature 0. The
draft starts as a copy of the target's embeddings and of its first and last layers.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from transformers import LlamaForCausalLM

from specpipe.demo.training.loop import Schedule, Trainer
from specpipe.demo.training.models import DRAFT_LAYERS, TARGET_LAYERS, create_model, load_checkpoint
from specpipe.demo.training.optimizer import Optimizer
from specpipe.demo.training.own_text import HELD_OUT_PROMPT, OWN_TEXT, OWN_TEXT_HELD_OUT, OWN_WINDOW
from specpipe.demo.training.paths import start_logging
from specpipe.demo.training.tokens import TRAINING_STREAM, WindowSampler, load_stream

_CORPUS_WINDOW = 512
_NUM_CORPUS_PARTS, _CORPUS_PART = 1, 2  # a step's parts, and the windows in each
_NUM_OWN_PARTS, _OWN_PART = 3, 3
_EVALUATION_PART = 8


def create_draft(target: LlamaForCausalLM, num_layers: int, seed: int) -> LlamaForCausalLM:
    """A model of `num_layers` layers that starts from parts of the target."""
    draft = create_model(num_layers, seed)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    for index, layer in enumerate(draft.model.layers):
        source = 0 if index == 0 else len(target.model.layers) - num_layers + index
        layer.load_state_dict(target.model.layers[source].state_dict())
    return draft


class AnswerAsTarget:
    """Match the target's next-token distributions."""

    def __init__(self, target: LlamaForCausalLM, draft: LlamaForCausalLM, seed: int) -> None:
        self._target = target
        self._draft = draft
        self._corpus = WindowSampler(
            load_stream(TRAINING_STREAM),
            window=_CORPUS_WINDOW,
            batch_size=_NUM_CORPUS_PARTS * _CORPUS_PART,
            seed=seed,
        )
        self._own = torch.from_numpy(load_stream(OWN_TEXT).astype("int64"))
        self._held_out = torch.from_numpy(load_stream(OWN_TEXT_HELD_OUT).astype("int64"))
        self._seed = seed

    def micro_batches(self, step: int, _progress: float, /) -> Sequence[torch.Tensor]:
        corpus = torch.from_numpy(self._corpus.batch(step)).split(_CORPUS_PART)
        return [*corpus, *self._own_batch(step).split(_OWN_PART)]

    def _own_batch(self, step: int) -> torch.Tensor:
        """Own windows of this step, in an order shuffled anew for each pass. [num, OWN_WINDOW]"""
        size = _NUM_OWN_PARTS * _OWN_PART
        epoch, index = divmod(step, len(self._own) // size)
        order = torch.randperm(len(self._own), generator=torch.Generator().manual_seed(self._seed + epoch))
        return self._own[order[index * size : (index + 1) * size]]

    def loss(self, micro_batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self._logits(self._target, micro_batch)
        guessed = self._logits(self._draft, micro_batch).log_softmax(dim=-1)
        divergence = functional.kl_div(guessed, wanted.log_softmax(dim=-1), reduction="batchmean", log_target=True)
        return divergence + functional.nll_loss(guessed, wanted.argmax(dim=-1))

    @staticmethod
    def _logits(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
        """[batch, length] -> [batch * length, vocab] float32"""
        hidden = model.model(input_ids=windows, use_cache=False).last_hidden_state
        return model.lm_head(hidden).flatten(0, 1)

    def evaluate(self) -> dict[str, float]:
        """Agreement: the share of the target's greedy tokens, from held-out prompts, that the draft ranks first."""
        agreements = [self._agreement(part) for part in self._held_out.split(_EVALUATION_PART)]
        return {"held_out_agreement": sum(agreements) / len(agreements)}

    def _agreement(self, windows: torch.Tensor) -> float:
        guesses = self._logits(self._draft, windows).argmax(dim=-1).view(-1, OWN_WINDOW)
        is_hit = guesses[:, HELD_OUT_PROMPT - 1 : -1] == windows[:, HELD_OUT_PROMPT:]
        return float(is_hit.float().mean())


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--name", default="draft", help="the checkpoint to write, and to resume from")
    parser.add_argument("--layers", type=int, default=DRAFT_LAYERS)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_checkpoint("target", TARGET_LAYERS)
    draft = create_draft(target, args.layers, args.seed)
    optimizer = Optimizer(draft, muon_rate=args.muon_rate, adam_rate=args.adam_rate, weight_decay=0.0)
    trainer = Trainer(args.name, draft, optimizer, Schedule(minutes=args.minutes))
    trainer.run(AnswerAsTarget(target, draft, args.seed))


if __name__ == "__main__":
    main()
