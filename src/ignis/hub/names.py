"""Names of Hugging Face models, and which files of a repository a name means.

Apart from `huggingface`, which fetches them: every start reads a name, few fetch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ignis.errors import DownloadError, UsageError

_NAME = re.compile(r"(?:hf:)?([\w.-]+)/([\w.-]+)(?::([\w.-]+))?", re.ASCII)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")


class HuggingFaceName(NamedTuple):
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
