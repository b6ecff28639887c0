"""If these fail, Ignis and the `gguf` package no longer read each other's files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from ignis.errors import ModelFileError, UsageError
from ignis.gguf import BLOCKS, GGUFFile, GGUFWriter, StringArray, ValueType, open_gguf

RNG_SHAPE = (6, 64)
WORDS = ["", "a", "Grüße", "漢字", " \n", "x" * 300]


def random_values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(RNG_SHAPE).astype(np.float32)


def write_ours(path: Path, **options: int) -> None:
    writer = GGUFWriter(path, "llama", **options)
    writer.add("a.uint", 7)
    writer.add("a.negative", -7)
    writer.add("a.large", 1 << 40)
    writer.add("a.float", 0.5)
    writer.add("a.double", 0.1, "float64")
    writer.add("a.bool", True)
    writer.add("a.u8", 255, ValueType.UINT8)
    writer.add("a.text", "Grüße\n")
    writer.add("a.words", WORDS)
    writer.add("a.ints", [1, -2, 3])
    writer.add("a.floats", np.array([1.5, -2.5], np.float32))
    writer.add("a.flags", [True, False])
    writer.add("a.nested", [[1, 2], [3], []])
    writer.add("a.empty", [])
    for seed, name in enumerate(("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")):
        writer.add_tensor(f"blk.{name}", random_values(seed), name)
    writer.add_tensor("norm", np.arange(5, dtype=np.float32))
    writer.write()


@pytest.mark.parametrize("options", [{}, {"version": 2}, {"alignment": 8}, {"alignment": 4096}])
def test_our_reader_reads_what_our_writer_wrote(tmp_path: Path, options: dict[str, int]) -> None:
    path = tmp_path / "m.gguf"
    write_ours(path, **options)
    with open_gguf(path) as f:
        assert f.version == options.get("version", 3)
        assert f.path == path
        m = f.metadata
        assert (m["a.uint"], m["a.negative"], m["a.large"], m["a.u8"]) == (7, -7, 1 << 40, 255)
        assert (m["a.float"], m["a.double"], m["a.bool"]) == (0.5, 0.1, True)
        assert m["a.text"] == "Grüße\n"
        assert isinstance(m["a.words"], StringArray) and list(m["a.words"]) == WORDS
        np.testing.assert_array_equal(m["a.ints"], np.array([1, -2, 3], np.int32))
        np.testing.assert_array_equal(m["a.flags"], [True, False])
        nested = m["a.nested"]
        assert isinstance(nested, tuple) and [list(x) for x in nested] == [[1, 2], [3], []]
        assert len(m["a.empty"]) == 0
        for seed, name in enumerate(("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")):
            info = f.tensors[f"blk.{name}"]
            assert info.shape == RNG_SHAPE and info.format is BLOCKS[name]
            assert info.offset % options.get("alignment", 32) == 0
            raw = BLOCKS[name].encode(random_values(seed))
            np.testing.assert_array_equal(f.data(info.name), raw.reshape(-1))
            np.testing.assert_array_equal(f.array(info.name), BLOCKS[name].decode(raw))
        assert f.tensors["norm"].shape == (5,)


def test_the_oracle_reads_what_our_writer_wrote(tmp_path: Path) -> None:
    write_ours(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, wanted in (("a.uint", 7), ("a.negative", -7), ("a.large", 1 << 40), ("a.float", 0.5),
                        ("a.bool", True), ("a.text", "Grüße\n"), ("a.words", WORDS),
                        ("a.ints", [1, -2, 3]), ("a.floats", [1.5, -2.5])):
        assert reader.fields[key].contents() == wanted
    tensors = {t.name: t for t in reader.tensors}
    assert list(tensors["blk.q4_1"].shape) == [64, 6]
    for seed, name in enumerate(("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")):
        tensor = tensors[f"blk.{name}"]
        assert tensor.tensor_type.name.lower() == name
        wanted = gguf.quants.quantize(random_values(seed), tensor.tensor_type)
        np.testing.assert_array_equal(tensor.data.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("alignment", [32, 128])
def test_our_reader_reads_what_the_oracle_wrote(tmp_path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e6)
    writer.add_bool("a.bool", False)
    writer.add_int64("a.i64", -(1 << 50))
    writer.add_token_list(WORDS)
    writer.add_token_scores([0.5] * len(WORDS))
    values = random_values()
    writer.add_tensor("dense", values)
    writer.add_tensor("packed", gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1),
                      raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "m.gguf") as f:
        assert f.require("general.architecture", str) == "qwen2"
        assert f.require("qwen2.block_count", int) == 2
        assert f.require("qwen2.rope.freq_base", float) == 1e6
        assert f.require("a.bool", bool) is False
        assert f.require("a.i64", int) == -(1 << 50)
        assert list(f.require("tokenizer.ggml.tokens", StringArray)) == WORDS
        assert f.tensors["packed"].shape == RNG_SHAPE
        np.testing.assert_array_equal(f.array("dense"), values)
        np.testing.assert_array_equal(f.data("packed"), BLOCKS["q4_1"].encode(values).reshape(-1))


@pytest.fixture
def model(tmp_path: Path) -> GGUFFile:
    write_ours(tmp_path / "m.gguf")
    return open_gguf(tmp_path / "m.gguf")


def test_tensor_data_is_the_mapped_file_and_read_only(model: GGUFFile) -> None:
    """A copy would put the weights on the heap."""
    [(base, nbytes, path)] = model.mappings
    assert path == model.path and nbytes == model.nbytes == path.stat().st_size
    info = model.tensors["blk.q8_0"]
    view = model.data("blk.q8_0")
    assert view.ctypes.data == model.address("blk.q8_0") == base + info.offset
    assert not view.flags.writeable and not view.flags.owndata
    floats = model.require("a.floats", np.ndarray)
    assert not floats.flags.writeable and base <= floats.ctypes.data < base + nbytes
    model.close()
    assert view[0] == model.path.read_bytes()[info.offset], "a view outlives close()"


def test_typed_access_says_what_is_wrong(model: GGUFFile) -> None:
    assert model.require("a.uint", float) == 7.0
    assert model.get("a.absent", 3) == 3 and model.get("a.absent", None, int) is None
    assert model.get("a.float", 0.0) == 0.5
    for key, kind, message in (
        ("a.absent", int, r"m.gguf: metadata 'a.absent' is missing: wanted an integer"),
        ("a.text", int, r"metadata 'a.text': got str 'Grüße\\n', wanted an integer"),
        ("a.bool", int, r"metadata 'a.bool': got bool 'True', wanted an integer"),
        ("a.uint", bool, r"got int '7', wanted a bool"),
        ("a.ints", StringArray, r"got an array of 3 int32, wanted an array of strings"),
        ("a.words", np.ndarray, r"got an array of strings, 6 of them, wanted an array of numbers"),
    ):
        with pytest.raises(ModelFileError) as caught:
            model.require(key, kind)
        assert message.replace("\\\\", "\\") in str(caught.value)
    with pytest.raises(ModelFileError, match=r"tensor 'blk.none' is missing"):
        model.data("blk.none")


def test_string_array() -> None:
    strings = StringArray.from_strings([*WORDS, b"\xff\xfea"])
    assert len(strings) == 7 and strings[3] == "漢字" and strings[-1] == "\ufffd\ufffda"
    assert strings.bytes_at(6) == b"\xff\xfea"
    assert list(strings[1:3]) == ["a", "Grüße"] and "a" in strings
    assert list(strings.iter_bytes())[2] == "Grüße".encode()
    assert list(StringArray.from_strings([])) == []
    with pytest.raises(IndexError):
        strings[7]


def test_tensors_from_functions_are_made_one_at_a_time(tmp_path: Path) -> None:
    """A converter of a large model must not need it whole in memory, nor twice the same tensor."""
    calls: list[int] = []

    def make(seed: int) -> np.ndarray:
        calls.append(seed)
        return random_values(seed)

    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for seed in range(3):
        writer.add_tensor(f"t{seed}", lambda seed=seed: make(seed), "q8_0", shape=RNG_SHAPE)
    writer.add_raw_tensor("raw", (2, 32), BLOCKS["q8_0"], lambda: b"\1" * 68)
    writer.add_raw_tensor("k", (256,), "nvfp4", np.zeros(144, np.uint8))
    assert calls == []
    writer.write()
    assert calls == [0, 1, 2]
    with open_gguf(tmp_path / "m.gguf") as f:
        for seed in range(3):
            np.testing.assert_array_equal(
                f.data(f"t{seed}"), BLOCKS["q8_0"].encode(random_values(seed)).reshape(-1))
        assert bytes(f.data("raw")) == b"\1" * 68
        assert not f.tensors["k"].format.supported


def test_large_tensors_are_encoded_in_pieces_without_a_seam(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((1100, 4096)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", values, "q4_0")
    writer.write()
    with open_gguf(tmp_path / "m.gguf") as f:
        np.testing.assert_array_equal(f.data("t"), BLOCKS["q4_0"].encode(values).reshape(-1))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    writer = GGUFWriter(path, "llama")
    writer.add_raw_tensor("t", (2, 32), "q8_0", b"too short")
    with pytest.raises(UsageError, match="bytes of tensor 't': got 9, wanted 68"):
        writer.write()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_writer_refusals(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add("k", 1)
    values = np.zeros((2, 33), np.float32)
    for action, message in (
        (lambda: writer.add("k", 2), "'k' is there already"),
        (lambda: writer.add("u", 256, "uint8"), "'u' cannot be written"),
        (lambda: writer.add("f", 1e300), "'f' cannot be written"),
        (lambda: writer.add("o", object()), "no GGUF type for object"),
        (lambda: writer.add("n", None), "no GGUF type for NoneType"),
        (lambda: writer.add("i", 1 << 70), "outside 64 bits"),
        (lambda: writer.add("s", 3, "string"), "int is not a string"),
        (lambda: writer.add_tensor("t", values, "q8_0"), "wanted a multiple of 32"),
        (lambda: writer.add_tensor("t", values, "iq2_s"), "no encoder"),
        (lambda: writer.add_tensor("t", values, "q9"), "weight format: got q9"),
        (lambda: writer.add_tensor("t", lambda: values), "needs a shape"),
        (lambda: writer.add_tensor("t", np.zeros((0, 4), np.float32)), "shape of tensor 't'"),
        (lambda: GGUFWriter(tmp_path / "m", "llama", version=1), "wanted 2 or 3"),
        (lambda: GGUFWriter(tmp_path / "m", "llama", alignment=24), "alignment: got 24"),
    ):
        with pytest.raises(UsageError, match=message):
            action()
