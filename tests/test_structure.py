"""Folder order is data flow: a package imports only what stands above it.

What would be broken: one import upward, and a reader can no longer start at the top.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SOURCE = REPOSITORY / "src" / "ignis"

# Top to bottom. A file may import from its own layer and from those above.
LAYERS = (
    "errors", "target", "settings", "gguf", "graph", "kernels", "native", "runtime", "text",
    "sampling", "hub", "quantize", "compile", "inspect", "api", "bench", "perplexity", "cli",
)  # fmt: skip
# What leaves the order, each with its reason.
EXCEPTIONS = {
    ("native", "ignis"): "the object cache digests the package's sources, wherever it lies",
    ("inspect", "ignis"): "sources are shown by their place in the package",
}
MAX_LINES, LONGEST_LINES = 400, 600


def modules() -> Iterator[Path]:
    yield from sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> str:
    """`ignis.graph.ir.ops` -> graph; the package's own front door is `ignis`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "ignis"


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and for type checks too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "ignis":  # `from ignis import hub` names a layer or the front door
                yield from (f"ignis.{n.name}" if n.name in LAYERS else "ignis" for n in node.names)
            else:
                yield node.module


def own_layer(file: Path) -> str:
    first = file.relative_to(SOURCE).parts[0]
    return "ignis" if first in ("__init__.py", "__main__.py") else first.removesuffix(".py")


def test_every_file_belongs_to_a_layer() -> None:
    unknown = {own_layer(file) for file in modules()} - {"ignis", *LAYERS}
    assert not unknown, f"name the place of {unknown} in LAYERS"


def test_imports_point_upward() -> None:
    wrong = []
    for file in modules():
        here = own_layer(file)
        if here == "ignis":  # the front door names what it offers
            continue
        for module in imports(file):
            there = layer_of(module)
            if module.split(".")[0] != "ignis" or there == here:
                continue
            if there == "ignis" and here in ("bench", "cli"):  # users of the front door
                continue
            above = there in LAYERS and LAYERS.index(there) < LAYERS.index(here)
            if not above and (here, there) not in EXCEPTIONS:
                wrong.append(f"{file.relative_to(SOURCE)} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("library", "layers"),
    [("llvmlite", {"native"}), ("regex", {"text"}), ("jinja2", {"text"}),
     ("click", {"cli"}), ("rich", {"cli"}), ("huggingface_hub", {"hub"}),
     ("safetensors", {"quantize"}), ("ml_dtypes", {"quantize"})],
)  # fmt: skip
def test_each_library_has_one_home(library: str, layers: set[str]) -> None:
    """What would have to change with it is in one place."""
    users = {
        own_layer(file)
        for file in modules()
        if any(module.split(".")[0] == library for module in imports(file))
    }
    assert users <= layers


def test_nothing_else_is_imported() -> None:
    """No PyTorch, no ggml, no hidden dependency: only the standard library and what is declared."""
    import sys

    declared = {"numpy", "llvmlite", "regex", "jinja2", "click", "rich", "huggingface_hub",
                "safetensors", "ml_dtypes"}
    known = {"ignis", *declared, *sys.stdlib_module_names}
    found = {module.split(".")[0] for file in modules() for module in imports(file)}
    assert found <= known, found - known


def test_files_stay_small(record_property: Callable[[str, object], None]) -> None:
    """Mostly below 400 lines; a file that cannot be is reported, and never reaches 600."""
    sizes = {
        str(file.relative_to(SOURCE)): len(file.read_text().splitlines()) for file in modules()
    }
    large = {name: n for name, n in sizes.items() if n >= MAX_LINES}
    record_property("files of 400 lines and more", large)
    assert max(sizes.values()) < LONGEST_LINES, large
    assert len(large) <= len(sizes) // 20, large


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(file.relative_to(SOURCE))
        for file in modules()
        if not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert not silent
