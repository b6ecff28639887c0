"""If these fail, a file that Ignis calls Q4_K_M is not the mix that users know by that name."""

from __future__ import annotations

import json

import pytest

from ignis.errors import UsageError
from ignis.gguf import open_gguf
from ignis.quantize.mix import (
    ALIASES,
    MIXES,
    ModelFacts,
    fallback,
    find_mix,
    is_quantized,
    wanted_format,
)
from ignis.quantize.source import GGUFSource
from tests.quantize.mixes import GOLDEN, SKELETONS, by_role

CHOICES = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("model", SKELETONS)
def test_each_tensor_has_the_format_that_llama_cpp_gives_it(model, tmp_path):
    """By the names and shapes of whole models, and by what their files say of themselves."""
    with open_gguf(SKELETONS[model].write(tmp_path / "m.gguf")) as file:
        source = GGUFSource(file)
    for name, mix in MIXES.items():
        if name == "mxfp4" and not source.facts.n_experts:
            continue    # llama.cpp has no such type for dense models
        ours = by_role((t.name, fallback(wanted_format(t.name, t.shape, mix, source.facts),
                                         t.shape[-1])) for t in source.tensors)
        assert ours == CHOICES[model][name], name


def test_mxfp4_of_a_dense_model_is_mxfp4():
    facts = ModelFacts(n_layers=2, tied=False)
    mix = find_mix("mxfp4")
    assert wanted_format("blk.0.ffn_up.weight", (64, 64), mix, facts) == "mxfp4"
    assert wanted_format("token_embd.weight", (64, 64), mix, facts) == "q8_0"


def test_pure_has_one_format():
    mix, facts = find_mix("q4_k_m"), ModelFacts(n_layers=4)
    for name in ("token_embd.weight", "blk.0.attn_v.weight", "blk.3.ffn_down.weight"):
        assert wanted_format(name, (2, 256), mix, facts, pure=True) == "q4_k"
    assert wanted_format("blk.0.ffn_gate_inp.weight", (2, 256), mix, facts, pure=True) == "f32"


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.bias",
                                  "blk.0.ffn_gate_inp_shexp.weight", "rope_freqs.weight"])
def test_vectors_and_routers_stay_f32(name):
    shape = (4, 64) if "inp" in name else (64,)
    assert not is_quantized(name, shape)
    assert wanted_format(name, shape, find_mix("q2_k"), ModelFacts(n_layers=1)) == "f32"


def test_names_are_those_of_the_field():
    assert find_mix("Q4_K_M") is find_mix("q4_k") is MIXES["q4_k_m"]
    assert set(ALIASES.values()) <= set(MIXES)
    with pytest.raises(UsageError, match=r"--type: unknown file type: got 'q9_k', wanted f32 or"):
        find_mix("q9_k")
