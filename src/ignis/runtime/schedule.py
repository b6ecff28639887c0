"""Which launches may follow each other without a barrier, and which every thread repeats.

A *step* is a run of launches between two barriers. Three rules decide where barriers stand:

    repeat    In a plan for one token, work that is one row (a norm, quantizing, rope, storing K
              and V) is done by every thread for itself, into memory of its own: cheaper than a
              barrier. Whatever reads the result reads its own thread's copy.
    by row    With more tokens such work is divided evenly by token. The same thread then holds
              the same tokens in the next launch of this kind, so no barrier stands between them.
    barrier   Everything else that reads what another thread may have written waits for it.

For one token a layer comes out as five steps:

    norm quantize q k v | rope rope store attend | quantize output | norm quantize gate up |
    swiglu quantize down |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ignis.errors import GraphError
from ignis.graph.ir import Graph, Value
from ignis.graph.passes.plan_memory import Timing
from ignis.runtime.launches import Launch

Given: TypeAlias = "frozenset[Hashable]"


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each launch: is it repeated by every thread, and which step does it belong to."""

    repeated: tuple[bool, ...]
    step: tuple[int, ...]

    @property
    def n_steps(self) -> int:
        """Steps of the plan: barriers that a run costs."""
        return self.step[-1] + 1 if self.step else 0

    def barrier_after(self, index: int) -> bool:
        """Whether threads meet behind launch `index`; always behind the last."""
        return index + 1 == len(self.step) or self.step[index] != self.step[index + 1]


def schedule(launches: Sequence[Launch], *, single: bool) -> Schedule:
    """Place the barriers of a plan; `single`: it serves steps of one token only."""
    repeated = tuple(single and launch.by_row for launch in launches)
    steps: list[int] = []
    current: list[int] = []  # launches since the last barrier
    for index, launch in enumerate(launches):
        if any(_must_wait(launches[p], launch, repeated[p]) for p in current):
            current = []
            steps.append(steps[-1] + 1)
        else:
            steps.append(steps[-1] if steps else 0)
        current.append(index)
    return Schedule(repeated, tuple(steps))


def _must_wait(producer: Launch, consumer: Launch, producer_is_repeated: bool) -> bool:
    """Whether the consumer may read what another thread writes in the producer."""
    if not producer.writes & consumer.reads:
        return False
    if producer_is_repeated:
        return False
    same_rows = producer.by_row and consumer.by_row and producer.per == consumer.per
    return not same_rows


def timing_of(graph: Graph, launches: Sequence[Launch], plan: Schedule) -> Timing:
    """What the memory planner needs to know of a schedule."""
    steps: dict[int, tuple[int, int]] = {}
    places = {id(op): index for index, op in enumerate(graph.operations)}
    private: set[Value] = set()
    for launch, step, repeated in zip(launches, plan.step, plan.repeated, strict=True):
        if launch.op is not None:
            index = places[id(launch.op)]
            steps[index] = (steps.get(index, (step, step))[0], step)
        if repeated:
            private |= {value for value in launch.writes if isinstance(value, Value)}
    ordered = tuple(steps[index] for index in range(len(graph.operations)))
    # Every thread writes a repeated output, all the same bytes, to the one place there is.
    return Timing(ordered, frozenset(private.difference(graph.outputs)))


def verify_schedule(
    launches: Sequence[Launch], plan: Schedule, given: frozenset[Hashable] = frozenset()
) -> None:
    """Raise GraphError with the number of the first broken rule; written apart from `schedule`.

    `given` values are there before the first launch.

        S1   every launch has its step; steps begin at 0 and rise by one
        S2   what a launch reads is given or was written by a launch before it
        S3   what a launch reads was written in an earlier step, or by its own thread
        S4   no two launches of a step write the same value
        S5   only work by row is repeated by every thread
    """
    for rule, check in RULES.items():
        try:
            check(launches, plan, given)
        except GraphError as error:
            raise GraphError(f"rule {rule}: {error}") from None


def steps_rise(launches: Sequence[Launch], plan: Schedule, given: Given) -> None:
    """S1."""
    if not len(plan.step) == len(plan.repeated) == len(launches):
        raise GraphError("not every launch has a step", got=len(plan.step), wanted=len(launches))
    for index, (before, step) in enumerate(zip((-1, *plan.step), plan.step, strict=False)):
        if step - before not in ((1,) if index == 0 else (0, 1)):
            raise GraphError("steps do not rise by one", where=f"launch {index}",
                             got=f"{step} behind {before}", wanted=before + 1)  # fmt: skip


def writes_come_first(launches: Sequence[Launch], plan: Schedule, given: Given) -> None:
    """S2."""
    written: set[Hashable] = set(given)
    for index, launch in enumerate(launches):
        missing = sorted(str(value) for value in launch.reads if value not in written)
        if missing:
            raise GraphError("a launch reads what no launch before it writes",
                             where=_where(index, launch), got=missing[0])  # fmt: skip
        written |= launch.writes


def barriers_separate_threads(launches: Sequence[Launch], plan: Schedule, given: Given) -> None:
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


def writes_are_single(launches: Sequence[Launch], plan: Schedule, given: Given) -> None:
    """S4."""
    for c, p in _pairs_of_a_step(plan):
        twice = sorted(map(str, launches[p].writes & launches[c].writes))
        if twice:
            raise GraphError("two launches of a step write the same value",
                             where=f"launches {p} and {c}", got=twice[0])  # fmt: skip


def repeated_work_is_by_row(launches: Sequence[Launch], plan: Schedule, given: Given) -> None:
    """S5."""
    for index, launch in enumerate(launches):
        if plan.repeated[index] and not launch.by_row:
            raise GraphError("work that is divided among threads is repeated by all",
                             where=_where(index, launch), wanted="work by row")  # fmt: skip


RULES: Mapping[str, Callable[[Sequence[Launch], Schedule, Given], None]] = MappingProxyType(
    {
        "S1": steps_rise,
        "S2": writes_come_first,
        "S3": barriers_separate_threads,
        "S4": writes_are_single,
        "S5": repeated_work_is_by_row,
    }
)
"""Every rule by its number, in the order of checking."""


def _pairs_of_a_step(plan: Schedule) -> Iterator[tuple[int, int]]:
    """(later, earlier) launch of each pair that runs without a barrier in between."""
    first = 0
    for c, step in enumerate(plan.step):
        while plan.step[first] != step:
            first += 1
        yield from ((c, p) for p in range(first, c))


def _where(index: int, launch: Launch) -> str:
    return f"launch {index}, {launch.kernel.name}"
