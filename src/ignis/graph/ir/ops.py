"""Every op of the IR, each declared once: here, in `attention`, `experts` and `pointwise`.

Axes: T tokens, R rows with logits, D width, N output width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.a8 import dequantize_a8, quantize_a8
from ignis.graph.ir.attention import Attend, Attention, Rope, RopeStore
from ignis.graph.ir.checks import expect, matrix
from ignis.graph.ir.experts import ExpertMatmul, ExpertSum, Route, RowGate
from ignis.graph.ir.operation import (
    Operand,
    Operation,
    OptionalOperand,
    Value,
    choice,
    count,
    optional,
    positive,
)
from ignis.graph.ir.pointwise import (
    Add,
    Columns,
    Geglu,
    Gelu,
    Mul,
    ScaleBy,
    Silu,
    Swiglu,
    capped,
)
from ignis.graph.ir.schedule import CHUNKS, Stage
from ignis.graph.ir.types import A8_BLOCK, BLOCK_FORMATS, WEIGHT_FORMATS, Dim, TensorType

if TYPE_CHECKING:
    from ignis.graph.ir.evaluation import Array, Evaluation

__all__ = [
    "OPS", "PRODUCTS", "Add", "Attend", "Attention", "Columns", "ExpertMatmul", "ExpertSum",
    "Geglu", "Gelu", "Logits", "Matmul", "MatmulGroup", "Mul", "Normalize", "Quantize", "Rmsnorm",
    "Rope", "RopeStore", "Route", "RowGate", "Scale", "ScaleBy", "Silu", "Swiglu",
]  # fmt: skip


class Normalize(Operation):
    """Divide each row by its root mean square: x * r with r = 1 / sqrt(mean(x^2) + eps).

    With a `group` each run of so many elements (a head) is normalized for itself.
    """

    name = "normalize"
    in_place = ("x",)
    x = Operand("f32")
    eps = positive()
    group = optional(count())

    def infer(self) -> TensorType:
        _group_width(self)
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _by_group(self, step[self.x], lambda x: _normalized(x, self.eps))


class Scale(Operation):
    """Multiply each row, or each `group` of elements in it, by a gain: x * gain."""

    name = "scale"
    in_place = ("x",)
    x = Operand("f32")
    gain = Operand("f32", weight=True)
    group = optional(count())

    def infer(self) -> TensorType:
        expect(self, "gain", self.gain, TensorType("f32", (_group_width(self),)))
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        return _by_group(self, step[self.x], lambda x: x * step[self.gain])


class Rmsnorm(Operation):
    """Normalize and scale in one: (x * r) * gain."""

    name = "rmsnorm"
    in_place = ("x",)
    x = Operand("f32")
    gain = Operand("f32", weight=True)
    eps = positive()
    group = optional(count())

    def infer(self) -> TensorType:
        expect(self, "gain", self.gain, TensorType("f32", (_group_width(self),)))
        return self.x.type

    def evaluate(self, step: Evaluation) -> Array:
        def scaled(x: Array) -> Array:
            return _normalized(x, self.eps) * step[self.gain]

        return _by_group(self, step[self.x], scaled)


class Matmul(Operation):
    """Multiply by a weight's transpose; then bias, then residual are added, in that order."""

    name = "matmul"
    in_place = ("residual",)
    share = CHUNKS
    x = Operand("f32", "a8")
    weight = Operand(*WEIGHT_FORMATS, weight=True)
    bias = OptionalOperand("f32", weight=True)
    residual = OptionalOperand("f32")

    def infer(self) -> TensorType:
        rows, n_outputs = _product(self, self.x, self.weight)
        result = TensorType("f32", (rows, n_outputs))
        if self.bias is not None:
            expect(self, "bias", self.bias, TensorType("f32", (n_outputs,)))
        if self.residual is not None:
            expect(self, "residual", self.residual, result)
        return result

    def evaluate(self, step: Evaluation) -> Array:
        y = step[self.x] @ step[self.weight].T
        for addend in (step.get(self.bias), step.get(self.residual)):
            if addend is not None:
                y = y + addend
        return y


class MatmulGroup(Operation):
    """Two or three matmuls that read one value: a result for each weight, biases added."""

    name = "matmul_group"
    share = CHUNKS
    x = Operand("f32", "a8")
    weight0 = Operand(*WEIGHT_FORMATS, weight=True)
    weight1 = Operand(*WEIGHT_FORMATS, weight=True)
    weight2 = OptionalOperand(*WEIGHT_FORMATS, weight=True)
    bias0 = OptionalOperand("f32", weight=True)
    bias1 = OptionalOperand("f32", weight=True)
    bias2 = OptionalOperand("f32", weight=True)

    @property
    def members(self) -> tuple[tuple[Value, Value | None], ...]:
        """The weight and the bias of each result, in order."""
        pairs = (
            (self.weight0, self.bias0), (self.weight1, self.bias1), (self.weight2, self.bias2)
        )  # fmt: skip
        return tuple((weight, bias) for weight, bias in pairs if weight is not None)

    def infer(self) -> tuple[TensorType, ...]:
        if self.weight2 is None and self.bias2 is not None:
            raise GraphError(
                "a bias without its weight", where=self.name, got=self.bias2, wanted="weight2"
            )
        if len({weight.type.dtype in BLOCK_FORMATS for weight, _ in self.members}) > 1:
            raise GraphError(
                "block-quantized and float weights read x in different forms",
                where=self.name,
                got=" and ".join(weight.type.dtype for weight, _ in self.members),
                wanted="weights of one kind",
            )
        types = []
        for weight, bias in self.members:
            rows, n_outputs = _product(self, self.x, weight)
            if bias is not None:
                expect(self, "bias", bias, TensorType("f32", (n_outputs,)))
            types.append(TensorType("f32", (rows, n_outputs)))
        return tuple(types)

    def evaluate(self, step: Evaluation) -> tuple[Array, ...]:
        products = []
        for weight, bias in self.members:
            y = step[self.x] @ step[weight].T
            products.append(y if bias is None else y + step[bias])
        return tuple(products)


class Quantize(Operation):
    """Quantize rows to A8 blocks of 32 (NUMERICS 1); exact evaluation is the identity.

    With rows = "R" only those that need logits are quantized, with "T" all there are.
    """

    name = "quantize"
    x = Operand("f32")
    rows = choice("T", "R", default="T")

    def infer(self) -> TensorType:
        rows, width = matrix(self, self.x)
        if self.rows == "R" and rows != "T":
            raise GraphError(
                "rows can be selected only from all tokens",
                where=self.name,
                got=self.x.type,
                wanted=f"f32[T,{width}]",
            )
        if width % A8_BLOCK:
            raise GraphError(
                "the width is not a number of A8 blocks",
                where=self.name,
                got=width,
                wanted=f"a multiple of {A8_BLOCK}",
            )
        return TensorType("a8", ("R" if self.rows == "R" else rows, width))

    def evaluate(self, step: Evaluation) -> Array:
        x = step[self.x]
        if self.rows == "R":
            x = x[step.logit_rows]
        if step.exact:
            return x
        q, d, _ = quantize_a8(x)
        return dequantize_a8(q, d)


class Logits(Operation):
    """Select the rows that need logits, then multiply by the output matrix's transpose.

    An operand of R rows has been selected already. With a `softcap` each logit y becomes
    softcap * tanh(y / softcap).
    """

    name = "logits"
    x = Operand("f32", "a8")
    weight = Operand(*WEIGHT_FORMATS, weight=True)
    rows = choice("R", default="R")
    softcap = optional(positive())

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The product; where there is a cap, it is put over the whole of it."""
        product = self.stage(CHUNKS, [self.x], [self.result])
        capping = self.stage(CHUNKS, [self.result], [self.result])
        return (product,) if self.softcap is None else (product, capping)

    def infer(self) -> TensorType:
        _, n_vocab = _product(self, self.x, self.weight)
        return TensorType("f32", (self.rows, n_vocab))

    def evaluate(self, step: Evaluation) -> Array:
        x = step[self.x]
        if self.x.type.shape[0] != "R":
            x = x[step.logit_rows]
        return capped(x @ step[self.weight].T, self.softcap)


PRODUCTS = (Matmul, MatmulGroup, ExpertMatmul, ExpertSum, Logits)
"""Ops that multiply x by matrices: block-quantized ones read it quantized, float ones as it is."""

OPS: Mapping[str, type[Operation]] = MappingProxyType(
    {
        op.name: op
        for op in (
            Normalize,
            Scale,
            Rmsnorm,
            Matmul,
            MatmulGroup,
            Rope,
            Attention,
            RopeStore,
            Attend,
            Add,
            Silu,
            Mul,
            Swiglu,
            Gelu,
            Geglu,
            ScaleBy,
            Columns,
            Route,
            ExpertMatmul,
            ExpertSum,
            RowGate,
            Quantize,
            Logits,
        )
    }
)
"""Every op by its name."""


def _group_width(op: Normalize | Scale | Rmsnorm) -> int:
    """The elements that are treated together: a row, or a group that divides it."""
    _, width = matrix(op, op.x)
    if op.group is not None and width % op.group:
        raise GraphError(
            "the width is not a number of groups",
            where=op.name,
            got=width,
            wanted=f"a multiple of group {op.group}",
        )
    return op.group or width


def _by_group(
    op: Normalize | Scale | Rmsnorm, x: Array, function: Callable[[Array], Array]
) -> Array:
    group = _group_width(op)
    by_group = (len(x), x.shape[1] // group, group)  # there may be no rows at all
    return function(x.reshape(by_group)).reshape(x.shape)


def _product(op: Operation, x: Value, weight: Value) -> tuple[Dim, int]:
    """Rows and columns of x times the weight's transpose."""
    rows, width = matrix(op, x)
    n_outputs, depth = matrix(op, weight)
    if depth != width or not isinstance(n_outputs, int):
        raise GraphError(
            f"{weight} does not fit {x}: {x.type}",
            where=op.name,
            got=weight.type,
            wanted=f"{weight.type.dtype}[N,{width}]",
        )
    return rows, n_outputs


def _normalized(x: Array, eps: float) -> Array:
    normalized: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normalized
