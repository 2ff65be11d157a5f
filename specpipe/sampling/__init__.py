"""Choosing tokens: noise, logits processing, and the rules that decide what a draft tree's walk accepts."""

from specpipe.sampling.coupled import Chooser, SamplingError
from specpipe.sampling.noise import Purpose, gumbel, position_key, uniform
from specpipe.sampling.processors import allowed_ids, has_cuts, process
from specpipe.sampling.rejection import Judge, Proposer

__all__ = [
    "Chooser",
    "Judge",
    "Proposer",
    "Purpose",
    "SamplingError",
    "allowed_ids",
    "gumbel",
    "has_cuts",
    "position_key",
    "process",
    "uniform",
]
