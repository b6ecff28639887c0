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
class Timing:
    """When ops run, where that is not simply one after the other.

    `steps` gives the first and the last step of each op: ops of one step run side by side on
    several threads, so nothing that lives in a step may change places within it. `private` values
    exist once a thread, in an arena of its own, and are used in the order of the ops.
    """

    steps: tuple[tuple[int, int], ...]
    private: frozenset[Value] = frozenset()

    @classmethod
    def sequential(cls, graph: Graph) -> Timing:
        """Every op is a step of its own."""
        return cls(tuple((i, i) for i in range(len(graph.operations))))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where each activation lies, for steps of up to `n_tokens` tokens and `n_logits` rows.

    `offsets` are bytes from the arena's start (private values: from the start of a thread's own),
    multiples of 64. `nbytes` is the arena's size and `bound_bytes` the peak of live bytes, below
    which no arena can be; `private_nbytes` is what each thread takes besides. `naive_nbytes` is
    what all values would take without sharing. Outputs outside the arena count in `output_nbytes`
    only.
    """

    graph: Graph
    n_tokens: int
    n_logits: int
    timing: Timing
    offsets: Mapping[Value, int]
    nbytes: int
    bound_bytes: int
    private_nbytes: int
    naive_nbytes: int
    output_nbytes: int

    @property
    def n_values(self) -> int:
        """Activations of the graph, outputs and inputs included."""
        return len(self.graph.values)

    @property
    def n_buffers(self) -> int:
        """Distinct places in the arena and in a thread's own memory."""
        private = self.timing.private
        return len({(value in private, offset) for value, offset in self.offsets.items()})


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
    """Lay the activations of a step out. Sizes grow with T and R, so a plan serves smaller steps.

    Args:
        outputs_in_arena: False leaves the graph's outputs to the caller.
        in_place: let results take the place of dying operands where the op allows it.
        reuse: False gives every value memory of its own.
        timing: which ops run side by side; default: none.

    The plan has been verified. Raises: GraphError for counts below one.
    """
    if n_tokens < 1 or n_logits < 0:
        raise GraphError("nothing to plan", got=f"T={n_tokens} R={n_logits}", wanted="T >= 1")
    timing = timing or Timing.sequential(graph)
    nbytes = {value: value.type.nbytes(n_tokens, n_logits) for value in graph.values}
    outside = frozenset() if outputs_in_arena else frozenset(graph.outputs)
    shared = [v for v in graph.values if v not in outside and v not in timing.private]
    private = [v for v in graph.values if v in timing.private]
    in_place = in_place and reuse
    sequential = Timing.sequential(graph).steps
    offsets: dict[Value, int] = {}
    sizes = []
    bound = 0
    for values, steps in ((shared, timing.steps), (private, sequential)):
        buffers = _buffers(graph, values, nbytes, steps, in_place=in_place)
        peak = _peak(buffers)
        places = _best_placement(buffers, peak) if reuse else _stacked(buffers)
        for buffer, place in zip(buffers, places, strict=True):
            offsets |= dict.fromkeys(buffer.values, place)
        ends = (p + align(b.nbytes) for b, p in zip(buffers, places, strict=True))
        sizes.append(max(ends, default=0))
        bound = bound or peak
    plan = MemoryPlan(
        graph,
        n_tokens,
        n_logits,
        timing,
        MappingProxyType({v: offsets[v] for v in graph.values if v in offsets}),
        sizes[0],
        bound,
        sizes[1],
        sum(nbytes.values()),
        sum(nbytes[value] for value in outside),
    )
    verify_plan(plan)
    return plan


def verify_plan(plan: MemoryPlan) -> None:
    """Raise GraphError where two live values share bytes, or one is unaligned or out of bounds.

    Written apart from the planner: it looks at lives and bytes only, and asks for every overlap
    whether the later value was computed in place of the earlier one.
    """
    graph, private = plan.graph, plan.timing.private
    for value in graph.values:
        if value not in plan.offsets and value not in graph.outputs:
            raise GraphError("a value has no place in the arena", got=value)
    sequential = Timing.sequential(graph).steps
    for mine, steps, nbytes in (
        (False, plan.timing.steps, plan.nbytes),
        (True, sequential, plan.private_nbytes),
    ):
        values = [v for v in plan.offsets if (v in private) == mine]
        lives, takeovers = _lives(graph, steps), _Takeovers(plan, steps)
        live: list[Value] = []
        for value in sorted(values, key=lambda v: lives[v]):
            live = [v for v in live if lives[v][1] >= lives[value][0]]
            _check_place(plan, value, live, nbytes, takeovers)
            live.append(value)


def _lives(graph: Graph, steps: Sequence[tuple[int, int]]) -> dict[Value, tuple[int, int]]:
    """First and last step of every activation; inputs exist before the first step."""
    lives = dict.fromkeys(graph.inputs, (-1, -1))
    for op, (first, last) in zip(graph.operations, steps, strict=True):
        for value in op.operands:
            if not value.is_weight:
                lives[value] = (lives[value][0], max(lives[value][1], last))
        lives |= dict.fromkeys(op.results, (first, last))
    end = steps[-1][1] + 1 if steps else 0
    for value in graph.outputs:
        lives[value] = (lives[value][0], end)
    return lives


def _check_place(
    plan: MemoryPlan,
    value: Value,
    live: Sequence[Value],
    arena_nbytes: int,
    takeovers: _Takeovers,
) -> None:
    """Check a value as it comes to life beside the live ones."""
    start = plan.offsets[value]
    end = start + value.type.nbytes(plan.n_tokens, plan.n_logits)
    if start % ALIGNMENT or not 0 <= start <= end <= arena_nbytes:
        raise GraphError(
            "a value lies unaligned or outside the arena",
            where=value,
            got=f"bytes {start} to {end}",
            wanted=f"multiples of {ALIGNMENT} within {arena_nbytes}",
        )
    for other in live:
        other_start = plan.offsets[other]
        other_end = other_start + other.type.nbytes(plan.n_tokens, plan.n_logits)
        overlaps = start < other_end and other_start < end
        if overlaps and not takeovers.allow(other, value):
            raise GraphError(
                f"{value} overlaps {other} while both live",
                where="memory plan",
                got=f"bytes {start} to {end} and {other_start} to {other_end}",
            )


class _Takeovers:
    """Which values may have been computed in place of which; tables over one graph."""

    def __init__(self, plan: MemoryPlan, steps: Sequence[tuple[int, int]]) -> None:
        self._plan, self._steps = plan, steps
        self._producer: dict[Value, int] = {}
        self._readers: dict[Value, list[int]] = {}
        for i, op in enumerate(plan.graph.operations):
            for value in op.operands:
                self._readers.setdefault(value, []).append(i)
            self._producer |= dict.fromkeys(op.results, i)

    def allow(self, old: Value, new: Value) -> bool:
        """Whether `new` is computed in place of `old`, perhaps by way of others in between."""
        producer = self._producer.get(new)
        if producer is None:
            return False
        return any(
            self._plan.offsets.get(value) == self._plan.offsets[new]
            and self._dies_in(value, producer)
            and (value == old or self.allow(old, value))
            for value in _replaceable(self._plan.graph.operations[producer])
            if value.type == new.type
        )

    def _dies_in(self, value: Value, reader: int) -> bool:
        """Whether nothing else reads the value in the step that the reader begins, or later."""
        begin = self._steps[reader][0]
        others = (self._steps[i][1] for i in self._readers[value] if i != reader)
        return value not in self._plan.graph.outputs and all(last < begin for last in others)


def _replaceable(op: Operation) -> list[Value]:
    """Operands whose place the result may take, if they die here.

    A value that the op also reads in another role (a matmul's input that is its residual too) is
    none: it is still needed when the first results are written.
    """
    named = [value for name in op.in_place if (value := op.operand(name)) is not None]
    return [value for value in named if op.operands.count(value) == named.count(value)]


def _buffers(
    graph: Graph,
    values: Sequence[Value],
    nbytes: Mapping[Value, int],
    steps: Sequence[tuple[int, int]],
    *,
    in_place: bool,
) -> list[_Buffer]:
    """Lives of the given values; those computed in place of others share a buffer."""
    lives = _lives(graph, steps)
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
        for other in _replaceable(graph.operations[op_index]):
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
