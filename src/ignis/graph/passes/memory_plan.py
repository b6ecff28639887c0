"""A memory plan as data, and the rules that every plan must satisfy.

    P1   every activation has a place; outputs may be left to the caller, all of them or none
    P2   places are multiples of 4 bytes within the arena, or within a thread's own memory
    P3   values share bytes only if their lives do not meet, or one takes the other's place
    P4   the sizes it states are those of its graph, and no arena is below its bound
    P5   no op runs before the ops that it reads from
    P6   an output is not private: the caller reads one place, not one a thread

The rules look at lives and bytes only; they know nothing of how the planner found the places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ignis.errors import GraphError
from ignis.graph.ir import Graph, Operation, Value
from ignis.graph.ir.schedule import Schedule
from ignis.graph.ir.types import ELEMENT


class Timing(NamedTuple):
    """When ops run, where that is not simply one after the other.

    `steps` gives the first and the last step of each op: ops of one step run side by side on
    several threads, so nothing that lives in a step may change places within it. `private` values
    exist once a thread, in an arena of its own, and are used in the order of the ops.
    """

    steps: tuple[tuple[int, int], ...]
    private: frozenset[Value] = frozenset()

    @classmethod
    def of(cls, graph: Graph, *, one: bool) -> Timing:
        """When ops run by the graph's schedule, in steps of one token or of several."""
        stages = graph.stages
        schedule = graph.schedule or Schedule.plain(len(stages))
        step = schedule.steps(one=one)
        steps: list[tuple[int, int]] = []
        entry = 1  # behind the inputs'
        for op in graph.operations:
            behind = entry + len(op.stages)
            steps.append((step[entry], step[behind - 1]))
            entry = behind
        private: set[Value] = set()
        for stage, repeated in zip(stages, schedule.repeated, strict=True):
            if one and repeated:
                private |= {value for value in stage.writes if isinstance(value, Value)}
        # Every thread writes a repeated output, all the same bytes, to the one place there is.
        return cls(tuple(steps), frozenset(private.difference(graph.outputs)))

    @classmethod
    def sequential(cls, graph: Graph) -> Timing:
        """Every op is a step of its own."""
        return cls(tuple((i, i) for i in range(len(graph.operations))))


class MemoryPlan(NamedTuple):
    """Where each activation lies, for steps of up to `n_tokens` tokens and `n_logits` rows.

    `offsets` are bytes from the arena's start (private values: from the start of a thread's own),
    multiples of 4, and of 64 if all sizes are. `nbytes` is the arena's size and `bound_bytes` the
    peak of live bytes, below which no arena can be; `private_nbytes` is what each thread takes
    besides. `naive_nbytes` is what all values would take without sharing. Outputs outside the arena
    count in `output_nbytes` only.
    """

    graph: Graph
    n_tokens: int
    n_logits: int
    timing: Timing
    offsets: Mapping[Value, int]
    nbytes: int
    bound_bytes: int
    private_nbytes: int
    private_bound_bytes: int
    naive_nbytes: int
    output_nbytes: int

    @property
    def gap_bytes(self) -> int:
        """What the arena and a thread's own memory take beyond the peaks of live bytes."""
        return self.nbytes + self.private_nbytes - self.bound_bytes - self.private_bound_bytes

    @property
    def n_values(self) -> int:
        """Activations of the graph, outputs and inputs included."""
        return len(self.graph.values)

    @property
    def n_buffers(self) -> int:
        """Distinct places in the arena and in a thread's own memory."""
        private = self.timing.private
        return len({(value in private, offset) for value, offset in self.offsets.items()})


def verify_plan(plan: MemoryPlan) -> None:
    """Raise GraphError with the number of the first broken rule."""
    for rule, check in RULES.items():
        try:
            check(plan)
        except GraphError as error:
            raise GraphError(f"rule {rule}: {error}") from None


def every_value_has_a_place(plan: MemoryPlan) -> None:
    """P1."""
    outputs = frozenset(plan.graph.outputs)
    for value in plan.graph.values:
        if value not in plan.offsets and value not in outputs:
            raise GraphError("a value has no place in the arena", got=value)
    if not outputs <= plan.offsets.keys() and not outputs.isdisjoint(plan.offsets):
        raise GraphError("some outputs lie in the arena, some outside", wanted="all or none")


def places_are_valid(plan: MemoryPlan) -> None:
    """P2."""
    nbytes = plan.graph.value_nbytes(plan.n_tokens, plan.n_logits)
    for value, start in plan.offsets.items():
        is_private = value in plan.timing.private
        limit = plan.private_nbytes if is_private else plan.nbytes
        end = start + nbytes[value]
        if start % ELEMENT or not 0 <= start <= end <= limit:
            raise GraphError(
                "a value lies unaligned or outside the arena",
                where=value,
                got=f"bytes {start} to {end}",
                wanted=f"multiples of {ELEMENT} within {limit}",
            )


def live_values_lie_apart(plan: MemoryPlan) -> None:
    """P3."""
    sequential = Timing.sequential(plan.graph).steps
    takeovers = _Takeovers(plan)
    nbytes = plan.graph.value_nbytes(plan.n_tokens, plan.n_logits)
    spans = {value: (start, start + nbytes[value]) for value, start in plan.offsets.items()}
    for is_private, steps in ((False, plan.timing.steps), (True, sequential)):
        values = [v for v in plan.offsets if (v in plan.timing.private) == is_private]
        lives = lives_of(plan.graph, steps) if values else {}
        live: list[tuple[int, Value]] = []  # until when, and what
        for value in sorted(values, key=lives.__getitem__):
            begin, end = lives[value]
            start, stop = spans[value]
            live = [other for other in live if other[0] >= begin]
            for _, other in live:
                other_start, other_stop = spans[other]
                overlaps = start < other_stop and other_start < stop
                if overlaps and not takeovers.allow(other, value, steps):
                    raise GraphError(
                        f"{value} overlaps {other} while both live",
                        where="memory plan",
                        got=f"bytes {start} to {stop} and {other_start} to {other_stop}",
                    )
            live.append((end, value))


def sizes_are_true(plan: MemoryPlan) -> None:
    """P4."""
    sizes = plan.graph.value_nbytes(plan.n_tokens, plan.n_logits)
    outside = sum(nbytes for value, nbytes in sizes.items() if value not in plan.offsets)
    for what, got, wanted in (
        ("all values", plan.naive_nbytes, sum(sizes.values())),
        ("the outputs outside", plan.output_nbytes, outside),
    ):
        if got != wanted:
            raise GraphError(f"the plan misstates the bytes of {what}", got=got, wanted=wanted)
    for what, got, bound in (
        ("the arena", plan.nbytes, plan.bound_bytes),
        ("a thread's own memory", plan.private_nbytes, plan.private_bound_bytes),
    ):
        if got < bound:
            raise GraphError(f"{what} is smaller than what lives at once", got=got, wanted=bound)


def ops_follow_what_they_read(plan: MemoryPlan) -> None:
    """P5."""
    steps = plan.timing.steps
    if len(steps) != len(plan.graph.operations):
        raise GraphError(
            "not every op has its time", got=len(steps), wanted=len(plan.graph.operations)
        )
    written: dict[Value, int] = {}
    for op, (first, last) in zip(plan.graph.operations, steps, strict=True):
        for value in op.operands:
            if first < written.get(value, 0) or last < first:
                raise GraphError(
                    f"{op.name} runs before what it reads is there",
                    where=value,
                    got=f"steps {first} to {last}",
                    wanted=f"step {written.get(value, 0)} or later",
                )
        written |= dict.fromkeys(op.results, last)


def outputs_are_shared(plan: MemoryPlan) -> None:
    """P6."""
    for value in plan.graph.outputs:
        if value in plan.timing.private:
            raise GraphError("an output exists once a thread", got=value, wanted="a shared value")


RULES: Mapping[str, Callable[[MemoryPlan], None]] = MappingProxyType(
    {
        "P1": every_value_has_a_place,
        "P2": places_are_valid,
        "P3": live_values_lie_apart,
        "P4": sizes_are_true,
        "P5": ops_follow_what_they_read,
        "P6": outputs_are_shared,
    }
)
"""Every rule by its number, in the order of checking."""


def lives_of(graph: Graph, steps: Sequence[tuple[int, int]]) -> dict[Value, tuple[int, int]]:
    """First and last step of every activation; inputs exist before the first step."""
    begin = dict.fromkeys(graph.inputs, -1)
    end = begin.copy()
    for op, (first, last) in zip(graph.operations, steps, strict=True):
        for value in op.operands:
            if not value.is_weight and end[value] < last:
                end[value] = last
        for value in op.results:
            begin[value], end[value] = first, last
    end |= dict.fromkeys(graph.outputs, steps[-1][1] + 1 if steps else 0)
    return {value: (first, end[value]) for value, first in begin.items()}


class _Takeovers:
    """Which values may have been computed in place of which; tables over one graph."""

    def __init__(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._producer: dict[Value, int] = {}
        self._readers: dict[Value, list[int]] = {}
        for i, op in enumerate(plan.graph.operations):
            for value in op.operands:
                self._readers.setdefault(value, []).append(i)
            self._producer |= dict.fromkeys(op.results, i)

    def allow(self, old: Value, new: Value, steps: Sequence[tuple[int, int]]) -> bool:
        """Whether `new` is computed in place of `old`, perhaps by way of others in between."""
        producer = self._producer.get(new)
        if producer is None:
            return False
        return any(
            self._plan.offsets.get(value) == self._plan.offsets[new]
            and self._dies_in(value, producer, steps)
            and (value == old or self.allow(old, value, steps))
            for value in replaceable(self._plan.graph.operations[producer])
            if value.type == new.type
        )

    def _dies_in(self, value: Value, reader: int, steps: Sequence[tuple[int, int]]) -> bool:
        """Whether nothing else reads the value in the step that the reader begins, or later."""
        begin = steps[reader][0]
        others = (steps[i][1] for i in self._readers[value] if i != reader)
        return value not in self._plan.graph.outputs and all(last < begin for last in others)


def replaceable(op: Operation) -> list[Value]:
    """Operands whose place the result may take, if they die here.

    A value that the op also reads in another role (a matmul's input that is its residual too) is
    none: it is still needed when the first results are written.
    """
    named = [value for name in op.in_place if (value := op.operand(name)) is not None]
    return [value for value in named if op.operands.count(value) == named.count(value)]
