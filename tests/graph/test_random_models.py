"""Random files of every architecture: lowering and interpreter against a plain forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from tests.random_models import CONTROL, KINDS, RandomModel, random_options, vocabulary

Array = np.ndarray[Any, Any]
IDS = [72, 101, 108, 108, 111, 299, 0, 256, 280, 17, 17, *range(60, 78)]


@pytest.fixture(params=[*range(12), *KINDS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RandomModel, GGUFFile]]:
    which = request.param
    if isinstance(which, int):
        options = random_options(which)
    else:
        options = RandomModel(formats=("q8_0", "f32"), seed=3, **KINDS[which])
    with open_gguf(options.write(tmp_path / "random.gguf")) as file:
        yield options, file


def _logits(graph: Graph, file: GGUFFile, **options: Any) -> Array:
    n = len(IDS)
    x = file.array("token_embd.weight")[IDS]
    table = np.arange(n), np.zeros(n, dtype=int), np.arange(n)
    return interpret(graph, {"x": x}, file.array, ReferenceCache(), *table, **options)[0]


def _yarn(theta: Array, keys: Mapping[str, Any], base: float, n_rot: int) -> tuple[Array, float]:
    """Frequencies and growth as YaRN's paper has them, in float64."""
    pairs = np.arange(n_rot // 2)
    n_ctx, factor = keys["rope.scaling.original_context_length"], keys["rope.scaling.factor"]

    def pair(n_turns: float) -> float:
        return float(n_rot * np.log(n_ctx / (n_turns * 2 * np.pi)) / (2 * np.log(base)))

    low, high = max(0, np.floor(pair(32))), min(n_rot - 1, np.ceil(pair(1)))
    ramp = np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    return theta / factor * ramp + theta * (1 - ramp), 1 + 0.1 * np.log(factor)


def _turns(o: RandomModel, file: GGUFFile, layer: int, n_tokens: int) -> Array:
    """The complex number that each pair of each token is multiplied by: [T, 1, n_rot/2]."""
    n_rot = o.rope_dim or o.head_dim
    is_local = o.architecture == "gemma3" and layer % 6 != 5
    base = 10000.0 if is_local else float(np.float32(o.rope_base))
    theta = base ** (-np.arange(0, n_rot, 2) / n_rot)
    kind, growth = o.keys.get("rope.scaling.type"), 1.0
    if o.rope_factors:
        theta = theta / file.array("rope_freqs.weight")
    if kind == "longrope":
        theta = theta / file.array("rope_factors_short.weight")
        growth = float(np.float32(o.keys["rope.scaling.attn_factor"]))
    if kind == "linear" and not is_local:
        theta = theta / o.keys["rope.scaling.factor"]
    if kind == "yarn":
        theta, growth = _yarn(theta, o.keys, base, n_rot)
    turns: Array = growth * np.exp(1j * np.arange(n_tokens)[:, None] * theta)[:, None, :]
    return turns


def _plain_forward(o: RandomModel, file: GGUFFile, ids: list[int]) -> Array:
    """The model as papers write it: whole sequence, no cache, complex numbers for rope."""

    def key(name: str, default: float) -> float:
        return float(np.float32(o.keys[name])) if name in o.keys else default

    def capped(x: Array, name: str) -> Array:
        cap = key(name, 0)
        y: Array = cap * np.tanh(x / cap) if cap else x
        return y

    def w(name: str) -> Array:
        return file.array(name).astype(np.float64)

    def linear(x: Array, name: str) -> Array:
        y = x @ w(f"{name}.weight").T
        return y + w(f"{name}.bias") if f"{name}.bias" in file.tensors else y

    def norm(x: Array, name: str) -> Array:
        eps = float(np.float32(1e-5))
        y: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w(f"{name}.weight")
        return y

    n_rot = o.rope_dim or o.head_dim
    is_neox = o.architecture not in ("llama", "granite", "smollm3")

    def rope(x: Array, turn: Array) -> Array:
        x = x.copy()
        rotated = x[..., :n_rot]
        pairs = (
            rotated.reshape(*x.shape[:2], 2, -1).swapaxes(2, 3)
            if is_neox
            else rotated.reshape(*x.shape[:2], -1, 2)
        )
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        both = np.stack([turned.real, turned.imag], axis=2 if is_neox else 3)
        x[..., :n_rot] = both.reshape(*x.shape[:2], n_rot)
        return x

    def heads(x: Array, i: int) -> tuple[Array, Array, Array]:
        n_query, n_key = o.n_heads * o.head_dim, o.n_kv_heads * o.head_dim
        blk = f"blk.{i}"
        if o.architecture == "phi3":
            flat = np.split(linear(x, f"{blk}.attn_qkv"), [n_query, n_query + n_key], axis=1)
        else:
            flat = [linear(x, f"{blk}.attn_{name}") for name in "qkv"]
        q, k, v = (part.reshape(len(ids), -1, o.head_dim) for part in flat)
        if o.has_head_norms:
            q, k = norm(q, f"{blk}.attn_q_norm"), norm(k, f"{blk}.attn_k_norm")
        if o.architecture != "smollm3" or i % 4 != 3:
            turn = _turns(o, file, i, len(ids))
            q, k = rope(q, turn), rope(k, turn)
        return q, k, v

    def gated(x: Array, blk: str) -> Array:
        if o.architecture == "phi3":
            gate, up = np.split(linear(x, f"{blk}.ffn_up"), 2, axis=1)
        else:
            gate, up = linear(x, f"{blk}.ffn_gate"), linear(x, f"{blk}.ffn_up")
        if o.is_gemma:
            inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            y: Array = gate * (1 + np.tanh(inner)) / 2 * up
        else:
            y = gate / (1 + np.exp(-gate)) * up
        return y

    def swiglu(x: Array, names: str, at: Any = slice(None)) -> Array:
        gate, up = (x @ w(names.format(name))[at].T for name in ("gate", "up"))
        y: Array = (gate / (1 + np.exp(-gate)) * up) @ w(names.format("down"))[at].T
        return y

    def mixture(x: Array, blk: str) -> Array:
        """Token by token, expert by expert."""
        scores = x @ w(f"{blk}.ffn_gate_inp.weight").T
        p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for t, row in enumerate(x):
            best = np.argsort(-p[t])[: o.n_used]
            norm = o.keys.get("expert_weights_norm", o.architecture != "qwen2moe")
            total = p[t, best].sum() if norm else 1.0
            for e in best:
                weight = p[t, e] / total * key("expert_weights_scale", 1)
                y[t] += weight * swiglu(row, f"{blk}.ffn_{{}}_exps.weight", e)
        if o.has_shared_expert:
            gate = 1 / (1 + np.exp(-x @ w(f"{blk}.ffn_gate_inp_shexp.weight")))
            y += gate[:, None] * swiglu(x, f"{blk}.ffn_{{}}_shexp.weight")
        return y

    def behind(branch: Array, name: str) -> Array:
        return norm(branch, name) if o.is_gemma else branch * key("residual_scale", 1)

    x = w("token_embd.weight")[ids] * key("embedding_scale", 1)
    if o.is_gemma:
        x = x * np.sqrt(o.n_embd)
    behind_own = np.arange(len(ids))[:, None] - np.arange(len(ids))
    for i in range(o.n_layers):
        blk = f"blk.{i}"
        q, k, v = heads(norm(x, f"{blk}.attn_norm"), i)
        k, v = (np.repeat(a, o.n_heads // o.n_kv_heads, axis=1) for a in (k, v))
        scores = np.einsum("thc,shc->hts", q, k) * key("attention.scale", o.head_dim**-0.5)
        seen = behind_own >= 0
        every = {"gemma2": 2, "gemma3": 6}.get(o.architecture, 0)
        if not every or i % every != every - 1:
            seen &= behind_own < o.keys.get("attention.sliding_window", len(ids))
        weights = np.exp(np.where(seen, capped(scores, "attn_logit_softcapping"), -np.inf))
        attended = np.einsum("hts,shc->thc", weights / weights.sum(-1, keepdims=True), v)
        branch = linear(attended.reshape(len(ids), -1), f"{blk}.attn_output")
        x = x + behind(branch, f"{blk}.post_attention_norm")
        normed = norm(x, f"{blk}.ffn_norm")
        branch = (
            mixture(normed, blk)
            if o.n_experts
            else linear(gated(normed, blk), f"{blk}.ffn_down")
        )
        x = x + behind(branch, f"{blk}.post_ffw_norm")
    output = "token_embd.weight" if o.tied else "output.weight"
    logits = norm(x, "output_norm") @ w(output).T / key("logit_scale", 1)
    return capped(logits, "final_logit_softcapping")


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
            assert plan.nbytes == plan.bound_bytes


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
    """A8 off by a factor or a block would be far away, not a percent.

    Where a router chooses another expert for it, that is far away too: then most tokens count.
    """
    options, file = model
    graph, _ = run_pipeline(build_graph(ModelConfig.from_gguf(file), file.tensors))
    exact, rounded = _logits(graph, file), _logits(graph, file, exact=False)
    differences = np.abs(rounded - exact).max(axis=1)
    difference = np.median(differences) if options.n_experts else differences.max()
    assert difference < 0.1 * exact.std() * 5
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
