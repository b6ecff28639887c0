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

from collections.abc import Sequence
from dataclasses import dataclass

from ignis.graph.ir import Graph, Value
from ignis.graph.passes.plan_memory import Timing
from ignis.runtime.launches import Launch


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
    return Timing(ordered, frozenset(private))


def verify_schedule(launches: Sequence[Launch], plan: Schedule) -> list[str]:
    """What is wrong with a schedule, one sentence each; written apart from `schedule`.

    Rule 1: what a launch reads was written in an earlier step, or by its own thread.
    Rule 2: two launches of one step do not write the same value.
    """
    wrong: list[str] = []
    for c, consumer in enumerate(launches):
        for p in range(c):
            producer = launches[p]
            if plan.step[p] != plan.step[c]:
                continue
            shared = sorted(map(str, producer.writes & consumer.reads))
            own_thread = plan.repeated[p] or (
                producer.by_row and consumer.by_row and producer.per == consumer.per
                and not plan.repeated[c]
            )  # fmt: skip
            if shared and not own_thread:
                wrong.append(f"launch {c} reads {shared[0]} in the step that writes it")
            if producer.writes & consumer.writes:
                wrong.append(f"launches {p} and {c} write the same value in one step")
    return wrong
