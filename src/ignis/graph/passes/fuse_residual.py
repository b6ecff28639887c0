"""The residual add becomes part of the matmul before it."""

from __future__ import annotations

from ignis.graph.ir import Graph, Operation
from ignis.graph.ir.ops import Add, Matmul
from ignis.graph.passes.rewrite import Private, absorb


def fuse_residual(graph: Graph) -> Graph:
    """Fold an add into the matmul that it alone reads, as its residual operand.

        %1 = matmul(%0, @w) : f32[T,64]
        %2 = add(%x, %1) : f32[T,64]

    becomes

        %2 = matmul(%0, @w, residual=%x) : f32[T,64]

    The sum is (acc + bias) + residual before and after, and addition commutes: the bits stay.
    """
    return absorb(graph, _fuse)


def _fuse(op: Operation, private: Private) -> tuple[Operation, Operation] | None:
    if not isinstance(op, Add):
        return None
    for branch, stream in ((op.b, op.a), (op.a, op.b)):
        matmul = private.get(branch)
        if isinstance(matmul, Matmul) and matmul.residual is None:
            operands = {
                "x": matmul.x,
                "weight": matmul.weight,
                "bias": matmul.bias,
                "residual": stream,
            }
            return matmul, Matmul.create(operands, {}, [op.result.name])
    return None
