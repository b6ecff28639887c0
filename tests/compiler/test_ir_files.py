"""Files of textual IR: run in the float64 interpreter and natively, they must agree.

What would be broken: an op's kernels compute something else than its declaration says. In `bad/`
every file has an error, and the line that must be blamed says which.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from ignis.errors import GraphError
from ignis.graph.ir import OPS, Graph, parse_graph, print_graph
from tests.compiler.random_graphs import Case
from tests.fuzz_graphs import check_case

FOLDER = Path(__file__).resolve().parents[1] / "ir"
FILES = sorted(FOLDER.glob("*.ir"))
BAD = sorted(FOLDER.glob("bad/*.ir"))


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("objects")


def _case(graph: Graph, seed: int, n_tokens: int) -> Case:
    rng = np.random.default_rng([seed, n_tokens])
    weights = {}
    for name, value in graph.weights.items():
        shape = value.type.sizes(0, 0)
        numbers = rng.normal(1 if len(shape) == 1 else 0, shape[-1] ** -0.5, shape)
        weights[name] = (
            np.full(shape, value.splat) if value.splat is not None else np.abs(numbers)
            if len(shape) == 1 else numbers
        ).astype(np.float32)  # fmt: skip
    inputs = {v.name: rng.normal(size=v.type.sizes(n_tokens, 0)).astype(np.float32)
              for v in graph.inputs}  # fmt: skip
    tokens = tuple((i % 3, i // 3) for i in range(n_tokens))
    return Case(seed, graph, weights, inputs, tokens, frozenset(range(0, n_tokens, 2)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_interpreter_and_native_code_agree(path: Path, objects: Path) -> None:
    """Every op within its bound of float64, every way to compile and run it equal by bits."""
    graph = parse_graph(path.read_text())
    assert parse_graph(print_graph(graph)) == graph
    for n_tokens in (1, 2, 13):
        check_case(_case(graph, zlib.crc32(path.stem.encode()), n_tokens), objects, n_settings=2)


def test_the_files_cover_every_op() -> None:
    seen = {op.name for path in FILES for op in parse_graph(path.read_text()).operations}
    assert seen == set(OPS)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_errors_name_the_line(path: Path) -> None:
    lines = path.read_text().splitlines()
    ((number, wanted),) = [
        (i, match[1]) for i, line in enumerate(lines, start=1)
        if (match := re.search(r"# error: (.*)", line))
    ]  # fmt: skip
    with pytest.raises(GraphError) as caught:
        parse_graph(path.read_text())
    assert str(caught.value).startswith(f"line {number}: {wanted}")
