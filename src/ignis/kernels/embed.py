"""Looks up rows of the embedding table and decodes them to f32."""

from __future__ import annotations

from collections.abc import Callable

from ignis.errors import KernelError
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i16, i32, i64, kernel, ptr
from ignis.kernels.panels import BLOCK, FORMATS, PanelFormat
from ignis.kernels.rows import Rows
from ignis.kernels.scales import RowHeader
from ignis.kernels.vectors import LANES, parts

_ELEMENTS = {"f32": f32, "f16": f16, "bf16": i16}


@kernel(ids=ptr, weight=ptr, y=ptr, n_embd=i64)
def embed(
    k: Builder, *, ids: Value, weight: Value, y: Value, n_embd: Value,
    begin: Value, end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """Row ids[t] of `weight`, decoded: i32[T] -> f32[T, n_embd]. A unit is a token.

    The bits are those of the format's NumPy decoder in `gguf.blocks`.
    """
    if format not in _ELEMENTS and format not in FORMATS:
        raise KernelError("no embedding kernel for this format", got=format)
    for token in k.range(begin, end):
        row = ids.at(token * 4).load(i32).to(i64)
        target = y.at(token * n_embd * f32.nbytes)
        if format in _ELEMENTS:
            element = _ELEMENTS[format]
            source = weight.at(row * n_embd * element.nbytes)
            for part in parts(k, n_embd):
                part.store(target, _decode_element(part.load, source, format))
        else:
            fmt = FORMATS[format]
            n_groups = fmt.n_groups(n_embd)
            source = weight.at(row * n_groups * fmt.group_nbytes)
            group_nbytes = BLOCK * fmt.group_blocks * f32.nbytes
            for g in k.range(n_groups):
                _decode_group(k, fmt, source.at(g * fmt.group_nbytes), target.at(g * group_nbytes))


def _decode_element(load: Callable[[Value, Type], Value], source: Value, format: str) -> Value:
    if format == "f32":
        return load(source, f32)
    bits = load(source, i16)
    if format == "f16":
        return bits.bits(f16.x(LANES)).to(f32)
    return (bits.zext(i32) << 16).bits(f32.x(LANES))


def _decode_group(k: Builder, fmt: PanelFormat, group: Value, target: Value) -> None:
    """Each half of each block: scale * q, then + minimum where the format has one."""
    rows, header = Rows(k, [group]), RowHeader(fmt.scheme.fields, group)
    for b in range(fmt.group_blocks):
        scales, minimums = fmt.scheme.terms(k, header, b, fmt.offset).decoded()
        for half, codes in enumerate(fmt.unpack(rows, b)):
            q = fmt.bytes(codes).zext(i32) - fmt.offset
            values = q.to(f32) * scales[half].splat(LANES)
            if minimums is not None:
                values = values + minimums[half].splat(LANES)
            target.at((2 * b + half) * LANES * f32.nbytes).store(values)
