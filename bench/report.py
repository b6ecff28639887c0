"""From seconds to ratios, shares and spreads; as tables, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

from rich.table import Table

from bench.engines import Plan
from ignis.bench import Spread
from ignis.runtime.ceilings import Ceilings
from ignis.runtime.work import Work

PHASES = ("prefill", "decode")


@dataclass(slots=True)
class Figures:
    """One engine on one file: tokens/s of each turn, and of Ignis the shares of the ceilings."""

    label: str
    is_peer: bool
    about: dict[str, Any]
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    ceilings: list[Ceilings] = field(default_factory=list)

    def add(self, reply: dict[str, Any], plan: Plan) -> None:
        """Add a turn, as the worker tells it."""
        self.prefill.append(plan.n_prompt / reply["prefill_s"])
        self.decode.append(plan.n_decode / reply["decode_s"])
        if found := [Ceilings(**ceilings) for ceilings in reply["ceilings"]]:
            self.ceilings.append(highest(found))

    def rates(self, phase: str) -> list[float]:
        """Tokens/s of each turn."""
        return self.prefill if phase == "prefill" else self.decode

    def share(self, phase: str, plan: Plan) -> Spread | None:
        """Of the ceiling measured in the same turn: arithmetic in prefill, bandwidth in decode."""
        if not self.ceilings:
            return None
        work = Work(**self.about["work"][phase])
        if phase == "prefill":
            shares = [rate / plan.n_prompt * work.arithmetic_seconds(ceilings)
                      for rate, ceilings in zip(self.prefill, self.ceilings, strict=True)]
        else:
            shares = [rate * work.bandwidth_seconds(ceilings)
                      for rate, ceilings in zip(self.decode, self.ceilings, strict=True)]
        return Spread.of(shares)

    def as_json(self, plan: Plan) -> dict[str, Any]:
        shares = {phase: self.share(phase, plan) for phase in PHASES}
        return {
            "label": self.label, "is_peer": self.is_peer, "about": self.about,
            "tok_s": {phase: _spread_json(Spread.of(self.rates(phase))) for phase in PHASES},
            "turns": {phase: [round(rate, 3) for rate in self.rates(phase)] for phase in PHASES},
            "share": {phase: _spread_json(s) for phase, s in shares.items() if s is not None},
            "ceilings": [asdict(ceilings) for ceilings in self.ceilings],
        }  # fmt: skip


@dataclass(slots=True)
class Comparison:
    """All engines on one file. `agreement`: correlation of logits with the first engine's."""

    model: str
    nbytes: int
    engines: list[Figures]
    agreement: dict[str, float] = field(default_factory=dict)

    @property
    def own(self) -> list[Figures]:
        return [figures for figures in self.engines if not figures.is_peer]

    def best_peer(self, phase: str) -> Figures | None:
        """The peer's faster setting in that phase, by the median."""
        peers = [figures for figures in self.engines if figures.is_peer]
        return max(peers, key=lambda f: Spread.of(f.rates(phase)).median, default=None)

    def ratio(self, figures: Figures, phase: str) -> Spread | None:
        """How often as fast as the best peer: turn by turn, so that slow minutes cancel out."""
        peer = self.best_peer(phase)
        if peer is None:
            return None
        pairs = zip(figures.rates(phase), peer.rates(phase), strict=True)
        return Spread.of([own / other for own, other in pairs])

    def as_json(self, plan: Plan) -> dict[str, Any]:
        engines = []
        for figures in self.engines:
            fields = figures.as_json(plan)
            if not figures.is_peer:
                ratios = {phase: self.ratio(figures, phase) for phase in PHASES}
                fields["ratio"] = {phase: _spread_json(r) for phase, r in ratios.items() if r}
            engines.append(fields)
        best = {phase: peer.label for phase in PHASES if (peer := self.best_peer(phase))}
        return {"model": self.model, "bytes": self.nbytes, "engines": engines, "best_peer": best,
                "agreement": {k: round(v, 5) for k, v in self.agreement.items()}}


def highest(found: Sequence[Ceilings]) -> Ceilings:
    """The best of several measurements: what else runs on the machine only lowers them."""
    return Ceilings(*map(max, *map(astuple, found))) if len(found) > 1 else found[0]


def footer(comparisons: Sequence[Comparison]) -> str:
    """The ceilings in the course of the run, as one line; empty where nobody measured them."""
    found = [c for comparison in comparisons for f in comparison.engines for c in f.ceilings]
    if not found:
        return ""
    spreads = [Spread.of(values) for values in zip(*map(astuple, found), strict=True)]
    units = ("GB/s", "int8 GMAC/s", "f32 GMAC/s")
    return "ceilings: " + ", ".join(
        f"{_range(spread, 1 if unit == 'GB/s' else 0)} {unit}"
        for spread, unit in zip(spreads, units, strict=True))


def _range(spread: Spread, digits: int) -> str:
    low, high = f"{spread.low:.{digits}f}", f"{spread.high:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def tables(comparisons: Sequence[Comparison], plan: Plan) -> Iterable[Table]:
    """One table a phase, for the terminal."""
    for phase in PHASES:
        n_tokens = plan.n_prompt if phase == "prefill" else plan.n_decode
        table = Table(title=f"{phase} {n_tokens}, tokens/s, {plan.n_threads} threads")
        for index, heading in enumerate(_headings(comparisons, phase)):
            table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
        for row in _rows(comparisons, plan, phase):
            table.add_row(*row)
        yield table


def markdown(comparisons: Sequence[Comparison], plan: Plan) -> str:
    """The same tables for a README."""
    parts = []
    for phase in PHASES:
        headings = _headings(comparisons, phase)
        lines = [headings, ["---", *["---:"] * (len(headings) - 1)],
                 *_rows(comparisons, plan, phase)]  # fmt: skip
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def _headings(comparisons: Sequence[Comparison], phase: str) -> list[str]:
    engines = comparisons[0].engines if comparisons else []
    own = [figures.label for figures in engines if not figures.is_peer]
    share = "of arithmetic" if phase == "prefill" else "of bandwidth"
    headings = [phase]
    for label in own:
        headings += [label, share]
    for figures in engines:
        if figures.is_peer:
            headings.append(figures.label)
    if len(own) < len(engines):
        headings += ["ratio" if len(own) == 1 else f"ratio of {label}" for label in own]
    return headings


def _rows(comparisons: Sequence[Comparison], plan: Plan, phase: str) -> Iterable[list[str]]:
    for comparison in comparisons:
        row = [comparison.model]
        for figures in comparison.own:
            share = figures.share(phase, plan)
            row += [_rate(figures, phase), "" if share is None else f"{100 * share.median:.0f} %"]
        row += [_rate(figures, phase) for figures in comparison.engines if figures.is_peer]
        ratios = [comparison.ratio(figures, phase) for figures in comparison.own]
        row += [f"{r.median:.2f} x ({r.low:.2f}-{r.high:.2f})" for r in ratios if r is not None]
        yield row


def _rate(figures: Figures, phase: str) -> str:
    spread = Spread.of(figures.rates(phase))
    digits = 0 if spread.median >= 100 else 1
    return f"{spread.median:.{digits}f}"


def _spread_json(spread: Spread | None) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: round(value, 4) for name, value in asdict(spread).items()}
