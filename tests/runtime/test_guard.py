"""A model file that is cut short while it is mapped ends in one line, not in a bus error.

And only that: faults that are not ours must look as they always did.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.random_models import write_random_model
from tests.runtime.scripts import run_script

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's SIGBUS")

_LOAD = """
import mmap, os, sys
import numpy as np
import ignis
path, layout = sys.argv[1:]
model = ignis.load(path, weights=layout, threads=2)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "model.gguf", n_layers=4, n_embd=128, n_ff=256)


@pytest.mark.parametrize("layout", ["mapped", "packed"])
def test_a_file_cut_short_while_generating(
    model: Path, layout: str, subprocess_env: dict[str, str]
) -> None:
    """Packed weights read the embedding from the file."""
    source = _LOAD + """
generation = model.generate([5, 6, 7], max_tokens=None)
print(repr(next(generation)), flush=True)
os.truncate(path, 4096)
model.logits(list(range(256)))
print("survived")
"""
    done = run_script(source, subprocess_env, model, layout)
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1 and "survived" not in done.stdout
    assert done.stderr == (
        f"error: {model}: the file was truncated while it was mapped; close the program that "
        "writes to it and run again\n"
    )


def test_a_file_cut_short_under_numpy(model: Path, subprocess_env: dict[str, str]) -> None:
    """The fault need not come from our own code."""
    source = _LOAD + """
os.truncate(path, 4096)
model._file.array("output_norm.weight").sum()
print("survived")
"""
    done = run_script(source, subprocess_env, model, "packed")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"error: {model}: the file was")


_FOREIGN = """
other = path + ".other"
with open(other, "wb") as file:
    file.write(bytes(1 << 20))
with open(other, "rb") as file:
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
os.truncate(other, 0)
print(int(mapped[-1]))
"""


def test_a_fault_that_is_not_ours_is_passed_on(
    model: Path, subprocess_env: dict[str, str]
) -> None:
    """To the system, or to the handler that was there before (here Python's faulthandler)."""
    done = run_script(_LOAD + _FOREIGN, subprocess_env, model, "mapped")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGBUS, "", "")
    before = "import faulthandler; faulthandler.enable()\n"
    done = run_script(before + _LOAD + _FOREIGN, subprocess_env, model, "mapped")
    assert done.returncode == -signal.SIGBUS
    assert done.stderr.startswith("Fatal Python error: Bus error")


def test_the_file_of_a_closed_model_is_not_ours(
    model: Path, subprocess_env: dict[str, str]
) -> None:
    """Somebody who still holds a view on it gets the plain fault; other models stay guarded."""
    source = _LOAD + """
view = model._file.data("token_embd.weight")
second = ignis.load(sys.argv[1] + ".second", threads=1)
model.close()
model.close()
os.truncate(path if len(sys.argv[2]) == 6 else path + ".second", 4096)
second.logits(list(range(200)))
print(int(view.sum()))
"""
    copy = model.with_name("model.gguf.second")
    for layout, fault in (("mapped", -signal.SIGBUS), ("auto", 1)):
        write_random_model(model, n_layers=4, n_embd=128, n_ff=256)
        copy.write_bytes(model.read_bytes())
        done = run_script(source, subprocess_env, model, layout)
        assert (done.returncode, done.stdout) == (fault, "")
        assert done.stderr == "" if fault != 1 else f"error: {copy}: the file was" in done.stderr
