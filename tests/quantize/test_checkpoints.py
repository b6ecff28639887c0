"""If these fail, a converted checkpoint is another model than the one it came from."""

from __future__ import annotations

import numpy as np
import pytest

from ignis.gguf import BLOCKS, open_gguf
from ignis.quantize import encode
from ignis.quantize.convert import Options, quantize
from ignis.quantize.hf.checkpoint import Checkpoint
from ignis.quantize.hf.tensors import neighbours
from tests.quantize.checkpoints import (
    KINDS,
    config_of,
    random_tensors,
    save_tensors,
    write_checkpoint,
    write_json,
)
from tests.quantize.forward import Forward
from tests.runtime.engines import engine, feed


@pytest.fixture
def converted(tmp_path):
    """Convert a checkpoint and return the file's path."""
    def run(folder, file_type="f32", name="out.gguf", **options):
        quantize(Checkpoint(folder), tmp_path / name, Options(type=file_type, **options))
        return tmp_path / name
    return run


@pytest.mark.parametrize("newer", [False, True], ids=["v4", "v5"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_computes_what_the_checkpoint_does(kind, newer, tmp_path, converted):
    """Logits of the float64 engine against a forward pass of transformers' classes in NumPy."""
    path = converted(write_checkpoint(tmp_path / "model", kind, newer=newer))
    ids = np.random.default_rng(1).integers(0, 650, 24).tolist()
    with engine(path, tmp_path, engine="reference", n_ctx=32) as runner:
        ours = feed(runner, ids)
    config = config_of(kind)
    theirs = Forward(config, random_tensors(config))(ids)
    assert theirs.std() > 0.2
    np.testing.assert_allclose(ours, theirs, atol=5e-5)     # cosines are rounded to f32


def test_numbers_that_transformers_does_not_write_are_its_defaults(tmp_path, converted):
    """A Gemma that sees: the text model's numbers lie one level down, and few are written."""
    config = config_of("gemma3", head_dim=256, num_attention_heads=8, num_key_value_heads=4)
    tensors = {f"language_model.{name}": t for name, t in random_tensors(config).items()}
    tensors["vision_tower.encoder.weight"] = np.ones((4, 4), np.float32)
    tensors["multi_modal_projector.mm_input_projection_weight"] = np.ones((4, 4), np.float32)
    folder = write_checkpoint(tmp_path / "model", "gemma3")
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window")
    write_json(folder / "config.json", {
        "architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {},
        "text_config": {key: config[key] for key in kept}})
    save_tensors(folder, tensors)
    with open_gguf(converted(folder)) as file:
        wanted = {"attention.head_count": 8, "attention.head_count_kv": 4, "rope.freq_base": 1e6,
                  "attention.key_length": 256, "context_length": 131072,
                  "rope.freq_base_swa": 10000.0}
        assert {key: file.metadata[f"gemma3.{key}"] for key in wanted} == wanted
        assert "gemma3.attention.scale" not in file.metadata    # 256, the head's width


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_halves_in_several_files_are_the_same_tensors(dtype, tmp_path, converted, monkeypatch):
    """Whatever the chunks; vectors become F32, and BF16 is copied where it is asked for."""
    whole = converted(write_checkpoint(tmp_path / "one", dtype=dtype), "q8_0", "one.gguf")
    monkeypatch.setattr(encode, "CHUNK_VALUES", 5 * 64)     # cuts heads of 16 rows
    parts = converted(write_checkpoint(tmp_path / "two", dtype=dtype, n_shards=3), "q8_0",
                      "two.gguf", n_threads=3)
    plain = converted(tmp_path / "two", dtype, "plain.gguf")
    stored = random_tensors(config_of("llama"))
    with open_gguf(whole) as a, open_gguf(parts) as b, open_gguf(plain) as c:
        assert [*a.tensors] == [*b.tensors] == [*c.tensors]
        assert [*a.tensors][:2] == ["token_embd.weight", "blk.0.attn_k.weight"]
        assert [*a.tensors][-2:] == ["output.weight", "output_norm.weight"]
        for name in a.tensors:
            np.testing.assert_array_equal(a.data(name), b.data(name), name)
        block = BLOCKS[dtype]
        q = block.encode(stored["model.layers.1.self_attn.q_proj.weight"])
        np.testing.assert_array_equal(c.data("blk.1.attn_q.weight"),
                                      neighbours(q, 16).reshape(-1))
        np.testing.assert_array_equal(
            a.data("blk.1.attn_q.weight"),
            BLOCKS["q8_0"].encode(block.decode(neighbours(q, 16))).reshape(-1))
        assert {t.format.name for t in a.tensors.values() if len(t.shape) == 1} == {"f32"}
        assert c.metadata["general.file_type"] == {"f16": 1, "bf16": 32}[dtype]


def test_heads_are_reordered_as_the_two_kinds_of_rope_need():
    """Pairs (i, i + C/2) become (2i, 2i + 1), head by head."""
    assert neighbours(np.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_a_tied_model_needs_no_head_and_drops_a_copy(tmp_path, converted):
    folder = write_checkpoint(tmp_path / "model", "llama3")
    tensors = random_tensors(config_of("llama3"))
    save_tensors(folder, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"],
                          "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    with open_gguf(converted(folder)) as file:
        assert "output.weight" not in file.tensors
        assert file.tensors["rope_freqs.weight"].shape == (8,)
        assert file.metadata["general.name"] == "model"


def test_experts_are_stacked_whatever_the_chunks(tmp_path, converted, monkeypatch):
    """One tensor of all experts; the router stays F32, as it decides by small differences."""
    folder = write_checkpoint(tmp_path / "model", "qwen3moe", dtype="bf16")
    whole = converted(folder, "q8_0", "one.gguf")
    monkeypatch.setattr(encode, "CHUNK_VALUES", 50 * 64)    # cuts experts of 32 rows
    with open_gguf(whole) as a, open_gguf(converted(folder, "q8_0", "two.gguf")) as b:
        for name in a.tensors:
            np.testing.assert_array_equal(a.data(name), b.data(name), name)
        assert a.tensors["blk.1.ffn_up_exps.weight"].shape == (6, 32, 64)
        assert a.tensors["blk.1.ffn_gate_inp.weight"].format.name == "f32"
        assert a.metadata["qwen3moe.expert_weights_norm"] is True
