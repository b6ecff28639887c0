"""If these break, the wheel is no longer pure, or `import ignis` no longer offers what it says."""

import importlib.metadata
import tomllib

import pytest

import ignis
from tests.conftest import REPOSITORY


def test_the_package_is_pure_python():
    files = [p for p in (REPOSITORY / "src" / "ignis").rglob("*") if p.is_file()
             and "__pycache__" not in p.parts]
    assert {p.name for p in files if p.suffix != ".py"} <= {"py.typed", "page.html"}


def test_every_public_name_is_there():
    assert ignis.__all__ == sorted(ignis.__all__)
    for name in ignis.__all__:
        assert getattr(ignis, name) is not None
        assert name in dir(ignis)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        ignis.nonsense  # noqa: B018 - the access is the test


def test_runtime_dependencies_stay_few():
    """Each has its reason beside it; a new one is a decision."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    names = {line.split(">=")[0] for line in project["dependencies"]}
    assert names == {"numpy", "llvmlite", "regex", "jinja2", "click", "rich"}


def test_the_installed_version_is_this_one():
    try:
        installed = importlib.metadata.version("ignis-llm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("run from the source tree, not installed")
    assert installed == ignis.__version__
