"""Close to float64: op by op, end to end, and on the default model against llama.cpp's logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ignis.compile import compile_model
from ignis.gguf import GGUFFile, open_gguf
from ignis.graph.ir import Operation, Value
from ignis.graph.ir.a8 import dequantize_a8, quantize_a8
from ignis.graph.ir.evaluation import Evaluation, ReferenceCache
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.ir.ops import Attend, Attention, Matmul, MatmulGroup, RopeStore
from ignis.graph.models import build_graph
from ignis.graph.passes import run_pipeline
from ignis.kernels import a8
from ignis.runtime.engine import ImperativeEngine
from ignis.runtime.step import StepBatch
from ignis.settings import Settings
from tests.compiler.bounds import bound, rope_of
from tests.converters import llama_to_qwen2
from tests.random_models import KINDS, random_models, write_random_model
from tests.runtime.engines import engine, feed, mean_kl

EPSILON = 2.0**-24  # half a unit in the last place of f32, relative
N_TOKENS = 24


@pytest.mark.parametrize(("kind", "formats"), [
    ("llama", ("q8_0", "q4_0", "q4_1")), ("qwen2", ("f32", "f16", "bf16")),
    ("qwen2", ("q4_1", "f16")), ("gemma2", ("q8_0", "f16")), ("gemma3", ("f32",)),
    ("phi3", ("q4_0",)), ("granite", ("f32",)), ("yarn", ("q8_0",)),
    ("mixtral", ("q4_0", "q8_0")), ("qwen2moe", ("f16", "f32")), ("qwen3moe", ("q8_0", "f32")),
])  # fmt: skip
def test_every_op_on_the_engines_own_inputs(
    tmp_path: Path, kind: str, formats: tuple[str, ...]
) -> None:
    """Each op, fed the bits that the engine fed it, agrees with its float64 meaning.

    A sum of n products of f32, in any order, errs by at most n * 2^-24 of the sum of their sizes;
    pointwise ops by a few units in the last place.
    """
    path = write_random_model(
        tmp_path / "m.gguf", formats=formats, rope_factors=True, tied=False, **KINDS[kind]
    )  # fmt: skip
    with open_gguf(path) as file:
        runner, _, _ = compile_model(file, Settings(cache_dir=tmp_path), engine="imperative")
        assert isinstance(runner, ImperativeEngine)
        check_every_op(runner, file)
        runner.close()


def check_every_op(runner: ImperativeEngine, file: GGUFFile) -> None:
    """Run a step and compare the result of each op with its meaning in float64."""
    ids = np.random.default_rng(0).integers(0, 297, N_TOKENS).tolist()
    batch = StepBatch(ids, [0] * N_TOKENS, range(N_TOKENS), range(0, N_TOKENS, 2))
    runner.forward(batch)
    values = _Values(runner, batch)
    for op in runner.graph.operations:
        _check(op, values, lambda name: file.array(name).astype(np.float64))


@pytest.mark.parametrize(("kind", "formats"), [
    ("llama", ("q8_0", "q4_1")), ("qwen2", ("f16",)), ("gemma2", ("q8_0",)), ("gemma3", ("f32",)),
    ("smollm3", ("q4_0", "f32")), ("phi3", ("q8_0",)), ("yarn", ("bf16",)),
])  # fmt: skip
def test_every_fused_op_on_the_engines_own_inputs(
    tmp_path: Path, kind: str, formats: tuple[str, ...]
) -> None:
    """The same behind all passes: groups, gated units, residuals, and attention on rotated keys.

    Those keys go straight to the cache and are no value; the plain graph has their bits.
    """
    path = write_random_model(tmp_path / "m.gguf", formats=formats, tied=False, **KINDS[kind])
    ids = np.random.default_rng(3).integers(0, 297, N_TOKENS).tolist()
    batch = StepBatch(ids, [0] * N_TOKENS, range(N_TOKENS), range(0, N_TOKENS, 2))
    with open_gguf(path) as file:
        plain, config, _ = compile_model(file, Settings(cache_dir=tmp_path), engine="imperative")
        assert isinstance(plain, ImperativeEngine)
        graph, _ = run_pipeline(build_graph(config, file.tensors), {"schedule_steps"})
        fused = ImperativeEngine(file, config, graph, plain.options)
        logits = [runner.forward(batch) for runner in (plain, fused)]
        assert np.array_equal(*logits)
        values, unfused = _Values(fused, batch), _Values(plain, batch)
        values.stored = {
            op.layer: (unfused.read(op.k), unfused.read(op.v))
            for op in plain.graph.operations if isinstance(op, Attention)
        }  # fmt: skip
        for op in graph.operations:
            for part in _parts(op):
                _check(part, values, lambda name: file.array(name).astype(np.float64))
        for runner in (plain, fused):
            runner.close()
    assert {"rmsnorm", "rope_store", "attend"} <= graph.kinds.keys()


def _parts(op: Operation) -> list[Operation]:
    """The ops of one result that a fused op stands for."""
    if isinstance(op, MatmulGroup):
        return [
            Matmul.create({"x": op.x, "weight": weight, "bias": bias}, {}, [result.name])
            for (weight, bias), result in zip(op.members, op.results, strict=True)
        ]
    return [replace(rope_of(op, op.q), results=op.results)] if isinstance(op, RopeStore) else [op]


class _Values:
    """What the imperative engine left in its buffers."""

    def __init__(self, runner: ImperativeEngine, batch: StepBatch) -> None:
        self.bucket = runner._bucket(len(batch.ids), len(batch.logit_rows))
        self.batch = batch
        self.stored: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def read(self, value: Value) -> NDArray[np.float64]:
        """The value as float64 [rows, width]; A8 as what its blocks stand for."""
        rows, width = value.type.sizes(len(self.batch.ids), len(self.batch.logit_rows))
        offset = self.bucket.memory_plan.offsets.get(value)
        memory = self.bucket.logits if offset is None else self.bucket.arena
        if value.type.dtype == "a8":
            q, d, _ = unpack_a8(memory.bytes[offset:], rows, width)
            return dequantize_a8(q, d)
        if value.type.dtype == "experts":  # the chosen ones stand first
            chosen = memory.view(np.int32, rows * width, offset or 0)
            return chosen.reshape(rows, width).astype(np.float64)
        flat = memory.view(np.float32, rows * width, offset or 0)
        return flat.reshape(rows, width).astype(np.float64)

    def raw(self, value: Value) -> NDArray[np.uint8]:
        return self.bucket.arena.bytes[self.bucket.memory_plan.offsets[value] :]


def unpack_a8(
    raw: NDArray[np.uint8], n_rows: int, width: int
) -> tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.int32]]:
    """q [rows, width], d and -128 * s [rows, blocks] of an A8 buffer."""
    n_blocks = width // 32
    blocks = raw[: a8.nbytes(n_rows, width)].reshape(n_blocks, n_rows, a8.BLOCK_NBYTES)
    by_row = np.ascontiguousarray(blocks.transpose(1, 0, 2))
    q = by_row[..., :32].view(np.int8).reshape(n_rows, width)
    d, n = (
        np.ascontiguousarray(by_row[..., at : at + 4]).view(dtype)[..., 0]
        for at, dtype in ((a8.D_AT, np.float32), (a8.N_AT, np.int32))
    )
    return q, d, n


def _check(op: Operation, values: _Values, weights: Any) -> None:
    batch = values.batch
    step = Evaluation(
        weights, ReferenceCache(rounded=True), np.asarray(batch.positions), np.asarray(batch.slots),
        np.asarray(batch.logit_rows), exact=False, values={},
    )  # fmt: skip
    for operand in op.operands:
        if not operand.is_weight:
            step.values[operand] = values.read(operand)
    if op.name == "quantize":
        x = step.values[op.operands[0]]
        rows = np.asarray(batch.logit_rows) if op.attributes["rows"] == "R" else slice(None)
        q, d, s = quantize_a8(x[rows])
        got_q, got_d, got_n = unpack_a8(values.raw(op.result), *q.shape)
        assert np.array_equal(got_q, q) and np.array_equal(got_d, d)
        assert np.array_equal(got_n, -128 * s)
        return
    if isinstance(op, Attend):
        step.cache.store(op.layer, 0, step.positions, *values.stored[op.layer],
                         op.kv_type or DEFAULT_KV_TYPE)  # fmt: skip
    found = op.evaluate(step)
    for result, wanted in zip(op.results, found if isinstance(found, tuple) else [found],
                              strict=True):  # fmt: skip
        error = np.abs(values.read(result) - wanted)
        exact = result.type.dtype == "experts"
        allowed = 0 if exact else _bound(op, step, wanted)
        assert (error <= allowed).all(), f"{op.name} {result}: {error.max()}"


def _bound(op: Operation, step: Evaluation, wanted: NDArray[np.float64]) -> Any:
    """The largest error that f32 may make in this op."""
    if op.name in ("matmul", "logits"):
        x, w = step[op.operand("x")], step[op.operand("weight")]  # type: ignore[index]
        if op.name == "logits" and len(x) != len(wanted):
            x = x[step.logit_rows]
        sizes = np.abs(x) @ np.abs(w).T
        return (w.shape[1] + 4) * EPSILON * (sizes + np.abs(wanted)) + 1e-30
    if op.name in ("expert_matmul", "expert_sum", "route", "row_gate"):
        return bound(op, step, wanted)
    if isinstance(op, Attention | Attend):
        # p is within n units of the scores' absolute error; values are convex combinations.
        v = np.nanmax(np.abs(step.cache.read(op.layer, 0, N_TOKENS)[1]))
        return 600 * EPSILON * v
    scale = np.abs(wanted).max(-1, keepdims=True)
    n = wanted.shape[-1] if op.name in ("normalize", "rmsnorm") else 1
    return (n + 16) * EPSILON * scale


@pytest.mark.parametrize("formats", [("f32",), ("f16",), ("bf16",)])
def test_float_models_end_to_end(tmp_path: Path, formats: tuple[str, ...]) -> None:
    """Mean KL to float64 at most 1e-5 where nothing is quantized."""
    ids = np.random.default_rng(1).integers(0, 297, 60).tolist()
    for options, path in ((a, write_random_model(tmp_path / f"{a}.gguf", architecture=a,
                                                 formats=formats, n_layers=4))
                          for a in ("llama", "qwen2")):  # fmt: skip
        with engine(path, tmp_path, engine="reference") as reference:
            exact = feed(reference, ids)
        with engine(path, tmp_path) as runner:
            assert mean_kl(exact, feed(runner, ids)) <= 1e-5, options


def test_random_models_against_float64(tmp_path: Path) -> None:
    """Shapes drawn at random: an error of wiring would show as a KL of order one."""
    for options, path in random_models(tmp_path, 10, seed=40):
        ids = np.random.default_rng(2).integers(0, 297, 30).tolist()
        with engine(path, tmp_path, engine="reference") as reference:
            exact = feed(reference, ids)
        with engine(path, tmp_path) as runner:
            limit = 1e-5 if set(options.formats) <= {"f32", "f16", "bf16"} else 2e-2
            assert mean_kl(exact, feed(runner, ids)) <= limit, options


def test_default_model_is_as_close_to_float64_as_its_peers(
    default_model: Path, tmp_path: Path
) -> None:
    """Mean KL on SmolLM2 Q4_1 at most 1.25 times the 3.4e-3 that llama.cpp has on such text."""
    with open_gguf(default_model) as file:
        from ignis.text import Tokenizer

        text = Path(__file__).read_text()[:1200]
        ids = Tokenizer.from_gguf(file).encode(text)[:256]
    with engine(default_model, tmp_path, engine="reference") as reference:
        exact = feed(reference, ids)
    with engine(default_model, tmp_path) as runner:
        assert mean_kl(exact, feed(runner, ids)) <= 1.25 * 3.4e-3


def test_default_model_against_llama_cpp(
    default_model: Path, tmp_path: Path, shared: Path
) -> None:
    """The golden prompts: the same ids, nearly always the same top token, the same greedy text."""
    golden = json.loads((shared / "golden/smollm2-135m-instruct-q4_1.json").read_text())
    with open_gguf(default_model) as file:
        from ignis.text import Tokenizer

        tokenizer = Tokenizer.from_gguf(file)
        for case in golden["cases"]:
            assert tokenizer.encode(case["text"], special=True) == case["ids"]
    agreeing, total = 0, 0
    with engine(default_model, tmp_path) as runner:
        for case in golden["cases"]:
            logits = feed(runner, case["ids"])
            top = np.asarray(case["top5_ids"])
            agreeing += int((logits.argmax(-1) == top[:, 0]).sum())
            total += len(top)
            mine = np.take_along_axis(logits, top, axis=1)
            difference = np.abs(mine - np.asarray(case["top5_logits"]))
            assert difference.mean() < 0.25, case["text"]
    assert agreeing / total >= 0.93


def test_the_same_weights_as_qwen2_say_the_same(default_model: Path, tmp_path: Path) -> None:
    """Neox rope, biases and the qwen2 lowering: SmolLM2 converted must say what it said."""
    with open_gguf(default_model) as file:
        converted = llama_to_qwen2(file, tmp_path / "qwen2.gguf")
    prompt = np.random.default_rng(4).integers(0, 40000, 12).tolist()
    said = []
    for path in (default_model, converted):
        with engine(path, tmp_path) as runner:
            logits = feed(runner, prompt)[-1]
            tokens: list[int] = []
            for position in range(len(prompt), len(prompt) + 32):
                tokens.append(int(logits.argmax()))
                logits = runner.forward(StepBatch(tokens[-1:], [0], [position], [0]))[0]
            said.append(tokens)
    assert said[0] == said[1]
