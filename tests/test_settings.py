"""If these break, a bad environment variable is silently believed, or a good one is not read."""

from pathlib import Path

import pytest

from ignis.errors import UsageError
from ignis.settings import Settings


def test_defaults_follow_home_and_xdg():
    assert Settings.from_env({"HOME": "/home/a"}).cache_dir == Path("/home/a/.cache/ignis")
    xdg = {"HOME": "/home/a", "XDG_CACHE_HOME": "/x"}
    assert Settings.from_env(xdg).models_dir == Path("/x/ignis/models")
    relative = {"HOME": "/home/a", "XDG_CACHE_HOME": "x"}  # ignored, as the specification says
    assert Settings.from_env(relative).objects_dir == Path("/home/a/.cache/ignis/objects")


def test_every_variable_is_read():
    settings = Settings.from_env({
        "IGNIS_CACHE_DIR": "/c", "IGNIS_THREADS": "3", "IGNIS_TARGET": "x86-64-v2",
        "IGNIS_DEBUG": "1", "NO_COLOR": "1", "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert settings == Settings(Path("/c"), 3, "x86-64-v2", True, False, "http://127.0.0.1:9")


def test_empty_variables_count_as_not_set():
    names = ("IGNIS_CACHE_DIR", "IGNIS_THREADS", "IGNIS_TARGET", "IGNIS_DEBUG", "NO_COLOR",
             "HF_ENDPOINT")
    empty = Settings.from_env({"HOME": "/h", **dict.fromkeys(names, "")})
    assert empty == Settings.from_env({"HOME": "/h"})


@pytest.mark.parametrize(("name", "value"), [
    ("IGNIS_THREADS", "0"), ("IGNIS_THREADS", "-1"), ("IGNIS_THREADS", "two"),
    ("IGNIS_THREADS", "1" * 5000), ("IGNIS_THREADS", "٣"), ("IGNIS_TARGET", "z80"),
    ("IGNIS_DEBUG", "maybe"), ("HF_ENDPOINT", "ftp://x"), ("IGNIS_CACHE_DIR", "/dev/null")])
def test_bad_values_are_named(name, value):
    with pytest.raises(UsageError, match=name):
        Settings.from_env({"HOME": "/h", name: value})
