"""Benchmark files are complete models, in every format, and are not written twice."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from click.testing import CliRunner

import ignis
from bench import make_models
from bench.make_models import ensure_model, main, reencode, split_name, write_random
from bench.random_blocks import random_weights
from bench.shapes import SHAPES, Llama3Scaling, Shape
from ignis.errors import UsageError
from ignis.gguf import BLOCKS, open_gguf
from tests.random_models import vocabulary, write_random_model

TINY = Shape(
    name="tiny", architecture="qwen2", vocabulary="tiny", n_vocab=len(vocabulary()) + 5,
    n_layers=2, n_embd=128, n_heads=2, n_kv_heads=1, n_ff=256, n_ctx=512, rope_base=1e4,
    norm_eps=1e-6,
)  # fmt: skip
LLAMA = replace(TINY, architecture="llama", scaling=Llama3Scaling())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("source") / "m.gguf", formats=("f32",))


@pytest.mark.parametrize("shape", [TINY, LLAMA], ids=["qwen2", "llama"])
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "bf16"])
def test_random_model_runs_and_its_activations_stay_in_bounds(tmp_path, source, shape, format):
    path = tmp_path / "m.gguf"
    write_random(shape, format, path, source)
    with ignis.load(path, threads=1, n_ctx=64) as model:
        logits = model.logits(list(range(1, 33)))
    assert logits.shape == (32, TINY.n_vocab)
    assert 0.2 < logits.std() < 20 and np.isfinite(logits).all()


def test_vocabulary_is_filled_up_with_unused_tokens(tmp_path, source):
    write_random(TINY, "f16", tmp_path / "m.gguf", source)
    with open_gguf(tmp_path / "m.gguf") as file:
        tokens = file.metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(file.metadata["tokenizer.ggml.token_type"]) == TINY.n_vocab
        assert list(tokens[: len(vocabulary())]) == vocabulary()
        assert list(file.metadata["tokenizer.ggml.token_type"][-5:]) == [5] * 5
        assert file.metadata["general.file_type"] == 1
    with pytest.raises(UsageError, match="larger than the shape's"):
        write_random(replace(TINY, n_vocab=10), "f16", tmp_path / "n.gguf", source)


@pytest.mark.parametrize("format", [name for name, block in BLOCKS.items() if block.supported])
def test_random_weights_of_every_format_are_centred_and_of_the_wanted_spread(format):
    n_columns = 1024
    raw = random_weights("w", 128, n_columns, format)
    values = BLOCKS[format].decode(raw.reshape(128, -1)).astype(np.float64)
    deviation = n_columns**-0.5
    assert abs(values.mean()) < 0.1 * deviation
    # MXFP4's scale is a power of two.
    assert deviation / 1.5 < values.std() < deviation * 1.5
    assert (raw == random_weights("w", 128, n_columns, format)).all()


def test_formats_that_cannot_be_decoded_are_refused():
    with pytest.raises(UsageError, match="no random weights in this format: got nvfp4"):
        random_weights("w", 4, 256, "nvfp4")


def test_reencoding_keeps_metadata_and_vectors(tmp_path, source):
    target = tmp_path / "t.gguf"
    reencode(source, target, "q4_0")
    with open_gguf(source) as old, open_gguf(target) as new:
        assert new.metadata["general.file_type"] == 2
        for key in old.metadata:
            a, b = old.metadata[key], new.metadata[key]
            assert list(a) == list(b) if hasattr(a, "__len__") else a == b, key
        for name, tensor in old.tensors.items():
            wanted = "f32" if len(tensor.shape) == 1 else "q4_0"
            if name == "token_embd.weight":
                wanted = "q8_0"
            assert new.tensors[name].format.name == wanted, name
            encoded = BLOCKS[wanted].encode(old.array(name))
            assert (new.data(name) == encoded.reshape(-1)).all(), name


def test_names(monkeypatch, source, tmp_path):
    assert split_name("qwen2.5-0.5b-q8_0") == ("qwen2.5-0.5b", "q8_0")
    with pytest.raises(UsageError, match="no such benchmark model: got gpt-q8_0"):
        split_name("gpt-q8_0")
    with pytest.raises(UsageError, match="smollm2-q9: no such weight format"):
        split_name("smollm2-q9")
    monkeypatch.setattr(make_models, "default_model", lambda: source)
    assert ensure_model("smollm2-q4_1", tmp_path) == source


def test_a_file_that_is_there_is_not_written_again(monkeypatch, source, tmp_path):
    monkeypatch.setattr(make_models, "SHAPES", MappingProxyType({"tiny": TINY}))
    monkeypatch.setattr(make_models, "default_model", lambda: source)
    arguments = ["tiny-q8_0", "smollm2-f16", "--folder", str(tmp_path / "new")]
    first = CliRunner().invoke(main, arguments)
    assert first.exit_code == 0, first.output
    paths = [tmp_path / "new" / name for name in ("tiny-q8_0.gguf", "smollm2-f16.gguf")]
    before = [path.stat().st_mtime_ns for path in paths]
    second = CliRunner().invoke(main, arguments)
    assert second.output == first.output == "".join(f"{path}\n" for path in paths)
    assert [path.stat().st_mtime_ns for path in paths] == before
    failed = CliRunner().invoke(main, ["tiny-q0"])
    assert failed.exit_code == 1 and failed.output.startswith("error: tiny-q0: no such weight")


def test_shapes_have_the_sizes_of_the_real_models():
    def n_weights(name):
        shape = SHAPES[name]
        return (sum(n * k for _, n, k in shape.matrices()) + sum(n for _, n in shape.vectors()))

    # As the publishers state them, in millions.
    assert n_weights("qwen2.5-0.5b") // 10**4 == 49403
    assert n_weights("qwen2.5-1.5b") // 10**4 == 154371
    assert n_weights("llama3.2-1b") // 10**4 == 123581
    factors = Llama3Scaling().factors(64, 5e5)
    assert factors[0] == 1 and factors[-1] == 32 and (np.diff(factors) >= 0).all()


def test_a_mix_is_the_one_that_quantize_writes(tmp_path, source):
    """A row named after a file type must measure what users have under that name."""
    wide = replace(TINY, n_embd=256, n_layers=4)
    path = tmp_path / "m.gguf"
    write_random(wide, "q4_k_m", path, source)
    with open_gguf(path) as file:
        formats = {name: tensor.format.name for name, tensor in file.tensors.items()}
        assert file.metadata["general.file_type"] == 15
    assert formats["token_embd.weight"] == formats["blk.3.attn_v.weight"] == "q6_k"
    assert formats["blk.1.attn_q.weight"] == "q4_k" and formats["blk.1.attn_norm.weight"] == "f32"
    assert split_name("qwen2.5-1.5b-q5_k_m") == ("qwen2.5-1.5b", "q5_k_m")
    with pytest.raises(UsageError, match="no such weight format"):
        split_name("smollm2-q4_k_m")
