"""How far an op of f32 may be from its float64 meaning, fed the same bits.

u = 2^-24 is half a unit in the last place. A sum of n products in any order errs by at most n * u
of the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); what else
an op does adds a few u. The bounds follow from that; none is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.graph.ir import Operation, Value
from ignis.graph.ir.attention import Attend, Rope, RopeStore
from ignis.graph.ir.evaluation import Evaluation

U = 2.0**-24
TINY = 2.0**-120  # products may fall below the normal range
MOST = 2.0**127  # and what is beyond this may have overflowed


def bound(op: Operation, step: Evaluation, wanted: NDArray[np.float64]) -> Any:
    """The largest absolute error of each element of the op's (first) result."""
    size = np.abs(wanted)
    if op.name in ("normalize", "rmsnorm"):
        # All squares are positive, so the sum's relative error is that of its n additions; the
        # root halves it; division, root and two products add four roundings.
        n = int(op.attributes.get("group", wanted.shape[-1]))  # type: ignore[arg-type]
        x = step[op.operands[0]]
        groups = (x**2).reshape(len(x), x.shape[1] // n, n).sum(-1, keepdims=True)
        squares = np.broadcast_to(groups, (*groups.shape[:2], n)).reshape(x.shape)
        # Squares beyond f32 make the sum infinite and the result 0: NUMERICS 4 says so.
        return np.where(squares > MOST, np.inf, (n / 2 + 8) * U * size + TINY)
    if op.name in ("add", "mul", "scale", "scale_by", "columns"):
        return 2 * U * size + TINY  # the factor of scale_by is rounded, too
    if op.name in ("silu", "swiglu"):
        # exp errs by 2 u relative; 1 + e, the division and one product round once each. Where
        # exp(-x) overflows, below x = -88.7, the result is 0 for something of up to 2.7e-37.
        factor = np.abs(step[op.operands[1]]) if op.name == "swiglu" else 1.0
        return 8 * U * size + TINY * np.maximum(factor, 1)
    if op.name in ("gelu", "geglu"):
        # 1 + tanh cancels on the negative side: it errs by a few u of 2, whatever is left.
        factor = np.abs(step[op.operands[1]]) if op.name == "geglu" else 1.0
        return 12 * U * np.abs(step[op.operands[0]]) * factor + TINY * np.maximum(factor, 1)
    if op.name == "rope":
        # Table entries are rounded once; a product and an fma round once each.
        x = np.abs(step[op.operands[0]])
        heads = x.reshape(len(x), -1, int(op.attributes["head_dim"]))  # type: ignore[arg-type]
        most = np.broadcast_to(2 * heads.max(-1, keepdims=True), heads.shape)
        magnitude = float(op.attributes.get("magnitude", 1.0))  # type: ignore[arg-type]
        return 6 * U * magnitude * most.reshape(x.shape) + TINY
    if op.name in ("matmul", "logits"):
        # A cap on top flattens errors; it adds a few of its own, of at most the cap.
        cap = float(op.attributes.get("softcap", 0.0))  # type: ignore[arg-type]
        return _product_bound(op, step, wanted) + 8 * U * cap
    if op.name in ("expert_matmul", "expert_sum"):
        return _expert_bound(op, step, wanted)
    if op.name == "route":
        # Powers err by the roundings of logit - maximum, in the exponent, and 2 u of exp; the sum
        # adds one a term, division and scale one each.
        logits = step[op.operands[0]]
        spread = logits.max(axis=1, keepdims=True) - logits.min(axis=1, keepdims=True)
        return (2 * spread + logits.shape[1] + 10) * U * size + TINY
    if op.name == "row_gate":
        # The score errs by D u of its products' sizes; the sigmoid passes on at most as much, and
        # is 0 where e to the -score exceeds the largest f32.
        x, w = step[op.operand("x")], step[op.operand("weight")]  # type: ignore[index]
        products = np.abs(x) @ np.abs(w).reshape(-1, 1)
        vanished = np.abs(step[op.operands[0]]) * 2.0**-128
        return ((x.shape[1] + 2) * products + 8) * U * size + vanished + TINY
    assert op.name in ("attention", "attend"), op.name
    return _attention_bound(op, step)


def _product_bound(op: Operation, step: Evaluation, wanted: NDArray[np.float64]) -> Any:
    """K products and their sums; then at most two additions, rounded at the size they have there.

    A block's weights d * q + m enter as two terms, each at most three times the row's largest.
    """
    x, w = step[op.operands[0]], step[op.matrices[0]]
    if op.name == "logits" and op.operands[0].type.shape[0] == "T":
        x = x[step.logit_rows]
    largest = 3 * np.abs(w).max(axis=1)
    sizes = np.abs(x).sum(-1, keepdims=True) * largest
    addends = [step[v] for v in op.operands[1:] if v not in op.matrices]
    more = sum((np.abs(a) for a in addends), np.zeros(1))
    largest_sum = sizes + more
    allowed = (w.shape[1] + 6) * U * (largest_sum + np.abs(wanted)) + TINY
    return np.where(largest_sum > MOST, np.inf, allowed)


def _expert_bound(op: Operation, step: Evaluation, wanted: NDArray[np.float64]) -> Any:
    """K products and their sums for each slot; a sum of slots adds one fma each."""
    (weight,) = op.matrices
    x, w = step[op.operands[0]], step[weight]
    experts = op.operand("experts")
    assert experts is not None
    chosen = step[experts].astype(int)
    n_tokens, n_used = chosen.shape
    largest = 3 * np.abs(w).max(axis=2)[chosen]  # [T, J, N]
    n_values = w.shape[2]
    if op.name == "expert_matmul":
        sizes = (np.abs(x).sum(-1)[:, None, None] * largest).reshape(wanted.shape)
        return (n_values + 6) * U * sizes + TINY
    gates, residual = (step[op.operand(name)] for name in ("gates", "residual"))  # type: ignore[index]
    slots = np.abs(x).reshape(n_tokens, n_used, n_values).sum(-1)
    sizes = (np.abs(gates) * slots)[:, :, None] * largest
    return (n_values + n_used + 6) * U * (sizes.sum(axis=1) + np.abs(residual)) + TINY


def _attention_bound(op: Operation, step: Evaluation) -> Any:
    """Scores err by (C + 2) u of their size; weights by as much in the exponent, plus n roundings
    of the sums; values are weighted means, so all of it times the largest value seen."""
    q = np.abs(step[op.operands[0]])
    k, v = (step[value] for value in op.operands[1:3]) if op.name == "attention" else (q[:0],) * 2
    head_dim = int(op.attributes["head_dim"])  # type: ignore[arg-type]
    scale = float(op.attributes["scale"])  # type: ignore[arg-type]
    seen = max(_largest(step, op, 0), float(np.abs(k).max(initial=0)))
    cap = float(op.attributes.get("softcap", 0.0))  # type: ignore[arg-type]
    score = head_dim * float(q.max(initial=0)) * seen * scale + 8 * cap
    value = max(_largest(step, op, 1), float(np.abs(v).max(initial=0)))
    n_keys = int(step.positions.max()) + 1
    return (2 * (head_dim + 3) * score + 2 * n_keys + 40) * U * value + 2.0**-24 * value + TINY


def attend_slack(op: Attend, step: Evaluation, errors: Mapping[int, Any]) -> float:
    """What keys may add to the error of attention: `errors` [n, K*C] by slot, of what the cache
    holds. A score errs by q times that, a weight by twice as much in the exponent."""
    score = 0.0
    for slot, error in errors.items():
        q = np.abs(step[op.q][step.slots == slot]).reshape(-1, op.n_kv_heads,
                                                           op.n_heads // op.n_kv_heads, op.head_dim)
        keys = error.reshape(-1, op.n_kv_heads, op.head_dim)
        score = max(score, float(np.einsum("tkgc,nkc->tkgn", q, keys).max(initial=0)) * op.scale)
    return 2 * float(np.expm1(score)) * _largest(step, op, 1)


def rope_of(op: RopeStore, x: Value) -> Rope:
    """The rope that a rope_store does on q or on k."""
    known = {spec.name for spec in Rope.attribute_specs}
    attributes = {name: value for name, value in op.attributes.items() if name in known}
    return Rope.create({"x": x, "factors": op.factors}, attributes, [f"{x.name}.turned"])


def _largest(step: Evaluation, op: Operation, which: int) -> float:
    layer = int(op.attributes["layer"])  # type: ignore[arg-type]
    pages = [p[which] for (at, _), p in step.cache._pages.items() if at == layer]
    return max((float(np.nanmax(np.abs(p), initial=0)) for p in pages), default=0.0)
