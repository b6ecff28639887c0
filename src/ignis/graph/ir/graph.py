"""A graph: inputs, operations in execution order, outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import is_not
from types import MappingProxyType

from ignis.graph.ir.operation import Operation, Value
from ignis.graph.ir.schedule import ROWS, Schedule, Stage
from ignis.graph.ir.types import MAPPED


@dataclass(frozen=True)  # not slotted: the derived tables below are cached on the instance
class Graph:
    """An immutable program in SSA form; one graph serves decode, prefill and batches.

    Weights are constants of the whole graph, named as in the GGUF file: they are whatever the
    operations read, and need no definition.

    Without a `schedule` operations run one after the other, and threads meet behind each.
    """

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]
    schedule: Schedule | None = None

    @cached_property
    def weights(self) -> Mapping[str, Value]:
        """The weights that operations read, by name, in order of first use."""
        used = (v for op in self.operations for v in op.operands if v.is_weight)
        return MappingProxyType({value.name: value for value in used})

    @cached_property
    def values(self) -> tuple[Value, ...]:
        """All activations: inputs, then results in order of definition."""
        return self.inputs + tuple(v for op in self.operations for v in op.results)

    @cached_property
    def producers(self) -> Mapping[Value, Operation]:
        """The operation that defines each result."""
        return MappingProxyType({v: op for op in self.operations for v in op.results})

    @cached_property
    def use_counts(self) -> Counter[Value]:
        """How often each value is read, by operations or as an output."""
        uses = Counter(v for op in self.operations for v in op.operands)
        uses.update(self.outputs)
        return uses

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """What a schedule has entries for: the inputs, then the stages of each operation."""
        given = Stage(ROWS, frozenset(), frozenset(self.inputs), "T")
        return (given, *(stage for op in self.operations for stage in op.stages))

    @cached_property
    def kinds(self) -> Counter[str]:
        """How many operations there are of each kind, fused operands told apart."""
        return Counter(op.kind for op in self.operations)

    @cached_property
    def tally(self) -> Counter[str]:
        """How many there are of what passes make: operations by kind, packed weights, and for steps
        of one token the stages that threads repeat and the barriers."""
        counts = Counter(self.kinds)
        counts["packed"] = sum(w.type.layout != MAPPED for w in self.weights.values())
        if self.schedule is not None:
            counts["repeated"] = sum(self.schedule.repeated)
            counts["barriers"] = self.schedule.n_barriers(one=True)
        return counts

    def with_operations(
        self, operations: Sequence[Operation], outputs: Sequence[Value] | None = None
    ) -> Graph:
        """The same inputs and outputs (or others), computed by other operations; no schedule.

        Where nothing changes it is this graph, with the tables that it has cached.
        """
        outputs = self.outputs if outputs is None else tuple(outputs)
        changed = len(operations) != len(self.operations) or any(
            map(is_not, operations, self.operations)
        )
        if not changed and outputs == self.outputs and self.schedule is None:
            return self
        return Graph(self.inputs, tuple(operations), outputs)

    def activation_nbytes(self, n_tokens: int, n_logits: int) -> int:
        """Bytes of all activations if each had a buffer of its own."""
        return sum(self.value_nbytes(n_tokens, n_logits).values())

    def value_nbytes(self, n_tokens: int, n_logits: int) -> dict[Value, int]:
        """Bytes of each activation; layers repeat a few types, so those are what is measured."""
        types = {value.type for value in self.values}
        nbytes = {type_: type_.nbytes(n_tokens, n_logits) for type_ in types}
        return {value: nbytes[value.type] for value in self.values}

    def __str__(self) -> str:
        from ignis.graph.ir.printer import print_graph  # the printer stands on the graph

        return print_graph(self)
