"""The random stream: SplitMix64, a counter-based generator of sixty-four-bit words.

Word i (0, 1, 2, ...) of the stream of a seed is

    z = seed + (i + 1) * 0x9E3779B97F4A7C15      (mod 2^64)
    z = (z xor z >> 30) * 0xBF58476D1CE4E5B9     (mod 2^64)
    z = (z xor z >> 27) * 0x94D049BB133111EB     (mod 2^64)
    z =  z xor z >> 31

and the uniform number in [0, 1) made of it is `(z >> 11) * 2^-53`, which is exact. Python integers
only: the stream is the same on every machine, and never changes with a library's version.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

MAX_SEED = _MASK


@dataclass(slots=True)
class RandomStream:
    """The stream of one seed (0 to 2^64 - 1), and how far it has been read.

    >>> RandomStream(1234567).next_word()
    6457827717110365317
    """

    seed: int
    n_drawn: int = 0

    def next_word(self) -> int:
        """The next word, 0 to 2^64 - 1."""
        self.n_drawn += 1
        z = (self.seed + self.n_drawn * _GOLDEN) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def next_uniform(self) -> float:
        """The next number in [0, 1), a multiple of 2^-53."""
        return (self.next_word() >> 11) * 2.0**-53


def fresh_seed() -> int:
    """A seed nobody has chosen; short enough (32 bits) to be typed again."""
    return secrets.randbits(32)
