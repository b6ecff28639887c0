"""Hugging Face models, `OWNER/REPOSITORY[:QUANTIZATION]`, through `huggingface_hub` (an extra).

The library finds the files, follows redirects and knows the user's token. Resuming is ours: it
deletes what an ended process had fetched, so each file is fetched into `.partial-DIGEST`, which
stays when the transfer is cut off and is where the next pull goes on.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ignis.errors import DownloadError, UsageError
from ignis.hub.progress import Progress, watching
from ignis.hub.store import check_space, install, locked_folder, sha256_of, translated_errors
from ignis.settings import Settings

_NAME = re.compile(r"(?:hf:)?([\w.-]+)/([\w.-]+)(?::([\w.-]+))?", re.ASCII)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_PARTIAL = ".partial-"


@dataclass(frozen=True, slots=True)
class HuggingFaceName:
    """`Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0`; without a quantization the repository has one file.

    >>> HuggingFaceName.parse("hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0").quantization
    'q8_0'
    """

    owner: str
    repository: str
    quantization: str | None

    @classmethod
    def parse(cls, text: str) -> HuggingFaceName | None:
        """None where `text` is not such a name. `.` and `..` are not owners or repositories."""
        match = _NAME.fullmatch(text)
        if match is None or {match[1], match[2]} & {".", ".."}:
            return None
        return cls(match[1], match[2], match[3])

    def __str__(self) -> str:
        return f"{self.owner}/{self.repository}" + f":{self.quantization}" * bool(self.quantization)

    @property
    def repo_id(self) -> str:
        return f"{self.owner}/{self.repository}"

    def folder(self, models_dir: Path) -> Path:
        return models_dir / "huggingface" / self.owner / self.repository

    def find(self, models_dir: Path) -> Path | None:
        """The (first) file, if all of them were fetched before."""
        folder = self.folder(models_dir)
        try:
            names = [str(p.relative_to(folder)) for p in folder.rglob("*.gguf") if p.is_file()]
            return folder / choose(names, self)[0]
        except (UsageError, DownloadError, OSError):
            return None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository; the digest is None for files outside large-file storage."""

    name: str
    nbytes: int | None
    sha256: str | None


def choose(names: Iterable[str], wanted: HuggingFaceName) -> list[str]:
    """The files of the one model that `wanted` means: one, or all parts of a split one in order.

    The quantization is compared without regard to case with the end of the name: `q4_k` is not
    `q4_k_m`. Raises `UsageError` where none or several match, `DownloadError` where a part is
    missing.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not Path(name).name.lower().startswith("mmproj"):
            models.setdefault(_SPLIT.sub("", name[:-5]), []).append(name)
    tag = (wanted.quantization or "").removesuffix(".gguf")
    ending = re.compile(rf"(?:^|[-._/]){re.escape(tag)}$", re.IGNORECASE)
    found = [stem for stem in models if not tag or ending.search(stem)]
    if len(found) != 1:
        listed = ", ".join(stem.rsplit("/", 1)[-1] for stem in models) or "no GGUF file"
        raise UsageError("no file matches" if not found else "several files match",
                         where=str(wanted), got=listed, wanted="one",
                         hint="name the quantization: OWNER/REPOSITORY:q8_0")
    parts = models[found[0]]
    match = _SPLIT.search(parts[0][:-5])
    if match is not None and len(parts) != int(match[2]):
        raise DownloadError("parts of a split model are missing", where=str(wanted),
                            got=len(parts), wanted=int(match[2]))
    return parts


def pull_huggingface(name: HuggingFaceName, settings: Settings, progress: Progress) -> Path:
    """Fetch the file or files of `name` unless they are there. Raises `DownloadError`."""
    if path := name.find(settings.models_dir):
        progress.already_there(path)
        return path
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
