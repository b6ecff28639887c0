"""Differential testing of the compiler on random graphs.

    python -m tests.fuzz_graphs --count 20000            all of them
    python -m tests.fuzz_graphs --seed 1234              one, again

Each graph runs plainly (no passes, one thread, a barrier behind every launch, red zones around all
values), every op compared with float64; then under random passes, threads, layouts, feature levels,
plans and cuts of its tokens into steps, compared with the plain run by bits.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignis.graph.ir import Graph, Operation, Value, print_graph
from ignis.graph.ir.a8 import dequantize_a8, quantize_a8
from ignis.graph.ir.evaluation import Evaluation, ReferenceCache
from ignis.graph.ir.kv_types import through_cache
from ignis.graph.ir.ops import Attend, Matmul, MatmulGroup, Quantize, RopeStore, Route
from ignis.graph.passes import TOGGLES
from ignis.graph.passes.dead_code import dead_code
from ignis.native.host import host_target
from ignis.target import Target
from tests.compiler.bounds import MOST, attend_slack, bound, rope_of
from tests.compiler.graph_runner import GraphRunner, Setting, decoded, encode, run_chunks
from tests.compiler.random_graphs import Case, random_case
from tests.runtime.test_accuracy import unpack_a8

Array = NDArray[Any]
PLAIN = Setting(disabled=TOGGLES, plain=True)


class MismatchError(AssertionError):
    """Two ways to compute the same graph that do not agree."""


def check_case(case: Case, folder: Path, n_settings: int = 3) -> None:
    """Raise MismatchError, or whatever goes wrong, unless all ways to run the case agree."""
    rng = np.random.default_rng([case.seed, 5])
    encoded = encode(case.weights, case.graph)
    wanted = check_plain(case, encoded, folder)
    for _ in range(n_settings):
        setting, chunks = random_setting(rng, len(case.tokens))
        runner = GraphRunner(case.graph, encoded, setting, folder)
        got = run_chunks(runner, case.inputs, case.tokens, case.wanted, chunks)
        for value, mine, plain in zip(case.graph.outputs, got, wanted, strict=True):
            both_nan = np.isnan(mine) & np.isnan(plain)
            differ = (mine.view(np.int32) != plain.view(np.int32)) & ~both_nan
            if differ.any():
                at = tuple(np.argwhere(differ)[0].tolist())
                raise MismatchError(f"{value}{list(at)} is {mine[at]!r}, plainly {plain[at]!r}; "
                                    f"{setting}, steps of {chunks}")  # fmt: skip


def check_plain(case: Case, encoded: dict[str, Array], folder: Path) -> list[Array]:
    """The outputs of the plain run, each op of which has been compared with float64."""
    runner = GraphRunner(case.graph, encoded, PLAIN, folder)
    wanted = run_chunks(runner, case.inputs, case.tokens, case.wanted, [len(case.tokens)])
    numbers = decoded(encoded, case.graph)
    slots, positions = (np.array(x) for x in zip(*case.tokens, strict=True))
    step = Evaluation(numbers.__getitem__, ReferenceCache(rounded=True), positions, slots,
                      np.array(sorted(case.wanted), dtype=np.int64), False, {})  # fmt: skip
    check = _PlainCheck(runner, step, (len(case.tokens), len(case.wanted)))
    with np.errstate(all="ignore"):  # numbers may well overflow; what comes out is compared
        for op in runner.graph.operations:
            check.op(op)
    return wanted


class _PlainCheck:
    """Compares op after op of a plain run with its meaning, fed the bits that it read."""

    def __init__(self, runner: GraphRunner, step: Evaluation, sizes: tuple[int, int]) -> None:
        self._runner, self._step, self._sizes = runner, step, sizes
        self._key_errors: dict[int, dict[int, Array]] = {}  # by layer and slot, behind rope_store

    def op(self, op: Operation) -> None:
        """Raise MismatchError unless the op's results are what they should be."""
        step = self._step
        for value in op.operands:
            if not value.is_weight:
                step.values[value] = self._read(value)
        if any(not np.isfinite(step.values[v]).all() for v in op.operands if not v.is_weight):
            return
        if isinstance(op, Quantize):
            self._quantize(op)
        elif isinstance(op, MatmulGroup):
            for (weight, bias), result in zip(op.members, op.results, strict=True):
                part = Matmul.create({"x": op.x, "weight": weight, "bias": bias}, {}, [result.name])
                self._compare(part, part.evaluate(step), result)
        elif isinstance(op, RopeStore):
            self._rope_store(op)
        elif isinstance(op, Route):
            chosen, gates = op.evaluate(step)
            if not np.array_equal(self._read(op.results[0]), chosen):
                raise MismatchError(f"{op.results[0]}: route chooses other experts than float64")
            self._compare(op, gates, op.results[1])
        elif not isinstance(op, Attend):
            self._compare(op, op.evaluate(step), op.result)
        elif op.layer in self._key_errors:
            exact = op.evaluate(step)
            more = attend_slack(op, step, self._key_errors[op.layer])
            self._compare(op, exact, op.result, more)

    def _read(self, value: Value) -> Array:
        rows, width = value.type.sizes(*self._sizes)
        buffer = self._runner.values[value]
        if value.type.dtype == "a8":
            q, d, _ = unpack_a8(buffer.bytes, rows, width)
            return dequantize_a8(q, d)
        if value.type.dtype == "experts":  # the chosen ones stand first
            chosen = buffer.bytes[: 4 * rows * width].view(np.int32)
            return chosen.reshape(rows, width).astype(np.float64)
        return buffer.floats(rows, width).astype(np.float64)

    def _quantize(self, op: Quantize) -> None:
        x = self._step.values[op.x]
        if op.rows == "R":
            x = x[self._step.logit_rows]
        q, d, s = quantize_a8(x)
        got = unpack_a8(self._runner.values[op.result].bytes, *q.shape)
        if not all(np.array_equal(a, b) for a, b in zip(got, (q, d, -128 * s), strict=True)):
            raise MismatchError(f"{op.result}: quantize gives other integers than NUMERICS 1")

    def _rope_store(self, op: RopeStore) -> None:
        """The rotated q; and what the cache must hold, with the keys that f16 may round apart."""
        step = self._step
        turned = op.evaluate(step)  # stores the keys, too
        q, k = (rope_of(op, x) for x in (op.q, op.k))
        self._compare(q, turned, op.result)
        exact = k.evaluate(step)
        error = np.broadcast_to(bound(k, step, exact), exact.shape)
        apart = _rounded_apart(exact, error, op.kv_type or "f16")
        self._key_errors[op.layer] = {
            int(slot): apart[step.slots == slot] for slot in np.unique(step.slots)
        }

    def _compare(self, op: Operation, exact: Any, result: Value, more: Any = 0.0) -> None:
        got = self._read(result)
        if not np.isfinite(exact).all():  # keys beyond f16, say: bits are still compared
            return
        allowed = np.broadcast_to(bound(op, self._step, exact) + more, got.shape)
        wrong = ~(np.abs(got - exact) <= allowed) & (np.abs(exact) < MOST)
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0].tolist())
            raise MismatchError(f"{op.name} {result}{list(at)} is {got[at]!r}, in float64 "
                                f"{exact[at]!r}, allowed {allowed[at]:.3g}")  # fmt: skip


def _rounded_apart(keys: Array, error: Array, kv_type: str) -> Array:
    """How far the cache's values of two keys may differ that are `error` from `keys`."""
    if kv_type != "q8_0":
        return np.abs(through_cache(keys + error, kv_type) - through_cache(keys - error, kv_type))
    blocks = (np.abs(keys) + error).reshape(len(keys), -1, 32)
    step = np.broadcast_to(blocks.max(axis=-1, keepdims=True) / 127, blocks.shape)
    # One step of the integer, and 127 times a step of the scale, which is an f16.
    return 2 * error + (1 + 2.0**-9 * 128) * step.reshape(keys.shape)


def levels() -> list[str]:
    """Feature levels that this machine can run, itself first."""
    host = host_target()
    return ["host", *(name for name in Target.levels() if host.runs(Target.level(name)))]


def random_setting(rng: np.random.Generator, n_tokens: int) -> tuple[Setting, list[int]]:
    """A way to compile and run, and sizes of steps that add up to `n_tokens`."""
    chunks: list[int] = []
    kind = rng.random()
    while (left := n_tokens - sum(chunks)) > 0:
        chunks.append(left if kind < 0.4 else 1 if kind < 0.6 else int(rng.integers(1, left + 1)))
    known = levels()
    return Setting(
        disabled=tuple(name for name in TOGGLES if rng.random() < 0.35),
        n_threads=int(rng.integers(1, 4)),
        level="host" if rng.random() < 0.6 else known[int(rng.integers(len(known)))],
        bucket=int(rng.choice([0, 0, 3])),
    ), chunks


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """A smaller case that still fails: fewer tokens, fewer outputs, ops taken away one by one."""
    for n in range(1, len(case.tokens)):
        if fails(case.first(n)):
            case = case.first(n)
            break
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """The case with one output less, or one that is made before, or with one op less: its readers
    get another value of its type, or an input in its stead."""
    graph = case.graph
    if len(graph.outputs) > 1:
        yield from (_without_rest(case, replace(graph, outputs=(v,))) for v in graph.outputs)
    for value in graph.outputs:
        producer = graph.producers.get(value)
        for before in () if producer is None else producer.operands:
            if before in graph.producers and before.type.dtype == "f32":
                yield _without_rest(case, replace(graph, outputs=(before,)))
    for i, op in reversed(list(enumerate(graph.operations))):
        rest = [o for o in graph.operations if o is not op]
        if all(v.type.dtype == "f32" and v.type.shape[0] == "T" for v in op.results):
            inputs = (*graph.inputs, *op.results)
            fed = replace(graph, inputs=inputs, operations=tuple(rest))
            if rest and not set(op.results) & set(graph.outputs):
                yield _without_rest(case, fed)
        earlier = [*graph.inputs, *(v for o in graph.operations[:i] for v in o.results)]
        same = {r: [v for v in earlier if v.type == r.type] for r in op.results}
        if all(same.values()):
            instead = {result: values[-1] for result, values in same.items()}
            moved = [replace(o, arguments=tuple(a and instead.get(a, a) for a in o.arguments))
                     for o in rest]
            outputs = tuple(instead.get(v, v) for v in graph.outputs)
            yield _without_rest(case, replace(graph, operations=tuple(moved), outputs=outputs))


def _without_rest(case: Case, graph: Graph) -> Case:
    """The case of a smaller graph: no dead code, no input that nobody reads, data for new ones."""
    graph = dead_code(graph)
    used = {v for op in graph.operations for v in op.operands} | set(graph.outputs)
    graph = replace(graph, inputs=tuple(v for v in graph.inputs if v in used))
    rng = np.random.default_rng(case.seed)
    inputs = {}
    for value in graph.inputs:
        fresh = rng.normal(size=value.type.sizes(len(case.tokens), 0)).astype(np.float32)
        inputs[value.name] = case.inputs.get(value.name, fresh)
    return replace(case, graph=graph, inputs=inputs)


def failure_of(case: Case, folder: Path, n_settings: int = 3) -> str | None:
    """What is wrong with the case, in a line; None if nothing is."""
    try:
        check_case(case, folder, n_settings)
    except Exception as error:  # whatever it is, it is a failure to report
        return f"{type(error).__name__}: {error}"
    return None


def report(case: Case, folder: Path, failure: str) -> str:
    """A failure for people: what, a shrunk graph, and how to see it again.

    A failure that does not come again, as those of threads do, is told as it was.
    """
    kind = failure.partition(":")[0]
    small = shrink(case, lambda c: (failure_of(c, folder) or "").startswith(kind))
    again = failure_of(small, folder) or f"{failure} (not every time)"
    return (f"seed {case.seed}: {again}\n\n{print_graph(small.graph)}\n"
            f"tokens {list(small.tokens)}, logits of {sorted(small.wanted)}\n"
            f"again: python -m tests.fuzz_graphs --seed {case.seed}\n")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz_graphs")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--objects", type=Path, default=Path.home() / ".cache/ignis/fuzz-objects")
    options = parser.parse_args()
    options.objects.mkdir(parents=True, exist_ok=True)
    seeds = [options.seed] if options.seed is not None else range(
        options.first, options.first + options.count)
    started, failed = time.perf_counter(), 0
    for n, seed in enumerate(seeds, start=1):
        if (failure := failure_of(random_case(seed), options.objects)) is not None:
            failed += 1
            print(report(random_case(seed), options.objects, failure), flush=True)
        if n % 1000 == 0:
            print(f"{n} graphs, {failed} failed, {time.perf_counter() - started:.0f} s", flush=True)
    print(f"{len(seeds)} graphs, {failed} failed, {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
