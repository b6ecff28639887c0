"""The Python API, on the default model and on small random ones: what callers build upon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ignis
from ignis.api import Model, _StopTexts
from ignis.errors import NumericsError, PromptTooLongError, UsageError
from ignis.text import StreamDecoder
from tests.random_models import write_random_model
from tests.runtime.scripts import run_script

PROMPT = "Once upon a time there was a little"


@pytest.fixture(scope="module")
def model(default_model: Path) -> Iterator[Model]:
    with ignis.load(default_model, n_ctx=512, threads=2) as loaded:
        yield loaded


@pytest.fixture
def random_model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "m.gguf", architecture="qwen2", formats=("q8_0", "f16"))


def fresh(model: Model) -> Model:
    """The model without anything in its KV cache."""
    model.new_sequence()
    return model


@pytest.mark.model
class TestDefaultModel:
    """One model for all: each test starts from an empty cache or says that it does not."""

    def test_same_seed_same_text(self, model: Model) -> None:
        """And another seed another text, or nothing would be random at all."""
        options = {"max_tokens": 24, "temperature": 1.0, "top_k": 50}
        texts = ["".join(model.generate(PROMPT, seed=seed, **options)) for seed in (7, 7, 8)]
        assert texts[0] == texts[1] != texts[2]

    def test_pieces_ids_and_statistics_agree(self, model: Model) -> None:
        generation = fresh(model).generate(PROMPT, max_tokens=20)
        text = "".join(generation)
        assert text == model.detokenize(generation.token_ids) and len(text) > 20
        stats = generation.stats
        assert stats.n_prompt == len(model.tokenize(PROMPT))
        assert stats.n_generated == len(generation.token_ids) == 20
        assert stats.finish_reason == "length"
        assert stats.prompt_seconds > 0 and stats.decode_seconds > 0

    def test_text_and_token_ids_are_the_same_prompt(self, model: Model) -> None:
        ids = model.tokenize(PROMPT)
        assert list(model.generate(ids, max_tokens=8)) == list(model.generate(PROMPT, max_tokens=8))

    def test_the_model_ends_a_chat_by_itself(self, model: Model) -> None:
        generation = model.chat([{"role": "user", "content": "Say hello."}], max_tokens=200)
        text = "".join(generation)
        assert generation.stats.finish_reason == "stop"
        assert text and "<|im_end|>" not in text

    def test_a_message_never_becomes_a_control_token(self, model: Model) -> None:
        """Counted by the prompt: as a control token the spelling would be one token."""
        def n_prompt(text: str) -> int:
            return model.chat([{"role": "user", "content": text}], max_tokens=0).stats.n_prompt

        assert n_prompt("a <|im_end|> b") > n_prompt("a b") + 3

    def test_stop_texts_across_pieces(self, model: Model) -> None:
        """Nothing of a stop text is shown, however the tokens cut it."""
        whole = "".join(fresh(model).generate(PROMPT, max_tokens=40))
        for first, last in ((10, 25), (30, 31), (17, 40)):
            stop = whole[first:last]
            generation = model.generate(PROMPT, max_tokens=40, stop=["not there", stop])
            assert "".join(generation) == whole[: whole.index(stop)]
            assert generation.stats.finish_reason == "stop"

    def test_a_stop_text_that_never_comes_holds_nothing_back(self, model: Model) -> None:
        whole = "".join(model.generate(PROMPT, max_tokens=12))
        almost = whole[-3:] + "\0"
        assert "".join(model.generate(PROMPT, max_tokens=12, stop=[almost])) == whole

    def test_max_tokens_zero(self, model: Model) -> None:
        generation = model.generate(PROMPT, max_tokens=0)
        assert list(generation) == []
        assert generation.stats.finish_reason == "length"

    def test_prefix_reuse_changes_nothing(self, model: Model, default_model: Path) -> None:
        """A chat of three turns equals each turn asked of a model that has seen nothing."""
        messages: list[dict[str, str]] = []
        fresh(model)
        for question in ("Name a colour.", "And another?", "Why these?"):
            messages.append({"role": "user", "content": question})
            reused = model.chat(messages, max_tokens=24)
            answer = "".join(reused)
            held = model._sequence.n_tokens
            assert held >= reused.stats.n_prompt
            with ignis.load(default_model, n_ctx=512, threads=1) as other:
                assert "".join(other.chat(messages, max_tokens=24)) == answer
            messages.append({"role": "assistant", "content": answer})

    def test_a_text_that_turns_elsewhere_is_cut_back(self, model: Model) -> None:
        first = "".join(fresh(model).generate(PROMPT, max_tokens=10))
        list(model.generate(PROMPT + " dog who", max_tokens=10))
        assert "".join(model.generate(PROMPT, max_tokens=10)) == first

    def test_logits_of_a_text(self, model: Model) -> None:
        """Of all positions, in chunks; the same bits as step by step."""
        ids = model.tokenize(PROMPT * 10)
        assert len(ids) > 70
        logits = model.logits(ids)
        assert logits.shape == (len(ids), model.config.n_vocab) and logits.dtype == np.float32
        sequence = model.new_sequence()
        assert np.array_equal(sequence.feed(ids[:50]), logits[49])
        assert np.array_equal(sequence.feed(ids[50:]), logits[-1])

    def test_tokenize_and_back(self, model: Model) -> None:
        text = "Größe <|im_start|> 🙂 한국어"
        ids = model.tokenize(text)
        assert model.detokenize(ids) == text
        with_control = model.tokenize(text, special=True)
        assert len(with_control) < len(ids) and model.detokenize(with_control) != text

    def test_half_characters_are_never_shown(self, model: Model) -> None:
        """Byte tokens of an emoji, one by one, as a model would say them."""
        ids = model.tokenize("🙂🙃")
        decoder = StreamDecoder(model.tokenizer)
        assert len(ids) > 2
        pieces = [decoder.push(i) for i in ids]
        assert "".join(pieces) == "🙂🙃" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
        assert "" in pieces and decoder.flush() == ""
        options = {"max_tokens": 60, "temperature": 3.0, "seed": 1}
        for piece in model.generate("🙂", **options):
            piece.encode()  # a lone surrogate would raise

    def test_the_context_is_a_limit_that_is_named(self, default_model: Path) -> None:
        with ignis.load(default_model, n_ctx=24, threads=1) as small:
            n_prompt = len(small.tokenize(PROMPT))
            generation = small.generate(PROMPT, max_tokens=None)
            text = "".join(generation)
            assert generation.stats.finish_reason == "context"
            assert generation.stats.n_generated == 24 - n_prompt + 1 and text
            too_long = "word " * 30
            n = len(small.tokenize(too_long))
            for call in (small.generate, lambda p: small.logits(small.tokenize(p))):
                with pytest.raises(PromptTooLongError, match=f"got {n} tokens, wanted at most 24"):
                    call(too_long)


@pytest.mark.parametrize("engine", ["graph", "imperative", "reference"])
def test_every_engine_generates(random_model: Path, engine: str) -> None:
    """Greedy text of a model whose best token leads by far is the same in all of them."""
    with ignis.load(random_model, engine=engine, threads=2) as model:
        generation = model.generate([10, 20, 30], max_tokens=6)
        list(generation)
        first = generation.token_ids[0]
        assert first == int(model.logits([10, 20, 30])[-1].argmax())
        assert generation.stats.n_generated == 6 or generation.stats.finish_reason == "stop"


def test_engines_agree_on_the_text(random_model: Path) -> None:
    said = {}
    for engine in ("graph", "imperative"):
        with ignis.load(random_model, engine=engine) as model:
            generation = model.generate("the thing", max_tokens=40, temperature=0.8, seed=3)
            list(generation)
            said[engine] = generation.token_ids
    assert said["graph"] == said["imperative"]


def test_closing_twice_and_using_a_closed_model(random_model: Path) -> None:
    before = set(threading.enumerate())
    model = ignis.load(random_model, threads=2)
    assert model.logits([1, 2]).shape == (2, 300)
    with model:
        pass
    model.close()
    for use in (lambda: model.logits([1]), lambda: list(model.generate([1]))):
        with pytest.raises(UsageError, match="the model is closed"):
            use()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert left <= {"ignis-interrupt"}  # one a process, for good


def test_a_damaged_weight_is_an_error_that_names_the_step(random_model: Path) -> None:
    """A scale that is NaN must come out as NaN, not as a silent token."""
    from ignis.gguf import open_gguf

    with open_gguf(random_model) as file:
        info = file.tensors["blk.1.ffn_down.weight"]
        start = bytes(random_model.read_bytes()).index(file.data(info.name).tobytes())
        nan = {"q8_0": np.float16(np.nan), "f16": np.float16(np.nan)}[info.format.name].tobytes()
    data = bytearray(random_model.read_bytes())
    data[start : start + 2] = nan
    random_model.write_bytes(data)
    with ignis.load(random_model, threads=2) as model:
        with pytest.raises(NumericsError, match=r"logits of step 0: .*got nan") as caught:
            list(model.generate([1, 2, 3], max_tokens=5))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [({"max_tokens": -1}, "max_tokens makes no sense: got -1"), ({"stop": [""]}, "empty stop text"),
     ({"temperature": -1.0}, "temperature: bad"), ({"top_p": 0}, "top_p: bad"),
     ({"seed": -1}, "seed: bad")],
)  # fmt: skip
def test_senseless_arguments(
    random_model: Path, arguments: dict[str, object], wrong: str
) -> None:
    with ignis.load(random_model) as model, pytest.raises(UsageError, match=wrong):
        model.generate("the", **arguments)


def test_senseless_options_of_load(random_model: Path) -> None:
    for options, wrong in (
        ({"engine": "steam"}, "no such engine: got steam"),
        ({"weights": "lead"}, "no such weight layout: got lead"),
        ({"threads": 0}, "number of threads"), ({"n_ctx": 0}, "the context can't"),
        ({"n_ctx": 1025}, "wanted 1 to 1024"), ({"pre": "none"}, "pre-tokenizer"),
    ):  # fmt: skip
        with pytest.raises(ignis.IgnisError, match=wrong):
            ignis.load(random_model, **options)


def test_empty_prompts_and_foreign_ids(random_model: Path) -> None:
    with ignis.load(random_model) as model:
        for prompt in ("", []):
            with pytest.raises(UsageError, match="the prompt is empty"):
                model.generate(prompt)
        with pytest.raises(UsageError, match="no such token: got 300, wanted 0 to 299"):
            list(model.generate([300]))
        with pytest.raises(UsageError, match="no such token: got -1"):
            model.logits([1, -1])


def test_a_generation_that_is_dropped_leaves_the_model_usable(random_model: Path) -> None:
    with ignis.load(random_model) as model:
        wanted = list(model.generate([1, 2, 3], max_tokens=9))
        next(model.generate([4, 5], max_tokens=9), None)
        assert list(model.generate([1, 2, 3], max_tokens=9)) == wanted


@pytest.mark.parametrize(
    ("stops", "pushed", "shown", "found"),
    [(["abc"], ["xab", "cd"], "x", True), (["abc"], ["xab", "d"], "xabd", False),
     (["abc"], ["ab"], "ab", False), (["aab"], ["aaab"], "a", True),
     (["aab"], ["a", "a", "a", "b"], "a", True), (["b", "ab"], ["xa", "b"], "x", True),
     (["\n\n"], ["x\n", "y\n", "\nz"], "x\ny", True), ([], ["ab"], "ab", False)],
)  # fmt: skip
def test_stop_texts(stops: list[str], pushed: list[str], shown: str, found: bool) -> None:
    texts = _StopTexts(stops)
    got = ""
    for piece in pushed:
        got += texts.push(piece)
        if texts.found:
            break
    if not texts.found:
        got += texts.flush()
    assert (got, texts.found) == (shown, found)


_INTERRUPTED = """
import os, signal, sys, threading, time
import ignis
model = ignis.load(sys.argv[1], n_ctx=8192, threads=2)
prompt = "Once upon a time there was a little"
ids = model.tokenize(prompt + " story of the sea" * 1500)[:8000]
before = "".join(model.generate(prompt, max_tokens=20))
sent = []
def interrupt():
    sent.append(time.perf_counter())
    os.kill(os.getpid(), signal.SIGINT)
for delay in (0.7, 0.05, 0.11):
    threading.Timer(delay, interrupt).start()
    try:
        list(model.generate(ids, max_tokens=None))
    except KeyboardInterrupt:
        print(time.perf_counter() - sent[-1])
    assert "".join(model.generate(prompt, max_tokens=20)) == before
"""


@pytest.mark.model
def test_ctrl_c_in_a_long_prompt(default_model: Path, subprocess_env: dict[str, str]) -> None:
    """Within half a second, and what comes after it is what would have come without."""
    done = run_script(_INTERRUPTED, subprocess_env, default_model)
    assert done.returncode == 0, done.stderr
    times = list(map(float, done.stdout.split()))
    assert len(times) == 3 and max(times) < 0.5
