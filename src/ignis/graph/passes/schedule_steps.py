"""Where threads must wait for each other, and what each of them does for itself."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from ignis.graph.ir import Graph
from ignis.graph.ir.schedule import CHUNKS, ROWS, Schedule, Stage


def schedule_steps(graph: Graph) -> Graph:
    """Place barriers between ops, and let every thread repeat what is one row of work.

        graph(%x: f32[T,64]) {
          %0 = rmsnorm(%x, @gain) {eps = 1e-06} : f32[T,64]
          %0.a8 = quantize(%0) {rows = "T"} : a8[T,64]
          %1 = matmul(%0.a8, @q) : f32[T,64]
          %2 = silu(%1) : f32[T,64]
          return %2
        }

    becomes

        graph(repeat %x: f32[T,64]) {
          repeat %0 = rmsnorm(%x, @gain) {eps = 1e-06} : f32[T,64]
          repeat %0.a8 = quantize(%0) {rows = "T"} : a8[T,64]
          barrier if T > 1
          %1 = matmul(%0.a8, @q) : f32[T,64]
          barrier
          repeat %2 = silu(%1) : f32[T,64]
          barrier
          return %2
        }

    A step is what stands between two barriers. Three rules decide:

        repeat    For one token, work that is one row is done by every thread for itself, into
                  memory of its own: cheaper than a barrier. Who reads it reads its own copy.
        by row    For several tokens such work is divided evenly by row. The same thread holds the
                  same rows in the next op of this kind, so no barrier stands between them.
        barrier   Everything else that reads what another thread may have written waits for it.

    Without this pass threads meet behind every op, and nothing is repeated.
    """
    repeated = tuple(stage.share != CHUNKS for stage in graph.stages)
    divided = (False,) * len(repeated)
    one, many = (_barriers(graph.stages, each) for each in (repeated, divided))
    return replace(graph, schedule=Schedule(repeated, one, many))


def _barriers(stages: Sequence[Stage], repeated: Sequence[bool]) -> tuple[bool, ...]:
    """Behind which stages threads meet: as late as possible, and always behind the last."""
    meet = [False] * len(stages)
    meet[-1] = True
    writers: dict[Hashable, Stage] = {}  # since the last barrier, by what they write
    for index, stage in enumerate(stages):
        if any(_must_wait(writers[read], stage) for read in stage.reads if read in writers):
            meet[index - 1] = True
            writers.clear()
        if not repeated[index]:
            writers |= dict.fromkeys(stage.writes, stage)
    return tuple(meet)


def _must_wait(writer: Stage, reader: Stage) -> bool:
    """Whether another thread may write what is read; rows of one axis are divided alike."""
    return not (writer.share == reader.share == ROWS and writer.axis == reader.axis)
