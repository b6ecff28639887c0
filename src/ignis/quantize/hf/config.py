"""`config.json` and its like: JSON files, and typed access to what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.models.config import MAX_COUNT

MAX_JSON_NBYTES = 1 << 28
_MAX_F32 = 3.4e38       # GGUF keeps these numbers in f32


def read_json(path: Path) -> Any:
    """The value of a JSON file; ModelFileError for what cannot be read, or is none."""
    try:
        if path.stat().st_size > MAX_JSON_NBYTES:
            raise ModelFileError("the file is too large", where=path,
                                 wanted=f"at most {MAX_JSON_NBYTES >> 20} MiB of JSON")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read it: {error.strerror}", where=path) from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"not JSON: {error}", where=path) from None


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object of a JSON file; an empty one where an `optional` file is not there."""
    if optional and not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelFileError("not a JSON object", where=path, got=type(value).__name__)
    return value


def kind_of(step: Any) -> str | None:
    """The `type` of a step in tokenizer.json; None for what is no step."""
    kind = step.get("type") if isinstance(step, dict) else None
    return kind if isinstance(kind, str) else None


class Section:
    """A JSON object whose values are checked as they are asked for.

    `defaults` are those of the model's class in transformers, which does not write them. A null
    counts as not there.
    """

    def __init__(self, where: object, values: Mapping[str, Any],
                 defaults: Mapping[str, Any] | None = None) -> None:
        self.where = where
        self.values = {**(defaults or {}), **values}

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str) -> Any:
        """A value of any type; None where there is none."""
        return self.values.get(key)

    def count(self, key: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.bad(key, f"an integer from 1 to {most}")
        return value

    def optional_count(self, key: str, most: int = MAX_COUNT) -> int | None:
        """A count; None where there is none, or 0."""
        return None if self.get(key) in (None, 0) else self.count(key, most=most)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) \
                or not 0 < value <= _MAX_F32:
            raise self.bad(key, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a string")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or not all(
                isinstance(x, int | float) and 0 < x < math.inf for x in value):
            raise self.bad(key, f"{length} finite numbers above 0")
        return [float(x) for x in value]

    def items(self, key: str, length: int) -> list[Any] | None:
        """A list with something for each layer; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            raise self.bad(key, f"{length} values, one a layer")
        return value[:length]

    def section(self, key: str) -> Section | None:
        """An object within; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, "an object")
        return Section(f"{self.where}: {key}", value)

    def refuse(self, key: str, *neutral: object, hint: str | None = None) -> None:
        """Raise unless a value is one that changes nothing, or is not there."""
        value = self.get(key)
        if value is not None and value not in neutral:
            wanted = " or ".join(map(_shown, neutral)) or "no such key"
            raise UnsupportedModelError(f"{key} is not supported", where=self.where,
                                        got=_shown(value), wanted=wanted, hint=hint)

    def bad(self, key: str, wanted: str) -> ModelFileError:
        value = self.get(key)
        got = "nothing" if value is None else _shown(value)
        return ModelFileError(f"bad {key}", where=self.where, got=got, wanted=wanted)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
