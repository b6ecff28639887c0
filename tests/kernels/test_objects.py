"""Object code for every kind of processor: complete in itself, whichever machine compiles it."""

from __future__ import annotations

import importlib
import pkgutil
import re
import struct
from typing import Any

import pytest

import ignis.kernels
from ignis.kernels import ceilings
from ignis.kernels.attention import attend
from ignis.kernels.attention_split import attend_split
from ignis.kernels.embed import embed
from ignis.kernels.lang import Kernel, KernelFamily
from ignis.kernels.matmul import matmul_rows, pack_panels
from ignis.kernels.matmul_float import matmul_float
from ignis.native.codegen import emit_assembly, emit_object
from ignis.native.emit import emit_kernel, new_module
from ignis.target import Target

_WEIGHTS: list[dict[str, Any]] = [{"format": name} for name in ("q8_0", "q4_0", "q4_1")]
_FLOATS: list[dict[str, Any]] = [{"format": name} for name in ("f32", "f16", "bf16")]
# The compile-time choices to emit of each kernel that has any.
_CHOICES: dict[str, list[dict[str, Any]]] = {
    "embed": [*_WEIGHTS, *_FLOATS, {"format": "iq2_s"}],  # that one has tables in its object
    "matmul_rows": _WEIGHTS,
    "matmul_mapped": _WEIGHTS[2:],
    "matmul_packed": [],  # the code of matmul_mapped, and slow to compile
    "pack_panels": _WEIGHTS[1:],
    "matmul_float": _FLOATS[1:2],
    "route": [{"among": "all"}],
    "experts_mapped": [{"format": "q4_1", "summed": True}],
    "experts_packed": [],  # the code of experts_mapped
    "experts_float": [{"format": "bf16", "summed": False}],
    "rope": [
        {"head_dim": 64, "n_rot": 64, "style": "neox"},
        {"head_dim": 80, "n_rot": 36, "style": "interleaved"},
    ],
    "kv_store": [{"head_dim": 64}],
    "rope_store": [{"head_dim": 64, "n_rot": 36, "style": "neox"}],
    "attend": [{"head_dim": 64, "group": 3}, {"head_dim": 80, "group": 1}],
    "attend_split": [{"head_dim": 64, "group": 3}],
}
# The linker itself provides this name: position-independent code finds its constants from it.
_OF_THE_LINKER = {"_GLOBAL_OFFSET_TABLE_"}
_ON_THE_STACK = r"%[xyz]mm.*\(%rsp\)|\(%rsp\).*%[xyz]mm"
# What has a form of its own on a processor that otherwise equals a lower level.
_WITH_DOTPROD = {"matmul_rows", "chain_dot4"}
_MACHINES = {"x86_64": 62, "aarch64": 183}


def families() -> list[KernelFamily]:
    """Every kernel of the package, found by looking through its modules."""
    found: dict[int, KernelFamily] = {}
    for module in pkgutil.iter_modules(ignis.kernels.__path__, "ignis.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, KernelFamily):
                found[id(value)] = value
    return list(found.values())


def _kernels() -> list[Kernel]:
    return [family(**choice) for family in families() for choice in _CHOICES.get(family.name, [{}])]


def elf_symbols(data: bytes) -> tuple[int, dict[str, bool]]:
    """The machine of an ELF object and its named symbols: whether each is defined."""
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF object"
    (machine,) = struct.unpack_from("<H", data, 18)
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count = struct.unpack_from("<HH", data, 58)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_size) for i in range(count)
    ]
    symbols: dict[str, bool] = {}
    for _, kind, _, _, offset, size, link, _, _, _ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = data[sections[link][4] :]
        for place in range(offset, offset + size, 24):
            name_at, _, _, section = struct.unpack_from("<IBBH", data, place)
            name = names[name_at : names.index(b"\0", name_at)].decode()
            if name:
                symbols[name] = section != 0
    return machine, symbols


@pytest.mark.parametrize("level", Target.levels())
def test_objects_have_no_undefined_symbols(level: str) -> None:
    """A call into a library that the JIT cannot find kills the process (NUMERICS 0)."""
    target = Target.level(level)
    for kernel in _kernels():
        if target.has("dotprod") and kernel.name not in _WITH_DOTPROD:
            continue
        module = new_module(target, kernel.symbol)
        emit_kernel(module, target, kernel)
        machine, symbols = elf_symbols(emit_object(module, target))
        assert machine == _MACHINES[target.triple.split("-")[0]]
        assert symbols[kernel.symbol], f"{kernel.symbol} does not define itself"
        undefined = {name for name, is_defined in symbols.items() if not is_defined}
        undefined -= _OF_THE_LINKER
        assert not undefined, f"{kernel.symbol} for {level} needs {undefined}"


@pytest.mark.parametrize("level", ["aarch64", "x86-64-v3"])
def test_nothing_is_fused_that_is_not_spelled_out(level: str) -> None:
    """Q4_1 decodes as a product, then a sum; a compiler that contracts them changes the bits."""
    target = Target.level(level)
    kernel = embed(format="q4_1")
    module = new_module(target, kernel.symbol)
    emit_kernel(module, target, kernel)
    text = emit_assembly(module, target)
    assert "fmul" in text or "vmulps" in text
    assert "fmla" not in text and "fmadd" not in text


def test_what_a_hypervisor_hides_is_not_used() -> None:
    """A CPU name brings its model's features: a Zen 4 whose AVX-512 is hidden met `zmm` and %k."""
    shown = Target.level("x86-64-v3")
    hidden = shown._replace(cpu="znver4", absent=frozenset({"avx512f", "avx512vl", "avx512vnni"}))
    for kernel in (embed(format="q4_1"), pack_panels(format="q8_0"), matmul_rows(format="q4_0")):
        module = new_module(hidden, kernel.symbol)
        emit_kernel(module, hidden, kernel)
        text = emit_assembly(module, hidden)
        assert "%ymm" in text
        assert not re.search(r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])|vpdpbusd", text)


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize("name", ["read_stream", "chain_dot4", "chain_fma"])
def test_ceilings_stay_in_registers(level: str, name: str) -> None:
    """A ceiling that spills is too low, and every share of it too high."""
    target, kernel = Target.level(level), getattr(ceilings, name)()
    module = new_module(target, kernel.symbol)
    emit_kernel(module, target, kernel)
    text = emit_assembly(module, target)
    assert ("%zmm" in text) == (level == "x86-64-v4")
    assert not re.search(_ON_THE_STACK, text)


@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 80), (3, 64), (7, 128)])
def test_attention_multiplies_in_registers(level: str, group: int, head_dim: int) -> None:
    """Tiles that are too large go through the stack, all of them; one or two operands may."""
    target = Target.level(level)
    for family in (attend, attend_split):
        kernel = family(head_dim=head_dim, group=group)
        module = new_module(target, kernel.symbol)
        emit_kernel(module, target, kernel)
        bodies = re.findall(r"\n(\.LBB\w+):\n((?:(?!\.LBB).*\n)*?)\tj\w+\t\1\n",
                            emit_assembly(module, target))  # fmt: skip
        # Those that shift are exponentials: their constants may well lie on the stack.
        products = [body for _, body in bodies if "vfmadd" in body and "vpslld" not in body]
        assert len(products) >= 3, "keys, values, and merging at least"
        for body in products:
            assert len(re.findall(_ON_THE_STACK, body)) <= body.count("vfmadd") // 2


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v4"])
def test_float_tiles_stay_in_registers(level: str, format: str) -> None:
    """Tiles that do not fit spill in every round: half the speed, and nothing else would tell."""
    target, kernel = Target.level(level), matmul_float(format=format)
    module = new_module(target, kernel.symbol)
    emit_kernel(module, target, kernel)
    loops = [x for x in inner_loops(emit_assembly(module, target)) if "vfmadd" in x]
    assert max(x.count("vfmadd") for x in loops) == (24 if level == "x86-64-v4" else 12)
    for loop in (x for x in loops if x.count("vfmadd") > 1):  # one: the values behind the last 16
        assert not re.search(_ON_THE_STACK, loop), loop


def inner_loops(assembly: str) -> list[str]:
    """Loops without a branch inside: from a label to a jump back to it, no label between."""
    return [
        match.group()
        for match in re.finditer(r"^(\.\w+):\n(?:\t.*\n)*?\tj\w+\t\1\n", assembly, re.MULTILINE)
    ]


def test_the_parser_sees_undefined_symbols() -> None:
    """Otherwise the test above proves nothing."""
    from llvmlite import ir

    target = Target.level("x86-64-v2")
    module = new_module(target, "calls")
    signature = ir.FunctionType(ir.VoidType(), [])
    outside = ir.Function(module, signature, "outside")
    builder = ir.IRBuilder(ir.Function(module, signature, "inside").append_basic_block())
    builder.call(outside, [])
    builder.ret_void()
    _, symbols = elf_symbols(emit_object(module, target))
    assert symbols["inside"] and not symbols["outside"]


def test_symbols_are_unique() -> None:
    """The object cache and the linker know a kernel by its symbol alone."""
    symbols = [kernel.symbol for kernel in _kernels()]
    assert len(symbols) == len(set(symbols))
