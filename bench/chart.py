"""The report as a picture: how often as fast as llama.cpp, per file, as an SVG.

    python -m bench.chart report.json docs/benchmarks.svg
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#1f2328", "#6e7781", "#d8dee4"
_COLORS = {"prefill": "#d9480f", "decode": "#1971c2"}
_ROW_INCHES = 0.52
_BAR = 0.36  # of a row; two bars and a gap fill it


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios of the first Ignis engine with their spread; the suffix says the format.

    Raises ValueError for a report without a peer. The same report gives the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = [(model, ratios) for model in report["models"] if (ratios := _ratios(model))]
    if not rows:
        raise ValueError("the report compares with no peer: there is nothing to draw")
    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "ignis", "font.size": 10.5,
        "font.family": "sans-serif",
        "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "DejaVu Sans", "sans-serif"],
    }  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(8.6, 1.55 + _ROW_INCHES * len(rows)), facecolor="white")
        axes = figure.add_axes(_frame(figure.get_figheight()))
        _bars(axes, rows)
        _caption(axes, report)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=160)


def _frame(height: float) -> tuple[float, float, float, float]:
    """Left, bottom, width, height of the plot: fixed margins in inches."""
    return 0.205, 0.38 / height, 0.745, 1 - (0.38 + 0.98) / height


def _ratios(model: Mapping[str, Any]) -> Mapping[str, Mapping[str, float]]:
    own = next((engine for engine in model["engines"] if not engine["is_peer"]), None)
    ratios: Mapping[str, Mapping[str, float]] = (own or {}).get("ratio", {})
    return ratios


def _bars(
    axes: Axes, rows: Sequence[tuple[Mapping[str, Any], Mapping[str, Mapping[str, float]]]]
) -> None:
    most = max(ratio["high"] for _, ratios in rows for ratio in ratios.values())
    for index, (_, ratios) in enumerate(rows):
        for phase, ratio in ratios.items():
            y = index + (-_BAR / 2 - 0.015 if phase == "prefill" else _BAR / 2 + 0.015)
            median, low, high = ratio["median"], ratio["low"], ratio["high"]
            axes.barh(y, median, _BAR, color=_COLORS[phase], zorder=2)
            axes.plot([low, high], [y, y], color=_INK, linewidth=1.0, alpha=0.65, zorder=3,
                      solid_capstyle="butt")
            axes.text(high + most * 0.012, y, f"{median:.2f}×", va="center", color=_INK,
                      fontsize=9.5, zorder=5,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})
    axes.axvline(1, color=_INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=4)
    axes.set_yticks(range(len(rows)), [model["model"] for model, _ in rows])
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, most * 1.1)
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.grid(axis="x", color=_GRID, linewidth=0.8, zorder=0)
    axes.tick_params(length=0, colors=_MUTED)
    axes.tick_params(axis="y", labelcolor=_INK, pad=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _caption(axes: Axes, report: Mapping[str, Any]) -> None:
    """Title, legend and what was measured where, above the bars."""
    plan, machine = report["plan"], report["machine"]

    def text(words: str, x: int, y: int, **style: Any) -> None:
        """Words at points right of and above the plot's upper left corner."""
        axes.annotate(words, (0, 1), (x, y), xycoords="axes fraction",
                      textcoords="offset points", va="baseline", **style)

    text("Speed of Ignis relative to llama.cpp", 0, 50, fontsize=14, fontweight="bold",
         color=_INK)
    text(f"same file, {plan['n_threads']} threads, {machine['processor']}, {machine['date']}; "
         "llama.cpp at its better setting = 1", 0, 33, fontsize=9.5, color=_MUTED)
    text("■", 0, 12, fontsize=11, color=_COLORS["prefill"])
    text(f"prompt of {plan['n_prompt']} tokens", 14, 12, fontsize=10, color=_INK)
    text("■", 150, 12, fontsize=11, color=_COLORS["decode"])
    text(f"generating {plan['n_decode']} tokens", 164, 12, fontsize=10, color=_INK)
    text("lines: smallest to largest", 308, 12, fontsize=9.5, color=_MUTED)


@click.command()
@click.argument("report", type=click.Path(exists=True, path_type=Path))
@click.argument("picture", type=click.Path(path_type=Path))
def main(report: Path, picture: Path) -> None:
    """Draw REPORT, the JSON of bench.compare, as PICTURE (.svg or .png)."""
    draw(json.loads(report.read_text()), picture)


if __name__ == "__main__":
    main()
