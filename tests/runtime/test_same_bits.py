"""The contract of NUMERICS.md: logits depend on the model and the tokens before, nothing else.

Everything here compares with ==. What would be broken: reproducible output, exact prefix caches,
and the proof that optimised and plain execution compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ignis.gguf import open_gguf
from ignis.native.host import host_target
from ignis.runtime.step import StepBatch
from ignis.target import Target
from tests.random_models import BLOCK_FORMATS, FLOAT_FORMATS, random_models, write_random_model
from tests.runtime.engines import Logits, engine, feed, random_chunks

N_TOKENS = 70  # more than one tile of every width, several pages


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One object cache for all engines of this file."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every supported weight format in it, attention over shared key heads."""
    return write_random_model(
        tmp_path_factory.mktemp("models") / "m.gguf", architecture=request.param,
        formats=BLOCK_FORMATS + FLOAT_FORMATS, n_layers=4, n_embd=96, n_heads=6, n_kv_heads=2,
        head_dim=32, n_ff=160, seed=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(0).integers(0, 297, N_TOKENS).tolist()


@pytest.fixture(scope="module")
def wanted(model: Path, objects: Path, ids: list[int]) -> Logits:
    """The logits of the imperative engine, one thread, mapped weights, one step."""
    with engine(model, objects, engine="imperative", n_threads=1, weights="mapped") as plain:
        logits = feed(plain, ids, [35, 35])
    assert np.isfinite(logits).all() and logits.std() > 0.1
    return logits


@pytest.mark.parametrize("weights", ["mapped", "packed"])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_layouts_and_chunks(
    model: Path, objects: Path, ids: list[int], wanted: Logits, n_threads: int, weights: str
) -> None:
    """Any number of threads, either layout; the text whole, token by token, in random chunks."""
    rng = np.random.default_rng(n_threads)
    with engine(model, objects, n_threads=n_threads, weights=weights) as runner:
        assert np.array_equal(feed(runner, ids), wanted)
        assert np.array_equal(feed(runner, ids, [1] * N_TOKENS), wanted)
        for _ in range(3):
            assert np.array_equal(feed(runner, ids, random_chunks(rng, N_TOKENS)), wanted)


def test_imperative_and_graph_agree_token_by_token(
    model: Path, objects: Path, ids: list[int], wanted: Logits
) -> None:
    """The unfused engine in its one-token form too."""
    with engine(model, objects, engine="imperative", n_threads=2, weights="packed") as plain:
        assert np.array_equal(feed(plain, ids, [1] * N_TOKENS), wanted)


def test_batch_mates_change_nothing(
    model: Path, objects: Path, ids: list[int], wanted: Logits
) -> None:
    """Sequences that share steps, each in its own slot, at different positions."""
    rng = np.random.default_rng(7)
    others = [rng.integers(0, 297, N_TOKENS).tolist() for _ in range(2)]
    texts = [ids, *others]
    with engine(model, objects, n_threads=2, n_slots=3) as runner:
        got: list[Logits] = []
        at = [0, 0, 0]
        while at[0] < N_TOKENS:
            tokens: list[tuple[int, int, int]] = []
            for slot, text in enumerate(texts):
                size = int(rng.integers(0, 8))
                for _ in range(min(size, N_TOKENS - at[slot])):
                    tokens.append((text[at[slot]], slot, at[slot]))
                    at[slot] += 1
            if tokens:
                order = rng.permutation(len(tokens)) if len(tokens) < 2 else range(len(tokens))
                batch = _batch([tokens[i] for i in order])
                logits = runner.forward(batch)
                mine = [i for i, slot in enumerate(batch.slots) if slot == 0]
                got.append(logits[mine])
        assert np.array_equal(np.concatenate(got), wanted)
        # The mates, alone, must equal what they were in company: feed slot 1 alone again.
        alone = feed(runner, others[0][: at[1]], slot=1)
        assert alone.shape[0] == at[1]


def _batch(tokens: Sequence[tuple[int, int, int]]) -> StepBatch:
    ids, slots, positions = zip(*tokens, strict=True)
    return StepBatch(ids, slots, positions, range(len(tokens)))


def test_a_prefix_kept_in_the_cache_changes_nothing(
    model: Path, objects: Path, ids: list[int], wanted: Logits
) -> None:
    """Cache hit and miss: cut a sequence back and continue it; pages are used again."""
    rng = np.random.default_rng(11)
    with engine(model, objects, n_threads=2) as runner:
        feed(runner, rng.integers(0, 297, 200).tolist())  # leaves dirty pages behind
        feed(runner, ids)
        for kept in (1, 15, 16, 17, 40, 69):
            runner.truncate(0, kept)
            n = N_TOKENS - kept
            positions = range(kept, N_TOKENS)
            batch = StepBatch(ids[kept:], [0] * n, positions, range(n))
            logits = runner.forward(batch) if n <= 64 else None
            if logits is None:
                half = StepBatch(ids[kept:45], [0] * (45 - kept), range(kept, 45), [])
                runner.forward(half)
                rest = StepBatch(ids[45:], [0] * 25, range(45, 70), range(25))
                assert np.array_equal(runner.forward(rest), wanted[45:])
            else:
                assert np.array_equal(logits, wanted[kept:])


def _lower_levels() -> list[str]:
    host = host_target()
    return [name for name in Target.levels() if host.runs(Target.level(name))]


@pytest.mark.parametrize("level", _lower_levels())
def test_feature_levels(
    model: Path, objects: Path, ids: list[int], wanted: Logits, level: str
) -> None:
    """Code for older processors: without AVX-512, without VNNI, without FMA and F16C."""
    system = host_target().triple.split("-", 1)[1]
    target = Target.level(level, system)
    with engine(model, objects, n_threads=2, target=target) as runner:
        assert np.array_equal(feed(runner, ids), wanted)
        assert np.array_equal(feed(runner, ids, [1] * N_TOKENS), wanted)


@pytest.mark.parametrize("disabled", [
    "dead_code", "fuse_norm", "fuse_swiglu", "fuse_residual", "plan_memory",
])  # fmt: skip
def test_each_pass_can_be_switched_off(
    model: Path, objects: Path, ids: list[int], wanted: Logits, disabled: str
) -> None:
    with engine(model, objects, n_threads=2, disabled_passes=[disabled]) as runner:
        assert np.array_equal(feed(runner, ids), wanted)
        assert np.array_equal(feed(runner, ids, [1] * N_TOKENS), wanted)


def test_random_models(tmp_path: Path, objects: Path) -> None:
    """Shapes, formats and kinds drawn at random: graph equals imperative."""
    rng = np.random.default_rng(5)
    for options, path in random_models(tmp_path, 12, seed=100):
        text = rng.integers(0, 297, 40).tolist()
        with engine(path, objects, engine="imperative", n_threads=1, weights="mapped") as plain:
            expected = feed(plain, text, [20, 20])
        with engine(path, objects, n_threads=2, weights="packed") as runner:
            assert np.array_equal(feed(runner, text), expected), options
            assert np.array_equal(feed(runner, text, [1] * 40), expected), options


def test_long_contexts_cross_segments(tmp_path: Path, objects: Path) -> None:
    """Attention merges segments of 256 positions in one order, however the text was cut."""
    path = write_random_model(tmp_path / "m.gguf", formats=("q8_0",), n_layers=1, n_ctx=2048)
    text = np.random.default_rng(1).integers(0, 297, 600).tolist()
    with engine(path, objects, engine="imperative", n_threads=1, weights="mapped") as plain:
        expected = feed(plain, text)
    with engine(path, objects, n_threads=3, n_ctx=1024) as runner:
        for chunks in ([64] * 9 + [24], [1] * 600, [50, 1, 60, 64, 1, 1, 63, *[60] * 6]):
            assert np.array_equal(feed(runner, text, chunks), expected)


def test_the_default_model(default_model: Path, objects: Path) -> None:
    """The real thing: engines, layouts, threads and chunks on SmolLM2."""
    text = np.random.default_rng(2).integers(0, 40000, 48).tolist()
    with engine(default_model, objects, engine="imperative", n_threads=1, weights="mapped") as e:
        expected = feed(e, text)
    for n_threads, weights in ((1, "packed"), (2, "mapped"), (3, "packed")):
        with engine(default_model, objects, n_threads=n_threads, weights=weights) as e:
            assert np.array_equal(feed(e, text), expected)
            assert np.array_equal(feed(e, text, [1] * 5 + [43]), expected)


def test_user_models(objects: Path) -> None:
    """Any GGUF that a user puts into models/: graph and imperative agree bit for bit."""
    folder = Path(__file__).resolve().parents[2] / "models"
    paths = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not paths:
        pytest.skip("no files in models/")
    for path in paths:
        with open_gguf(path) as file:
            n_vocab = file.tensors["token_embd.weight"].shape[0]
        text = np.random.default_rng(3).integers(0, n_vocab, 24).tolist()
        with engine(path, objects, engine="imperative", weights="mapped") as plain:
            expected = feed(plain, text)
        with engine(path, objects) as runner:
            assert np.array_equal(feed(runner, text), expected), path
