"""If these break, the wrong file of a repository is taken, or a cut transfer begins anew."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ignis.errors import DownloadError, UsageError
from ignis.hub import HuggingFaceName, find_local, huggingface, pull
from ignis.settings import Settings
from tests.hub.hub_server import serving

BIG = bytes(range(251)) * 100_000      # two and a half of the library's 10 MiB chunks
FILES = {
    "README.md": b"text",
    "toy-q4_k.gguf": b"k", "toy-q4_k_m.gguf": b"km", "toy-Q8_0.gguf": BIG,
    "toy-f16-00001-of-00002.gguf": b"one", "toy-f16-00002-of-00002.gguf": b"two",
    "mmproj-toy-f16.gguf": b"eyes",
}
hub = pytest.importorskip("huggingface_hub")


@pytest.fixture
def server():
    with serving(dict(FILES)) as server:
        yield server


@pytest.fixture
def settings(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    return Settings(cache_dir=tmp_path / "cache", hf_endpoint=server.url)


def stored(settings):
    folder = settings.models_dir / "huggingface" / "Owner" / "Toy-GGUF"
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_names():
    assert HuggingFaceName.parse("Qwen/Qwen2.5-0.5B-Instruct-GGUF:q8_0") == HuggingFaceName(
        "Qwen", "Qwen2.5-0.5B-Instruct-GGUF", "q8_0")
    assert HuggingFaceName.parse("hf:a/b") == HuggingFaceName("a", "b", None)
    for bad in ("smollm2", "a/b/c", "../b", "a/..", "./b", "a/b:", "a b/c", "/a", "a/b:c/d", "é/b"):
        assert HuggingFaceName.parse(bad) is None


@pytest.mark.parametrize(("tag", "files"), [
    ("q4_k", ["toy-q4_k.gguf"]), ("Q4_K_M", ["toy-q4_k_m.gguf"]), ("q8_0", ["toy-Q8_0.gguf"]),
    ("F16", ["toy-f16-00001-of-00002.gguf", "toy-f16-00002-of-00002.gguf"])])
def test_the_quantization_is_the_end_of_the_name(tag, files):
    assert huggingface.choose(FILES, HuggingFaceName("a", "b", tag)) == files


@pytest.mark.parametrize(("tag", "message"), [
    ("q2_k", "no file matches: got .*toy-q4_k_m"), (None, "several files match")])
def test_a_choice_that_is_none_lists_what_there_is(tag, message):
    with pytest.raises(UsageError, match=message):
        huggingface.choose(FILES, HuggingFaceName("a", "b", tag))


def test_a_missing_part_is_an_error():
    with pytest.raises(DownloadError, match="parts of a split model are missing: got 1, wanted 2"):
        huggingface.choose(["x-f16-00002-of-00002.gguf"], HuggingFaceName("a", "b", None))


def test_a_file_is_fetched_once(server, settings):
    path = pull("Owner/Toy-GGUF:q8_0", settings)
    assert path.read_bytes() == BIG
    assert stored(settings) == ["toy-Q8_0.gguf"]
    n_requests = len(server.requests)
    assert pull("Owner/Toy-GGUF:Q8_0", settings) == path
    assert find_local("Owner/Toy-GGUF:q8_0", settings) == path
    assert len(server.requests) == n_requests


def test_all_parts_of_a_split_model_are_fetched(settings):
    path = pull("Owner/Toy-GGUF:f16", settings)
    assert path.name == "toy-f16-00001-of-00002.gguf"
    assert stored(settings) == ["toy-f16-00001-of-00002.gguf", "toy-f16-00002-of-00002.gguf"]


def test_a_dropped_connection_is_resumed(server, settings):
    server.cut_after, server.n_cuts = 15_000_000, 1
    assert pull("Owner/Toy-GGUF:q8_0", settings).read_bytes() == BIG
    first, second = server.gets()
    assert first is None and second is not None and int(second[6:-1]) > 0


def test_an_ended_pull_is_resumed_by_the_next(server, settings, tmp_path):
    """SIGINT in the middle of a transfer; the next process asks for the rest only."""
    server.cut_after, server.n_cuts = 15_000_000, 1
    server.stall.set()
    environment = {**os.environ, "IGNIS_CACHE_DIR": str(settings.cache_dir),
                   "HF_ENDPOINT": server.url,
                   "PYTHONPATH": str(Path(huggingface.__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", "from ignis.hub import pull; from ignis.settings import Settings; "
         "pull('Owner/Toy-GGUF:q8_0', Settings.from_env())"],
        env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not any(p.stat().st_size for p in settings.models_dir.rglob("data")) \
            and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert [p for p in stored(settings) if p.endswith(".gguf")] == []
    partial, = settings.models_dir.rglob("data")
    n_there = partial.stat().st_size
    assert 0 < n_there < len(BIG)
    assert pull("Owner/Toy-GGUF:q8_0", settings).read_bytes() == BIG
    assert server.gets()[-1] == f"bytes={n_there}-"
    assert stored(settings) == ["toy-Q8_0.gguf"]


def test_wrong_bytes_are_refused_and_not_gone_on_with(server, settings):
    server.wrong_digest = True
    with pytest.raises(DownloadError, match="SHA-256 differs"):
        pull("Owner/Toy-GGUF:q8_0", settings)
    assert stored(settings) == []


def test_an_unknown_repository_is_one_clear_error(settings):
    with pytest.raises(DownloadError, match=r"Owner/Nothing: no such model.*HTTP 404"):
        pull("Owner/Nothing", settings)


def test_an_unreachable_server_is_one_clear_error(tmp_path):
    settings = Settings(cache_dir=tmp_path, hf_endpoint="http://127.0.0.1:1")
    with pytest.raises(DownloadError, match="Owner/Toy-GGUF:q8_0: cannot fetch it") as caught:
        pull("Owner/Toy-GGUF:q8_0", settings)
    assert "\n" not in str(caught.value)


def test_without_the_extra_the_error_says_what_to_install(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"pip install 'ignis-llm\[hub\]'"):
        pull("Owner/Toy-GGUF:q8_0", settings)
