"""The arena against its bound, the peak of live bytes, on every supported model.

What would be broken: memory that nobody needs. The bound is reached to the byte for the models'
real shapes and for random ones, in every bucket that the engine plans for.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

from ignis.gguf import open_gguf
from ignis.graph.ir import Graph
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.passes import plan_memory, run_pipeline
from ignis.runtime.engine import _LOGIT_BUCKETS, _TOKEN_BUCKETS
from tests.graph.qwen_shape import QWEN2_05B, decoder_tensors
from tests.random_models import KINDS, random_models, write_random_model

BUCKETS = tuple(product(_TOKEN_BUCKETS, _LOGIT_BUCKETS))
N_LAYERS = 8  # of real shapes: layers repeat, and so do their lives


def _shape(architecture: str, n_embd: int, heads: tuple[int, int, int], n_ff: int, n_vocab: int,
           **more: object) -> ModelConfig:  # fmt: skip
    n_heads, n_kv_heads, head_dim = heads
    return QWEN2_05B._replace(
        architecture=architecture, n_layers=N_LAYERS, n_embd=n_embd, n_heads=n_heads,
        n_kv_heads=n_kv_heads, head_dim=head_dim, rope_dim=head_dim, n_ff=n_ff, n_vocab=n_vocab,
        **more,
    )  # fmt: skip


LOCAL = {"window": 512, "local_layers": frozenset(range(0, N_LAYERS, 2))}
SHAPES = {
    "SmolLM2-135M": _shape("llama", 576, (9, 3, 64), 1536, 49152),
    "Llama-3.2-1B": _shape("llama", 2048, (32, 8, 64), 8192, 128256),
    "Mistral-7B-v0.1": _shape("llama", 4096, (32, 8, 128), 14336, 32000, **LOCAL),
    "Qwen2.5-0.5B": _shape("qwen2", 896, (14, 2, 64), 4864, 151936),
    "Qwen2.5-1.5B": _shape("qwen2", 1536, (12, 2, 128), 8960, 151936),
    "Qwen3-0.6B": _shape("qwen3", 1024, (16, 8, 128), 3072, 151936),
    "gemma-2-2b": _shape("gemma2", 2304, (8, 4, 256), 9216, 256000, attention_softcap=50.0,
                         logit_softcap=30.0, embedding_scale=48.0, **LOCAL),
    "gemma-3-270m": _shape("gemma3", 640, (4, 1, 256), 2048, 262144, local_rope_base=1e4,
                           embedding_scale=math.sqrt(640), **LOCAL),
    "gemma-3-1b": _shape("gemma3", 1152, (4, 1, 256), 6912, 262144, local_rope_base=1e4,
                         embedding_scale=math.sqrt(1152), **LOCAL),
    "Phi-3-mini": _shape("phi3", 3072, (32, 32, 96), 8192, 32064),
    "granite-3.1-2b": _shape("granite", 2048, (32, 8, 64), 8192, 49155, residual_scale=0.22,
                             embedding_scale=12.0, logit_scale=8.0),
    "SmolLM3-3B": _shape("smollm3", 2048, (16, 4, 128), 11008, 128256),
}  # fmt: skip


def _at_the_bound(graph: Graph, buckets: tuple[tuple[int, int], ...] = BUCKETS) -> None:
    for n_tokens, n_logits in buckets:
        plan = plan_memory(graph, n_tokens, n_logits, outputs_in_arena=False)
        assert plan.nbytes == plan.bound_bytes, (n_tokens, n_logits)
        assert plan.private_nbytes == plan.private_bound_bytes, (n_tokens, n_logits)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["q8_0", "f16"])
def test_shapes_of_real_models(name: str, dtype: str) -> None:
    config = SHAPES[name]
    graph, _ = run_pipeline(build_graph(config, decoder_tensors(config, dtype)))
    _at_the_bound(graph)


@pytest.mark.parametrize("kind", KINDS)
def test_small_models_of_every_kind(tmp_path: Path, kind: str) -> None:
    """Odd widths, where rounding to cache lines would show."""
    for formats in (("q8_0",), ("f32", "q4_0")):
        path = write_random_model(tmp_path / f"{formats[0]}.gguf", formats=formats, **KINDS[kind])
        with open_gguf(path) as file:
            config = ModelConfig.from_gguf(file)
            graph, _ = run_pipeline(build_graph(config, file.tensors))
        _at_the_bound(graph)


def test_random_shapes(tmp_path: Path) -> None:
    for _, path in random_models(tmp_path, 12, seed=300):
        with open_gguf(path) as file:
            graph, _ = run_pipeline(build_graph(ModelConfig.from_gguf(file), file.tensors))
        _at_the_bound(graph, ((1, 1), (16, 8), (512, 1)))


def test_passes_switched_off_cost_at_most_two_percent() -> None:
    """Other lives, other puzzles: not always solved to the byte, but never far off."""
    naive = build_graph(QWEN2_05B, decoder_tensors(QWEN2_05B))
    for off in ("fuse_norm", "fuse_qkv", "fuse_residual", "rope_store", "schedule_steps"):
        graph, _ = run_pipeline(naive, {off})
        for n_tokens, n_logits in ((1, 1), (128, 8)):
            plan = plan_memory(graph, n_tokens, n_logits, outputs_in_arena=False)
            assert plan.nbytes <= 1.02 * plan.bound_bytes, off
