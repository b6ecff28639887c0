"""How much work a step is: multiply-adds and bytes, counted from the graph.

What is counted is what any implementation must do: each weight read once a step, as many bytes as
it has in the file, and of experts as many as the tokens can have chosen; keys and values of all
positions read once; a multiply-add for each weight and row, and two for each query element and
each key it sees. Norms, rope and the like are not counted: their time is overhead. Divided by the
machine's ceilings this gives the least time a step can take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ignis.gguf import BLOCKS
from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.ir.types import BLOCK_FORMATS
from ignis.kernels.kv_pages import PAGE, page_nbytes


class Ceilings(Protocol):
    """What the machine can do at most; `ignis.runtime.ceilings.measure` finds it."""

    @property
    def bandwidth_gb_s(self) -> float: ...
    @property
    def int8_gmac_s(self) -> float: ...
    @property
    def f32_gmac_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepSize:
    """A step of one sequence: T tokens behind `n_past` positions, R rows of logits."""

    n_tokens: int
    n_past: int = 0
    n_logits: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds of bytes and of f32; bytes of weights and of the KV cache."""

    int8_macs: int = 0
    f32_macs: int = 0
    weight_nbytes: int = 0
    kv_nbytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.int8_macs + other.int8_macs, self.f32_macs + other.f32_macs,
            self.weight_nbytes + other.weight_nbytes, self.kv_nbytes + other.kv_nbytes,
        )  # fmt: skip

    @property
    def macs(self) -> int:
        return self.int8_macs + self.f32_macs

    @property
    def nbytes(self) -> int:
        return self.weight_nbytes + self.kv_nbytes

    def arithmetic_seconds(self, ceilings: Ceilings) -> float:
        """The time that the multiply-adds take at the arithmetic ceilings, one kind a time."""
        return (
            self.int8_macs / ceilings.int8_gmac_s + self.f32_macs / ceilings.f32_gmac_s
        ) / 1e9

    def least_seconds(self, ceilings: Ceilings) -> float:
        """The time that the machine's ceilings allow: arithmetic or bandwidth, the slower."""
        return max(self.arithmetic_seconds(ceilings), self.bandwidth_seconds(ceilings))

    def bandwidth_seconds(self, ceilings: Ceilings) -> float:
        """The time that the bytes take at the bandwidth ceiling."""
        return self.nbytes / ceilings.bandwidth_gb_s / 1e9


def step_work(graph: Graph, size: StepSize) -> Work:
    """The work of a whole step."""
    return sum((operation_work(op, size) for op in graph.operations), Work())


def operation_work(op: Operation, size: StepSize) -> Work:
    """The work of one op of a step; none for all but products and attention."""
    if op.name in ("attention", "attend"):
        return _attention_work(op, size)
    rows = size.n_logits if op.results[0].type.shape[0] == "R" else size.n_tokens
    total = Work()
    for weight in op.matrices if rows else ():
        *experts, n_outputs, n_inputs = weight.type.sizes(0, 0)
        n_used = _experts_of_a_row(op) if experts else 1
        macs = rows * n_used * n_outputs * n_inputs
        n_read = min(rows * n_used, experts[0]) if experts else 1
        nbytes = n_read * n_outputs * BLOCKS[weight.type.dtype].row_nbytes(n_inputs)
        if weight.type.dtype in BLOCK_FORMATS:
            total += Work(int8_macs=macs, weight_nbytes=nbytes)
        else:
            total += Work(f32_macs=macs, weight_nbytes=nbytes)
    return total


def _experts_of_a_row(op: Operation) -> int:
    experts = op.operand("experts")
    assert experts is not None
    return int(experts.type.shape[1])


def _attention_work(op: Operation, size: StepSize) -> Work:
    """Scores and weighted values over all visible positions; keys and values read once."""
    head_dim = int(op.attributes["head_dim"])  # type: ignore[arg-type]
    n_heads = int(op.attributes["n_heads"])  # type: ignore[arg-type]
    n_kv_heads = int(op.attributes["n_kv_heads"])  # type: ignore[arg-type]
    kv_type = str(op.attributes.get("kv_type", DEFAULT_KV_TYPE))
    n_positions = size.n_past + size.n_tokens
    # Token t of the step sees n_past + t + 1 positions, or as many as its window has.
    n_seen = size.n_tokens * size.n_past + size.n_tokens * (size.n_tokens + 1) // 2
    if (window := op.attributes.get("window")) is not None:
        assert isinstance(window, int)
        n_seen = sum(min(size.n_past + t + 1, window) for t in range(size.n_tokens))
        n_positions = min(n_positions, window + size.n_tokens - 1)
    return Work(
        f32_macs=2 * n_seen * n_heads * head_dim,
        kv_nbytes=n_positions * n_kv_heads * page_nbytes(head_dim, kv_type) // PAGE,
    )
