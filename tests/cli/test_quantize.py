"""If these break, `ignis quantize` no longer says what it did, or what stopped it."""

import re

import pytest

from ignis.gguf import open_gguf
from tests.quantize.checkpoints import write_checkpoint
from tests.random_models import RandomModel


@pytest.fixture
def model(tmp_path):
    return RandomModel(formats=("f32",), n_embd=96, n_heads=3, n_kv_heads=1).write(
        tmp_path / "in.gguf")


def test_it_says_what_became_of_the_model(call, model, tmp_path):
    target = tmp_path / "out.gguf"
    result = call("quantize", str(model), str(target), "--type", "Q4_0")
    assert (result.code, result.out) == (0, "")
    lines = result.err.splitlines()
    assert re.fullmatch(r"quantizing to q4_0 \(\d\.\d MiB\)", lines[0])
    assert lines[1] == f"saved {target}"
    assert re.fullmatch(r"\d\.\d MiB -> 0\.\d MiB, \d\.\d\d bits a weight", lines[2])
    assert lines[3] == "q8_0 instead of q6_k, whose blocks do not divide the rows: 1 tensor(s)"
    with open_gguf(target) as file:
        assert file.tensors["blk.0.attn_v.weight"].format.name == "q4_0"


def test_quiet_says_nothing(call, model, tmp_path):
    result = call("quantize", str(model), str(tmp_path / "o.gguf"), "--type", "q8_0", "-q")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_a_checkpoint_becomes_a_model_that_runs(call, tmp_path):
    """From a folder of safetensors to logits, in one command."""
    folder, target = write_checkpoint(tmp_path / "model", dtype="bf16"), tmp_path / "out.gguf"
    result = call("quantize", "--from-safetensors", str(folder), str(target), "--type", "q8_0")
    assert (result.code, result.out) == (0, "") and f"saved {target}" in result.err
    tokens = call("tokenize", "-m", str(target), "--ids", "Hello world")
    assert tokens.code == 0 and len(tokens.out.split()) > 1
    for arguments, complaint in (
        ((str(folder),), "a folder, not a GGUF file; --from-safetensors"),
        (("--from-safetensors", str(target)), "not a checkpoint: wanted a folder"),
        (("--from-safetensors", str(tmp_path)), "config.json: cannot read it"),
    ):
        result = call("quantize", *arguments, str(tmp_path / "new.gguf"), "--type", "q8_0")
        assert result.code == 1 and complaint in result.error
        assert not (tmp_path / "new.gguf").exists()


@pytest.mark.parametrize(("arguments", "code", "complaint"), [
    (("in.gguf", "out.gguf"), 2, "Missing option '--type'"),
    (("in.gguf", "out.gguf", "--type", "q9"), 2, "'q9' is not one of 'f32'"),
    (("n" * 300, "out.gguf", "--type", "q8_0"), 1, "cannot open model: File name too long"),
    (("n" * 300, "out.gguf", "--type", "q8_0", "--from-safetensors"), 1, "File name too long"),
    (("in.gguf", "in.gguf", "--type", "q8_0"), 1, "would overwrite its own source"),
    (("in.gguf", "no/out.gguf", "--type", "q8_0"), 1, "the folder to write to is not there"),
    (("no.gguf", "out.gguf", "--type", "q8_0"), 1, "no.gguf: model file not found"),
    (("in.gguf", "out.gguf", "--type", "q8_0", "--threads", "0"), 2, "--threads"),
])  # fmt: skip
def test_a_mistake_is_one_line(arguments, code, complaint, call, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("quantize", *arguments)
    assert result.code == code and complaint in result.error
    assert {path.name for path in tmp_path.iterdir()} == {"in.gguf"}
