"""If these fail, quantizing changes what it should keep, or depends on how the work was cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from struct import pack

import numpy as np
import pytest

from ignis.errors import NumericsError, UsageError
from ignis.gguf import BLOCKS, GGUFWriter, open_gguf
from ignis.gguf.writer import _pack_string, pack_value
from ignis.graph.models import ModelConfig, build_graph
from ignis.hub.progress import Silent
from ignis.quantize import encode
from ignis.quantize.mix import MIXES
from tests.quantize.conftest import names
from tests.random_models import RandomModel

FLOATS = ("f32", "f16", "bf16")
SIMPLE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
OURS = ("general.quantization_version", "general.file_type")


@pytest.fixture
def model(tmp_path):
    return RandomModel(formats=("f32",), n_layers=2, tied=False).write(tmp_path / "in.gguf")


def awkward(path: Path, **options: int) -> Path:
    """A file with every kind of value, bytes that are no UTF-8, integers among its tensors."""
    writer = GGUFWriter(path, "none-of-ours", **options)
    writer.add("general.file_type", 0)
    writer.add("a.text", b"\xff\xfe not UTF-8")
    writer.add("a.u8", 255, "uint8")
    writer.add("a.double", 0.1, "float64")
    writer.add("a.words", ["", "a", "\n"])
    writer.add("a.nested", [[1, 2], [], [3]])
    writer.add("a.empty", np.zeros(0, np.uint16))
    rng = np.random.default_rng(0)
    writer.add_tensor("z.weight", rng.normal(size=(3, 2, 64)).astype(np.float32), "f16")
    writer.add_raw_tensor("counts", (5,), "i32", np.arange(5, dtype=np.int32).view(np.uint8))
    writer.add_tensor("a.weight", rng.normal(size=(70, 96)).astype(np.float32), "bf16")
    writer.add_tensor("half.bias", rng.normal(size=7).astype(np.float32), "f16")
    writer.add_tensor("odd.weight", rng.normal(size=(4, 33)).astype(np.float32), "f32")
    writer.write()
    return path


@pytest.mark.parametrize("options", [{}, {"version": 2}, {"alignment": 8}, {"alignment": 4096}])
def test_everything_else_keeps_its_bytes_and_its_order(options, tmp_path, convert):
    source, target = awkward(tmp_path / "in.gguf", **options), tmp_path / "out.gguf"
    before = source.read_bytes()
    convert(source, target, "q8_0")
    assert source.read_bytes() == before
    with open_gguf(source) as old, open_gguf(target) as new:
        assert [*new.metadata] == [*old.metadata, "general.quantization_version"]
        assert (new.metadata["general.file_type"], new.metadata[OURS[0]]) == (7, 2)
        for key in old.metadata.keys() - set(OURS):
            assert new.packed_value(key) == old.packed_value(key), key
        assert new.packed_value("a.u8") == pack_value(np.uint8(255), None)
        assert [*new.tensors] == [*old.tensors]
        formats = {name: tensor.format.name for name, tensor in new.tensors.items()}
        assert formats == {"z.weight": "q8_0", "counts": "i32", "a.weight": "q8_0",
                           "half.bias": "f32", "odd.weight": "f16"}
        np.testing.assert_array_equal(new.data("counts"), old.data("counts"))
        np.testing.assert_array_equal(new.array("half.bias"), old.array("half.bias"))
        np.testing.assert_array_equal(
            new.data("z.weight"), BLOCKS["q8_0"].encode(old.array("z.weight")).reshape(-1))


@pytest.mark.parametrize("source_format", [*FLOATS, "q8_0"])
@pytest.mark.parametrize("target_format", [*FLOATS, *SIMPLE])
def test_each_tensor_is_what_the_encoder_makes_of_the_whole(
        source_format, target_format, tmp_path, convert, monkeypatch):
    """Chunks of a few rows and several threads, against one call."""
    monkeypatch.setattr(encode, "CHUNK_VALUES", 200)
    source = RandomModel(formats=(source_format,), n_layers=1).write(tmp_path / "in.gguf")
    for n_threads in (1, 3):
        convert(source, tmp_path / f"{n_threads}.gguf", target_format, pure=True,
                n_threads=n_threads)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()
    with open_gguf(source) as old, open_gguf(tmp_path / "3.gguf") as new:
        for name, info in new.tensors.items():
            wanted = target_format if len(info.shape) > 1 else "f32"
            assert info.format.name == wanted
            same = old.tensors[name].format is info.format
            whole = old.data(name) if same else info.format.encode(old.array(name)).reshape(-1)
            np.testing.assert_array_equal(new.data(name), whole, name)


@pytest.mark.parametrize("name", [name for name, mix in MIXES.items()
                                  if BLOCKS[mix.format].encodable])
def test_every_type_that_can_be_written_runs(name, tmp_path, convert):
    """Lowering takes whatever the mix gave the tensors, and the numbers are in its keys."""
    shape = {"n_embd": 256, "n_ff": 256, "n_layers": 4, "tied": False}
    source = RandomModel(formats=("f32",), **shape).write(tmp_path / "in.gguf")
    try:
        convert(source, tmp_path / "out.gguf", name)
    except UsageError as error:     # the better formats of the mix
        assert "no encoder for" in str(error)
        pytest.skip(str(error))
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.metadata["general.file_type"] == MIXES[name].file_type
        assert file.tensors["blk.1.ffn_up.weight"].format.name == MIXES[name].format
        build_graph(ModelConfig.from_gguf(file), file.tensors)


def test_a_model_in_parts_becomes_one_file(tmp_path, convert):
    whole = RandomModel(formats=("f32",)).write(tmp_path / "whole.gguf")
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    with open_gguf(whole) as file:
        chosen = [*file.tensors]
        for index, path in enumerate(parts):
            writer = GGUFWriter(path, None)
            for key in file.metadata if index == 0 else ():
                writer.add_packed(key, file.packed_value(key))
            writer.add("split.no", index, "uint16")
            writer.add("split.count", 2, "uint16")
            writer.add("split.tensors.count", len(chosen), "int32")
            for name in chosen[index::2]:
                info = file.tensors[name]
                writer.add_raw_tensor(name, info.shape, info.format, file.data(name))
            writer.write()
    convert(whole, tmp_path / "one.gguf", "q8_0")
    convert(parts[1], tmp_path / "two.gguf", "q8_0")
    with open_gguf(tmp_path / "one.gguf") as one, open_gguf(tmp_path / "two.gguf") as two:
        assert [*two.metadata] == [*one.metadata]
        for name in one.tensors:
            np.testing.assert_array_equal(one.data(name), two.data(name))
    with pytest.raises(UsageError, match="overwrite its own source"):
        convert(parts[0], parts[1], "q8_0", force=True)


def test_quantizing_twice_needs_to_be_asked_for(model, tmp_path, convert):
    convert(model, tmp_path / "q4.gguf", "q4_0", pure=True)
    with pytest.raises(UsageError, match=r"quantized already: got q4_0, .*--requantize"):
        convert(tmp_path / "q4.gguf", tmp_path / "out.gguf", "q8_0")
    assert names(tmp_path) == {"in.gguf", "q4.gguf"}
    convert(tmp_path / "q4.gguf", tmp_path / "out.gguf", "q8_0", requantize=True)
    convert(tmp_path / "q4.gguf", tmp_path / "same.gguf", "q4_0", pure=True)   # nothing to lose
    with open_gguf(tmp_path / "q4.gguf") as old, open_gguf(tmp_path / "same.gguf") as new:
        for name in old.tensors:
            np.testing.assert_array_equal(old.data(name), new.data(name))


@pytest.mark.parametrize(("value", "file_type", "complaint"), [
    (np.nan, "q8_0", "'blk.0.ffn_up.weight' cannot be quantized: got nan"),
    (-np.inf, "bf16", "'blk.0.ffn_up.weight' cannot be quantized: got inf"),
    (-7e4, "f16", "'blk.0.ffn_up.weight' cannot be stored as f16: got 70000.0, .*--type bf16"),
    (7e4, "q4_0", "'blk.0.ffn_up.weight' cannot be stored as q4_0"),
])  # fmt: skip
def test_weights_that_a_format_cannot_hold_are_refused(
        value, file_type, complaint, tmp_path, convert):
    writer = GGUFWriter(tmp_path / "in.gguf", "llama")
    weights = np.ones((50, 64), np.float32)
    weights[43, 21] = value
    writer.add_tensor("token_embd.weight", np.ones((50, 64), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", weights)
    writer.write()
    with pytest.raises(NumericsError, match=complaint):
        convert(tmp_path / "in.gguf", tmp_path / "out.gguf", file_type)
    assert names(tmp_path) == {"in.gguf"}
    convert(tmp_path / "in.gguf", tmp_path / "out.gguf", "f32")     # the same bytes: no question


def test_progress_counts_the_source(model, tmp_path, convert):
    class Watch(Silent):
        def begin(self, what: str, total: int | None) -> None:
            seen.append(total)

        def advance_to(self, done: int) -> None:
            seen.append(done)

    seen: list[int] = []
    report = convert(model, tmp_path / "out.gguf", "q4_1", Watch())
    assert seen[0] == seen[-1] == report.nbytes_before and seen[1:] == sorted(seen[1:])
    with open_gguf(tmp_path / "out.gguf") as file:
        assert report.nbytes_after == sum(t.nbytes for t in file.tensors.values())
    assert report.fallbacks == {("q6_k", "q8_0"): 1}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc says how much it was")
def test_memory_does_not_grow_with_the_model(tmp_path, subprocess_env):
    """One tensor of 256 MB (a hole on the disk); the process may take a tenth on top of itself."""
    path, n_rows, k = tmp_path / "in.gguf", 1 << 16, 1 << 10
    head = (b"GGUF" + pack("<IQQ", 3, 1, 1) + _pack_string("general.architecture")
            + pack_value("llama", None) + _pack_string("token_embd.weight")
            + pack("<IQQIQ", 2, k, n_rows, 0, 0))
    path.write_bytes(head)
    os.truncate(path, -(-len(head) // 32) * 32 + 4 * n_rows * k)
    script = (
        "import sys; from pathlib import Path\n"
        "from ignis.gguf import open_gguf\n"
        "from ignis.quantize.convert import Options, quantize\n"
        "from ignis.quantize.source import GGUFSource\n"
        "def peak():\n"
        "    text = Path('/proc/self/status').read_text()\n"
        "    return int(text.split('VmHWM:')[1].split()[0])\n"
        "before = peak()\n"
        "with open_gguf(sys.argv[1]) as f, GGUFSource(f) as source:\n"
        "    quantize(source, Path(sys.argv[2]), Options(type='f16', n_threads=2))\n"
        "print(peak() - before)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, path, tmp_path / "out.gguf"],
                         env=subprocess_env, capture_output=True, text=True, check=True)
    assert int(run.stdout) < 60 << 10, run.stdout   # KiB: LLVM's start, and chunks of 1 MB
