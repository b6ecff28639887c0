"""A kernel's Python source and the code that it becomes."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ignis
from ignis.errors import UsageError
from ignis.kernels.lang import Kernel
from ignis.native.codegen import emit_assembly, optimise, target_machine
from ignis.native.emit import emit_kernel, new_module
from ignis.target import Target

FORMS = ("llvm", "asm")


@dataclass(frozen=True, slots=True)
class KernelCode:
    """A kernel as it is written and as it runs: `llvm` is optimised IR, `asm` assembly."""

    symbol: str
    file: str  # relative to the package
    line: int
    source: str
    form: str
    code: str


def kernel_code(kernel: Kernel, target: Target, form: str) -> KernelCode:
    """Emit a kernel for `target` as "llvm" or "asm"."""
    module = new_module(target, kernel.symbol)
    emit_kernel(module, target, kernel)
    if form == "asm":
        code = _without_noise(emit_assembly(module, target))
    elif form == "llvm":
        code = str(optimise(module, target_machine(target)))
    else:
        raise UsageError("no such form of code", got=form, wanted=" or ".join(FORMS))
    lines, first = inspect.getsourcelines(kernel.body)
    path = Path(inspect.getfile(kernel.body)).relative_to(Path(ignis.__file__).parent)
    source = textwrap.dedent("".join(lines))
    return KernelCode(kernel.symbol, path.as_posix(), first, source, form, code)


def find_kernels(kernels: Mapping[str, Kernel], name: str | None) -> list[Kernel]:
    """The kernels of that symbol, or of that name whatever their specialisation; None: all."""
    found = [k for k in kernels.values() if name in (None, k.symbol, k.name)]
    if not found:
        raise UsageError("this model uses no such kernel", got=name, wanted=", ".join(kernels))
    return found


def _without_noise(assembly: str) -> str:
    """Assembly without the directives that say nothing about the code."""
    noise = (".cfi", ".p2align", ".type", ".size", ".section", ".text", ".file", ".globl", ".ident")
    lines = assembly.splitlines()
    return "\n".join(line for line in lines if not line.strip().startswith(noise)) + "\n"
