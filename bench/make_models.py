"""Write the model files that benchmarks run on, where they are not there yet.

    python -m bench.make_models                       all of the default set
    python -m bench.make_models qwen2.5-0.5b-q4_0     by name

A name is a shape and a format. `smollm2-*` are real weights: the default model, decoded and encoded
again. The others have a real model's shape and vocabulary, and random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import click
import numpy as np
from numpy.typing import NDArray

from bench.random_blocks import random_weights
from bench.shapes import SHAPES, Shape
from ignis import hub
from ignis.errors import IgnisError, UsageError
from ignis.gguf import BLOCKS, GGUFFile, GGUFWriter, open_gguf
from ignis.quantize.mix import MIXES, ModelFacts, fallback, find_mix, wanted_format
from ignis.settings import Settings

REAL = "smollm2"
REAL_FORMAT = "q4_1"  # of the default model's file
DEFAULT_SET = (
    "smollm2-q4_1", "smollm2-q8_0", "smollm2-q4_0", "smollm2-f16", "smollm2-bf16",
    "qwen2.5-0.5b-q8_0", "qwen2.5-0.5b-q4_0", "qwen2.5-1.5b-q8_0", "qwen2.5-1.5b-q4_0",
    "llama3.2-1b-q8_0", "llama3.2-1b-q4_0",
    "qwen2.5-1.5b-q4_k_m", "qwen2.5-1.5b-q5_k_m", "qwen2.5-1.5b-q6_k", "qwen2.5-1.5b-iq4_xs",
)  # fmt: skip

# Files in a 4-bit format usually keep the embedding, which is the output as well, at 8 bits.
_EMBEDDING_FORMAT = MappingProxyType({"q4_0": "q8_0", "q4_1": "q8_0"})
_VOCABULARIES = Path(__file__).resolve().parents[2] / "shared" / "vocab"


def ensure_model(name: str, folder: Path | None = None) -> Path:
    """The file of that name in `folder` (default: in the cache), written if it is not there.

    Raises UsageError for a name that no shape and format make up.
    """
    folder = folder or Settings.from_env().cache_dir / "bench"
    shape_name, format = split_name(name)
    if (shape_name, format) == (REAL, REAL_FORMAT):
        return default_model()
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    if shape_name == REAL:
        reencode(default_model(), path, format)
    else:
        shape = SHAPES[shape_name]
        write_random(shape, format, path, vocabulary_file(shape.vocabulary))
    return path


def split_name(name: str) -> tuple[str, str]:
    """`qwen2.5-0.5b-q8_0` -> its shape and its format."""
    shape, _, format = name.rpartition("-")
    if shape != REAL and shape not in SHAPES:
        raise UsageError("no such benchmark model", got=name,
                         wanted=f"{' or '.join([REAL, *SHAPES])}, then - and a format")
    known = {**BLOCKS, **({} if shape == REAL else MIXES)}
    if format not in known:
        raise UsageError("no such weight format", where=name, got=format, wanted=", ".join(known))
    return shape, format


def default_model() -> Path:
    return hub.resolve(None, Settings.from_env())


def vocabulary_file(name: str) -> Path:
    """The vocabulary of that name beside the checkout; without one, the default model's."""
    path = _VOCABULARIES / f"ggml-vocab-{name}.gguf"
    return path if path.exists() else default_model()


def reencode(source: Path, target: Path, format: str) -> None:
    """Write the model in `source` with all matrices in another format; vectors stay F32."""
    with open_gguf(source) as file:
        architecture = file.require("general.architecture", str)
        writer = GGUFWriter(target, architecture)
        for key, value in file.metadata.items():
            if key not in ("general.architecture", "general.file_type", "general.alignment"):
                writer.add(key, value)
        _add_file_type(writer, format)
        for name, tensor in file.tensors.items():
            to = matrix_format(name, format) if len(tensor.shape) > 1 else "f32"
            if to == tensor.format.name:
                writer.add_raw_tensor(name, tensor.shape, to, _raw(file, name))
            else:
                writer.add_tensor(name, _decoded(file, name), to, shape=tensor.shape)
        writer.write()


def matrix_format(name: str, format: str) -> str:
    """The format of a matrix in a file of that format."""
    return _EMBEDDING_FORMAT.get(format, format) if name.startswith("token_embd.") else format


def _raw(file: GGUFFile, name: str) -> Callable[[], NDArray[np.uint8]]:
    return lambda: file.data(name)


def _decoded(file: GGUFFile, name: str) -> Callable[[], NDArray[np.float32]]:
    return lambda: file.array(name)


def write_random(shape: Shape, format: str, path: Path, vocabulary: Path) -> None:
    """Write a model of a shape with random weights; memory holds one matrix at a time."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add("general.name", f"{shape.name} shape, random weights")
    for key, value in shape.hyperparameters().items():
        writer.add(f"{shape.architecture}.{key}", value)
    _add_file_type(writer, format)
    with open_gguf(vocabulary) as file:
        for key, entry in _vocabulary(file, shape.n_vocab):
            writer.add(key, entry)
        for name, n_rows, n_columns in shape.matrices():
            to = _format_of(name, (n_rows, n_columns), shape, format)
            weights = _random(name, n_rows, n_columns, to)
            writer.add_raw_tensor(name, (n_rows, n_columns), to, weights)
        rng = np.random.default_rng(0)
        for name, n in shape.vectors():
            mean, deviation = (0.0, 0.1) if name.endswith(".bias") else (1.0, 0.05)
            writer.add_tensor(name, rng.normal(mean, deviation, n).astype(np.float32), "f32")
        if shape.scaling is not None:
            factors = shape.scaling.factors(shape.head_dim, shape.rope_base)
            writer.add_tensor("rope_freqs.weight", factors, "f32")
        writer.write()


def _format_of(name: str, matrix: tuple[int, int], shape: Shape, format: str) -> str:
    if format in _EMBEDDING_FORMAT or format not in MIXES:
        return matrix_format(name, format)
    facts = ModelFacts(shape.n_layers, shape.n_heads // shape.n_kv_heads)
    return fallback(wanted_format(name, matrix, find_mix(format), facts), matrix[1])


def _random(
    name: str, n_rows: int, n_columns: int, format: str
) -> Callable[[], NDArray[np.uint8]]:
    return lambda: random_weights(name, n_rows, n_columns, format)


def _add_file_type(writer: GGUFWriter, format: str) -> None:
    if format in MIXES:  # for display only
        writer.add("general.file_type", MIXES[format].file_type)


def _vocabulary(file: GGUFFile, n_vocab: int) -> Iterator[tuple[str, object]]:
    """A vocabulary's metadata, filled up to `n_vocab` tokens with tokens that nothing uses."""
    unused = 5
    for key, value in file.metadata.items():
        if not key.startswith("tokenizer."):
            continue
        missing = n_vocab - len(value) if hasattr(value, "__len__") else 0
        if key == "tokenizer.ggml.tokens" and missing:
            if missing < 0:
                raise UsageError("the vocabulary is larger than the shape's", where=file.path,
                                 got=len(value), wanted=f"at most {n_vocab}")  # type: ignore[arg-type]
            tokens = list(value.iter_bytes())  # type: ignore[union-attr]
            yield key, tokens + [f"[PAD{i}]".encode() for i in range(len(tokens), n_vocab)]
        elif key == "tokenizer.ggml.token_type" and missing:
            yield key, np.pad(np.asarray(value, np.int32), (0, missing), constant_values=unused)
        elif key != "tokenizer.ggml.scores" or not missing:
            yield key, value


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--folder", type=click.Path(path_type=Path), help="[default: bench/ in the cache]")
def main(names: tuple[str, ...], folder: Path | None) -> None:
    """Write benchmark model files, those that are not there yet, and print their paths."""
    try:
        for name in names or DEFAULT_SET:
            click.echo(ensure_model(name, folder))
    except IgnisError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
