"""The schedule of a graph, carried over to the launches that its ops were lowered to.

The pass `schedule_steps` has decided where threads meet and what each of them repeats; here every
launch finds its place in that, and rules check the outcome, launch by launch. For one token a
layer comes out as five steps:

    norm quantize q k v | rope store attend | quantize output | norm quantize gate up |
    swiglu quantize down |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ignis.errors import GraphError
from ignis.graph.ir import Graph
from ignis.graph.ir.schedule import Schedule
from ignis.runtime.launches import Launch

Given: TypeAlias = "frozenset[Hashable]"


class Timetable(NamedTuple):
    """For each launch: is it repeated by every thread, and which step does it belong to."""

    repeated: tuple[bool, ...]
    step: tuple[int, ...]

    @classmethod
    def one_step(cls, n_launches: int) -> Timetable:
        """For launches that do not depend on each other: threads meet behind the last only."""
        return cls((False,) * n_launches, (0,) * n_launches)

    @property
    def n_steps(self) -> int:
        """Steps of the plan: barriers that a run costs."""
        return self.step[-1] + 1 if self.step else 0

    def barrier_after(self, index: int) -> bool:
        """Whether threads meet behind launch `index`; always behind the last."""
        return index + 1 == len(self.step) or self.step[index] != self.step[index + 1]


def timetable_of(graph: Graph, launches: Sequence[Launch], *, one: bool) -> Timetable:
    """What the graph's schedule says of its launches, in steps of one token or of several."""
    schedule = graph.schedule or Schedule.plain(len(graph.stages))
    first_entry: dict[int, int] = {}
    entry = 1  # the inputs' is the first: launches of no op write them
    for op in graph.operations:
        first_entry[id(op)] = entry
        entry += len(op.stages)
    entries = [0 if x.op is None else first_entry[id(x.op)] + x.stage for x in launches]
    step = schedule.steps(one=one)
    begin = step[entries[0]] if entries else 0
    return Timetable(
        tuple(one and schedule.repeated[entry] for entry in entries),
        tuple(step[entry] - begin for entry in entries),
    )


def verify_schedule(
    launches: Sequence[Launch], plan: Timetable, given: frozenset[Hashable] = frozenset()
) -> None:
    """Raise GraphError with the number of the first broken rule; written apart from the pass.

    `given` values are there before the first launch.

        S1   every launch has its step; steps begin at 0 and rise by one
        S2   what a launch reads is given or was written by a launch before it
        S3   what a launch reads was written in an earlier step, or by its own thread
        S4   no two launches of a step write the same value, but each thread its own
        S5   only work by row, or of one thread, is repeated by every thread
    """
    for rule, check in RULES.items():
        try:
            check(launches, plan, given)
        except GraphError as error:
            raise GraphError(f"rule {rule}: {error}") from None


def steps_rise(launches: Sequence[Launch], plan: Timetable, given: Given) -> None:
    """S1."""
    if not len(plan.step) == len(plan.repeated) == len(launches):
        raise GraphError("not every launch has a step", got=len(plan.step), wanted=len(launches))
    for index, (before, step) in enumerate(zip((-1, *plan.step), plan.step, strict=False)):
        if step - before not in ((1,) if index == 0 else (0, 1)):
            raise GraphError("steps do not rise by one", where=f"launch {index}",
                             got=f"{step} behind {before}", wanted=before + 1)  # fmt: skip


def writes_come_first(launches: Sequence[Launch], plan: Timetable, given: Given) -> None:
    """S2."""
    written: set[Hashable] = set(given)
    for index, launch in enumerate(launches):
        missing = sorted(str(value) for value in launch.reads if value not in written)
        if missing:
            raise GraphError("a launch reads what no launch before it writes",
                             where=_where(index, launch), got=missing[0])  # fmt: skip
        written |= launch.writes


def barriers_separate_threads(launches: Sequence[Launch], plan: Timetable, given: Given) -> None:
    """S3."""
    for c, p in _pairs_of_a_step(plan):
        producer, consumer = launches[p], launches[c]
        common = sorted(map(str, producer.writes & consumer.reads))
        own_thread = plan.repeated[p] or (
            producer.by_row and consumer.by_row and producer.per == consumer.per
            and not plan.repeated[c]
        )  # fmt: skip
        if common and not own_thread:
            raise GraphError("no barrier between the threads that write and those that read",
                             where=_where(c, consumer), got=f"{common[0]} in one step",
                             wanted=f"a step behind launch {p}")  # fmt: skip


def writes_are_single(launches: Sequence[Launch], plan: Timetable, given: Given) -> None:
    """S4."""
    for c, p in _pairs_of_a_step(plan):
        twice = sorted(map(str, launches[p].writes & launches[c].writes))
        if twice and not (plan.repeated[p] and plan.repeated[c]):
            raise GraphError("two launches of a step write the same value",
                             where=f"launches {p} and {c}", got=twice[0])  # fmt: skip


def repeated_work_is_by_row(launches: Sequence[Launch], plan: Timetable, given: Given) -> None:
    """S5."""
    for index, launch in enumerate(launches):
        if plan.repeated[index] and not (launch.by_row or launch.is_whole):
            raise GraphError("work that is divided among threads is repeated by all",
                             where=_where(index, launch), wanted="work by row")  # fmt: skip


RULES: Mapping[str, Callable[[Sequence[Launch], Timetable, Given], None]] = MappingProxyType(
    {
        "S1": steps_rise,
        "S2": writes_come_first,
        "S3": barriers_separate_threads,
        "S4": writes_are_single,
        "S5": repeated_work_is_by_row,
    }
)
"""Every rule by its number, in the order of checking."""


def _pairs_of_a_step(plan: Timetable) -> Iterator[tuple[int, int]]:
    """(later, earlier) launch of each pair that runs without a barrier in between."""
    first = 0
    for c, step in enumerate(plan.step):
        while plan.step[first] != step:
            first += 1
        yield from ((c, p) for p in range(first, c))


def _where(index: int, launch: Launch) -> str:
    return f"launch {index}, {launch.kernel.name}"
