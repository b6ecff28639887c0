"""What tests of every area share."""

import os
from pathlib import Path

import pytest

from ignis import hub
from ignis.errors import IgnisError
from ignis.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of vocabularies and golden logits beside the checkout; skips without it."""
    if not SHARED.is_dir():
        pytest.skip("../shared is absent")
    return SHARED


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, fetched if need be; skips where that is impossible."""
    try:
        return hub.resolve(None, Settings.from_env())
    except IgnisError as error:
        pytest.skip(f"the default model is not to be had: {error}")


@pytest.fixture(scope="session")
def subprocess_env() -> dict[str, str]:
    """The environment for `python -m ignis` in a process of its own, from this checkout."""
    path = [str(REPOSITORY / "src"), str(REPOSITORY)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("IGNIS_") or k ==
            "IGNIS_CACHE_DIR"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "error"}
