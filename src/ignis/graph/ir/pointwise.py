"""Ops that treat every element alike, or copy.

Axes: T tokens, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.checks import expect, matrix
from ignis.graph.ir.operation import Operand, Operation, count, index, positive
from ignis.graph.ir.types import TensorType

if TYPE_CHECKING:
    from ignis.graph.ir.evaluation import Array, Evaluation


class Add(Operation):
    """Add two values: the residual stream and a branch."""

    name = "add"
    in_place = ("a", "b")
    a = Operand("f32")
    b = Operand("f32")

    def infer(self) -> TensorType:
        expect(self, "b", self.b, self.a.type)
        return self.a.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.a] + step[self.b]


class Silu(Operation):
    """The sigmoid-weighted unit: x / (1 + exp(-x))."""

    name = "silu"
    in_place = ("x",)
    x = Operand("f32")

    def infer(self) -> TensorType:
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _silu(step[self.x])


class Mul(Operation):
    """Multiply two values elementwise."""

    name = "mul"
    in_place = ("a", "b")
    a = Operand("f32")
    b = Operand("f32")

    def infer(self) -> TensorType:
        expect(self, "b", self.b, self.a.type)
        return self.a.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.a] * step[self.b]


class Swiglu(Operation):
    """The gated unit of a feed-forward block: silu(gate) * up."""

    name = "swiglu"
    in_place = ("gate", "up")
    gate = Operand("f32")
    up = Operand("f32")

    def infer(self) -> TensorType:
        expect(self, "up", self.up, self.gate.type)
        return self.gate.type

    def evaluate(self, step: Evaluation) -> Array:
        return _silu(step[self.gate]) * step[self.up]


class Gelu(Operation):
    """The Gaussian-weighted unit by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))."""

    name = "gelu"
    in_place = ("x",)
    x = Operand("f32")

    def infer(self) -> TensorType:
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _gelu(step[self.x])


class Geglu(Operation):
    """The gated unit of a feed-forward block: gelu(gate) * up."""

    name = "geglu"
    in_place = ("gate", "up")
    gate = Operand("f32")
    up = Operand("f32")

    def infer(self) -> TensorType:
        expect(self, "up", self.up, self.gate.type)
        return self.gate.type

    def evaluate(self, step: Evaluation) -> Array:
        return _gelu(step[self.gate]) * step[self.up]


class ScaleBy(Operation):
    """Multiply every element by one number."""

    name = "scale_by"
    in_place = ("x",)
    x = Operand("f32")
    factor = positive()

    def infer(self) -> TensorType:
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.x] * self.factor


class Columns(Operation):
    """Copy `width` columns from column `first` on: one of the parts of a fused projection."""

    name = "columns"
    x = Operand("f32")
    first = index()
    width = count()

    def infer(self) -> TensorType:
        rows, width = matrix(self, self.x)
        end = self.first + self.width
        if end > width:
            raise GraphError(
                "columns outside the operand",
                where=self.name,
                got=f"{self.first} to {end} of {self.x}: {self.x.type}",
                wanted=f"a width of {end} or more",
            )
        return TensorType("f32", (rows, self.width))

    def evaluate(self, step: Evaluation) -> Array:
        return step[self.x][:, self.first : self.first + self.width]


def capped(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), in float64; x itself without a cap."""
    return x if cap is None else cap * np.tanh(x / cap)


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, -0
        silu: Array = x / (1 + np.exp(-x))
    return silu


def _gelu(x: Array) -> Array:
    """The tanh form of gelu, in float64."""
    y: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y
