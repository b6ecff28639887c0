"""A checkpoint directory as a source: everything is checked before the first row is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ignis.errors import ModelFileError, TokenizerError, UnsupportedModelError, UsageError
from ignis.gguf import BLOCKS, GGUFFile
from ignis.gguf.values import DEFAULT_ALIGNMENT
from ignis.gguf.writer import pack_value
from ignis.graph.models import ModelConfig, build_graph
from ignis.quantize.hf.architectures import HFArchitecture, find_hf_architecture
from ignis.quantize.hf.config import Section, read_object
from ignis.quantize.hf.experts import stacked
from ignis.quantize.hf.hyperparameters import Hyperparameters, read_hyperparameters
from ignis.quantize.hf.rope import Factors
from ignis.quantize.hf.shards import read_shards, shard_paths, weight_format
from ignis.quantize.hf.tensors import Stored, converted, gguf_name, is_left_out, place_in_file
from ignis.quantize.hf.vocabulary import read_vocabulary
from ignis.quantize.mix import ModelFacts
from ignis.quantize.source import Rows, SourceTensor
from ignis.text import Tokenizer


@dataclass(frozen=True, slots=True)
class _Described:
    """The GGUF file that will be, as far as lowering looks at it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]


class Checkpoint:
    """A Hugging Face directory, converted as it is read.

    Raises UsageError for what is no directory, ModelFileError for files that are missing or do
    not fit together, UnsupportedModelError for models that Ignis cannot run, TokenizerError for
    a vocabulary that it cannot use.
    """

    def __init__(self, folder: Path) -> None:
        try:
            is_folder = folder.is_dir()
        except OSError as error:
            raise UsageError(f"cannot read it: {error.strerror}", where=folder) from None
        if not is_folder:
            raise UsageError("not a checkpoint", where=folder, wanted="a folder with config.json")
        architecture, numbers = _read_config(folder)
        shards = shard_paths(folder)
        self.paths = [*shards, *folder.glob("*.json"), *folder.glob("*.model"),
                      *folder.glob("*.jinja")]
        self.alignment = DEFAULT_ALIGNMENT
        self.tensors = _tensors(read_shards(shards), folder, architecture, numbers)
        values = {"general.architecture": architecture.gguf, "general.type": "model",
                  "general.name": folder.resolve().name, **numbers.keys}
        n_vocab = _lower(_Described(folder, values, {t.name: t for t in self.tensors}))
        values |= read_vocabulary(folder, n_vocab)
        try:
            self.metadata = {key: pack_value(value) for key, value in values.items()}
        except UnicodeEncodeError as error:     # JSON can spell half a character
            raise TokenizerError(f"text that is no Unicode: {error.reason}", where=folder
                                 ) from None
        self.facts = ModelFacts(n_layers=numbers.n_layers, tied=numbers.tied,
                                group=numbers.n_heads // numbers.n_kv_heads,
                                n_experts=numbers.n_experts)

    def check(self, file: GGUFFile) -> None:
        """Raise TokenizerError unless the vocabulary of the finished file can be used."""
        Tokenizer.from_gguf(file)


def _read_config(folder: Path) -> tuple[HFArchitecture, Hyperparameters]:
    path = folder / "config.json"
    values = read_object(path)
    architecture = find_hf_architecture(Section(path, values))
    if isinstance(inner := values.get("text_config"), dict):    # of a model that also sees
        values = values | inner
    return architecture, read_hyperparameters(Section(path, values, architecture.defaults),
                                              architecture)


def _lower(file: _Described) -> int:
    """Build the graph once, which checks names and shapes; return the number of tokens."""
    config = ModelConfig.from_gguf(file)
    build_graph(config, file.tensors)
    return config.n_vocab


def _tensors(stored: Mapping[str, Stored], folder: Path, architecture: HFArchitecture,
             numbers: Hyperparameters) -> list[SourceTensor]:
    """All tensors of the GGUF file, in its order."""
    tensors: dict[str, SourceTensor] = {
        name: _factors(name, values) for name, values in numbers.factors.items()}
    experts: dict[str, dict[int, Stored]] = defaultdict(dict)
    for hf_name, tensor in stored.items():
        if is_left_out(hf_name):
            continue
        place = gguf_name(hf_name, architecture)
        if place is None or place[0] in tensors:
            raise UnsupportedModelError(f"tensor '{hf_name}' has no place in {architecture.gguf}",
                                        where=folder)
        name, expert = place
        known = replace(tensor, dtype=weight_format(tensor, folder))
        if expert is not None:
            experts[name][expert] = known
        elif name != "output.weight" or not numbers.tied:   # else a copy of the embedding
            tensors[name] = converted(known, name, architecture, numbers)
    for name, parts in experts.items():
        tensors[name] = stacked(name, parts, numbers.n_experts, folder)
    if "output.weight" not in tensors and not numbers.tied:
        raise ModelFileError("tensor 'lm_head.weight' is missing", where=folder,
                             hint="or tie_word_embeddings in config.json should be true")
    return sorted(tensors.values(), key=lambda tensor: place_in_file(tensor.name))


def _factors(name: str, values: Factors) -> SourceTensor:
    def read(start: int, stop: int) -> Rows:
        return values.view(np.uint8)[None]

    return SourceTensor(name, values.shape, BLOCKS["f32"], read)
