"""Every architecture, every way to stretch rope: bits, float64, and Gemma against llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ignis import hub
from ignis.runtime.step import StepBatch
from ignis.settings import Settings
from ignis.target import Target
from tests.kernels.helpers import levels, target
from tests.random_models import BLOCK_FORMATS, FLOAT_FORMATS, KINDS, write_random_model
from tests.runtime.engines import Logits, engine, feed, mean_kl, random_chunks

N_TOKENS = 70  # several windows of 20


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One object cache for all engines of this file."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M, where it was fetched before."""
    path = hub.find_local("gemma3-270m", Settings.from_env())
    if path is None:
        pytest.skip("`ignis pull gemma3-270m` fetches the model of this test")
    return path


def _plain(path: Path, objects: Path, ids: list[int]) -> Logits:
    with engine(path, objects, engine="imperative", n_threads=1, weights="mapped") as runner:
        return feed(runner, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree_bit_for_bit(kind: str, tmp_path: Path, objects: Path) -> None:
    """Threads, layouts, chunks: with windows, caps, norms of heads and fused projections too."""
    path = write_random_model(tmp_path / "m.gguf", formats=BLOCK_FORMATS + FLOAT_FORMATS,
                              **KINDS[kind])  # fmt: skip
    rng = np.random.default_rng(6)
    ids = rng.integers(0, 297, N_TOKENS).tolist()
    wanted = _plain(path, objects, ids)
    assert np.isfinite(wanted).all() and wanted.std() > 0.1
    for n_threads, weights in ((1, "packed"), (2, "mapped"), (3, "packed")):
        with engine(path, objects, n_threads=n_threads, weights=weights) as runner:
            assert np.array_equal(feed(runner, ids), wanted)
            assert np.array_equal(feed(runner, ids, [1] * N_TOKENS), wanted)
            assert np.array_equal(feed(runner, ids, random_chunks(rng, N_TOKENS)), wanted)


def test_experts_and_batch_mates(tmp_path: Path, objects: Path) -> None:
    """Tokens of other sequences go to the same experts, and change nothing of one's own."""
    path = write_random_model(tmp_path / "m.gguf", formats=("q8_0", "f16"), **KINDS["qwen2moe"])
    rng = np.random.default_rng(12)
    texts = rng.integers(0, 297, (3, 24)).tolist()
    with engine(path, objects, n_threads=2, n_slots=3) as runner:
        alone = [feed(runner, text) for text in texts]
        for slot in range(3):
            runner.truncate(slot, 0)
        got: list[list[Logits]] = [[], [], []]
        for first in range(0, 24, 6):
            tokens = [(slot, at) for slot in range(3) for at in range(first, first + 6)]
            slots, positions = zip(*tokens, strict=True)
            ids = [texts[slot][at] for slot, at in tokens]
            logits = runner.forward(StepBatch(ids, slots, positions, range(18)))
            for slot in range(3):
                got[slot].append(logits[6 * slot : 6 * slot + 6])
        assert all(np.array_equal(np.concatenate(mine), own)
                   for mine, own in zip(got, alone, strict=True))  # fmt: skip


@pytest.mark.parametrize("window", [40, 256, 300])
def test_windows_over_segments(window: int, tmp_path: Path, objects: Path) -> None:
    """A window leaves segments of 256 positions behind; they are not merged, however it is fed."""
    path = write_random_model(tmp_path / "m.gguf", n_layers=2, n_ctx=1024,
                              keys={"attention.sliding_window": window})  # fmt: skip
    ids = np.random.default_rng(7).integers(0, 297, 620).tolist()
    wanted = _plain(path, objects, ids)
    with engine(path, objects, engine="reference") as reference:
        assert mean_kl(feed(reference, ids), wanted) < 2e-2
    with engine(path, objects, n_threads=2) as runner:
        for chunks in ([1] * 620, [60, 1, 64, 63, 1, 1, *[43] * 10]):
            assert np.array_equal(feed(runner, ids, chunks), wanted)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "phi3", "qwen2moe"])
def test_feature_levels(kind: str, level: str, tmp_path: Path, objects: Path) -> None:
    """Code for older processors computes the same bits."""
    path = write_random_model(tmp_path / "m.gguf", formats=("f16", "q8_0"), **KINDS[kind])
    ids = np.random.default_rng(8).integers(0, 297, 40).tolist()
    wanted = _plain(path, objects, ids)
    older: Target = target(level)
    with engine(path, objects, n_threads=2, target=older) as runner:
        assert np.array_equal(feed(runner, ids, [20, *[1] * 20]), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_close_to_float64(kind: str, tmp_path: Path, objects: Path) -> None:
    """Mean KL at most 1e-5 where nothing is quantized."""
    path = write_random_model(tmp_path / "m.gguf", formats=("f32",), **KINDS[kind])
    ids = np.random.default_rng(9).integers(0, 297, 60).tolist()
    with engine(path, objects, engine="reference") as reference:
        exact = feed(reference, ids)
    # A cache of halves may swap experts that are nearly equal, which changes a token by a lot.
    kv_type = "f32" if "n_experts" in KINDS[kind] else "f16"
    with engine(path, objects, kv_type=kv_type) as runner:
        assert mean_kl(exact, feed(runner, ids)) <= 1e-5


def test_long_factors_follow_the_context(tmp_path: Path, objects: Path) -> None:
    """Two contexts, two sets of factors: a context has its own, from the first token on."""
    path = write_random_model(tmp_path / "m.gguf", formats=("f32",), **KINDS["phi3-long"])
    ids = np.random.default_rng(10).integers(0, 297, 20).tolist()
    logits = {}
    for n_ctx in (200, 300, 301, 512):
        with engine(path, objects, n_ctx=n_ctx) as runner:
            logits[n_ctx] = feed(runner, ids)
    assert np.array_equal(logits[200], logits[300]) and np.array_equal(logits[301], logits[512])
    assert np.abs(logits[300] - logits[301]).max() > 0.01


def test_gemma_against_llama_cpp(gemma: Path, objects: Path, shared: Path) -> None:
    """The golden prompts: nearly always the same top token, logits close, greedy text alike."""
    golden = json.loads((shared / "golden/gemma-3-270m-q4_k_m.json").read_text())
    agreeing = total = 0
    with engine(gemma, objects, n_ctx=512) as runner:
        for case in golden["cases"]:
            logits = feed(runner, case["ids"])
            top = np.asarray(case["top5_ids"])
            agreeing += int((logits.argmax(-1) == top[:, 0]).sum())
            total += len(top)
            mine = np.take_along_axis(logits, top, axis=1)
            assert np.abs(mine - np.asarray(case["top5_logits"])).mean() < 0.3, case["text"]
        case = golden["cases"][0]
        tokens, row = [], feed(runner, case["ids"])[-1]
        for position in range(len(case["ids"]), len(case["ids"]) + 32):
            tokens.append(int(row.argmax()))
            row = runner.forward(StepBatch(tokens[-1:], [0], [position], [0]))[0]
    assert agreeing / total >= 0.9
    assert sum(a == b for a, b in zip(tokens, case["greedy_32"], strict=True)) >= 16


def test_gemma_engines_agree_bit_for_bit(gemma: Path, objects: Path) -> None:
    """A context longer than the window of 512, so that local layers forget."""
    ids = np.random.default_rng(11).integers(0, 250_000, 600).tolist()
    batch = [StepBatch(ids[:512], [0] * 512, range(512), []),
             StepBatch(ids[512:], [0] * 88, range(512, 600), [0, 40, 87])]  # fmt: skip
    logits = []
    for name, n_threads, weights in (("imperative", 1, "mapped"), ("graph", 2, "packed")):
        with engine(gemma, objects, engine=name, n_threads=n_threads, weights=weights) as runner:
            runner.forward(batch[0])
            logits.append(runner.forward(batch[1]))
    assert np.array_equal(*logits)
