"""Lets the target go on from beginnings in the corpus: the text whose continuation the draft has to guess.

Writes `own_text.npy` (from training files, part greedy and part sampled) and `own_text_held_out.npy` (greedy, from
held-out files, to measure on): windows that begin with a prompt. [num_windows, OWN_WINDOW] uint16
"""

import argparse
import io
import logging
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from specpipe.demo.training.generation import continue_texts
from specpipe.demo.training.models import TARGET_LAYERS, load_checkpoint
from specpipe.demo.training.paths import replace_file, start_logging, work_path
from specpipe.demo.training.tokens import HELD_OUT_STREAM, TRAINING_STREAM, WindowSampler, load_stream

_log = logging.getLogger(__name__)

OWN_TEXT, OWN_TEXT_HELD_OUT = "own_text.npy", "own_text_held_out.npy"
OWN_WINDOW = 384
HELD_OUT_PROMPT = 192

_PROMPT_LENGTHS = (64, 128, 192, 256)
_TEMPERATURES = (0.0, 0.0, 0.7)
_BATCH_SIZE = 48


def write(model: LlamaForCausalLM, minutes: float, seed: int) -> None:
    """Generate for `minutes`, then write both files."""
    _save(OWN_TEXT_HELD_OUT, [_held_out_batch(model)])
    generator = torch.Generator().manual_seed(seed)
    stream = load_stream(TRAINING_STREAM)
    end_s = time.monotonic() + 60 * minutes
    batches: list[torch.Tensor] = []
    sampler = WindowSampler(stream, window=max(_PROMPT_LENGTHS), batch_size=_BATCH_SIZE, seed=seed)
    while time.monotonic() < end_s:
        length = _PROMPT_LENGTHS[len(batches) % len(_PROMPT_LENGTHS)]
        temperature = _TEMPERATURES[len(batches) % len(_TEMPERATURES)]
        prompts = torch.from_numpy(sampler.batch(len(batches))[:, :length])
        num_tokens = OWN_WINDOW - length
        batches.append(continue_texts(model, prompts, num_tokens, temperature=temperature, generator=generator))
    _save(OWN_TEXT, batches)


def _held_out_batch(model: LlamaForCausalLM) -> torch.Tensor:
    sampler = WindowSampler(load_stream(HELD_OUT_STREAM), window=HELD_OUT_PROMPT, batch_size=_BATCH_SIZE, seed=2)
    return continue_texts(model, torch.from_numpy(sampler.batch(0)), OWN_WINDOW - HELD_OUT_PROMPT)


def _save(name: str, batches: list[torch.Tensor]) -> None:
    windows = torch.cat(batches).numpy().astype(np.uint16)
    buffer = io.BytesIO()
    np.save(buffer, windows)
    path: Path = work_path(name)
    replace_file(path, buffer.getvalue())
    _log.info("%s: %d windows, %d tokens", name, len(windows), windows.size)


def main() -> None:
    start_logging()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write(load_checkpoint("target", TARGET_LAYERS), args.minutes, args.seed)


if __name__ == "__main__":
    main()
