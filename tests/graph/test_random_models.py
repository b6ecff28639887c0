"""Random files of both architectures: lowering and interpreter against a plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ignis.gguf import GGUFFile, open_gguf
from ignis.graph.ir import Graph, parse_graph, print_graph, verify
from ignis.graph.ir.interpreter import ReferenceCache, interpret
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import plan_memory, run_pipeline
from ignis.text import Tokenizer
from tests.random_models import CONTROL, RandomModel, random_options, vocabulary

Array = np.ndarray[Any, Any]
IDS = [72, 101, 108, 108, 111, 299, 0, 256, 280, 17, 17]


@pytest.fixture(params=range(12))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RandomModel, GGUFFile]]:
    options = random_options(request.param)
    with open_gguf(options.write(tmp_path / "random.gguf")) as file:
        yield options, file


def _logits(graph: Graph, file: GGUFFile, **options: Any) -> Array:
    n = len(IDS)
    x = file.array("token_embd.weight")[IDS]
    table = np.arange(n), np.zeros(n, dtype=int), np.arange(n)
    return interpret(graph, {"x": x}, file.array, ReferenceCache(), *table, **options)[0]


def _plain_forward(o: RandomModel, file: GGUFFile, ids: list[int]) -> Array:
    """The model as papers write it: whole sequence, no cache, complex numbers for rope."""

    def w(name: str) -> Array:
        return file.array(name).astype(np.float64)

    def linear(x: Array, name: str) -> Array:
        y = x @ w(f"{name}.weight").T
        return y + w(f"{name}.bias") if f"{name}.bias" in file.tensors else y

    def norm(x: Array, name: str) -> Array:
        eps = float(np.float32(1e-5))
        y: Array = x / np.sqrt((x**2).mean(1, keepdims=True) + eps) * w(f"{name}.weight")
        return y

    n_rot = o.rope_dim or o.head_dim
    theta = float(np.float32(o.rope_base)) ** (-np.arange(0, n_rot, 2) / n_rot)
    if o.rope_factors:
        theta = theta / w("rope_freqs.weight")
    turn = np.exp(1j * np.arange(len(ids))[:, None] * theta)[:, None, :]

    def rope(x: Array) -> Array:
        x = x.reshape(len(ids), -1, o.head_dim).copy()
        rotated = x[..., :n_rot]
        pairs = (
            rotated.reshape(*x.shape[:2], 2, -1).swapaxes(2, 3)
            if o.architecture == "qwen2"
            else rotated.reshape(*x.shape[:2], -1, 2)
        )
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        both = np.stack([turned.real, turned.imag], axis=2 if o.architecture == "qwen2" else 3)
        x[..., :n_rot] = both.reshape(*x.shape[:2], n_rot)
        return x

    x = w("token_embd.weight")[ids]
    mask = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for i in range(o.n_layers):
        h = norm(x, f"blk.{i}.attn_norm")
        q, k = rope(linear(h, f"blk.{i}.attn_q")), rope(linear(h, f"blk.{i}.attn_k"))
        v = linear(h, f"blk.{i}.attn_v").reshape(k.shape)
        k, v = (np.repeat(a, o.n_heads // o.n_kv_heads, axis=1) for a in (k, v))
        scores = np.exp(np.einsum("thc,shc->hts", q, k) / np.sqrt(o.head_dim) + mask)
        attended = np.einsum("hts,shc->thc", scores / scores.sum(-1, keepdims=True), v)
        x = x + linear(attended.reshape(len(ids), -1), f"blk.{i}.attn_output")
        h = norm(x, f"blk.{i}.ffn_norm")
        gate = linear(h, f"blk.{i}.ffn_gate")
        gated = gate / (1 + np.exp(-gate)) * linear(h, f"blk.{i}.ffn_up")
        x = x + linear(gated, f"blk.{i}.ffn_down")
    output = "token_embd.weight" if o.tied else "output.weight"
    logits: Array = norm(x, "output_norm") @ w(output).T
    return logits


def test_graph_and_optimised_graph_compute_the_model(model: tuple[RandomModel, GGUFFile]) -> None:
    options, file = model
    graph = build_graph(ModelConfig.from_gguf(file), file.tensors)
    optimised, _ = run_pipeline(graph, check=True)
    verify(optimised, legalized=True)
    assert parse_graph(print_graph(optimised)) == optimised
    wanted = _plain_forward(options, file, IDS)
    assert wanted.std() > 0.1, "logits too flat to tell anything"
    np.testing.assert_allclose(_logits(graph, file), wanted, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(_logits(optimised, file), wanted, rtol=1e-8, atol=1e-9)


def test_plans_reach_the_bound(model: tuple[RandomModel, GGUFFile]) -> None:
    _, file = model
    graph, _ = run_pipeline(build_graph(ModelConfig.from_gguf(file), file.tensors))
    for n_tokens, n_logits in ((1, 1), (5, 1), (64, 64)):
        for outside in (False, True):
            plan = plan_memory(graph, n_tokens, n_logits, outputs_in_arena=not outside)
            assert plan.nbytes <= plan.bound_bytes + 64, "more than alignment costs"


def test_token_by_token_equals_the_whole_prompt(model: tuple[RandomModel, GGUFFile]) -> None:
    _, file = model
    graph = build_graph(ModelConfig.from_gguf(file), file.tensors)
    cache, x = ReferenceCache(), file.array("token_embd.weight")[IDS]
    one_by_one = [
        interpret(graph, {"x": x[i : i + 1]}, file.array, cache, *np.array([[i], [5], [0]]))[0][0]
        for i in range(len(IDS))
    ]
    np.testing.assert_allclose(one_by_one, _logits(graph, file), rtol=1e-9, atol=1e-10)


def test_rounding_activations_costs_little(model: tuple[RandomModel, GGUFFile]) -> None:
    """A8 off by a factor or a block would be far away, not a percent."""
    _, file = model
    graph, _ = run_pipeline(build_graph(ModelConfig.from_gguf(file), file.tensors))
    exact, rounded = _logits(graph, file), _logits(graph, file, exact=False)
    assert np.abs(rounded - exact).max() < 0.1 * exact.std() * 5
    assert ("quantize" in graph.kinds) == (not np.array_equal(rounded, exact))


def test_the_vocabulary_works(tmp_path: Path) -> None:
    path = RandomModel().write(tmp_path / "m.gguf")
    assert len(vocabulary()) == len(set(vocabulary())) == 300
    with open_gguf(path) as file:
        tokenizer = Tokenizer.from_gguf(file)
        ids = tokenizer.encode("the thing and\n\nthe ünïcode 🚀")
        assert max(ids) >= 256, "no merge was used"
        assert tokenizer.decode(ids) == "the thing and\n\nthe ünïcode 🚀"
        assert tokenizer.encode("<|im_start|>", special=True) == [vocabulary().index(CONTROL[1])]


def test_files_are_reproducible(tmp_path: Path) -> None:
    first, second = (random_options(3).write(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
