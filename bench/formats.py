"""What each file type costs and brings: size, speed, perplexity, divergence from F32.

    python -m bench.formats                                     docs/formats.json, docs/formats.md
    python -m bench.formats --readme README.md                  and the table in the README
    python -m bench.formats --model my.gguf --type q4_k_m --type q6_k --text my.txt --no-speed

A model is decoded to F32, which is the base; every type is made of that, by the encoders of
`ignis quantize`. The default models are published quantized, so the type they came in loses
next to nothing here. The default text is the Python language reference as `pydoc` carries it
(PSF licence), which every Python installation has.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import ignis
from bench.compare import compare, machine
from bench.engines import Plan, ignis_spec
from bench.format_table import FormatRow, markdown, put_into_readme
from bench.report import Figures
from ignis import hub
from ignis.errors import IgnisError
from ignis.gguf import open_gguf
from ignis.perplexity import PerplexityResult, measure_perplexity, open_kl_base
from ignis.perplexity.windows import DEFAULT_CTX, Windows
from ignis.quantize.convert import Options, Report, quantize
from ignis.quantize.mix import ALIASES, MIXES
from ignis.quantize.source import GGUFSource
from ignis.runtime.threads import available_threads
from ignis.settings import Settings

BASE = "f32"
MODELS = ("smollm2", "gemma3-270m")
TYPES = tuple(name for name in MIXES if name != BASE and not name.startswith("tq"))
"""All but the ternary ones, which are for models that were trained so."""

_DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class Text:
    """What is scored, and what the report calls it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Scope:
    """How much is measured: `plan` None leaves speed out."""

    text: Text
    n_ctx: int
    n_windows: int
    n_threads: int
    plan: Plan | None


def default_text() -> Text:
    """The topics of Python's own reference, in the order of their names."""
    from pydoc_data.topics import topics

    version = ".".join(map(str, sys.version_info[:2]))
    return Text(f"the Python {version} language reference",
                "\n".join(topics[name] for name in sorted(topics)))


def measure_model(
    model: str, types: Sequence[str], scope: Scope, folder: Path, tell: Callable[[str], None]
) -> Iterator[FormatRow]:
    """The rows of one model, F32 first. Files that it makes are gone when the next row is asked."""
    original = hub.resolve(model, Settings.from_env())
    name = original.stem if model.endswith(".gguf") else model
    base, distributions = folder / f"{name}-{BASE}.gguf", folder / f"{name}.kl"
    tell(f"{name}: {BASE}")
    written = _write(original, base, BASE, scope.n_threads)
    with _removed(base), _removed(distributions):
        result = _score(base, scope, save_kl=distributions)
        compared = _score(base, scope, kl_base=distributions)  # the floor of the comparison
        result = replace(result, against_base=compared.against_base)
        yield _row(name, BASE, written, _speed(base, scope, tell), result)
        for type_ in types:
            tell(f"{name}: {type_}")
            path = folder / f"{name}-{type_}.gguf"
            with _removed(path):
                written = _write(base, path, type_, scope.n_threads)
                result = _score(path, scope, kl_base=distributions)
                yield _row(name, type_, written, _speed(path, scope, tell), result)


def _write(source: Path, target: Path, type_: str, n_threads: int) -> Report:
    options = Options(type=type_, requantize=True, force=True, n_threads=n_threads)
    with open_gguf(source) as file, GGUFSource(file) as opened:
        return quantize(opened, target, options)


def _score(
    path: Path, scope: Scope, save_kl: Path | None = None, kl_base: Path | None = None
) -> PerplexityResult:
    with ignis.load(path, threads=scope.n_threads, n_ctx=scope.n_ctx) as model:
        windows = Windows.of_text(model.tokenizer, scope.text.text, scope.n_ctx)
        windows = replace(windows, ids=windows.ids[: scope.n_windows * scope.n_ctx])
        base = None if kl_base is None else open_kl_base(kl_base)
        return measure_perplexity(model, windows, kl_base=base, save_kl=save_kl)


def _speed(path: Path, scope: Scope, tell: Callable[[str], None]) -> Figures | None:
    if scope.plan is None:
        return None
    spec = ignis_spec(path, scope.plan, "auto")
    return compare(path.stem, path.stat().st_size, [spec], scope.plan, tell).own[0]


def _row(
    model: str, type_: str, report: Report, figures: Figures | None, result: PerplexityResult
) -> FormatRow:
    return FormatRow(model, type_, report.path.stat().st_size, report.bits_per_weight,
                     sum(report.fallbacks.values()), figures, result)


@contextmanager
def _removed(path: Path) -> Iterator[None]:
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def as_report(rows: Sequence[FormatRow], scope: Scope) -> dict[str, Any]:
    """The whole report as JSON values."""
    encoded = scope.text.text.encode()
    plan = asdict(scope.plan or Plan(scope.n_threads))
    return {
        "machine": machine(), "plan": {**plan, "n_ctx": scope.n_ctx},
        "text": {"name": scope.text.name, "bytes": len(encoded),
                 "sha256": hashlib.sha256(encoded).hexdigest()},
        "rows": [row.as_json() for row in rows],
    }  # fmt: skip


@click.command()
@click.option("--model", "models", multiple=True, default=MODELS, show_default=True,
              help="A name as for `ignis pull`, or a GGUF file; may be repeated.")
@click.option("--type", "types", multiple=True, default=TYPES,
              type=click.Choice([*MIXES, *ALIASES]), help="May be repeated.  [default: all]")
@click.option("--text", "text_path", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Score this file.  [default: Python's language reference]")
@click.option("--ctx", "n_ctx", type=click.IntRange(8), default=DEFAULT_CTX, show_default=True)
@click.option("--windows", "n_windows", type=click.IntRange(1), default=16, show_default=True,
              help="Windows to score at most.")
@click.option("--threads", "n_threads", type=click.IntRange(1), default=available_threads())
@click.option("--repeat", "n_repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--no-speed", is_flag=True, help="Perplexity only: the machine may be busy.")
@click.option("--folder", type=click.Path(path_type=Path),
              help="Where model files are made and removed again.  [default: bench/ in the cache]")
@click.option("--json", "json_path", type=click.Path(path_type=Path),
              default=_DOCS / "formats.json")
@click.option("--markdown", "markdown_path", type=click.Path(path_type=Path),
              default=_DOCS / "formats.md")
@click.option("--readme", type=click.Path(path_type=Path), help="Renew the table in this file.")
def main(
    models: tuple[str, ...], types: tuple[str, ...], text_path: Path | None, n_ctx: int,
    n_windows: int, n_threads: int, n_repeats: int, no_speed: bool, folder: Path | None,
    json_path: Path, markdown_path: Path, readme: Path | None,
) -> None:  # fmt: skip
    """Compare file types: size, speed, perplexity, divergence from F32."""
    text = Text(text_path.name, text_path.read_text()) if text_path else default_text()
    plan = None if no_speed else Plan(n_threads=n_threads, n_repeats=n_repeats)
    scope = Scope(text, n_ctx, n_windows, n_threads, plan)
    folder = folder or Settings.from_env().cache_dir / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[FormatRow] = []
    report: Mapping[str, Any] = {}
    try:
        with Console(stderr=True).status("") as status, \
                tempfile.TemporaryDirectory(prefix="formats-", dir=folder) as made:
            for model in models:
                for row in measure_model(model, types, scope, Path(made), status.update):
                    rows.append(row)
                    report = as_report(rows, scope)
                    # After every row: a long run may be cut short.
                    json_path.write_text(json.dumps(report, indent=1) + "\n")
        print(markdown(report))
        markdown_path.write_text(f"# File types compared\n\n{markdown(report)}")
        if readme is not None:
            put_into_readme(readme, markdown(report))
    except (IgnisError, OSError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
