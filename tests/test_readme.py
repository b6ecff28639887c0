"""The README against the code: what it shows is what there is."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import tomllib
from pathlib import Path

import click
import pytest

import ignis
from ignis.cli.app import _COMMANDS
from ignis.gguf import open_gguf
from ignis.graph.ir import print_graph
from ignis.graph.ir.types import WEIGHT_FORMATS
from ignis.graph.models import ModelConfig, build_graph
from ignis.graph.models.registry import ARCHITECTURES
from ignis.graph.passes import run_pipeline
from ignis.kernels import norm
from tests.conftest import REPOSITORY
from tests.random_models import write_random_model

README = (REPOSITORY / "README.md").read_text()
SOURCE = REPOSITORY / "src" / "ignis"


def blocks(marker: str) -> list[str]:
    """The fenced blocks behind `<!-- marker -->`."""
    found = re.findall(rf"<!-- {marker} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block marked {marker}"
    return found


def test_the_graphs_are_what_the_passes_make(tmp_path: Path) -> None:
    """Each dump stands in the printed graph after the pass it is marked with, line by line."""
    with open_gguf(write_random_model(tmp_path / "m.gguf", n_layers=1)) as file:
        naive = build_graph(ModelConfig.from_gguf(file), file.tensors)
    after = {"before": textwrap.dedent(print_graph(naive))}
    run_pipeline(naive, on_pass=lambda step, graph: after.update({step.name: print_graph(graph)}))
    for stage in ("before", "fuse_residual", "fuse_gate_up", "schedule_steps"):
        (shown,) = blocks(f"ir: {stage}")
        printed = "\n".join(line.strip() for line in after[stage].splitlines())
        assert shown.strip() in printed, stage


def test_the_kernel_is_the_real_one() -> None:
    (shown,) = blocks("kernel: scale")
    source = textwrap.dedent(inspect.getsource(norm.scale.body))
    assert textwrap.indent(shown.strip(), "    ") in source


def commands() -> dict[str, str]:
    """What the README says of each command's arguments."""
    (shown,) = blocks("cli")
    found = re.findall(r"^ignis (\w+)((?:.|\n +)*)", shown, re.MULTILINE)
    return dict(found)


def test_every_command_is_listed() -> None:
    assert list(commands()) == sorted(commands(), key=list(commands()).index)
    assert set(commands()) == set(_COMMANDS)


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_a_command_has_these_options_and_no_others(name: str) -> None:
    """Scripts rely on the exact spelling; the shortest one of each option is shown."""
    command = getattr(importlib.import_module(f"ignis.cli.{name}"), name)
    options = [p for p in command.params if isinstance(p, click.Option)]
    shown = set(re.findall(r"(?<![\w.])--?[a-z][a-z-]*", commands()[name]))
    known = {spelling for option in options for spelling in option.opts}
    assert shown <= known, f"no such option: {shown - known}"
    missing = [option.opts for option in options if not shown & set(option.opts)]
    assert not missing


def test_the_folders_are_those_there_are() -> None:
    (shown,) = blocks("tree")
    listed = set(re.findall(r"^  (\w+(?:\.py|/)) ", shown, re.MULTILINE))
    there = {
        path.name + ("/" if path.is_dir() else "")
        for path in SOURCE.iterdir()
        if path.name not in ("__pycache__", "__init__.py", "__main__.py", "py.typed")
    }
    assert listed == there
    for folder in re.findall(r"^([a-z]\S*/) ", shown, re.MULTILINE):
        assert (REPOSITORY / folder).is_dir(), folder


def test_models_and_formats_are_complete() -> None:
    for name in (*ARCHITECTURES, *WEIGHT_FORMATS):
        assert re.search(rf"\b{name}\b", README, re.IGNORECASE), name


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in (*project["dependencies"], *extras["hub"], *extras["convert"]):
        assert re.search(rf"^\| {line.split('>=')[0]} \| \w", README, re.MULTILINE), line


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (REPOSITORY / target).exists(), target
    shown = set(re.findall(r"\(docs/decisions/([^)]+)\)", README))
    assert shown == {path.name for path in (REPOSITORY / "docs" / "decisions").glob("*.md")}


@pytest.mark.model
def test_the_python_example_runs(
    default_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"## Python\n\n```python\n(.*?)```", README, re.DOTALL)
    load = ignis.load
    monkeypatch.setattr(ignis, "load", lambda: load(default_model))
    exec(compile(example, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 20
