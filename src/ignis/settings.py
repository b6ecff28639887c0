"""The one place that reads the environment.

    IGNIS_CACHE_DIR   models and compiled objects; default $XDG_CACHE_HOME/ignis or ~/.cache/ignis
    IGNIS_THREADS     number of threads; default: what affinity and the cgroup quota allow
    IGNIS_TARGET      feature level to compile for, e.g. x86-64-v2; default: this processor
    IGNIS_DEBUG       1: tracebacks instead of one-line errors
    NO_COLOR          any text: no colours (https://no-color.org)
    HF_ENDPOINT       another Hugging Face server, as its own tools understand it

An empty variable counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ignis.errors import UsageError
from ignis.target import Target

MAX_THREADS = 1024
_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"0", "false", "no", "off"})


class Settings(NamedTuple):
    """What the environment says, checked."""

    cache_dir: Path
    threads: int | None = None
    target: str | None = None
    debug: bool = False
    color: bool = True
    hf_endpoint: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `environ` (default: the process environment).

        Raises `UsageError` that names the variable, its value and what it may be.
        """
        env = {name: value for name, value in (os.environ if environ is None else environ).items()
               if value}
        return cls(
            cache_dir=_cache_dir(env),
            threads=_threads(env),
            target=_target(env),
            debug=_flag(env, "IGNIS_DEBUG"),
            color="NO_COLOR" not in env,
            hf_endpoint=_endpoint(env),
        )

    @property
    def models_dir(self) -> Path:
        """Fetched models, one folder each."""
        return self.cache_dir / "models"

    @property
    def objects_dir(self) -> Path:
        """Compiled kernels."""
        return self.cache_dir / "objects"


def _cache_dir(env: Mapping[str, str]) -> Path:
    if chosen := env.get("IGNIS_CACHE_DIR"):
        return _absolute("IGNIS_CACHE_DIR", chosen)
    # The XDG specification says that a relative path is to be ignored.
    base = env.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "ignis"
    return _absolute("HOME", env.get("HOME", "~")) / ".cache" / "ignis"


def _absolute(name: str, text: str) -> Path:
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # no home directory for this user
        raise UsageError("cannot find the cache folder", where=name, got=repr(text),
                         hint="set IGNIS_CACHE_DIR to a folder") from error
    if path.exists() and not path.is_dir():
        raise UsageError("not a folder", where=name, got=path)
    return path


def _threads(env: Mapping[str, str]) -> int | None:
    text = env.get("IGNIS_THREADS")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_THREADS):
        raise UsageError("bad number of threads", where="IGNIS_THREADS", got=repr(text),
                         wanted=f"1 to {MAX_THREADS}")
    return int(text)


def _target(env: Mapping[str, str]) -> str | None:
    name = env.get("IGNIS_TARGET")
    if name is not None and name not in Target.levels():
        raise UsageError("unknown feature level", where="IGNIS_TARGET", got=repr(name),
                         wanted=" or ".join(Target.levels()))
    return name


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0").lower()
    if text not in _YES | _NO:
        raise UsageError("not a switch", where=name, got=repr(text), wanted="1 or 0")
    return text in _YES


def _endpoint(env: Mapping[str, str]) -> str | None:
    url = env.get("HF_ENDPOINT")
    if url is not None and not url.startswith(("https://", "http://")):
        raise UsageError("not a web address", where="HF_ENDPOINT", got=repr(url),
                         wanted="https://...")
    return url
