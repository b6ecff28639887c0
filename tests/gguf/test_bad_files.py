"""If these fail, a damaged or hostile file crashes Ignis, hangs it, eats memory, or is believed."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.gguf import GGUFFile, GGUFWriter, StringArray, open_gguf
from ignis.gguf.strings import StringWalkError, walk_strings

HUGE = 1 << 60
N_MUTATIONS = 2500


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + payload


def tensor(name: str | bytes = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0
           ) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(keys: list[bytes] | None = None, tensors: list[bytes] | None = None,
               data: int = 0, *, n_keys: int | None = None, n_tensors: int | None = None,
               version: int = 3, magic: bytes = b"GGUF", alignment: int = 32) -> bytes:
    """Assemble a file by hand, with whatever lies its header should tell."""
    keys, tensors = keys or [], tensors or []
    head = magic + struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors,
                               len(keys) if n_keys is None else n_keys)
    body = head + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % alignment) + bytes(data)


@pytest.fixture
def refusal(tmp_path: Path) -> Callable[[bytes], str]:
    """Open bytes as a file; return the one line that refuses them."""

    def refuse(content: bytes) -> str:
        path = tmp_path / "bad.gguf"
        path.write_bytes(content)
        tracemalloc.start()
        start = time.perf_counter()
        with pytest.raises(ModelFileError) as caught:
            open_gguf(path)
        seconds = time.perf_counter() - start
        peak_nbytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert seconds < 2 and peak_nbytes < 4 << 20
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and message.isprintable() and len(message) < 500
        return message.removeprefix(f"{path}: ")

    return refuse


ARRAY, STRING = 9, 8


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + payload


LIES = [
    (b"GGU", "not a GGUF file: magic: got 'GGU', wanted 'GGUF'"),
    (b"\x7fELF" + bytes(60), r"not a GGUF file: magic: got '\x7fELF', wanted 'GGUF'"),
    (b"PK\x03\x04" + bytes(60), "got a zip archive, perhaps a PyTorch checkpoint"),
    (b"version https://git-lfs.github.com/spec/v1\n", "got a Git LFS pointer"),
    (b"<!DOCTYPE html>", "got an HTML or XML page"),
    (b"GGUF\x03", "version: the file ends too early: got 1 bytes at 4, wanted 4 bytes"),
    (gguf_bytes(version=1), "version: got 1, wanted 2 or 3"),
    (gguf_bytes(version=4), "version: got 4, wanted 2 or 3"),
    (gguf_bytes(version=3 << 24), "version: got 3 of a big-endian file, wanted 2 or 3"),
    (gguf_bytes(magic=b"FUGG"), "got a big-endian GGUF file"),
    (gguf_bytes(n_tensors=HUGE), f"tensor count: got {HUGE}, wanted at most 0, as 16 bytes"),
    (gguf_bytes(n_keys=HUGE), f"metadata count: got {HUGE}, wanted at most 0"),
    (gguf_bytes(n_keys=1, data=64), "metadata key 1 of 1, length: got 0, wanted 1 to 65535"),
    (gguf_bytes([key("k", 13, bytes(8))]), "metadata 'k', type: got 13, wanted 0 (UINT8) to 12"),
    (gguf_bytes([key("k", 7, b"\2")]), "metadata 'k', bool: got 2, wanted 0 or 1"),
    (gguf_bytes([key("k", ARRAY, array(7, 3, b"\0\1\3"))]), "metadata 'k', bool: got 3"),
    (gguf_bytes([key("k", STRING, struct.pack("<Q", HUGE))]),
     f"metadata 'k': the file ends too early: got 19 bytes at 45, wanted {HUGE} bytes"),
    (gguf_bytes([key("k", ARRAY, array(4, HUGE))]), f"array count: got {HUGE}, wanted at most"),
    (gguf_bytes([key("k", ARRAY, array(8, HUGE))]), f"array count: got {HUGE}, wanted at most"),
    (gguf_bytes([key("k", ARRAY, array(9, HUGE))]), f"array count: got {HUGE}, wanted at most"),
    (gguf_bytes([key("k", ARRAY, array(13, 1))]), "metadata 'k', elements, type: got 13"),
    (gguf_bytes([key("k", ARRAY, array(8, 3, string("a") + struct.pack("<Q", HUGE)))], data=64),
     "metadata 'k', string 2 of 3: got an end beyond the file's"),
    (gguf_bytes([key("k", ARRAY, array(8, 1, struct.pack("<Q", (1 << 64) - 1)))], data=64),
     "metadata 'k', string 1 of 1: got an end beyond the file's"),
    (gguf_bytes([key(b"\xff\xfe", 0, b"\1")], data=32), r"key 1 of 1: got '\xff\xfe', wanted UTF"),
    (gguf_bytes([key("a\nb", 13, b"\1")], data=32), r"metadata 'a\nb', type: got 13"),
    (gguf_bytes([key("k" * 500, 13, b"\1")]), "kkk...', type: got 13"),
    (gguf_bytes([key("k", 0, b"\1"), key("k", 0, b"\1")]),
     "duplicate metadata key: got 'k', wanted each key once"),
    (gguf_bytes([key("general.alignment", 4, struct.pack("<I", 24))]),
     "metadata 'general.alignment': got 24, wanted a power of two from 8 to 65536"),
    (gguf_bytes([key("general.alignment", 4, struct.pack("<I", 0))]), "alignment': got 0"),
    (gguf_bytes([key("general.alignment", 4, struct.pack("<I", 1 << 31))]), "got 2147483648"),
    (gguf_bytes([key("general.alignment", 8, string("32"))]), "alignment': got str"),
    (gguf_bytes([key("general.alignment", 7, b"\1")]), "alignment': got True"),
    (gguf_bytes(tensors=[tensor()], data=127),
     "tensor 't', data: got a file of 191 bytes, wanted 128 bytes at 64; the file may be cut"),
    (gguf_bytes(tensors=[tensor(offset=HUGE)], data=128), f"wanted 128 bytes at {HUGE + 64}"),
    (gguf_bytes(tensors=[tensor(offset=8)], data=256), "offset: got 8, wanted a multiple of the"),
    (gguf_bytes(tensors=[tensor(), tensor()], data=256), "duplicate tensor: got 't'"),
    (gguf_bytes(tensors=[tensor(), tensor("u", offset=96)], data=256),
     "tensor 'u' overlaps 't': got offset 192, wanted at least 224"),
    (gguf_bytes(tensors=[tensor(dims=())], data=256), "number of dimensions: got 0, wanted 1 to 4"),
    (gguf_bytes(tensors=[tensor(dims=(1,) * 5)], data=256), "number of dimensions: got 5"),
    (gguf_bytes(tensors=[tensor(dims=(32, 0))], data=256), "dimensions: got [32, 0], wanted each"),
    (gguf_bytes(tensors=[tensor(dims=(1 << 32, 1 << 32))], data=256), f"wanted {1 << 66} bytes"),
    (gguf_bytes(tensors=[tensor(dims=((1 << 64) - 1,) * 4)], data=256), "data: got a file of"),
    (gguf_bytes(tensors=[tensor(dims=(33,), kind=3)], data=256),
     "tensor 't', row length: got 33, wanted a multiple of 32 for type q4_1"),
    (gguf_bytes(tensors=[tensor(kind=4)], data=256), "got 4 (q4_2), which ggml has withdrawn"),
    (gguf_bytes(tensors=[tensor(kind=99)], data=256), "tensor 't', type: got 99"),
    (gguf_bytes(tensors=[tensor(name="")], data=256), "name of tensor 1 of 1, length: got 0"),
]


@pytest.mark.parametrize(("content", "message"), LIES, ids=[message for _, message in LIES])
def test_lies_are_named(refusal: Callable[[bytes], str], content: bytes, message: str) -> None:
    assert message in refusal(content)


def test_withdrawn_types_are_told_from_nonsense(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=[tensor(kind=31)], data=256))
    with pytest.raises(UnsupportedModelError, match=r"31 \(q4_0_4_4\)"):
        open_gguf(path)


def nested(depth: int) -> bytes:
    payload = array(0, 1, b"\7")
    for _ in range(depth - 1):
        payload = array(ARRAY, 1, payload)
    return gguf_bytes([key("k", ARRAY, payload)])


def test_nested_arrays_up_to_the_limit(tmp_path: Path, refusal: Callable[[bytes], str]) -> None:
    """A file must not choose how deep Python recurses."""
    path = tmp_path / "m.gguf"
    path.write_bytes(nested(4))
    with open_gguf(path) as f:
        value = f.metadata["k"]
        for _ in range(3):
            assert isinstance(value, tuple) and len(value) == 1
            value = value[0]
        assert isinstance(value, np.ndarray) and value.tolist() == [7]
    for depth in (5, 6, 10_000):
        assert "depth of nested arrays: got over 4" in refusal(nested(depth))


def test_work_is_bounded_whatever_the_size_of_the_file(refusal: Callable[[bytes], str]) -> None:
    """Millions of empty things fit into a file that is large enough; none may be walked."""
    assert "array count: got 5000000, wanted at most 4194304" in refusal(
        gguf_bytes([key("k", ARRAY, array(8, 5_000_000))], data=40_000_000))
    assert "array count: got 100000, wanted at most 65536" in refusal(
        gguf_bytes([key("k", ARRAY, array(9, 100_000))], data=1_200_000))
    assert "metadata count: got 70000, wanted at most 65536" in refusal(
        gguf_bytes(n_keys=70_000, data=1_000_000))
    assert "tensor count: got 70000, wanted at most 65536" in refusal(
        gguf_bytes(n_tensors=70_000, data=3_000_000))
    assert "at most 16777216 bytes of text in all" in refusal(
        gguf_bytes([key("k", STRING, string(bytes(17_000_000)))]))


def test_the_limits_of_string_walking() -> None:
    raw = string("ab") + string("") + string("c")
    data = np.frombuffer(raw, np.uint8)
    strings, end = walk_strings(raw, data, 0, 3)
    assert list(strings) == ["ab", "", "c"] and end == len(raw)
    assert strings.offsets.tolist() == [8, 18, 26] and strings.lengths.tolist() == [2, 0, 1]
    assert walk_strings(raw, data, len(raw), 0)[1] == len(raw)
    for length in range(len(raw)):
        with pytest.raises(StringWalkError) as caught:
            walk_strings(raw[:length], data[:length], 0, 3)
        # A string is blamed if its prefix or its bytes are cut.
        assert caught.value.index == (0 if length < 10 else 1 if length < 18 else 2)


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add("general.alignment", 32)
    writer.add("a.bool", True)
    writer.add("a.float", 1.5)
    writer.add("a.words", ["ab", "", "Grüße", "x"])
    writer.add("a.numbers", [1, 2, 3])
    writer.add("a.flags", [True, False])
    writer.add("a.nested", [[1], [2, 3]])
    writer.add_tensor("a", np.ones((2, 32), np.float32), "q8_0")
    writer.add_tensor("b", np.ones((3, 32), np.float32), "q4_1")
    writer.add_tensor("c", np.ones(9, np.float32))
    writer.write()
    return path.read_bytes()


def use(f: GGUFFile) -> None:
    """Touch everything that an opened file promises."""
    for value in f.metadata.values():
        if isinstance(value, StringArray):
            assert len(list(value)) == len(value)
    for name, info in f.tensors.items():
        assert len(f.data(name)) == info.nbytes
        if info.format.supported:
            assert f.array(name).shape == info.shape


def opens_or_refuses(path: Path, content: bytes) -> bool:
    """Open and use the bytes, or be refused in one line; anything else fails the test."""
    path.write_bytes(content)
    start = time.perf_counter()
    try:
        with open_gguf(path) as f:
            use(f)
        return True
    except ModelFileError as error:
        assert str(error).isprintable()
        return False
    finally:
        assert time.perf_counter() - start < 2


def test_every_prefix(small_model: bytes, tmp_path: Path) -> None:
    """A download that broke off is never taken for a model."""
    needed = len(small_model) - (-9 * 4 % 32)       # the rest is padding after the last tensor
    for length in range(len(small_model) + 1):
        opened = opens_or_refuses(tmp_path / "m.gguf", small_model[:length])
        assert opened == (length >= needed), length


def mutate(content: bytes, rng: random.Random) -> bytes:
    """Damage the header or the data in one to three places."""
    raw = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw))
        match rng.randrange(7):
            case 0:
                raw[at] ^= 1 << rng.randrange(8)
            case 1:
                raw[at] = rng.randrange(256)
            case 2:
                raw[at:at] = rng.randbytes(rng.randint(1, 9))
            case 3:
                del raw[at : at + rng.randint(1, 9)]
            case 4:
                width = rng.choice((4, 8))
                number = rng.choice((0, 1, 2, 9, 255, 1 << 31, 1 << 60, (1 << 63) - 1, 1 << 63,
                                     (1 << 64) - 1, len(raw), len(raw) - at))
                raw[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
            case 5:
                end = rng.randrange(len(raw))
                raw[at:at] = raw[end : end + rng.randint(1, 64)]
            case _:
                del raw[at:]
        if not raw:
            break
    return bytes(raw)


def test_mutated_files(small_model: bytes, tmp_path: Path) -> None:
    rng = random.Random(20)
    results = [opens_or_refuses(tmp_path / "m.gguf", mutate(small_model, rng))
               for _ in range(N_MUTATIONS)]
    # Both outcomes are common, or the mutations test nothing.
    assert N_MUTATIONS // 20 < sum(results) < N_MUTATIONS * 19 // 20


def test_random_bytes(tmp_path: Path) -> None:
    rng = random.Random(21)
    for _ in range(300):
        noise = rng.randbytes(rng.randrange(300))
        assert not opens_or_refuses(tmp_path / "m.gguf", noise)
        opens_or_refuses(tmp_path / "m.gguf", b"GGUF\3\0\0\0" + noise)
        opens_or_refuses(tmp_path / "m.gguf", gguf_bytes(n_keys=2, n_tensors=1) + noise)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")        # opening it would wait for a writer
    for name, message in (("empty", "an empty file"), ("pipe", "not a regular file"),
                          (".", "not a regular file"), ("none", "model file not found"),
                          ("none\0", "cannot open model"), ("empty/x", "cannot open model"),
                          ("x" * 300, "cannot open model")):
        with pytest.raises(ModelFileError) as caught:
            open_gguf(tmp_path / name)
        assert message in str(caught.value) and str(caught.value).isprintable()


def test_a_refused_file_is_not_kept_open(tmp_path: Path) -> None:
    """A server that is offered many bad files must not run out of descriptors."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=[tensor(), tensor()], data=256))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (no Path is as short)
    errors = []
    for _ in range(20):
        with pytest.raises(ModelFileError) as caught:
            open_gguf(path)
        errors.append(str(caught.value))
        del caught
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208
