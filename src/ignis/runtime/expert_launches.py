"""Kernel launches of the ops of a mixture of experts."""

from __future__ import annotations

from ignis.graph.ir import Operation, Value
from ignis.graph.ir.ops import ExpertMatmul, ExpertSum, Route
from ignis.graph.ir.types import BLOCK_FORMATS, PANELS
from ignis.kernels import matmul_experts, matmul_float, routing
from ignis.kernels.rows import ROWS
from ignis.runtime.launch import (
    Argument,
    Launch,
    Surroundings,
    launch_of,
    rows_of,
    unit_rows,
)


def route(op: Operation, at: Surroundings) -> list[Launch]:
    assert isinstance(op, Route)
    rows, n_experts = rows_of(op), int(op.logits.type.shape[1])
    chosen, gates = op.results
    tables: dict[str, Argument] = {
        "experts": at.address(chosen), "n_experts": n_experts, "n_used": op.n_used,
        "n_tokens": rows,
    }  # fmt: skip
    args = tables | {
        "logits": at.operand(op, "logits"), "gates": at.address(gates), "scale": op.scale or 1.0,
    }  # fmt: skip
    scratch = routing.route_scratch_nbytes(n_experts)
    own = frozenset({chosen})
    return [
        launch_of(op, routing.route(among=op.among), args, 1, per=rows, scratch_nbytes=scratch),
        Launch(op, routing.group_experts(), tables, 1, own, own, gate=rows,
               scratch_nbytes=8 * n_experts, stage=1),
    ]  # fmt: skip


def expert_matmul(op: Operation, at: Surroundings) -> list[Launch]:
    assert isinstance(op, ExpertMatmul)
    return [_experts(op, op.experts, op.weight, at, {"gates": None, "residual": None})]


def expert_sum(op: Operation, at: Surroundings) -> list[Launch]:
    assert isinstance(op, ExpertSum)
    more = {name: at.operand(op, name) for name in ("gates", "residual")}
    return [_experts(op, op.experts, op.weight, at, more)]


def _experts(
    op: Operation, experts: Value, weight: Value, at: Surroundings, more: dict[str, Argument]
) -> Launch:
    rows, format = rows_of(op), weight.type.dtype
    _, n_rows, n_values = (int(n) for n in weight.type.shape)
    args: dict[str, Argument] = {
        "weight": at.operand(op, "weight"), "x": at.operand(op, "x"), "y": at.address(op.result),
        "experts": at.operand(op, "experts"), "n_rows": n_rows, "n_values": n_values,
        "n_tokens": rows, "n_used": int(experts.type.shape[1]),
    } | more  # fmt: skip
    static = {"format": format, "summed": isinstance(op, ExpertSum)}
    single = at.is_single(rows)
    grain = int(single)  # of every expert, so one is much already
    if format not in BLOCK_FORMATS:
        n = unit_rows(single)
        return launch_of(op, matmul_experts.experts_float(**static), args | {"unit_rows": n},
                         -(-n_rows // n), gate=rows, shared=True, grain=grain,
                         scratch_nbytes=matmul_float.scratch_nbytes(n_values))  # fmt: skip
    if weight.type.layout == PANELS:
        kernel, scratch = matmul_experts.experts_packed, matmul_experts.PACKED_SCRATCH_NBYTES
    else:
        kernel = matmul_experts.experts_mapped
        scratch = matmul_experts.mapped_scratch_nbytes(format, n_values)
    return launch_of(op, kernel(**static), args, -(-n_rows // ROWS), gate=rows, shared=True,
                     grain=grain, scratch_nbytes=scratch)  # fmt: skip


def row_gate(op: Operation, at: Surroundings) -> list[Launch]:
    (x, branch) = (op.operand(name) for name in ("x", "branch"))
    assert x is not None and branch is not None
    args: dict[str, Argument] = {name: at.operand(op, name) for name in ("branch", "x", "weight")}
    args |= {
        "y": at.address(op.result), "n": int(branch.type.shape[1]),
        "n_values": int(x.type.shape[1]),
    }  # fmt: skip
    return [launch_of(op, routing.row_gate(), args, 1, per=rows_of(op))]
