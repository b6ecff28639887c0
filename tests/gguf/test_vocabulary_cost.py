"""If these fail, opening a model with a large vocabulary has become slow or heavy."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from ignis.gguf import GGUFWriter, StringArray, open_gguf

SHARED = Path(__file__).resolve().parents[3] / "shared" / "vocab"
VOCABULARIES = ("qwen2", "llama-bpe", "gpt-2", "llama-spm", "phi-3", "deepseek-llm")


def shared(name: str) -> Path:
    path = SHARED / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"{path.name} is not at hand")
    return path


def check_cost(path: Path, seconds: float, nbytes: int) -> None:
    durations = []
    for _ in range(3):
        start = time.process_time()
        open_gguf(path).close()
        durations.append(time.process_time() - start)
    assert min(durations) < seconds
    tracemalloc.start()
    try:
        with open_gguf(path):
            assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies(name: str) -> None:
    check_cost(shared(name), seconds=0.15, nbytes=40 << 20)


def test_a_made_vocabulary_of_150k_tokens_and_merges(tmp_path: Path) -> None:
    """The same without the shared files: a clone alone tests it."""
    writer = GGUFWriter(tmp_path / "m.gguf", "qwen2")
    tokens = [f"t{i:x}" for i in range(150_000)]
    writer.add("tokenizer.ggml.tokens", tokens)
    writer.add("tokenizer.ggml.merges", [f"{a} {a[1:]}" for a in tokens])
    writer.write()
    check_cost(tmp_path / "m.gguf", seconds=0.15, nbytes=40 << 20)


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_metadata_equals_the_oracle(name: str) -> None:
    """Every key of a real file, each string and number, as the `gguf` package reads it."""
    fields = GGUFReader(shared(name)).fields
    with open_gguf(shared(name)) as f:
        for key, value in f.metadata.items():
            wanted = fields[key].contents()
            if isinstance(value, StringArray):
                assert list(value) == wanted
            elif isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, wanted)
            else:
                assert value == wanted
        assert set(fields) - set(f.metadata) == {
            "GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}
