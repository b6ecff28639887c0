"""Mixtures of experts: choosing them, multiplying by their weights, summing what they say.

A token's chosen experts stand in ascending order of their index; slot j is the j-th of them. What
the experts compute is one row a token, the slots side by side, so ops by element know nothing of
experts.

Axes: T tokens, D width, E experts, J slots (experts that a token uses), F hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.checks import expect, matrix
from ignis.graph.ir.operation import (
    Operand,
    Operation,
    Value,
    choice,
    count,
    optional,
    positive,
)
from ignis.graph.ir.schedule import CHUNKS, ROWS, WHOLE, Stage
from ignis.graph.ir.types import WEIGHT_FORMATS, Dim, TensorType

if TYPE_CHECKING:
    from ignis.graph.ir.evaluation import Array, Evaluation, Integers


class Route(Operation):
    """Choose the `n_used` experts of the largest logits, the lower index where two are equal.

    Two results: the chosen experts in ascending order, and the gate of each: its softmax
    probability among "all" experts, or among the "chosen" ones; times `scale` where there is one.
    """

    name = "route"
    logits = Operand("f32")
    n_used = count()
    among = choice("all", "chosen")
    scale = optional(positive())

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Tokens choose row by row; then it is written down who has which token."""
        experts = self.results[0]
        return (
            self.stage(ROWS, [self.logits], self.results),
            self.stage(WHOLE, [experts], [experts]),
        )

    def infer(self) -> tuple[TensorType, TensorType]:
        rows, n_experts = matrix(self, self.logits)
        if self.n_used > n_experts:
            raise GraphError(
                "more experts are used than there are",
                where=self.name,
                got=self.n_used,
                wanted=f"at most {n_experts}",
            )
        shape = (rows, self.n_used)
        return TensorType("experts", shape), TensorType("f32", shape)

    def evaluate(self, step: Evaluation) -> tuple[Array, Array]:
        logits = step[self.logits]
        # A stable sort of what falls keeps the lower index first.
        chosen = np.sort(np.argsort(-logits, axis=1, kind="stable")[:, : self.n_used], axis=1)
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        gates = np.take_along_axis(powers, chosen, axis=1)
        gates = gates / (powers if self.among == "all" else gates).sum(axis=1, keepdims=True)
        return chosen.astype(np.float64), gates * (self.scale or 1.0)


class ExpertMatmul(Operation):
    """Multiply each token by its chosen experts' weights (transposed): a slot beside the other."""

    name = "expert_matmul"
    share = CHUNKS
    x = Operand("f32", "a8")
    experts = Operand("experts")
    weight = Operand(*WEIGHT_FORMATS, weight=True)

    def infer(self) -> TensorType:
        rows, width = matrix(self, self.x)
        n_used = _slots(self, rows, self.experts)
        n_outputs = _expert_outputs(self, self.weight, width)
        return TensorType("f32", (rows, n_used * n_outputs))

    def evaluate(self, step: Evaluation) -> Array:
        x, weight = step[self.x], step[self.weight]
        chosen = step[self.experts].astype(np.int64)
        y = np.zeros((*chosen.shape, weight.shape[1]))
        for expert, rows, slots in _by_expert(chosen):
            y[rows, slots] = x[rows] @ weight[expert].T
        return y.reshape(len(x), chosen.shape[1] * weight.shape[1])


class ExpertSum(Operation):
    """Multiply each slot by its expert's weights (transposed), and add all to the residual.

    Experts in ascending order; each row of their output is multiplied by its gate as it is added.
    """

    name = "expert_sum"
    in_place = ("residual",)
    share = CHUNKS
    x = Operand("f32", "a8")
    experts = Operand("experts")
    gates = Operand("f32")
    weight = Operand(*WEIGHT_FORMATS, weight=True)
    residual = Operand("f32")

    def infer(self) -> TensorType:
        rows, width = matrix(self, self.x)
        n_used = _slots(self, rows, self.experts)
        expect(self, "gates", self.gates, TensorType("f32", (rows, n_used)))
        if width % n_used:
            raise GraphError(
                "the width is not a number of slots",
                where=self.name,
                got=width,
                wanted=f"a multiple of {n_used}",
            )
        result = TensorType("f32", (rows, _expert_outputs(self, self.weight, width // n_used)))
        expect(self, "residual", self.residual, result)
        return result

    def evaluate(self, step: Evaluation) -> Array:
        gates, weight = step[self.gates], step[self.weight]
        chosen = step[self.experts].astype(np.int64)
        x = step[self.x].reshape(*chosen.shape, weight.shape[2])
        y: Array = step[self.residual].copy()
        for expert, rows, slots in _by_expert(chosen):
            y[rows] += gates[rows, slots, None] * (x[rows, slots] @ weight[expert].T)
        return y


class RowGate(Operation):
    """Multiply each row of a branch by one number: the sigmoid of x . weight."""

    name = "row_gate"
    in_place = ("branch",)
    branch = Operand("f32")
    x = Operand("f32")
    weight = Operand("f32", weight=True)

    def infer(self) -> TensorType:
        rows, width = matrix(self, self.x)
        if self.weight.type.shape not in ((width,), (1, width)):
            expect(self, "weight", self.weight, TensorType("f32", (width,)))
        if matrix(self, self.branch)[0] != rows:
            expect(self, "branch", self.branch, TensorType("f32", (rows, "D")))
        return self.branch.type

    def evaluate(self, step: Evaluation) -> Array:
        score = step[self.x] @ step[self.weight].reshape(-1, 1)
        with np.errstate(over="ignore"):  # exp(-score) = inf gives the right limit, 0
            y: Array = step[self.branch] / (1 + np.exp(-score))
        return y


def _slots(op: Operation, rows: Dim, experts: Value) -> int:
    """How many experts each row has chosen."""
    n_rows, n_used = matrix(op, experts)
    if n_rows != rows:
        expect(op, "experts", experts, TensorType("experts", (rows, n_used)))
    return n_used


def _expert_outputs(op: Operation, weight: Value, width: int) -> int:
    """The output width of all experts' weights, [E, N, width]."""
    shape = weight.type.shape
    if len(shape) != 3 or shape[2] != width or not isinstance(shape[1], int):
        raise GraphError(
            f"{weight} does not fit rows of {width}",
            where=op.name,
            got=weight.type,
            wanted=f"{weight.type.dtype}[E,N,{width}]",
        )
    return shape[1]


def _by_expert(chosen: Integers) -> Iterator[tuple[int, Integers, Integers]]:
    """Each chosen expert, ascending, with the rows and the slots that it is chosen in."""
    for expert in np.unique(chosen):
        rows, slots = np.nonzero(chosen == expert)
        yield int(expert), rows, slots
