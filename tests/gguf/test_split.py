"""If these fail, a model in several files is not found, or half a model is taken for a whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ignis.errors import ModelFileError
from ignis.gguf import GGUFWriter, open_gguf


def part(folder: Path, index: int, count: int = 3) -> Path:
    return folder / f"model-{index + 1:05}-of-{count:05}.gguf"


def write_part(path: Path, index: object, count: int = 3, *, total: int = 3,
               tensor: str | None = None, extra: dict[str, int] | None = None) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add("split.no", index)
    writer.add("split.count", count, "uint16")
    writer.add("split.tensors.count", total, "int32")
    for key, value in (extra or {}).items():
        writer.add(key, value)
    name = f"t{index}" if tensor is None else tensor
    writer.add_tensor(name, np.full((2, 32), float(str(index)), np.float32), "f16")
    writer.write()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(3):
        extra = {"llama.block_count": 9} if index == 0 else None
        write_part(part(tmp_path, index), index, extra=extra)
    return tmp_path


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_part_opens_the_whole(folder: Path, index: int) -> None:
    with open_gguf(part(folder, index)) as f:
        assert f.path == part(folder, 0)
        assert f.require("llama.block_count", int) == 9
        assert list(f.tensors) == ["t0", "t1", "t2"]
        assert [path for _, _, path in f.mappings] == [part(folder, i) for i in range(3)]
        for i in range(3):
            assert f.tensors[f"t{i}"].file_index == i
            np.testing.assert_array_equal(f.array(f"t{i}"), np.full((2, 32), i, np.float32))
            base, nbytes, _ = f.mappings[i]
            assert base <= f.address(f"t{i}") < base + nbytes


def test_a_single_file_may_carry_the_keys(tmp_path: Path) -> None:
    write_part(tmp_path / "any-name.gguf", 0, count=1, total=1)
    with open_gguf(tmp_path / "any-name.gguf") as f:
        assert list(f.tensors) == ["t0"]


def missing_part(folder: Path) -> None:
    part(folder, 2).unlink()


def first_part_missing(folder: Path) -> None:
    part(folder, 0).rename(folder / "elsewhere.gguf")


def wrong_count(folder: Path) -> None:
    write_part(part(folder, 1), 1, count=4)


def wrong_number(folder: Path) -> None:
    write_part(part(folder, 1), 2, tensor="t1")


def not_an_integer(folder: Path) -> None:
    write_part(part(folder, 1), "1", tensor="t1")


def without_keys(folder: Path) -> None:
    writer = GGUFWriter(part(folder, 1), "llama")
    writer.write()


def same_tensor_twice(folder: Path) -> None:
    write_part(part(folder, 2), 2, tensor="t1")


def too_few_tensors(folder: Path) -> None:
    write_part(part(folder, 0), 0, total=4)


def cut_part(folder: Path) -> None:
    part(folder, 2).write_bytes(part(folder, 2).read_bytes()[:-40])


@pytest.mark.parametrize(("damage", "message"), [
    (missing_part, "model-00003-of-00003.gguf: model file not found; part 3 of 3"),
    (first_part_missing, "model-00001-of-00003.gguf: model file not found; part 1 of 3"),
    (wrong_count, "model-00002-of-00003.gguf: metadata 'split.count': got 4, wanted 3"),
    (wrong_number, "model-00002-of-00003.gguf: metadata 'split.no': got 2, wanted 1"),
    (not_an_integer, "model-00002-of-00003.gguf: metadata 'split.no': got str"),
    (without_keys, "model-00002-of-00003.gguf: metadata 'split.count': got nothing, wanted 3"),
    (same_tensor_twice, "model-00003-of-00003.gguf: duplicate tensor: got 't1'"),
    (too_few_tensors, "model-00001-of-00003.gguf: metadata 'split.tensors.count': got 4"),
    (cut_part, "model-00003-of-00003.gguf: tensor 't2', data: got a file of"),
])
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    opened = part(folder, 1) if damage is first_part_missing else part(folder, 0)
    with pytest.raises(ModelFileError) as caught:
        open_gguf(opened)
    assert message in str(caught.value)


def test_a_renamed_part_says_which_name_it_needs(folder: Path) -> None:
    renamed = part(folder, 0).rename(folder / "m.gguf")
    with pytest.raises(ModelFileError, match=r"wanted a name that ends in -0000\?-of-00003.gguf"):
        open_gguf(renamed)
