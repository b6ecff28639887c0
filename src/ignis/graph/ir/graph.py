"""A graph: inputs, operations in execution order, outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from ignis.graph.ir.operation import Operation, Value


@dataclass(frozen=True)  # not slotted: the derived tables below are cached on the instance
class Graph:
    """An immutable program in SSA form; one graph serves decode, prefill and batches.

    Weights are constants of the whole graph, named as in the GGUF file: they are whatever the
    operations read, and need no definition.
    """

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]

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
    def kinds(self) -> Counter[str]:
        """How many operations there are of each kind, fused operands told apart."""
        return Counter(op.kind for op in self.operations)

    def with_operations(self, operations: Sequence[Operation]) -> Graph:
        """The same inputs and outputs, computed by other operations."""
        return replace(self, operations=tuple(operations))

    def activation_nbytes(self, n_tokens: int, n_logits: int) -> int:
        """Bytes of all activations if each had a buffer of its own."""
        return sum(value.type.nbytes(n_tokens, n_logits) for value in self.values)

    def __str__(self) -> str:
        from ignis.graph.ir.printer import print_graph  # the printer stands on the graph

        return print_graph(self)
