"""The `reference` engine: the graph's meaning in float64 NumPy, the oracle of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ignis.errors import GraphError
from ignis.graph.ir.evaluation import Array, Evaluation, Integers, ReferenceCache
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.operation import Value

__all__ = ["ReferenceCache", "interpret"]


def interpret(
    graph: Graph,
    inputs: Mapping[str, np.ndarray[Any, Any]],
    weights: Callable[[str], np.ndarray[Any, Any]],
    cache: ReferenceCache,
    positions: np.ndarray[Any, Any],
    slots: np.ndarray[Any, Any],
    logit_rows: np.ndarray[Any, Any],
    *,
    exact: bool = True,
    observe: Callable[[Value, Array], None] | None = None,
) -> tuple[Array, ...]:
    """Run one step of T tokens and return the outputs in float64.

    Args:
        inputs: array [T, D] of each input, by name without the `%`.
        weights: the dequantized array of a GGUF tensor, by name.
        cache: read and extended by attention.
        positions, slots: [T], each token's place in its sequence, and its sequence.
        logit_rows: [R], the tokens of the step whose logits are wanted.
        exact: quantization is the identity; otherwise it rounds as NUMERICS 1 says.
        observe: called with each result in order, for op-by-op comparisons.

    Raises: GraphError for arrays that do not fit the graph.
    """
    step = Evaluation(
        weights,
        cache,
        _integers("positions", positions),
        _integers("slots", slots),
        _integers("logit_rows", logit_rows),
        exact,
        {},
    )
    _check_table(step)
    sizes = len(step.positions), len(step.logit_rows)
    for value in graph.inputs:
        step.values[value] = _input(value, inputs, sizes)
    last_use = _last_use(graph)
    for i, op in enumerate(graph.operations):
        computed = op.evaluate(step)
        arrays = computed if isinstance(computed, tuple) else (computed,)
        for result, array in zip(op.results, arrays, strict=True):
            assert array.shape == result.type.sizes(*sizes), (op.name, array.shape, result.type)
            step.values[result] = array
            if observe is not None:
                observe(result, array)
        for value in {*op.operands, *op.results}:
            if not value.is_weight and last_use.get(value, i) == i:
                del step.values[value]
    return tuple(step.values[value] for value in graph.outputs)


def _last_use(graph: Graph) -> dict[Value, int]:
    last = {v: i for i, op in enumerate(graph.operations) for v in op.operands}
    return last | dict.fromkeys(graph.outputs, len(graph.operations))


def _integers(name: str, array: np.ndarray[Any, Any]) -> Integers:
    array = np.asarray(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GraphError(f"{name} is not a list of integers", got=f"{array.dtype}{array.shape}")
    if array.size and array.min() < 0:
        raise GraphError(f"{name} holds a negative number", got=int(array.min()))
    return array.astype(np.int64)


def _check_table(step: Evaluation) -> None:
    """One row a token, no position twice, logits only of tokens that are there."""
    n_tokens = len(step.positions)
    if len(step.slots) != n_tokens:
        raise GraphError("a slot for each token", got=len(step.slots), wanted=n_tokens)
    places = set(zip(step.slots.tolist(), step.positions.tolist(), strict=True))
    if len(places) != n_tokens:
        raise GraphError("two tokens of a step have the same slot and position")
    if step.logit_rows.size and int(step.logit_rows.max()) >= n_tokens:
        raise GraphError(
            "a row of logits lies outside the step",
            got=int(step.logit_rows.max()),
            wanted=f"below {n_tokens}",
        )


def _input(
    value: Value, inputs: Mapping[str, np.ndarray[Any, Any]], sizes: tuple[int, int]
) -> Array:
    if value.name not in inputs:
        raise GraphError("an input is missing", where=value, wanted=value.type)
    array = np.asarray(inputs[value.name], dtype=np.float64)
    if array.shape != value.type.sizes(*sizes):
        raise GraphError(
            "an input has the wrong shape",
            where=value,
            got=array.shape,
            wanted=value.type.sizes(*sizes),
        )
    return array
