"""How threads share the work of a graph: the stages of its ops, and where threads meet."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import accumulate
from typing import NamedTuple

ROWS = "rows"
CHUNKS = "chunks"
WHOLE = "whole"


class Stage(NamedTuple):
    """A part of an op, and how threads share it.

    rows     a row of the result is one thread's, made from the same row of what is read: little
             work, divided evenly, or repeated by every thread where there is one row only
    chunks   pieces of any kind, handed out as threads ask for them
    whole    little work on all rows at once: one thread's; for a single row every thread repeats it

    `reads` and `writes` are values, and the state that ops with an effect share. `axis` is what the
    rows are of: tokens, "T", or rows of logits, "R".
    """

    share: str
    reads: frozenset[Hashable]
    writes: frozenset[Hashable]
    axis: str


class Schedule(NamedTuple):
    """Which stages every thread repeats, and behind which of them threads meet at a barrier.

    Entry 0 stands for the graph's inputs, then one follows for each stage of each op. `meet_one`
    holds for steps of one token (and at most one row of logits), in which `repeated` stages are
    done by every thread for itself; `meet_many` for steps of several, where nothing is repeated.
    """

    repeated: tuple[bool, ...]
    meet_one: tuple[bool, ...]
    meet_many: tuple[bool, ...]

    @classmethod
    def plain(cls, n_stages: int) -> Schedule:
        """Nothing is repeated, and threads meet behind every stage."""
        return cls((False,) * n_stages, (True,) * n_stages, (True,) * n_stages)

    def steps(self, *, one: bool) -> tuple[int, ...]:
        """The step of each entry; a step is what stands between two barriers."""
        meet = self.meet_one if one else self.meet_many
        return tuple(accumulate(meet[:-1], initial=0))

    def n_barriers(self, *, one: bool) -> int:
        """How often threads meet in a step of one token, or of several."""
        return sum(self.meet_one if one else self.meet_many)
