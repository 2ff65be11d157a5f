"""Trains the target on the corpus: next-token cross-entropy, first on short windows, then on longer ones."""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from transformers import LlamaForCausalLM

from specpipe.demo.training.loop import Schedule, Trainer
from specpipe.demo.training.models import TARGET_LAYERS, create_model
from specpipe.demo.training.optimizer import Optimizer
from specpipe.demo.training.paths import start_logging
from specpipe.demo.training.tokens import HELD_OUT_STREAM, TRAINING_STREAM, WindowSampler, load_stream

# (share of the time budget at which it starts, window length in tokens)
WINDOWS = ((0.0, 256), (0.5, 512), (0.85, 1024))
BATCH_TOKENS = 2048
# Small enough for the caches of one core.
MICRO_BATCH_TOKENS = 1024
_NUM_EVALUATION_WINDOWS = 24


def window_at(progress: float) -> int:
    """The window length, in tokens, at this share of the budget."""
    return [window for start, window in WINDOWS if progress >= start][-1]


class NextToken:
    """Predict the next token of the corpus."""

    def __init__(self, model: LlamaForCausalLM, seed: int) -> None:
        stream = load_stream(TRAINING_STREAM)
        self._model = model
        self._samplers = {
            window: WindowSampler(stream, window=window, batch_size=BATCH_TOKENS // window, seed=seed + window)
            for _, window in WINDOWS
        }
        held_out = WindowSampler(load_stream(HELD_OUT_STREAM), window=512, batch_size=_NUM_EVALUATION_WINDOWS, seed=0)
        self._held_out = torch.from_numpy(held_out.batch(0))

    def micro_batches(self, step: int, progress: float, /) -> Sequence[torch.Tensor]:
        window = window_at(progress)
        windows = torch.from_numpy(self._samplers[window].batch(step))
        return list(windows.split(MICRO_BATCH_TOKENS // window))

    def loss(self, micro_batch: torch.Tensor) -> torch.Tensor:
        hidden = self._model.model(input_ids=micro_batch, use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden[:, :-1].flatten(0, 1))
        return functional.cross_entropy(logits, micro_batch[:, 1:].flatten())

    def evaluate(self) -> dict[str, float]:
        parts = self._held_out.split(4)
        return {"held_out_loss": sum(self.loss(part).item() for part in parts) / len(parts)}


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=117.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--adam-rate", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = create_model(TARGET_LAYERS, args.seed)
    optimizer = Optimizer(model, muon_rate=args.muon_rate, adam_rate=args.adam_rate, weight_decay=args.weight_decay)
    trainer = Trainer("target", model, optimizer, Schedule(minutes=args.minutes))
    trainer.run(NextToken(model, args.seed))


if __name__ == "__main__":
    main()
