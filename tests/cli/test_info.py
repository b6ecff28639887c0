"""If these break, `ignis info` misstates a file, or says that it runs when it does not."""

import json

import numpy as np
import pytest

from ignis.cli.app import run_app
from ignis.gguf import GGUFWriter, open_gguf
from ignis.inspect import outlook as looking
from tests.gguf.test_split import part, write_part
from tests.random_models import write_random_model


@pytest.fixture
def info(capsys):
    """Run the command; code, the description, the one line on stderr."""
    def run(*arguments, as_json=True):
        code = run_app(["info", *map(str, arguments), *(["--json"] if as_json else [])])
        captured = capsys.readouterr()
        shown = json.loads(captured.out) if as_json and captured.out else captured.out
        return code, shown, captured.err
    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """2 layers of width 64, 4 heads of 32, 2 of keys, 300 tokens."""
    folder = tmp_path_factory.mktemp("info")
    return write_random_model(folder / "m.gguf", formats=("q8_0",), n_ctx=1000)


def test_what_it_is(info, model):
    code, seen, err = info(model)
    assert (code, err, seen["runs"], seen["problems"]) == (0, "", True, [])
    assert (seen["architecture"], seen["gguf_version"], seen["files"]) == ("llama", 3, 1)
    assert seen["shape"] == {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2,
                             "hidden_width": 96, "context": 1000}
    assert seen["rope"] == {"freq_base": 10000.0, "dimension_count": 32}
    with open_gguf(model) as file:
        matrices = [t for t in file.tensors.values() if t.format.name == "q8_0"]
        assert seen["tensors"]["total"]["tensors"] == len(file.tensors)
    row = seen["tensors"]["by_type"]["q8_0"]
    assert row["tensors"] == len(matrices)
    assert row["bytes"] == sum(t.nbytes for t in matrices)
    assert row["bytes"] * 32 == row["parameters"] * 34
    total = seen["tensors"]["total"]
    assert seen["tensors"]["bits_per_weight"] == round(8 * total["bytes"] / total["parameters"], 3)
    assert seen["tensors"]["groups"] == {
        "embedding": {"q8_0": 1}, "norms": {"f32": 5}, "attention qkv": {"q8_0": 6},
        "attention output": {"q8_0": 2}, "feed-forward in": {"q8_0": 4},
        "feed-forward out": {"q8_0": 2}}
    assert (seen["tokenizer"]["model"], seen["tokenizer"]["pre"]) == ("gpt2", "qwen2")
    assert seen["metadata"]["tokenizer.ggml.tokens"] == {"array": 300}


def test_memory_follows_the_options(info, model):
    needs = {}
    for weights in ("mapped", "packed"):
        for kv_type in ("f32", "f16", "q8_0"):
            arguments = ("--ctx", 100, "--weights", weights, "--kv-type", kv_type, "--threads", 2)
            _, seen, _ = info(model, *arguments)
            needs[weights, kv_type] = seen["memory"]
            assert seen["memory"]["layout"] == weights
    f16 = needs["mapped", "f16"]
    # layers, positions in pages of 16, heads of keys, keys and values, head width, bytes
    assert f16["kv_cache"] == 2 * 112 * 2 * 2 * 32 * 2
    assert needs["mapped", "f32"]["kv_cache"] == 2 * f16["kv_cache"]
    assert needs["mapped", "q8_0"]["kv_cache"] == f16["kv_cache"] * 34 // 64
    for one in needs.values():
        parts = ("weights", "kv_cache", "activations", "tables", "vocabulary", "program")
        assert one["total"] == sum(one[part] for part in parts)
        assert one["own"] < one["total"] and one["free"] > 0
    assert f16["packed_weights"] == 0 < needs["packed", "f16"]["packed_weights"]
    assert f16["mapped_weights"] > needs["packed", "f16"]["mapped_weights"]


def test_for_people(info, tmp_path):
    path = write_random_model(tmp_path / "m.gguf", architecture="gemma3", keys={
        "attention.sliding_window": 20, "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0, "name": "x"}, n_layers=6)
    code, shown, _ = info(path, as_json=False)
    assert code == 0
    lines = [line.split(maxsplit=1) for line in shown.splitlines()]
    found = {line[0]: line[1] for line in lines if len(line) == 2}
    assert found["runs"] == "yes" and "window 20" in found["shape"]
    assert "scaling.type linear, scaling.factor 8.0" in found["rope"]
    assert "with a context of 1024 tokens" in found["memory"]
    assert "while kernels are compiled" in shown


def test_any_part_of_a_split_file_stands_for_the_whole(info, tmp_path):
    for index in range(3):
        write_part(part(tmp_path, index), index)
    for index in (0, 2):
        _, seen, _ = info(part(tmp_path, index))
        assert (seen["files"], seen["tensors"]["total"]["tensors"]) == (3, 3)
        assert seen["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_control_characters_are_shown(info, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add("general.name", "small\x1b[31m")
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32), "f16")
    writer.write()
    code, shown, err = info(tmp_path / "m.gguf", as_json=False)
    assert code == 1 and "\x1b" not in shown + err and r"small\x1b[31m" in shown


def expect_no(info, path, message):
    """A model that does not run: code 1, and the reason in the description and on stderr."""
    code, seen, err = info(path)
    assert (code, seen["runs"]) == (1, False)
    assert message in seen["problems"][0] and err == f"error: {seen['problems'][0]}\n"
    assert info(path, as_json=False)[1].count("runs          no") == 1
    return seen


def test_an_unknown_architecture_is_told_apart(info, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add("mamba.block_count", 3)
    writer.add("general.file_type", 19)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32), "f16")
    writer.write()
    seen = expect_no(info, tmp_path / "m.gguf", "unsupported architecture: got 'mamba'")
    assert (seen["shape"], seen["file_type"], seen["memory"]) == ({"layers": 3}, "iq2_xxs", None)
    assert any("tokenizer.ggml.model" in problem for problem in seen["problems"][1:])


def test_a_vocabulary_without_weights_is_told_apart(info, tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write()
    expect_no(info, tmp_path / "m.gguf", "a vocabulary and no weights")


def test_an_unknown_tokenizer_leaves_the_memory(info, model, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(model.read_bytes().replace(b"gpt2", b"rwkv", 1))
    seen = expect_no(info, path, "the tokenizer of RWKV is not supported")
    assert seen["memory"]["kv_cache"] > 0


def test_a_format_without_kernels_is_told_apart(info, model, tmp_path, monkeypatch):
    from ignis.graph.models import lowering

    monkeypatch.setattr(lowering, "WEIGHT_FORMATS", ("f32", "f16"))
    seen = expect_no(info, model, "unsupported type: got q8_0")
    assert "take the model in another quantization" in seen["problems"][0]


def test_a_context_that_is_too_long_is_told_apart(info, model):
    code, seen, err = info(model, "--ctx", 1001)
    assert code == 1 and "got 1001, wanted 1 to 1000" in seen["problems"][0] in err


def test_too_little_memory_is_told_apart(info, model, monkeypatch):
    """By what does not stay in the file; mapped weights only make a run slow."""
    _, seen, _ = info(model, "--weights", "mapped")
    needs = seen["memory"]
    monkeypatch.setattr(looking, "available_memory", lambda: needs["own"] - 1)
    code, seen, err = info(model, "--weights", "packed")
    assert code == 1 and "a run needs more memory than is free" in seen["problems"][0] in err
    assert "--weights mapped" in err and seen["memory"]["free"] == needs["own"] - 1
    monkeypatch.setattr(looking, "available_memory", lambda: needs["own"] + 1)
    code, seen, err = info(model, "--weights", "mapped")
    assert (code, err) == (0, "") and "read from the disk" in seen["remarks"][0]


def test_a_bad_file_is_one_line(info, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(50))
    code, shown, err = info(tmp_path / "bad.gguf")
    assert code == 1 and not shown and err.count("\n") == 1 and "bad.gguf" in err
