"""Looks up rows of the embedding table and decodes them to f32."""

from __future__ import annotations

from collections.abc import Callable

from ignis.errors import KernelError
from ignis.gguf.blocks import BLOCKS
from ignis.kernels.lang import Builder, Type, Value, f16, f32, i8, i16, i32, i64, kernel, ptr
from ignis.kernels.vectors import LANES, parts

_BLOCK = 32
_BLOCK_FORMATS = ("q8_0", "q4_0", "q4_1")
_ELEMENTS = {"f32": f32, "f16": f16, "bf16": i16}


@kernel(ids=ptr, weight=ptr, y=ptr, n_embd=i64)
def embed(
    k: Builder, *, ids: Value, weight: Value, y: Value, n_embd: Value,
    begin: Value, end: Value, scratch: Value, format: str,
) -> None:  # fmt: skip
    """Row ids[t] of `weight`, decoded: i32[T] -> f32[T, n_embd]. A unit is a token.

    The bits are those of the format's NumPy decoder in `gguf.blocks`.
    """
    if format not in _ELEMENTS and format not in _BLOCK_FORMATS:
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
            n_blocks, nbytes = n_embd // _BLOCK, BLOCKS[format].nbytes
            source = weight.at(row * n_blocks * nbytes)
            for block in k.range(n_blocks):
                low, high = _decode_block(k, source.at(block * nbytes), format)
                target.at(block * (_BLOCK * f32.nbytes)).store(low)
                target.at(block * (_BLOCK * f32.nbytes) + LANES * f32.nbytes).store(high)


def _decode_element(load: Callable[[Value, Type], Value], source: Value, format: str) -> Value:
    if format == "f32":
        return load(source, f32)
    bits = load(source, i16)
    if format == "f16":
        return bits.bits(f16.x(LANES)).to(f32)
    return (bits.zext(i32) << 16).bits(f32.x(LANES))


def _decode_block(k: Builder, block: Value, format: str) -> tuple[Value, Value]:
    """The two halves of a block of 32: d * q, then + m where the format has a minimum."""
    d = block.load(f16).to(f32).splat(LANES)
    if format == "q8_0":
        low, high = (block.at(2 + LANES * half).load(i8.x(LANES)).to(i32) for half in range(2))
        return low.to(f32) * d, high.to(f32) * d
    packed = block.at(4 if format == "q4_1" else 2).load(i8.x(LANES)).zext(i32)
    low, high = packed & 15, packed >> 4
    if format == "q4_0":
        return (low - 8).to(f32) * d, (high - 8).to(f32) * d
    m = block.at(2).load(f16).to(f32).splat(LANES)
    return low.to(f32) * d + m, high.to(f32) * d + m
