"""If these fail, a checkpoint that cannot be converted ends in a traceback, or worse, in a file."""

from __future__ import annotations

import builtins
import copy
import json
import random
import struct

import numpy as np
import pytest

from ignis.errors import IgnisError, UsageError
from ignis.quantize.convert import Options, quantize
from ignis.quantize.hf.checkpoint import Checkpoint
from tests.quantize.checkpoints import (
    config_of,
    in_newer_form,
    random_tensors,
    save_tensors,
    write_checkpoint,
    write_json,
)
from tests.quantize.conftest import names


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


@pytest.mark.parametrize(("kind", "changes", "complaint"), [
    ("llama", {"architectures": ["BertModel"]}, "unsupported model class: got 'BertModel'"),
    ("llama", {"architectures": None}, "unsupported model class: got None"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ("llama", {"hidden_act": "relu"}, 'hidden_act is not supported: got "relu", wanted "silu"'),
    ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation is not supported"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is not supported: got true"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "bad layer_types"),
    ("llama", {"num_local_experts": 8}, "num_local_experts is not supported: got 8, wanted 0"),
    ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is not supported"),
    ("qwen3moe", {"mlp_only_layers": [0]}, "mlp_only_layers is not supported"),
    ("qwen3moe", {"num_experts": 7}, "ffn_down_exps.weight: not one matrix an expert: got 6"),
    ("qwen3moe", {"num_experts_per_tok": None}, "bad num_experts_per_tok"),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}, "bad no_rope_layers"),
    ("llama", {"num_hidden_layers": None}, "bad num_hidden_layers: got nothing, wanted an integer"),
    ("llama", {"num_hidden_layers": 10**12}, "bad num_hidden_layers"),
    ("llama", {"hidden_size": True}, "bad hidden_size: got true"),
    ("llama", {"num_key_value_heads": 3}, "bad num_key_value_heads: got 3, wanted a divisor"),
    ("llama", {"rms_norm_eps": 0}, "bad rms_norm_eps"),
    ("llama", {"tie_word_embeddings": "no"}, "bad tie_word_embeddings"),
    ("llama", {"partial_rotary_factor": 0.5}, "rope of a part of each head is not supported"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "stretch rope: got 'dynamic'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "bad factor: got nothing"),
    ("llama", {"rope_scaling": LLAMA3}, "bad high_freq_factor"),
    ("qwen3", {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale is not"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
     "bad short_factor: got .1., wanted 8 finite numbers"),
    ("llama", {"num_hidden_layers": 3}, "tensor blk.2.attn_norm.weight is missing"),
    ("llama", {"num_hidden_layers": 1}, "tensor blk.1.attn_k.weight has no place"),
    ("llama", {"intermediate_size": 95}, "tensor blk.0.ffn_gate.weight has the wrong shape"),
    ("llama", {"head_dim": 15}, "dimension_count"),
    ("llama3", {"head_dim": 2**31 - 1}, "bad head_dim: got 2147483647, wanted .* 1 to 65536"),
    ("gemma3", {"num_hidden_layers": 2**31 - 1}, "bad num_hidden_layers: .* 1 to 65536"),
    ("mixtral", {"num_local_experts": 2**31 - 1}, "bad num_local_experts: .* 1 to 65536"),
    ("phi3", {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 1}},
     "bad original_max_position_embeddings: got 1, wanted 2 or more"),
    ("llama", {"rms_norm_eps": 1e300}, "bad rms_norm_eps: got 1e.300, wanted a finite number"),
    ("llama", {"rope_theta": 10**400}, "bad rope_theta: .* a finite number above 0"),
])  # fmt: skip
def test_a_config_that_cannot_be_followed_is_refused(kind, changes, complaint, tmp_path):
    """Never ignored: a model would be converted that computes something else."""
    folder = write_checkpoint(tmp_path / "model", kind)
    write_json(folder / "config.json", {**config_of(kind), **changes})
    with pytest.raises(IgnisError, match=complaint):
        Checkpoint(folder)


def test_tensors_that_do_not_fit_are_refused(folder):
    config = config_of("llama")
    tensors = random_tensors(config)
    head = tensors.pop("lm_head.weight")
    for changed, complaint in (
        (tensors, "tensor 'lm_head.weight' is missing"),
        ({**tensors, "lm_head.weight": head, "model.layers.0.mlp.gate.weight": head},
         "'model.layers.0.mlp.gate.weight' has no place in llama"),
        ({**tensors, "lm_head.weight": head[:, :60]}, "output.weight has the wrong shape"),
        ({**tensors, "lm_head.weight": head[None]}, "output.weight has the wrong shape"),
        ({**tensors, "lm_head.weight": head, "score.weight": head}, "'score.weight' has no place"),
    ):
        save_tensors(folder, changed)
        with pytest.raises(IgnisError, match=complaint):
            Checkpoint(folder)


def rewrite_header(folder, change):
    """Change the JSON at the start of model.safetensors."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_weights_that_are_no_plain_floats_are_refused(folder):
    """FP8 checkpoints carry scales elsewhere; integers are another scheme's."""
    for dtype, scale in (("F8_E4M3", 4), ("I32", 1)):
        def change(header, dtype=dtype, scale=scale):
            row = header["model.norm.weight"]
            row |= {"dtype": dtype, "shape": [64 * scale]}

        rewrite_header(write_checkpoint(folder), change)
        with pytest.raises(IgnisError, match=f"'model.norm.weight' has an unsupported type: "
                                             f"got {dtype}, .*BF16 or F16"):
            Checkpoint(folder)


def remove(name):
    return lambda folder: (folder / name).unlink()


def write(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def index_of(value):
    return write("model.safetensors.index.json", json.dumps(value).encode())


@pytest.mark.parametrize(("change", "complaint"), [
    (remove("config.json"), "config.json: cannot read it: No such file"),
    (write("config.json", b"{"), "config.json: not JSON"),
    (write("config.json", b"\xff"), "config.json: not JSON"),
    (write("config.json", b"[" * 100_000), "config.json: not JSON"),
    (write("config.json", b"[]"), "config.json: not a JSON object: got list"),
    (remove("tokenizer.json"), "no tokenizer: wanted tokenizer.json or tokenizer.model"),
    (remove("model.safetensors"), "no safetensors: got nothing, wanted model.safetensors or"),
    (write("model.safetensors", b""), "not a safetensors file that can be read"),
    (write("model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
     "not a safetensors file that can be read"),
    (index_of({"weight_map": {"a": "gone.safetensors"}}), "gone.safetensors: file not found"),
    (index_of({"weight_map": {"a": "../x.safetensors"}}), "bad weight_map: got '../x.safetensors'"),
    (index_of({"weight_map": {"a": "/etc/passwd"}}), "bad weight_map: got '/etc/passwd'"),
    (index_of({}), "bad weight_map: wanted a file for each tensor"),
])  # fmt: skip
def test_files_that_are_missing_or_broken(change, complaint, folder):
    change(folder)
    with pytest.raises(IgnisError, match=complaint):
        Checkpoint(folder)


def test_the_file_names_of_other_checkpoints_are_named(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(IgnisError, match=r"no safetensors: got pytorch_model\.bin"):
        Checkpoint(folder)
    with pytest.raises(UsageError, match="not a checkpoint: wanted a folder"):
        Checkpoint(folder / "pytorch_model.bin")


def test_files_cut_short_and_changed_end_in_one_line(folder):
    """The header of safetensors: 60 cuts, 300 random changes."""
    path = folder / "model.safetensors"
    data, rng = path.read_bytes(), random.Random(0)
    for i in range(360):
        changed = bytearray(data[: rng.randrange(9000)] if i < 60 else data)
        for _ in range(3 if i >= 60 else 0):
            changed[rng.randrange(3000)] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            Checkpoint(folder)
        except IgnisError as error:
            assert "\n" not in str(error)


def test_nothing_of_the_checkpoint_is_overwritten(folder, tmp_path):
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        with pytest.raises(UsageError, match="overwrite its own source"):
            quantize(Checkpoint(folder), folder / name, Options(type="f16", force=True))


def test_weights_that_are_not_finite_leave_nothing(folder, tmp_path):
    tensors = random_tensors(config_of("llama"))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_tensors(folder, tensors)
    complaint = r"'blk\.1\.ffn_up\.weight' cannot be quantized: got nan"
    with pytest.raises(IgnisError, match=complaint):
        quantize(Checkpoint(folder), tmp_path / "out.gguf", Options(type="f16"))
    assert names(tmp_path) == {"model"}


def test_without_the_packages_the_extra_is_named(folder, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name in ("safetensors", "ml_dtypes"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install 'ignis-llm\[convert\]'"):
        Checkpoint(folder)


_ODD = (None, True, 0, -1, 1e400, 3.5, "", "x", [], [1], {}, {"type": "x"}, [None], "\ud800")


def mutated(value, rng):
    """The same JSON with one node, anywhere, replaced by something odd or left out."""
    value = copy.deepcopy(value)
    node = value
    while True:
        keys = [*node] if isinstance(node, dict) else [*range(len(node))]
        key = rng.choice(keys)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and rng.random() < 0.7:
            node = inner
            continue
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice(_ODD)
        return value


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json",
                                  "generation_config.json"])
def test_odd_json_ends_in_one_line(name, folder):
    """60 changes of one value each: an error of ours, or a model that can be converted."""
    rng = random.Random(0)
    write_json(folder / "generation_config.json", {"eos_token_id": [658, 657]})
    description = json.loads((folder / "tokenizer.json").read_text())
    description["model"]["vocab"] = dict([*description["model"]["vocab"].items()][:4])
    description["model"]["merges"] = description["model"]["merges"][:3]
    description["added_tokens"] += [{"id": 5, "content": "<a>", "special": False}]
    description["post_processor"] = {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "<|endoftext|>"}}, {"Sequence": {"id": "A"}}]}
    write_json(folder / "tokenizer.json", description)
    settings = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"7": {"content": "<b>", "special": True}},
                "add_bos_token": True, "chat_template": [{"name": "default", "template": "x"}]}
    write_json(folder / "tokenizer_config.json", settings)
    config = in_newer_form(config_of("gemma3", rope_scaling=dict(LLAMA3, high_freq_factor=9.0)))
    save_tensors(folder, random_tensors(config_of("gemma3")))
    write_json(folder / "config.json", config)
    whole = json.loads((folder / name).read_text())
    n_refused = 0
    for _ in range(60):
        write_json(folder / name, mutated(whole, rng))
        try:
            Checkpoint(folder)
        except IgnisError as error:
            assert "\n" not in str(error)
            n_refused += 1
    assert n_refused < 60
