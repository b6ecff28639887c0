"""Lowering: the graphs of known architectures, and refusal of what a file must not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.ir import parse_graph, print_graph, verify
from ignis.graph.ir.rope import RopeScaling
from ignis.graph.models import ARCHITECTURES, ModelConfig, build_graph
from ignis.graph.models.experts import Experts
from tests.graph.qwen_shape import QWEN2_05B, decoder_tensors, tensor

TINY = QWEN2_05B._replace(
    n_layers=1, n_embd=64, n_heads=2, n_kv_heads=1, head_dim=32, n_ff=96, n_vocab=300,
    rope_dim=32, source="tiny.gguf",
)  # fmt: skip

SOME_EXPERTS = Experts(n_experts=4, n_used=2)

METADATA: dict[str, object] = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 1,
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 64,
    "qwen2.feed_forward_length": 96,
    "qwen2.attention.head_count": 2,
    "qwen2.attention.head_count_kv": 1,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen2.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["a"] * 290,
}


def _file(**changes: object) -> Any:
    """An open file; `__` stands for a dot, None removes a key."""
    metadata = dict(METADATA)
    for key, value in changes.items():
        metadata["qwen2." + key.replace("__", ".")] = value
    kept = {key: value for key, value in metadata.items() if value is not None}
    return SimpleNamespace(path="tiny.gguf", metadata=kept, tensors=decoder_tensors(TINY))


def test_config_of_a_file() -> None:
    assert ModelConfig.from_gguf(_file()) == TINY


def test_defaults_where_the_file_says_nothing() -> None:
    config = ModelConfig.from_gguf(_file(attention__head_count_kv=None, rope__freq_base=None))
    assert config.n_kv_heads == config.n_heads == 2
    assert config.rope_base == 10000.0
    wide = ModelConfig.from_gguf(_file(attention__key_length=48, attention__value_length=48))
    assert (wide.head_dim, wide.rope_dim) == (48, 48)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "bad qwen2.block_count: got nothing, wanted an integer from 1"),
        ("block_count", 0, "bad qwen2.block_count: got 0"),
        ("block_count", -3, "bad qwen2.block_count: got -3"),
        ("block_count", 2**40, "bad qwen2.block_count: got 1099511627776"),
        ("block_count", 2**31 - 1, "bad qwen2.block_count: .* an integer from 1 to 65536"),
        ("expert_count", np.array([], np.float32), "qwen2.expert_count: got a ndarray"),
        ("block_count", 1.0, "bad qwen2.block_count: got 1.0"),
        ("block_count", True, "bad qwen2.block_count: got True"),
        ("block_count", "x" * 999, "bad qwen2.block_count: got 'xxx"),
        ("attention__head_count_kv", np.array([1, 2]), "head_count_kv: got a ndarray"),
        ("attention__head_count_kv", 3, "wanted a divisor of head_count 2"),
        ("attention__head_count", 3, "head_count: got 3|head_count_kv"),
        ("attention__head_count", 128, "wanted a divisor of embedding_length 64"),
        ("attention__layer_norm_rms_epsilon", None, "epsilon: got nothing"),
        ("attention__layer_norm_rms_epsilon", float("nan"), "epsilon: got nan"),
        ("rope__freq_base", 0.0, "freq_base: got 0.0"),
        ("rope__freq_base", float("inf"), "freq_base: got inf"),
        ("rope__dimension_count", 34, "wanted an even number up to 32"),
        ("rope__dimension_count", 15, "wanted an even number up to 32"),
    ],
)
def test_senseless_values_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        ModelConfig.from_gguf(_file(**{key: value}))
    assert str(caught.value).startswith("tiny.gguf: ")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope__scaling__type", "dynamic"),
        ("rope__scaling__yarn_ext_factor", 0.5),
        ("rope__freq_base_swa", 1e4),
        ("expert_count", 8),
        ("attention__sliding_window", 4096),
        ("attention__causal", False),
        ("attention__clamp_kqv", 8.0),
        ("attention__scale", 0.1),
        ("attention__value_length", 16),
        ("logit_scale", 0.5),
        ("embedding_scale", 12.0),
        ("residual_scale", 0.2),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", np.array([1.0])),
    ],
)
def test_features_are_refused_never_ignored(key: str, value: object) -> None:
    """A model that runs but computes something else is worse than one that does not run."""
    with pytest.raises(UnsupportedModelError, match=key.replace("__", r"\.")):
        ModelConfig.from_gguf(_file(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope__scaling__type", "none"),
        ("rope__scaling__factor", 1.0),
        ("expert_count", 0),
        ("attention__sliding_window", 32768),
        ("attention__causal", True),
    ],
)
def test_features_that_change_nothing_are_taken(key: str, value: object) -> None:
    assert ModelConfig.from_gguf(_file(**{key: value})) == TINY


def test_linear_and_yarn_scaling_are_read() -> None:
    """The names that converters used over time; a factor alone means linear."""
    for changes in (
        {"rope__scale_linear": 4.0}, {"rope__scaling__factor": 4.0},
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    ):  # fmt: skip
        assert ModelConfig.from_gguf(_file(**changes)).rope_scaling == RopeScaling(4.0)
    yarn = {
        "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 8192, "rope__freq_base": 10000.0,
    }  # fmt: skip
    scaling = ModelConfig.from_gguf(_file(**yarn)).rope_scaling
    # 32 ln(8192 / (32 * 2 pi)) / (2 ln 10000) = 6.44, and with 1 in place of 32 it is 12.46.
    assert (scaling.ramp_low, scaling.ramp_high) == (6, 13)
    assert scaling.magnitude == pytest.approx(1 + 0.1 * np.log(4))
    stronger = ModelConfig.from_gguf(_file(**yarn, rope__scaling__attn_factor=2.0))
    assert stronger.rope_scaling.magnitude == 2 * scaling.magnitude
    for kind in ("yarn", "linear"):
        with pytest.raises(ModelFileError, match=r"bad qwen2.rope.scaling.factor"):
            ModelConfig.from_gguf(_file(rope__scaling__type=kind, rope__scaling__factor=None))


def _other(architecture: str, **changes: object) -> ModelConfig:
    """The config of a file that says the same, for another architecture."""
    file = _file(**changes)
    metadata = {k.replace("qwen2.", f"{architecture}.", 1): v for k, v in file.metadata.items()}
    file.metadata = metadata | {"general.architecture": architecture}
    return ModelConfig.from_gguf(file)


def test_gemma_says_little_and_means_much() -> None:
    """Embedding scale, local layers and rope bases are not in the file."""
    window = {"attention__sliding_window": 512, "block_count": 12}
    gemma3 = _other("gemma3", **window)
    assert gemma3.embedding_scale == 8.0 and gemma3.window == 512
    assert sorted(gemma3.local_layers) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert (gemma3.local_rope_base, gemma3.rope_base) == (10000.0, 1e6)
    assert _other("gemma3", **window, rope__freq_base_swa=500.0).local_rope_base == 500
    gemma2 = _other("gemma2", **window, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    assert sorted(gemma2.local_layers) == [0, 2, 4, 6, 8, 10]
    assert (gemma2.attention_softcap, gemma2.logit_softcap) == (50.0, 30.0)
    assert gemma2.score_scale == 1 / np.sqrt(32)
    largest = _other("gemma2", block_count=46, attention__key_length=16,
                     attention__value_length=16)  # fmt: skip
    assert largest.score_scale == 1 / np.sqrt(64 // 2)
    said = {"attention__sliding_window_pattern": np.array([True, False, False, True])}
    assert _other("gemma3", **{**window, "block_count": 4}, **said).local_layers == {0, 3}
    assert _other("gemma3", **window, attention__sliding_window_pattern=2).local_layers == set(
        range(0, 12, 2))  # fmt: skip
    for bad in (np.array([True]), np.arange(12), 0, "x"):
        with pytest.raises(ModelFileError, match="sliding_window_pattern"):
            _other("gemma3", **window, attention__sliding_window_pattern=bad)
    assert _other("gemma3", attention__sliding_window=32768).window is None


def test_mistral_and_granite_keys() -> None:
    assert _other("llama", attention__sliding_window=4096).local_layers == {0}
    granite = _other("granite", embedding_scale=12.0, residual_scale=0.22, logit_scale=8.0,
                     attention__scale=0.015625)  # fmt: skip
    assert (granite.embedding_scale, granite.residual_scale) == (12.0, 0.22)
    assert (granite.logit_scale, granite.score_scale) == (0.125, 0.015625)
    with pytest.raises(UnsupportedModelError, match=r"granite.rope.scaling.finetuned: got False"):
        _other("granite", rope__scaling__finetuned=False)


def _moe_file(architecture: str, **changes: object) -> Any:
    """A file of that architecture with experts."""
    named = {"expert_count": 4, "expert_used_count": 2} | changes
    plain = _file(**named).metadata
    metadata = {key.replace("qwen2", architecture): value for key, value in plain.items()}
    metadata["general.architecture"] = architecture
    return SimpleNamespace(path="tiny.gguf", metadata=metadata, tensors=decoder_tensors(TINY))


def _with_experts(architecture: str) -> ModelConfig:
    """The tiny model with four experts, two of which are used."""
    config = TINY._replace(architecture=architecture, experts=SOME_EXPERTS._replace(n_ff=32))
    return ARCHITECTURES[architecture].complete(config)


def test_experts_of_a_file() -> None:
    """What files leave unsaid depends on the architecture; what they say goes before."""
    def experts(architecture: str, **changes: object) -> Experts:
        found = ModelConfig.from_gguf(_moe_file(architecture, **changes)).experts
        assert found is not None
        return found

    plain = SOME_EXPERTS._replace(n_ff=48)
    assert experts("llama") == plain._replace(n_ff=96, normalized=True)
    assert experts("qwen3moe") == plain._replace(normalized=True)
    assert experts("qwen2moe") == plain._replace(normalized=False, n_ff_shared=96)
    said = {"expert_weights_norm": True, "expert_weights_scale": 2.5,
            "expert_feed_forward_length": 32, "expert_gating_func": 1}  # fmt: skip
    wanted = plain._replace(n_ff=32, normalized=True, scale=2.5)
    assert experts("qwen3moe", **said) == wanted
    said |= {"expert_shared_feed_forward_length": 64, "expert_shared_count": 1}
    assert experts("qwen2moe", **said) == wanted._replace(n_ff_shared=64)
    assert experts("qwen3moe", feed_forward_length=None, expert_feed_forward_length=32).n_ff == 32


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("llama", "expert_used_count", 5, "got 5, wanted at most expert_count 4"),
        ("llama", "expert_used_count", None, "expert_used_count: got nothing"),
        ("llama", "expert_used_count", 0, "expert_used_count: got 0"),
        ("llama", "expert_weights_norm", 2.0, "expert_weights_norm: got 2.0, wanted true or false"),
        ("qwen2moe", "expert_weights_scale", -1.0, "expert_weights_scale: got -1.0"),
        ("qwen2moe", "expert_count", 0, "expert_count: got no experts"),
        ("qwen3moe", "expert_count", None, "expert_count: got no experts"),
        ("llama", "expert_gating_func", 2, "unsupported llama.expert_gating_func: got 2, wanted 1"),
        ("qwen3moe", "expert_group_count", 8, "unsupported qwen3moe.expert_group_count: got 8"),
        ("qwen3moe", "expert_shared_count", 1, "unsupported qwen3moe.expert_shared_count: got 1"),
        ("qwen2moe", "leading_dense_block_count", 1, "leading_dense_block_count: got 1"),
        ("llama", "expert_shared_feed_forward_length", 64, "expert_shared_feed_forward_length"),
    ],
)
def test_bad_experts_are_refused(
    architecture: str, key: str, value: object, message: str
) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        ModelConfig.from_gguf(_moe_file(architecture, **{key: value}))
    assert str(caught.value).startswith("tiny.gguf: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe"])
def test_every_tensor_of_experts_is_needed_in_its_shape(architecture: str) -> None:
    config = _with_experts(architecture)
    tensors = decoder_tensors(config)
    build_graph(config, tensors)
    names = [name for name in tensors if ".ffn_" in name and "norm" not in name]
    assert len(names) == (8 if architecture == "qwen2moe" else 4)
    for name in names:
        shape = tensors[name].shape
        for wrong in ((*shape[:-1], shape[-1] + 32), (shape[0] + 1, *shape[1:])):
            bad = tensors | {name: tensor(*wrong)}
            with pytest.raises(ModelFileError, match=f"{name} has the wrong shape: got"):
                build_graph(config, bad)
        del (missing := dict(tensors))[name]
        with pytest.raises(ModelFileError, match=f"tiny.gguf: tensor {name} is missing: wanted"):
            build_graph(config, missing)


def test_experts_of_old_files_are_refused_by_name() -> None:
    """The first Mixtral files keep each expert apart."""
    config = _with_experts("llama")
    tensors = {
        name.replace("_exps", f".{e}"): tensor(*t.shape[1:]) if "_exps" in name else t
        for name, t in decoder_tensors(config).items() for e in range(4)
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.ffn_gate\.0\.weight holds a"):
        build_graph(config, tensors)


def test_the_gate_of_a_shared_expert_may_be_a_matrix_of_one_row() -> None:
    config = _with_experts("qwen2moe")
    name = "blk.0.ffn_gate_inp_shexp.weight"
    graph = build_graph(config, decoder_tensors(config) | {name: tensor(1, 64)})
    assert graph.weights[name].type.shape == (1, 64)


def test_phi3_takes_the_factors_of_its_context() -> None:
    """Short contexts the short ones, longer contexts the long ones; both must be there."""
    file = {"rope__scaling__type": "longrope", "rope__scaling__original_context_length": 4096,
            "rope__scaling__attn_factor": 1.19, "context_length": 32768}  # fmt: skip
    phi3 = _other("phi3", **file)
    assert phi3.rope_scaling == RopeScaling(magnitude=1.19)
    factors = {f"rope_factors_{n}.weight": tensor(16) for n in ("short", "long")}
    tensors = decoder_tensors(phi3) | factors
    for n_ctx, wanted in ((4096, "short"), (4097, "long")):
        graph = build_graph(phi3.for_context(n_ctx), tensors)
        used = {op.operand("factors").name for op in graph.operations if op.name == "rope"}
        assert used == {f"rope_factors_{wanted}.weight"}
    del tensors["rope_factors_short.weight"]
    with pytest.raises(ModelFileError, match=r"rope_factors_short.weight is missing"):
        build_graph(phi3, tensors)


def test_unknown_architectures_are_listed() -> None:
    file = _file()
    for name in ("gpt-neox", 3, None):
        file.metadata["general.architecture"] = name
        with pytest.raises(ModelFileError, match="architecture"):
            ModelConfig.from_gguf(file)
    with pytest.raises(UnsupportedModelError, match="got 'mamba', wanted llama or qwen2 or"):
        build_graph(TINY._replace(architecture="mamba"), decoder_tensors(TINY))


def test_fewer_rows_than_tokens() -> None:
    file = _file()
    file.metadata["tokenizer.ggml.tokens"] = ["a"] * 301
    with pytest.raises(ModelFileError, match="fewer rows than there are tokens: got 300"):
        ModelConfig.from_gguf(file)
    file.tensors["token_embd.weight"] = tensor(300)
    with pytest.raises(ModelFileError, match="missing or misshapen"):
        ModelConfig.from_gguf(file)


@pytest.mark.parametrize("name", decoder_tensors(TINY))
def test_every_tensor_is_needed_in_its_shape(name: str) -> None:
    tensors = decoder_tensors(TINY)
    first = tensors.pop(name)
    with pytest.raises(ModelFileError, match=rf"tiny.gguf: tensor {name} is missing: wanted"):
        build_graph(TINY, tensors)
    tensors[name] = tensor(*first.shape[:-1], first.shape[-1] + 32)
    with pytest.raises(ModelFileError, match=rf"tiny.gguf: tensor {name} has the wrong shape"):
        build_graph(TINY, tensors)
    tensors[name] = tensor(*first.shape, dtype="q9_9")
    with pytest.raises(UnsupportedModelError, match="unsupported type: got q9_9, wanted f32"):
        build_graph(TINY, tensors)


def test_a_tensor_without_a_place_is_refused() -> None:
    tensors = decoder_tensors(TINY) | {"blk.0.attn_q_norm.weight": tensor(32)}
    with pytest.raises(UnsupportedModelError, match=r"attn_q_norm\.weight has no place in"):
        build_graph(TINY, tensors)


def test_output_tied_or_not() -> None:
    tied = build_graph(TINY, decoder_tensors(TINY))
    assert tied.operations[-1].operands[1].weight_name == "token_embd.weight"
    untied = TINY._replace(tied_output=False)
    graph = build_graph(untied, decoder_tensors(untied))
    assert graph.operations[-1].operands[1].weight_name == "output.weight"


def test_frequency_factors_reach_every_rope() -> None:
    llama = TINY._replace(architecture="llama", rope_style="interleaved")
    graph = build_graph(llama, decoder_tensors(llama) | {"rope_freqs.weight": tensor(16)})
    ropes = [op for op in graph.operations if op.name == "rope"]
    assert len(ropes) == 2
    assert all(op.operand("factors") is not None for op in ropes)
    assert all(op.attributes["style"] == "interleaved" for op in ropes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_verify_and_round_trip(architecture: str) -> None:
    style = ARCHITECTURES[architecture].rope_style
    config = TINY._replace(architecture=architecture, rope_style=style)
    if architecture.endswith("moe"):
        config = _with_experts(architecture)._replace(rope_style=style)
    graph = build_graph(config, decoder_tensors(config))
    verify(graph)
    assert parse_graph(print_graph(graph)) == graph
    # Beside llama's: norms of heads, norms behind branches; parts of two matmuls for five matmuls.
    # With experts: router and route more, and the sum is an op with the residual; a shared expert
    # takes its own five, the gate of its row and a sum.
    more = {"qwen3": 4, "gemma2": 4, "gemma3": 8, "phi3": 2, "qwen3moe": 4 + 1, "qwen2moe": 1 + 7}
    assert len(graph.operations) == 18 + 3 + more.get(architecture, 0)
