"""Rows of `bench.formats` as JSON, as Markdown, and in the README."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Figures
from ignis.bench import Spread
from ignis.cli.perplexity import result_json
from ignis.errors import UsageError
from ignis.perplexity import PerplexityResult

_BEGIN, _END = "<!-- formats -->\n", "<!-- end of formats -->"
_SIZE, _SPEED = ("type", "MiB", "bits"), ("prefill", "decode")
_QUALITY = ("perplexity", "KL mean", "KL 99.9 %", "same top")


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One file type of one model. `n_fallbacks` matrices have rows too short for their format."""

    model: str
    type: str
    nbytes: int
    bits_per_weight: float
    n_fallbacks: int
    figures: Figures | None  # None: speed was not measured
    result: PerplexityResult

    def as_json(self) -> dict[str, Any]:
        speed = None
        if self.figures is not None:
            speed = {phase: _spread(Spread.of(self.figures.rates(phase))) for phase in _SPEED}
        return {
            "model": self.model, "type": self.type, "bytes": self.nbytes,
            "bits_per_weight": round(self.bits_per_weight, 3), "fallbacks": self.n_fallbacks,
            "speed": speed, **result_json(self.result),
        }  # fmt: skip


def markdown(report: Mapping[str, Any]) -> str:
    """A table a model from the JSON report, and a line that says what it was measured on."""
    models = list(dict.fromkeys(row["model"] for row in report["rows"]))
    parts = []
    for model in models:
        rows = [row for row in report["rows"] if row["model"] == model]
        headings = (*_SIZE, *(_SPEED if _has_speed(report) else ()), *_QUALITY)
        cells = [_cells(row, _has_speed(report)) for row in rows]
        lines = [headings, ("---", *["---:"] * (len(headings) - 1)), *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"{model}\n\n{table}")
    return "\n\n".join([*parts, _about(report)]) + "\n"


def put_into_readme(path: Path, text: str) -> None:
    """Replace what stands between the README's markers. Raises UsageError without them."""
    readme = path.read_text()
    if _BEGIN not in readme or _END not in readme:
        raise UsageError("the README has no place for the table", where=path,
                         wanted=f"{_BEGIN.strip()} and {_END}")
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    path.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}")


def shown_in_readme(readme: str) -> str:
    """What stands between the markers."""
    found = re.search(f"{_BEGIN}\n(.*)\n{_END}", readme, re.DOTALL)
    return found[1] if found else ""


def _has_speed(report: Mapping[str, Any]) -> bool:
    return any(row["speed"] for row in report["rows"])


def _cells(row: Mapping[str, Any], with_speed: bool) -> Sequence[str]:
    speed, base = row["speed"] or {}, row["base"]
    rates = [_rate(speed[phase]["median"]) if speed else "" for phase in _SPEED] \
        if with_speed else []
    divergence = ["", "", ""]
    if base is not None:
        kl = base["kl"]
        divergence = [_significant(kl["value"]), _significant(kl["p99.9"]),
                      f"{100 * base['same_top']['value']:.1f} %"]  # fmt: skip
    perplexity = row["perplexity"]
    return (
        row["type"].upper(), f"{row['bytes'] / 2**20:.1f}", f"{row['bits_per_weight']:.2f}",
        *rates, f"{perplexity['value']:.3f} ± {perplexity['error']:.3f}", *divergence,
    )  # fmt: skip


def _about(report: Mapping[str, Any]) -> str:
    text, machine, plan = report["text"], report["machine"], report["plan"]
    windows = [row["windows"] for row in report["rows"]]
    about = (f"Text: {text['name']}, {_range(windows)} windows of {plan['n_ctx']} tokens; "
             f"divergence is from F32.")
    if _has_speed(report):
        about += (f" Tokens/s: {plan['n_prompt']} of prompt, {plan['n_decode']} decoded, "
                  f"{plan['n_threads']} threads.")
    return f"{about} {machine['processor']}, {machine['date']}."


def _range(numbers: Iterable[int]) -> str:
    low, high = min(numbers := list(numbers), default=0), max(numbers, default=0)
    return str(low) if low == high else f"{low} to {high}"


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"


def _significant(x: float) -> str:
    """Two digits that count; what is below the floor of the comparison is shown as such."""
    if x < 1e-7:
        return "< 1e-7"
    return f"{x:.1e}" if x < 1e-3 else f"{x:.2g}" if x < 0.1 else f"{x:.2f}"


def _spread(spread: Spread) -> dict[str, float]:
    return {name: round(getattr(spread, name), 3) for name in ("median", "low", "high")}
