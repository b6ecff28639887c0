"""If these break, scripts that call `ignis run` break."""

import json

import pytest

from ignis.sampling.stream import MAX_SEED


def test_text_goes_to_stdout_and_the_rest_to_stderr(call, models):
    result = call("run", "-m", "x.gguf", "-p", "hello there")
    assert (result.code, result.out) == (0, "hello there \n")
    assert result.err.splitlines() == [
        "loaded fake", "compiler: 2 ops -> 1 op",
        "[2 prompt tok in 0.50s (4.0 tok/s) | 2 gen tok in 0.50s (4.0 tok/s)]"]
    assert models[0].calls[-1] == "closed"


def test_every_option_reaches_the_model(call, models):
    call("run", "-m", "x.gguf", "-p", "q", "-n", "7", "-t", "0.5", "--top-k", "3", "--top-p", "0.9",
         "--min-p", "0.1", "--repeat-penalty", "1.2", "--seed", "9", "-s", "be brief", "--engine",
         "imperative", "--threads", "2", "--ctx", "64", "--stop", "A", "--stop", "B", "--pre",
         "qwen2", "--weights", "packed")
    model, = models
    assert str(model.path) == "x.gguf"
    assert model.options == {"threads": 2, "n_ctx": 64, "engine": "imperative", "pre": "qwen2",
                             "weights": "packed", "prepare_chat": True,
                             "kv_type": "f16"}
    assert model.calls[0] == (
        "chat", [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}],
        {"max_tokens": 7, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1,
         "repeat_penalty": 1.2, "seed": 9, "stop": ["A", "B"]})


def test_raw_continues_the_prompt_as_it_is(call, models):
    call("run", "-m", "x.gguf", "--raw", "--special", "-n", "-1", "-p", "a  b")
    kind, prompt, options = models[0].calls[0]
    assert (kind, prompt, options["special"], options["max_tokens"]) == (
        "generate", "a  b", True, None)


def test_prompts_from_a_file_and_from_stdin_lose_one_line_break(call, models, tmp_path):
    (tmp_path / "p.txt").write_bytes("früh\n\n".encode())
    call("run", "-m", "x.gguf", "--raw", "-f", str(tmp_path / "p.txt"))
    call("run", "-m", "x.gguf", "--raw", stdin="spät\r\n".encode())
    assert [model.calls[0][1] for model in models] == ["früh\n", "spät"]


def test_json_is_one_object_and_nothing_else(call):
    result = call("run", "-m", "x.gguf", "-p", "ä b c", "-n", "2", "--seed", "5", "--json", "-q")
    assert json.loads(result.out) == {
        "model": "x.gguf", "text": "ä b ", "token_ids": [0, 1], "finish_reason": "length",
        "prompt_tokens": 3, "generated_tokens": 2, "prompt_tok_s": 6.0, "tok_s": 4.0, "seed": 5}
    assert result.out.count("\n") == 1 and result.err == ""


def test_a_seed_is_made_up_and_told(call, models):
    result = call("run", "-m", "x.gguf", "-p", "a", "-t", "1", "--json")
    seed = json.loads(result.out)["seed"]
    assert 0 <= seed <= MAX_SEED and models[0].calls[0][2]["seed"] == seed


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["-p", "x", "-t", "-1"], 1, "temperature: bad sampling parameter: got -1.0, wanted 0 or more"),
    (["-p", "x", "--top-p", "0"], 1, "top_p: bad sampling parameter"),
    (["-p", "x", "--seed", "-1"], 1, "seed: bad sampling parameter"),
    (["-p", "x", "--stop", ""], 1, "--stop: an empty text would stop at once"),
    (["-p", ""], 1, "the prompt is empty; give one"),
    ([], 1, "the prompt is empty"),
    (["-p", "\udcff"], 1, "-p: not UTF-8: got byte 0xff"),
    (["-f", "/nowhere/p"], 1, "/nowhere/p: cannot read it: No such file or directory"),
    (["-p", "x", "-n", "many"], 2, "'many' is not a valid integer"),
    (["-p", "x", "-n", "-2"], 2, "-2 is not in the range"),
    (["-p", "x", "-f", "y"], 2, "-p and -f exclude each other"),
    (["-p", "x", "--raw", "-s", "y"], 2, "-s needs the chat template"),
    (["-p", "x", "--special"], 2, "--special needs --raw"),
    (["-p", "x", "--engine", "steam"], 2, "'steam' is not one of"),
    (["-p", "x", "--threads", "0"], 2, "0 is not in the range"),
    (["--no-such"], 2, "--no-such"),
    (["-p", "x", "-m", "nonsense"], 1, "nonsense: no such file, and not the name of a model"),
    (["-p", "LONG"], 1, "the prompt is longer than the context: got 9, wanted 4"),
    (["-p", "a NAN"], 1, "logits of step 1: not a number"),
    (["-p", "a BUG"], 1, "unexpected ZeroDivisionError: division by zero; this is a bug in Ignis; "
                         "IGNIS_DEBUG=1"),
])
def test_every_error_is_one_line(call, arguments, code, message):
    if "-m" not in arguments:
        arguments = ["-m", "x.gguf", *arguments]
    result = call("run", *arguments)
    assert result.code == code
    assert message in result.error


def test_stdin_that_is_not_utf8_is_named(call):
    assert "stdin: not UTF-8: got byte 0xff at offset 2" in call(
        "run", "-m", "x.gguf", stdin=b"ab\xff").error


def test_what_was_said_before_an_error_stays(call):
    assert call("run", "-m", "x.gguf", "-p", "a b NAN").out == "a b \n"


def test_debug_shows_where_a_bug_is(call, monkeypatch):
    monkeypatch.setenv("IGNIS_DEBUG", "1")
    result = call("run", "-m", "x.gguf", "-p", "BUG")
    assert result.code == 1 and "Traceback" in result.err


def test_a_bad_environment_is_one_line(call, monkeypatch):
    monkeypatch.setenv("IGNIS_THREADS", "none")
    assert "IGNIS_THREADS: bad number of threads" in call("run", "-m", "x.gguf", "-p", "a").error
