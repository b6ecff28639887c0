"""Give every activation an offset in one arena, reusing the memory of values that died.

A value lives from the operation that defines it to the last that reads it; two values may share
bytes when their lives do not meet, or where an op may work in place on an operand that dies.

    time     0    1    2    3
    %x      [==========]                offset 0
    %0           [=====]                offset 3584
    %1                [=====]           offset 7168
    %2                     [=====]      offset 0: %x is dead
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ignis.errors import GraphError
from ignis.graph.ir import Graph, Value
from ignis.graph.ir.types import ALIGNMENT, ELEMENT, align
from ignis.graph.passes.memory_plan import (
    MemoryPlan,
    Timing,
    lives_of,
    replaceable,
    verify_plan,
)

__all__ = ["MemoryPlan", "Timing", "plan_memory", "verify_plan"]


@dataclass(slots=True)
class _Buffer:
    """Values that share one place because each is computed in place of the one before."""

    values: list[Value]
    nbytes: int
    start: int
    end: int


def plan_memory(
    graph: Graph,
    n_tokens: int,
    n_logits: int,
    *,
    outputs_in_arena: bool = True,
    in_place: bool = True,
    reuse: bool = True,
    timing: Timing | None = None,
) -> MemoryPlan:
    """Give every activation an offset in one arena; values that died lend their bytes.

        %0 = silu(%x) : f32[T,64]
        %1 = matmul(%0, @w) : f32[T,128]
        %2 = columns(%1) {first = 0, width = 64} : f32[T,64]
        %3 = add(%2, %x) : f32[T,64]

    becomes, for one token and with %x in bytes 512 to 768,

        %0 = silu(%x) : f32[T,64]                             # bytes 768 to 1024
        %1 = matmul(%0, @w) : f32[T,128]                      # bytes 0 to 512
        %2 = columns(%1) {first = 0, width = 64} : f32[T,64]  # bytes 768 to 1024, %0 is dead
        %3 = add(%2, %x) : f32[T,64]                          # bytes 768 to 1024, in place of %2

    Sizes grow with T and R, so a plan serves smaller steps. Without this pass every value has
    memory of its own.

    Args:
        outputs_in_arena: False leaves the graph's outputs to the caller.
        in_place: let results take the place of dying operands where the op allows it.
        reuse: False gives every value memory of its own.
        timing: which ops run side by side; default: as the graph is scheduled.

    The plan has been verified. Raises: GraphError for counts below one.
    """
    if n_tokens < 1 or n_logits < 0:
        raise GraphError("nothing to plan", got=f"T={n_tokens} R={n_logits}", wanted="T >= 1")
    timing = timing or Timing.of(graph, one=n_tokens == 1 and n_logits <= 1)
    nbytes = graph.value_nbytes(n_tokens, n_logits)
    outside = frozenset() if outputs_in_arena else frozenset(graph.outputs)
    shared = [v for v in graph.values if v not in outside and v not in timing.private]
    private = [v for v in graph.values if v in timing.private]
    in_place = in_place and reuse
    sequential = Timing.sequential(graph).steps
    offsets: dict[Value, int] = {}
    sizes, peaks = [], []
    for values, steps in ((shared, timing.steps), (private, sequential)):
        buffers = _buffers(graph, values, nbytes, steps, in_place=in_place)
        peak = _peak(buffers)
        places = _best_placement(buffers, peak) if reuse else _stacked(buffers)
        for buffer, place in zip(buffers, places, strict=True):
            offsets |= dict.fromkeys(buffer.values, place)
        sizes.append(_end(buffers, places))
        peaks.append(peak)
    plan = MemoryPlan(
        graph,
        n_tokens,
        n_logits,
        timing,
        MappingProxyType({v: offsets[v] for v in graph.values if v in offsets}),
        sizes[0],
        peaks[0],
        sizes[1],
        peaks[1],
        sum(nbytes.values()),
        sum(nbytes[value] for value in outside),
    )
    verify_plan(plan)
    return plan


def _buffers(
    graph: Graph,
    values: Sequence[Value],
    nbytes: Mapping[Value, int],
    steps: Sequence[tuple[int, int]],
    *,
    in_place: bool,
) -> list[_Buffer]:
    """Lives of the given values; those computed in place of others share a buffer."""
    if not values:
        return []
    lives = lives_of(graph, steps)
    readers: dict[Value, list[int]] = {}
    for i, op in enumerate(graph.operations):
        for value in op.operands:
            readers.setdefault(value, []).append(i)
    owner: dict[Value, _Buffer] = {}
    buffers: list[_Buffer] = []
    wanted = frozenset(values)

    def take_over(op_index: int, result: Value) -> bool:
        """Put the result in the place of an operand that nothing else reads then or later."""
        begin = steps[op_index][0]
        for other in replaceable(graph.operations[op_index]):
            buffer = owner.get(other)
            if buffer is None or buffer.values[-1] != other or other.type != result.type:
                continue
            others = (i for i in readers[other] if i != op_index)
            if other in graph.outputs or any(steps[i][1] >= begin for i in others):
                continue
            buffer.values.append(result)
            buffer.end = lives[result][1]
            owner[result] = buffer
            return True
        return False

    def define(value: Value) -> None:
        owner[value] = _Buffer([value], nbytes[value], *lives[value])
        buffers.append(owner[value])

    for value in graph.inputs:
        if value in wanted:
            define(value)
    for i, op in enumerate(graph.operations):
        for result in op.results:
            if result not in wanted:
                continue
            single = len(op.results) == 1
            if not (in_place and single and take_over(i, result)):
                define(result)
    return buffers


def _peak(buffers: Sequence[_Buffer]) -> int:
    """The most bytes that live at one time."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.start] = changes.get(buffer.start, 0) + buffer.nbytes
        changes[buffer.end + 1] = changes.get(buffer.end + 1, 0) - buffer.nbytes
    live = peak = 0
    for time in sorted(changes):
        live += changes[time]
        peak = max(peak, live)
    return peak


_Order = Callable[[_Buffer], tuple[int, ...]]
_ORDERS: tuple[_Order, ...] = (
    lambda b: (-b.nbytes, b.start),
    lambda b: (b.start - b.end, -b.nbytes),
    lambda b: (b.start, -b.nbytes),
)
"""Greedy placement depends on its order; big values first is best nearly always."""

_REPAIRS = 16
"""Attempts to improve each order; layers repeat, so each mends the same flaw in all of them."""


def _best_placement(buffers: Sequence[_Buffer], bound: int) -> list[int]:
    """Offsets of the smallest arena found: the first that reaches the bound ends the search.

    After each attempt the buffers that stick out at the arena's end are placed before all others.
    Where rounding up to cache lines keeps the arena above its bound, values begin at any element.
    """
    best = _stacked(buffers)
    best_nbytes = _end(buffers, best)
    for limit in (ALIGNMENT, ELEMENT):
        for key in _ORDERS:
            order = sorted(range(len(buffers)), key=[key(b) for b in buffers].__getitem__)
            for _ in range(_REPAIRS):
                places = _first_fit(buffers, order, limit)
                nbytes = _end(buffers, places)
                if nbytes < best_nbytes:
                    best, best_nbytes = places, nbytes
                if best_nbytes == bound:
                    return best
                ends = [p + b.nbytes for p, b in zip(places, buffers, strict=True)]
                order.sort(key=[end != nbytes for end in ends].__getitem__)
    return best


def _first_fit(buffers: Sequence[_Buffer], order: Sequence[int], limit: int) -> list[int]:
    """Each buffer, in the given order, at the lowest offset free during all of its life.

    It begins at a multiple of the largest power of two that divides its size, up to `limit`.
    """
    places = [0] * len(buffers)
    taken: dict[int, set[tuple[int, int]]] = {}  # bytes by time: most lives are short
    for i in order:
        b = buffers[i]
        step = min(b.nbytes & -b.nbytes or limit, limit)
        life = [taken.setdefault(time, set()) for time in range(b.start, b.end + 1)]
        at = 0
        for lo, hi in sorted(set().union(*life)):
            if at + b.nbytes <= lo:
                break
            at = max(at, align(hi, step))
        places[i] = at
        for spans in life:
            spans.add((at, at + b.nbytes))
    return places


def _stacked(buffers: Sequence[_Buffer]) -> list[int]:
    """One behind the other, each at the beginning of a cache line."""
    places, at = [], 0
    for buffer in buffers:
        places.append(at)
        at += align(buffer.nbytes)
    return places


def _end(buffers: Sequence[_Buffer], places: Sequence[int]) -> int:
    """Where the last byte ends."""
    return max((p + b.nbytes for p, b in zip(places, buffers, strict=True)), default=0)
