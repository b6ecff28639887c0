"""Other libraries change the processor's rounding and denormal mode; logits must not notice.

The mode that the caller had is there again afterwards: it is the caller's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from llvmlite import ir

from ignis.kernels.lang import ptr
from ignis.native.cache import ObjectCache
from ignis.native.emit import new_function
from ignis.native.host import host_target
from ignis.native.library import Library, Routine
from ignis.target import Target
from tests.random_models import write_random_model
from tests.runtime.engines import engine, feed

pytestmark = pytest.mark.skipif(not host_target().is_x86, reason="MXCSR is x86's")

DEFAULT = 0x1F80
FLUSH = 0x8040  # subnormal results become zero, subnormal operands count as zero
UP, DOWN, TO_ZERO = 0x4000, 0x2000, 0x6000
EXCEPTIONS = 0x3F  # flags of what has happened, which nobody promises to keep


def _emit(module: ir.Module, target: Target) -> None:
    for name in ("stmxcsr", "ldmxcsr"):
        k, (place,) = new_function(module, target, f"call_{name}", (ptr,))
        k.intrinsic(f"llvm.x86.sse.{name}", None, place)
        k.ret()


@pytest.fixture(scope="module")
def library() -> Library:
    return Library([Routine("float_mode", _emit)], host_target(), ObjectCache(None))


@pytest.fixture
def mode(library: Library) -> Iterator[Callable[[int | None], int]]:
    """Read this thread's MXCSR, or set it; the default is put back afterwards."""
    word = ctypes.c_uint32()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    store, load = (function(library.address(f"call_{n}")) for n in ("stmxcsr", "ldmxcsr"))

    def change(wanted: int | None = None) -> int:
        if wanted is not None:
            word.value = wanted
            load(ctypes.addressof(word))
        store(ctypes.addressof(word))
        return word.value & ~EXCEPTIONS

    yield change
    change(DEFAULT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float_mode")
    return write_random_model(folder / "m.gguf", formats=("q4_1", "q8_0", "f16"), seed=5)


@pytest.mark.parametrize("engine_name", ["graph", "imperative"])
@pytest.mark.parametrize(
    "foreign", [FLUSH, UP, DOWN, TO_ZERO | FLUSH], ids=["flush", "up", "down", "to zero, flush"]
)
def test_logits_keep_their_bits_and_the_caller_its_mode(
    model: Path, mode: Callable[..., int], foreign: int, engine_name: str
) -> None:
    """From the first step of an engine on, rope tables included; main thread and workers."""
    ids = np.random.default_rng(0).integers(0, 297, 40).tolist()
    objects = model.parent
    with engine(model, objects, engine=engine_name, n_threads=2) as runner:
        wanted = feed(runner, ids)
    with engine(model, objects, engine=engine_name, n_threads=2) as runner:
        mode(DEFAULT | foreign)
        logits = feed(runner, ids)
        single = feed(runner, ids, [1] * len(ids))
        assert mode() == DEFAULT | foreign
        mode(DEFAULT)
    assert np.array_equal(logits, wanted) and np.array_equal(single, wanted)


def test_the_mode_does_matter(mode: Callable[..., int]) -> None:
    """Otherwise the test above proves nothing."""
    x = np.full(64, 1e-30, np.float32)
    third = np.float32(1) / np.full(64, 3, np.float32)
    mode(DEFAULT | FLUSH | DOWN)
    flushed, down = x * x * np.float32(1e20), np.float32(1) / np.full(64, 3, np.float32)
    mode(DEFAULT)
    assert (flushed == 0).all() and (down != third).all()
