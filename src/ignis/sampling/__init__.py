"""Logits to a token: greedy, temperature, top-k, top-p, min-p and repetition penalty."""

from ignis.sampling.sampler import Sampler
from ignis.sampling.stream import RandomStream, fresh_seed

__all__ = ["RandomStream", "Sampler", "fresh_seed"]
