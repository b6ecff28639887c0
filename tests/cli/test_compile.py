"""`ignis compile`: what it prints for a small model, and its one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ignis.graph.ir import parse_graph
from ignis.graph.passes import PIPELINE, TOGGLES
from tests.cli.conftest import Result
from tests.random_models import write_random_model

Call = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models")
    return str(write_random_model(folder / "m.gguf", architecture="qwen2", formats=("q4_1",)))


def test_the_pipeline_and_the_plans(call: Call, model: str) -> None:
    result = call("compile", model, "--verify")
    assert result.code == 0, result.err
    for step in PIPELINE:
        assert f"\n  {step.name} " in result.out
    assert "verified before and after every pass" in result.out
    assert "a decoded token costs 11 barriers: 5.50 a layer" in result.out


def test_json_has_every_figure(call: Call, model: str) -> None:
    data = json.loads(call("compile", model, "--json").out)
    assert [p["name"] for p in data["passes"]] == [step.name for step in PIPELINE]
    assert data["lowering"]["ops"] == data["passes"][0]["ops_before"] == 2 * 18 + 3
    assert data["passes"][-1]["ops_after"] == 2 * 13 + 3
    decode = data["plans"][0]
    assert (decode["n_tokens"], decode["steps"]) == (1, 5 * 2 + 1)
    assert decode["gap"] == 0


@pytest.mark.parametrize("name", ["lowering", "dead_code", "fuse_swiglu", "fuse_gate_up"])
def test_dumps_are_graphs(call: Call, model: str, name: str) -> None:
    graph = parse_graph(call("compile", model, "--dump-after", name).out)
    assert ("swiglu" in graph.kinds) == (name in ("fuse_swiglu", "fuse_gate_up"))


def test_the_memory_plan_is_dumped_as_comments(call: Call, model: str) -> None:
    """Offsets beside the ops; the text is still the graph behind all passes."""
    text = call("compile", model, "--dump-after", "plan_memory").out
    assert parse_graph(text) == parse_graph(
        call("compile", model, "--dump-after", "schedule_steps").out)
    assert text.startswith("# T = 1, R = 1: an arena of ")
    assert "of its own" in text and "# outside" in text
    assert text.count("  # bytes ") > 20


def test_passes_can_be_switched_off(call: Call, model: str) -> None:
    options = [word for name in TOGGLES for word in ("--disable", name)]
    data = json.loads(call("compile", model, "--json", *options).out)
    assert [p["name"] for p in data["passes"]] == ["legalize_activations"]
    assert data["disabled"] == list(TOGGLES)
    assert data["plans"][0]["arena"] > 5 * data["plans"][0]["bound"] / 2


@pytest.mark.parametrize("form", ["llvm", "asm"])
def test_code_stands_beside_its_source(call: Call, model: str, form: str) -> None:
    out = call("compile", model, "--emit", form, "--kernel", "swiglu").out
    assert "def swiglu(" in out and "kernels/elementwise.py" in out
    assert ("define void @" if form == "llvm" else "\nswiglu:\n") in out


def test_dot(call: Call, model: str) -> None:
    out = call("compile", model, "--dot").out
    assert out.startswith("digraph model {") and out.endswith("}\n")
    assert out.count("subgraph") == 3 and '"%x" -> op0' in out


def test_the_page(call: Call, model: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = call("compile", model, "--html", str(page))
    assert result.code == 0 and f"wrote {page}" in result.err
    assert page.read_text().startswith("<!doctype html>")
    nowhere = str(tmp_path / "no" / "such" / "folder.html")
    assert "cannot write it" in call("compile", model, "--html", nowhere).error
    assert call("compile", model, "--html", str(page), "-q").code == 0      # anew


def test_a_page_never_takes_the_place_of_a_model(call: Call, model: str, tmp_path: Path) -> None:
    """`--html` and the model's name, swapped or completed by the shell."""
    before = Path(model).read_bytes()
    (tmp_path / "link.html").symlink_to(model)
    for path in (model, str(tmp_path / "link.html")):
        result = call("compile", model, "--html", path)
        assert result.code == 1 and "is there already, and is not a page" in result.error
    assert Path(model).read_bytes() == before


@pytest.mark.parametrize(("options", "message"), [
    (["--dump-after", "fuse_all"], "no such pass: got fuse_all, wanted lowering or dead_code"),
    (["--dump-after", "fuse_norm", "--disable", "fuse_norm"], "this pass is switched off"),
    (["--dump-after", "plan_memory", "--disable", "plan_memory"], "this pass is switched off"),
    (["--disable", "fuse_all"], "no such pass: got fuse_all"),
    (["--disable", "legalize_activations"], "this pass can't be switched off"),
    (["--emit", "asm", "--kernel", "gelu"], "this model uses no such kernel: got gelu, wanted"),
    (["--kernel", "swiglu"], "add --emit asm"),
    (["--profile"], "add --html"),
])  # fmt: skip
def test_errors_are_one_line(call: Call, model: str, options: list[str], message: str) -> None:
    result = call("compile", model, *options)
    assert result.code == 1
    assert message in result.error


def test_a_missing_tensor_is_named(call: Call, tmp_path: Path, model: str) -> None:
    data = Path(model).read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    assert "tensor blk.1.ffn_up.weight is missing" in call("compile", str(broken)).error
