"""Ignis: an LLM inference engine for CPUs that compiles a GGUF model to machine code.

    import ignis
    model = ignis.load()                    # the default model, fetched once
    for piece in model.generate("Once upon", max_tokens=64):
        print(piece, end="")

The names below are imported on first use (PEP 562), so that `ignis --version` and `ignis --help`
start without NumPy and LLVM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ignis.api import Generation, GenerationStats, Model, load
    from ignis.errors import IgnisError

__version__ = "0.1.0"

__all__ = ["Generation", "GenerationStats", "IgnisError", "Model", "__version__", "load"]

_HOMES = {
    "Generation": "ignis.api",
    "GenerationStats": "ignis.api",
    "IgnisError": "ignis.errors",
    "Model": "ignis.api",
    "load": "ignis.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
