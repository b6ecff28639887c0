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
from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.types import ALIGNMENT, align


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where each activation lies, for steps of up to `n_tokens` tokens and `n_logits` rows.

    `offsets` are bytes from the arena's start, multiples of 64. `nbytes` is the arena's size and
    `bound_bytes` the peak of live bytes, below which no arena can be; `naive_nbytes` what all
    values would take without sharing. Outputs outside the arena count in `output_nbytes` only.
    """

    graph: Graph
    n_tokens: int
    n_logits: int
    offsets: Mapping[Value, int]
    nbytes: int
    bound_bytes: int
    naive_nbytes: int
    output_nbytes: int

    @property
    def n_values(self) -> int:
        """Activations of the graph, outputs and inputs included."""
        return len(self.graph.values)

    @property
    def n_buffers(self) -> int:
        """Distinct places in the arena."""
        return len(set(self.offsets.values()))


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
) -> MemoryPlan:
    """Lay the activations of a step out. Sizes grow with T and R, so a plan serves smaller steps.

    Args:
        outputs_in_arena: False leaves the graph's outputs to the caller.
        in_place: let results take the place of dying operands where the op allows it.
        reuse: False gives every value memory of its own.

    The plan has been verified. Raises: GraphError for counts below one.
    """
    if n_tokens < 1 or n_logits < 0:
        raise GraphError("nothing to plan", got=f"T={n_tokens} R={n_logits}", wanted="T >= 1")
    nbytes = {value: value.type.nbytes(n_tokens, n_logits) for value in graph.values}
    outside = frozenset() if outputs_in_arena else frozenset(graph.outputs)
    buffers = _buffers(graph, nbytes, outside, in_place=in_place and reuse)
    bound = _peak(buffers)
    places = _best_placement(buffers, bound) if reuse else _stacked(buffers)
    offsets = {v: place for b, place in zip(buffers, places, strict=True) for v in b.values}
    plan = MemoryPlan(
        graph,
        n_tokens,
        n_logits,
        MappingProxyType({v: offsets[v] for v in graph.values if v in offsets}),
        max((place + align(b.nbytes) for b, place in zip(buffers, places, strict=True)), default=0),
        bound,
        sum(nbytes.values()),
        sum(nbytes[value] for value in outside),
    )
    verify_plan(plan)
    return plan


def verify_plan(plan: MemoryPlan) -> None:
    """Raise GraphError where two live values share bytes, or one is unaligned or out of bounds.

    Written apart from the planner: it walks the graph with the set of values that are live.
    """
    graph = plan.graph
    uses = {v: i for i, op in enumerate(graph.operations) for v in op.operands}
    uses |= dict.fromkeys(graph.outputs, len(graph.operations))
    live: list[Value] = []
    for value in graph.inputs:
        _check_place(plan, value, live)
    live = [value for value in live if value in uses]
    for i, op in enumerate(graph.operations):
        replaceable = [v for v in _replaceable(op) if uses[v] == i]
        for result in op.results:
            same_place = [
                v
                for v in replaceable
                if plan.offsets.get(v) == plan.offsets.get(result) and v.type == result.type
            ]
            _check_place(plan, result, live, same_place[:1])
        live = [v for v in live if uses.get(v, -1) > i]


def _check_place(
    plan: MemoryPlan, value: Value, live: list[Value], taken_over: Sequence[Value] = ()
) -> None:
    """Check a value as it comes to life beside the live ones, then add it to them."""
    start = plan.offsets.get(value)
    if start is None:
        if value not in plan.graph.outputs:
            raise GraphError("a value has no place in the arena", got=value)
        return
    end = start + value.type.nbytes(plan.n_tokens, plan.n_logits)
    if start % ALIGNMENT or not 0 <= start <= end <= plan.nbytes:
        raise GraphError(
            "a value lies unaligned or outside the arena",
            where=value,
            got=f"bytes {start} to {end}",
            wanted=f"multiples of {ALIGNMENT} within {plan.nbytes}",
        )
    for other in live:
        other_start = plan.offsets[other]
        other_end = other_start + other.type.nbytes(plan.n_tokens, plan.n_logits)
        if start < other_end and other_start < end and other not in taken_over:
            raise GraphError(
                f"{value} overlaps {other} while both live",
                where="memory plan",
                got=f"bytes {start} to {end} and {other_start} to {other_end}",
            )
    live.append(value)


def _replaceable(op: Operation) -> list[Value]:
    """Operands whose place the result may take, if they die here."""
    return [value for name in op.in_place if (value := op.operand(name)) is not None]


def _buffers(
    graph: Graph, nbytes: Mapping[Value, int], outside: frozenset[Value], *, in_place: bool
) -> list[_Buffer]:
    """Lives of all values in the arena; values computed in place of others share a buffer."""
    n_operations = len(graph.operations)
    last_use = {v: i for i, op in enumerate(graph.operations) for v in op.operands}
    last_use |= dict.fromkeys(graph.outputs, n_operations)
    owner: dict[Value, _Buffer] = {}
    buffers: list[_Buffer] = []

    def define(value: Value, time: int, candidates: Sequence[Value]) -> None:
        if value in outside:
            return
        end = last_use.get(value, time)
        for other in candidates:
            buffer = owner.get(other)
            # buffer.end == time: the operand dies here, and no other result has taken its place.
            if buffer is not None and buffer.end == time and other.type == value.type:
                buffer.values.append(value)
                buffer.end = end
                owner[value] = buffer
                return
        owner[value] = _Buffer([value], nbytes[value], time, end)
        buffers.append(owner[value])

    for value in graph.inputs:
        define(value, -1, ())
    for i, op in enumerate(graph.operations):
        for result in op.results:
            define(result, i, _replaceable(op) if in_place and op.n_results == 1 else ())
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
    """
    best: list[int] = [0] * len(buffers)
    best_nbytes = sum(align(b.nbytes) for b in buffers) + 1
    for key in _ORDERS:
        order = sorted(range(len(buffers)), key=[key(b) for b in buffers].__getitem__)
        for _ in range(_REPAIRS):
            places = _first_fit(buffers, order)
            ends = [p + align(b.nbytes) for p, b in zip(places, buffers, strict=True)]
            nbytes = max(ends, default=0)
            if nbytes < best_nbytes:
                best, best_nbytes = places, nbytes
            if best_nbytes < bound + ALIGNMENT:
                return best
            order.sort(key=[end != nbytes for end in ends].__getitem__)
    return best


def _first_fit(buffers: Sequence[_Buffer], order: Sequence[int]) -> list[int]:
    """Each buffer, in the given order, at the lowest offset free during all of its life."""
    places = [0] * len(buffers)
    placed: list[tuple[int, int, int, int]] = []
    for i in order:
        b, size = buffers[i], align(buffers[i].nbytes)
        meets = [p for p in placed if p[2] <= b.end and b.start <= p[3]]
        at = 0
        for lo, hi, _, _ in sorted(meets):
            if at + size <= lo:
                break
            at = max(at, hi)
        places[i] = at
        placed.append((at, at + size, b.start, b.end))
    return places


def _stacked(buffers: Sequence[_Buffer]) -> list[int]:
    places, at = [], 0
    for buffer in buffers:
        places.append(at)
        at += align(buffer.nbytes)
    return places
