"""`ignis quantize`: make a GGUF file of another type."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ignis.cli.interrupt import orderly_termination
from ignis.cli.options import quiet_option, tell, threads_option
from ignis.errors import UsageError
from ignis.quantize.mix import ALIASES, MIXES

if TYPE_CHECKING:
    from ignis.cli.progress import TerminalProgress
    from ignis.quantize.convert import Report
    from ignis.quantize.source import Source
    from ignis.settings import Settings


@click.command(short_help="make a GGUF file of another type")
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--type", "file_type", metavar="T", required=True,
              type=click.Choice([*MIXES, *ALIASES], case_sensitive=False),
              help="File type: " + ", ".join(MIXES) + ".")
@click.option("--from-safetensors", is_flag=True,
              help="IN is a Hugging Face checkpoint: a folder of safetensors with config.json.")
@click.option("--pure", is_flag=True, help="Every matrix in the type's own format, no mix.")
@click.option("--requantize", is_flag=True,
              help="Also from tensors that are quantized already, and lose quality twice.")
@click.option("--force", is_flag=True, help="Overwrite OUT if it is there.")
@threads_option
@quiet_option
def quantize(source: str, target: Path, file_type: str, from_safetensors: bool, pure: bool,
             requantize: bool, force: bool, threads: int | None, quiet: bool) -> None:
    """Write the model IN to OUT with its matrices in another format.

    IN is a GGUF file, any part of one in several files, or a name as for `ignis pull`; its
    weights are F32, F16, BF16 or Q8_0. Types such as q4_k_m are mixes: the same tensors have
    better formats as in llama.cpp's files. Vectors stay F32. OUT appears when it is complete
    and has been read again. Checkpoints need `pip install 'ignis-llm[convert]'`.
    """
    from ignis.cli.progress import TerminalProgress
    from ignis.quantize.convert import Options
    from ignis.quantize.convert import quantize as write
    from ignis.settings import Settings

    settings = Settings.from_env()
    options = Options(type=file_type, pure=pure, requantize=requantize, force=force,
                      n_threads=threads or settings.threads)
    progress = TerminalProgress(quiet, mention_present=False)
    with orderly_termination(), ExitStack() as stack:
        opened = (_checkpoint(source) if from_safetensors
                  else _gguf(source, settings, progress, stack))
        report = write(opened, target, options, progress)
    for line in _remarks(report):
        tell(line, quiet)


def _gguf(source: str, settings: Settings, progress: TerminalProgress, stack: ExitStack) -> Source:
    from ignis import hub
    from ignis.gguf import open_gguf
    from ignis.quantize.source import GGUFSource

    path = hub.resolve(source, settings, progress)
    with suppress(OSError):     # opening it says what is wrong
        if path.is_dir():
            raise UsageError("a folder, not a GGUF file", where=source,
                             hint="--from-safetensors reads a Hugging Face checkpoint")
    file = stack.enter_context(open_gguf(path))
    return stack.enter_context(GGUFSource(file))


def _checkpoint(source: str) -> Source:
    from ignis.quantize.hf.checkpoint import Checkpoint

    return Checkpoint(Path(source))


def _remarks(report: Report) -> list[str]:
    mib = [n / 2**20 for n in (report.nbytes_before, report.nbytes_after)]
    lines = [f"{mib[0]:.1f} MiB -> {mib[1]:.1f} MiB, {report.bits_per_weight:.2f} bits a weight"]
    lines += [f"{got} instead of {wanted}, whose blocks do not divide the rows: {n} tensor(s)"
              for (wanted, got), n in report.fallbacks.items()]
    return lines
