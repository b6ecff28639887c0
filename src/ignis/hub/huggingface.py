"""Hugging Face models, `OWNER/REPOSITORY[:QUANTIZATION]`, through `huggingface_hub` (an extra).

The library finds the files, follows redirects and knows the user's token. Resuming is ours: it
deletes what an ended process had fetched, so each file is fetched into `.partial-DIGEST`, which
stays when the transfer is cut off and is where the next pull goes on.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignis.errors import DownloadError, UsageError
from ignis.hub.names import HuggingFaceName, choose
from ignis.hub.progress import Progress, watching
from ignis.hub.store import check_space, install, locked_folder, sha256_of, translated_errors
from ignis.settings import Settings

_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository; the digest is None for files outside large-file storage."""

    name: str
    nbytes: int | None
    sha256: str | None


def pull_huggingface(name: HuggingFaceName, settings: Settings, progress: Progress) -> Path:
    """Fetch the file or files of `name` unless they are there. Raises `DownloadError`."""
    hub = _library()
    folder = name.folder(settings.models_dir)
    with locked_folder(folder, progress):
        if path := name.find(settings.models_dir):
            progress.already_there(path)
            return path
        try:
            revision, files = _list_files(hub, name, settings)
            chosen = [files[n] for n in choose(files, name)]
            for file in chosen:
                _fetch(hub, name, revision, file, folder, settings, progress)
        except (DownloadError, UsageError):
            raise
        except OSError as error:    # huggingface_hub's HTTP errors are OSErrors or httpx errors
            raise _translated(name, error) from error
        except Exception as error:
            # Which HTTP library raises depends on the version of huggingface_hub.
            if type(error).__module__.split(".")[0] not in {"httpx", "httpx2", "httpcore",
                                                            "huggingface_hub", "requests"}:
                raise
            raise _translated(name, error) from error
    path = folder / chosen[0].name
    progress.finished(path)
    return path


def _library() -> Any:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        importlib.import_module("huggingface_hub.file_download")
        importlib.import_module("huggingface_hub.utils.logging")
    except ImportError as error:
        raise DownloadError("Hugging Face names need the package huggingface_hub",
                            hint="run: pip install 'ignis-llm[hub]'") from error
    # What it would print is shown by our own progress and our own errors.
    hub.utils.disable_progress_bars()
    hub.utils.logging.set_verbosity_error()
    return hub


def _list_files(
    hub: Any, name: HuggingFaceName, settings: Settings
) -> tuple[str, dict[str, RemoteFile]]:
    """The commit that `main` is now, and its files. One commit for all parts of a split model."""
    info = hub.HfApi(endpoint=settings.hf_endpoint).model_info(name.repo_id, files_metadata=True)
    files = {}
    for sibling in info.siblings or ():
        if Path(sibling.rfilename).is_absolute() or ".." in Path(sibling.rfilename).parts:
            continue    # a name that would leave the model's folder
        sha256 = getattr(sibling.lfs, "sha256", None)
        files[sibling.rfilename] = RemoteFile(sibling.rfilename, sibling.size, sha256)
    return info.sha, files


def _fetch(
    hub: Any, name: HuggingFaceName, revision: str, file: RemoteFile, folder: Path,
    settings: Settings, progress: Progress,
) -> None:
    """One file, going on where an earlier pull was cut off."""
    destination = folder / file.name
    if destination.is_file() and destination.stat().st_size == file.nbytes:
        return
    url = hub.hf_hub_url(name.repo_id, file.name, revision=revision, endpoint=settings.hf_endpoint)
    remote = hub.get_hf_file_metadata(url, endpoint=settings.hf_endpoint)
    key = file.sha256 or re.sub(r"\W", "_", f"{revision}_{file.name}", flags=re.ASCII)
    workplace = folder / f"{_PARTIAL}{key}"
    partial = workplace / "data"
    with translated_errors(destination):
        workplace.mkdir(exist_ok=True)
        destination.parent.mkdir(parents=True, exist_ok=True)
        n_there = partial.stat().st_size if partial.exists() else 0
        if remote.size is not None and n_there > remote.size:
            partial.unlink()
            n_there = 0
    check_space(folder, max(0, (remote.size or 0) - n_there))
    # The token goes to the hub alone, not to the storage server that it redirects to.
    headers = hub.utils.build_hf_headers(token=None if remote.location == url else False)
    with watching(progress, f"fetching {destination.name}", workplace, remote.size), \
            partial.open("ab") as out:
        hub.file_download.http_get(remote.location, out, resume_size=n_there, headers=headers,
                                   expected_size=remote.size)
    try:
        install(partial, destination, file.sha256, sha256_of(partial))
    finally:
        partial.unlink(missing_ok=True)     # damaged bytes must not be gone on with
        workplace.rmdir()


def _translated(name: HuggingFaceName, error: Exception) -> DownloadError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403, 404):
        return DownloadError("no such model, or no access to it", where=str(name),
                             got=f"HTTP {status}", hint="is the name right? `hf auth login` helps "
                             "with models that ask for consent")
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return DownloadError(f"cannot fetch it: {reason[0]}", where=str(name),
                         hint="pull again to go on where it stopped")
