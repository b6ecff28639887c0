"""Weights stay where they are promised to be, and a run takes no more memory than promised."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ignis.gguf import open_gguf
from ignis.graph.ir.types import align
from ignis.runtime.memory import Memory, drop_pages
from ignis.runtime.weights import packing_pieces
from tests.random_models import BLOCK_FORMATS, write_random_model
from tests.runtime.engines import engine, feed
from tests.runtime.scripts import run_script


def test_memory_is_zero_aligned_and_not_committed_before_use() -> None:
    """A cache for a long context must cost what is used of it, so far beyond what there is."""
    memory = Memory(1 << 40)
    assert memory.address % 4096 == 0
    view = memory.view(np.int64, 4, 1 << 39)
    assert view.tolist() == [0] * 4
    view[0] = 7
    assert memory.view(np.int64, 1, 1 << 39)[0] == 7
    assert (align(0), align(1), align(64), align(65, 4096)) == (0, 64, 64, 4096)


def test_huge_memory_is_memory() -> None:
    """Asking for huge pages must not change what is there, nor fail where there are none."""
    for nbytes in (1, 3 << 20):
        memory = Memory(nbytes, huge=True)
        assert not memory.bytes.any()
        memory.bytes[-1] = 7
        assert memory.view(np.uint8, 1, memory.nbytes - 1)[0] == 7


def test_packing_leaves_the_file_readable(tmp_path: Path) -> None:
    """Pages that the system may drop must come back with the same bytes."""
    path = write_random_model(tmp_path / "m.gguf", formats=BLOCK_FORMATS, n_layers=3)
    stored = path.read_bytes()
    ids = [1, 2, 3, 4, 5]
    with engine(path, tmp_path, weights="mapped", n_threads=1) as mapped:
        wanted = feed(mapped, ids)
    with engine(path, tmp_path, weights="packed", n_threads=2) as packed:
        file = packed._file
        whole = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * len(stored)).from_address(file.mappings[0][0])
        )
        assert whole.tobytes() == stored
        address, nbytes, _ = file.mappings[0]
        drop_pages(address, nbytes)
        assert whole.tobytes() == stored
        assert np.array_equal(feed(packed, ids), wanted)
        assert packed.weights.packed and packed.weights.layout == "packed"


@pytest.mark.parametrize("limit", [1, 3000, 1 << 30])
def test_tensors_are_packed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """A large matrix must not be in memory twice while it is packed; pieces leave no row out."""
    path = write_random_model(tmp_path / "m.gguf", formats=(*BLOCK_FORMATS, "f16"), n_layers=1)
    with engine(path, tmp_path, weights="mapped", n_threads=1) as mapped:
        wanted = feed(mapped, [1, 2, 3])
    monkeypatch.setattr("ignis.runtime.engine.PACK_NBYTES", limit)
    with engine(path, tmp_path, weights="packed", n_threads=2) as packed:
        for tensor in packed.weights.packed:
            pieces = list(packing_pieces(tensor, limit))
            assert sum(piece.n_rows for piece in pieces) == tensor.n_rows
            assert all(p.nbytes <= limit or p.n_rows <= 16 for p in pieces)
        assert np.array_equal(feed(packed, [1, 2, 3]), wanted)


_MEASURE = """
import json, sys
import ignis
with ignis.load(sys.argv[1], weights=sys.argv[2], threads=2) as model:
    list(model.generate("Once upon a time " * 40, max_tokens=16))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    # Not `ru_maxrss`, which begins at what the parent had when it forked.
    print(json.dumps({name: int(status[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon")}))
"""


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_of_the_default_model(
    default_model: Path, subprocess_env: dict[str, str]
) -> None:
    """At most 1.15 times the file and 150 MB, mapped or packed; mapped makes no copy at all.

    With kernels from the cache: a first run compiles them, for which LLVM takes some 50 MB more.
    """
    nbytes = default_model.stat().st_size
    heap = {}
    for layout in ("mapped", "packed"):
        run_script(_MEASURE, subprocess_env, default_model, layout)
        done = run_script(_MEASURE, subprocess_env, default_model, layout)
        assert done.returncode == 0, done.stderr
        measured = json.loads(done.stdout)
        assert measured["VmHWM"] < 1.15 * nbytes + 150e6, layout
        heap[layout] = measured["RssAnon"]
    with open_gguf(default_model) as file:
        weights = sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 2)
    assert heap["packed"] - heap["mapped"] > 0.9 * weights
