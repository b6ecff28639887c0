"""`ignis info` says beforehand what a run takes: a machine is bought, or not, by that figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ignis import hub
from ignis.gguf import open_gguf
from ignis.inspect.outlook import RunOptions, outlook
from ignis.settings import Settings
from tests.conftest import REPOSITORY
from tests.runtime.scripts import run_script

_CTX = 1024
_FILL = """
import pathlib, sys
import ignis
with ignis.load(sys.argv[1], weights=sys.argv[2], n_ctx=int(sys.argv[3]), threads=1) as model:
    ids = model.tokenize(pathlib.Path(sys.argv[4]).read_text() * 2)[: model.n_ctx - 8]
    assert len(ids) == model.n_ctx - 8
    list(model.generate(ids, max_tokens=8))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    # Not `ru_maxrss`, which begins at what the parent had when it forked.
    print(int(status["VmHWM"].split()[0]) * 1024)
"""


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("model", "layout"), [("smollm2", "packed"), ("gemma3-270m", "mapped")])
def test_a_run_takes_what_was_said(
    model: str, layout: str, default_model: Path, subprocess_env: dict[str, str]
) -> None:
    """Within a tenth or 30 MB of the peak, the context filled, kernels from the cache."""
    path = hub.find_local(model, Settings.from_env())
    if path is None:
        pytest.skip(f"`ignis pull {model}` fetches the model of this test")
    with open_gguf(path) as file:
        found = outlook(file, RunOptions(1, _CTX, layout))
    assert not found.problems and found.needs is not None
    text = REPOSITORY / "tests" / "perplexity" / "text.txt"
    for _ in range(2):  # the first compiles
        done = run_script(_FILL, subprocess_env, path, layout, _CTX, text, timeout=180)
        assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert abs(found.needs.total - measured) < max(30e6, measured / 10), found.needs
