"""From an op of the graph to kernel launches: one short function an op.

A `Launch` is a kernel, its arguments, and its units of work. Arguments that change from step to
step are the names of counts (`T`, `R`, `S`); all else is final.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ignis.errors import GraphError
from ignis.gguf import BLOCKS
from ignis.graph.ir import Operation, Value
from ignis.graph.ir.ops import Matmul, MatmulGroup
from ignis.graph.ir.types import BLOCK_FORMATS, PANELS
from ignis.kernels import (
    attention,
    attention_split,
    elementwise,
    matmul,
    matmul_float,
    norm,
    panels,
)
from ignis.kernels.embed import embed
from ignis.kernels.lang import Kernel
from ignis.kernels.quantize import quantize
from ignis.kernels.rope import rope
from ignis.kernels.rope_store import rope_store, rope_store_scratch_nbytes
from ignis.kernels.rows import ROWS
from ignis.runtime.kv_cache import KVCache
from ignis.runtime.step import StepTables


@dataclass(frozen=True, slots=True)
class Private:
    """An address in the memory that each thread has for itself: an offset in bytes."""

    offset: int


Argument = int | float | str | Private | None

_MAX_GROUP = 8  # query heads that share each load of a key
_DECODE_UNIT_ROWS = 8  # of float weights for one token: small, for chunks to be cut from
_GRAIN_NBYTES = 65536  # of weights that a thread reads in one go for one token


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel over `units` units of work, times the count `per` where there is one.

    `gate` names a count without which there is nothing to do. `shared` work is handed out in
    chunks as threads ask for it; other work, small and even, is divided beforehand.
    """

    op: Operation | None
    kernel: Kernel
    args: Mapping[str, Argument]
    units: int
    reads: frozenset[Hashable] = frozenset()  # values, and the KV cache of a layer
    writes: frozenset[Hashable] = frozenset()
    per: str | None = None
    gate: str | None = None
    shared: bool = False
    scratch_nbytes: int = 0
    grain: int = 0  # of work that streams weights: units of a chunk long enough to prefetch
    stage: int = 0  # of the op: which of its stages the launch belongs to
    part: Operation | None = None  # of a group of matmuls: the one that this launch computes

    @property
    def computes(self) -> Operation | None:
        """The op, or the part of it, that this launch computes."""
        return self.part or self.op

    @property
    def by_row(self) -> bool:
        """Whether a unit is one row (a token), computed from the same row of its operands."""
        return self.units == 1 and self.per is not None and not self.shared


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where everything that ops touch lies, for steps of up to `n_tokens` and `n_logits`."""

    n_tokens: int
    n_logits: int
    address: Callable[[Value], Argument]
    weights: Mapping[str, int]  # addresses
    tables: StepTables
    cache: KVCache
    rope_table: Callable[[Operation], int]

    def operand(self, op: Operation, name: str) -> Argument:
        """The address of an operand, or None for an optional one that is absent."""
        value = op.operand(name)
        if value is None:
            return None
        return self.weights[value.name] if value.is_weight else self.address(value)


def embedding_launch(weight: int, format: str, x: Value, at: Surroundings) -> Launch:
    """The graph's input: the rows of the step's tokens in the table at address `weight`."""
    args: dict[str, Argument] = {
        "ids": at.tables.address("ids"), "weight": weight, "y": at.address(x),
        "n_embd": int(x.type.shape[1]),
    }  # fmt: skip
    return Launch(None, embed(format=format), args, units=1, per="T", writes=frozenset({x}))


def lower(op: Operation, at: Surroundings) -> list[Launch]:
    """The launches that compute an op."""
    lowering = _LOWERINGS.get(op.name)
    if lowering is None:
        raise GraphError("no kernel computes this op", got=op.name, wanted=", ".join(_LOWERINGS))
    return lowering(op, at)


def _width(op: Operation) -> int:
    return int(op.result.type.shape[1])


def _rows(op: Operation) -> str:
    """Whether the op's results have a row a token, "T", or a row of logits, "R"."""
    return str(op.results[0].type.shape[0])


def _by_token(
    op: Operation, at: Surroundings, kernel: Kernel, operands: tuple[str, ...], **args: Argument
) -> list[Launch]:
    """A kernel whose unit is a token and whose operands keep their names."""
    words: dict[str, Argument] = {name: at.operand(op, name) for name in operands}
    words |= {"y": at.address(op.result), "n": _width(op)} | args
    return [_launch(op, kernel, words, units=1, per=_rows(op))]


def _launch(op: Operation, kernel: Kernel, args: Mapping[str, Argument], units: int,
            **more: Any) -> Launch:  # fmt: skip
    """A launch that reads the op's activations and writes its result."""
    reads = frozenset(value for value in op.operands if not value.is_weight)
    return Launch(op, kernel, args, units, reads=reads, writes=frozenset({op.result}), **more)


def _normalize(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, norm.normalize(), ("x",), **_groups(op), eps=_number(op, "eps"))


def _scale(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, norm.scale(), ("x", "gain"), **_groups(op))


def _rmsnorm(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(
        op, at, norm.rmsnorm(), ("x", "gain"), **_groups(op), eps=_number(op, "eps")
    )


def _groups(op: Operation) -> dict[str, Argument]:
    """The elements of a row that are normalized together, and how many such groups it has."""
    width = _width(op)
    group = int(op.attributes.get("group", width))  # type: ignore[arg-type]
    return {"n": group, "n_groups": width // group}


def _rope(op: Operation, at: Surroundings) -> list[Launch]:
    kernel = rope(head_dim=op.attributes["head_dim"], n_rot=op.attributes["n_rot"],
                  style=op.attributes["style"])  # fmt: skip
    return _by_token(op, at, kernel, ("x",), positions=at.tables.address("positions"),
                     table=at.rope_table(op))  # fmt: skip


def _add(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.add(), ("a", "b"))


def _mul(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.mul(), ("a", "b"))


def _silu(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.silu(), ("x",))


def _swiglu(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.swiglu(), ("gate", "up"))


def _gelu(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.gelu(), ("x",))


def _geglu(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.geglu(), ("gate", "up"))


def _scale_by(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, elementwise.scale_by(), ("x",), factor=_number(op, "factor"))


def _columns(op: Operation, at: Surroundings) -> list[Launch]:
    (x,) = op.operands
    return _by_token(op, at, elementwise.columns(), ("x",), first=_count(op, "first"),
                     width=int(x.type.shape[1]))  # fmt: skip


def _quantize(op: Operation, at: Surroundings) -> list[Launch]:
    args: dict[str, Argument] = {
        "x": at.operand(op, "x"), "y": at.address(op.result), "rows": _selection(op, at),
        "n": _width(op), "n_rows": _rows(op),
    }  # fmt: skip
    return [_launch(op, quantize(), args, units=1, per=_rows(op))]


def _attention(op: Operation, at: Surroundings) -> list[Launch]:
    store = attention.kv_store(head_dim=_count(op, "head_dim"), kv_type="f16")
    args = _pages(op, at, _count(op, "n_kv_heads"))
    args |= {"k": at.operand(op, "k"), "v": at.operand(op, "v")}
    stored = Launch(op, store, args, units=1, per="T", writes=_cached(op),
                    reads=frozenset(_operands(op, "k", "v")))  # fmt: skip
    return [stored, *(replace(launch, stage=1) for launch in _attend(op, at))]


def _rope_store(op: Operation, at: Surroundings) -> list[Launch]:
    head_dim = _count(op, "head_dim")
    kernel = rope_store(head_dim=head_dim, n_rot=_count(op, "n_rot"),
                        style=op.attributes["style"])  # fmt: skip
    (k,) = _operands(op, "k")
    args = _pages(op, at, int(k.type.shape[1]) // head_dim)
    args |= {name: at.operand(op, name) for name in ("q", "k", "v")}
    args |= {"y": at.address(op.result), "table": at.rope_table(op),
             "n_heads": _width(op) // head_dim}  # fmt: skip
    return [Launch(op, kernel, args, units=1, per="T", writes=_cached(op) | {op.result},
                   reads=frozenset(_operands(op, "q", "k", "v")),
                   scratch_nbytes=rope_store_scratch_nbytes(head_dim))]  # fmt: skip


def _attend(op: Operation, at: Surroundings) -> list[Launch]:
    n_heads, head_dim = _count(op, "n_heads"), _count(op, "head_dim")
    shared_heads = n_heads // _count(op, "n_kv_heads")
    group = max(g for g in range(1, _MAX_GROUP + 1) if shared_heads % g == 0)
    args = _pages(op, at, _count(op, "n_kv_heads"))
    args |= {"q": at.operand(op, "q"), "y": at.address(op.result), "n_heads": n_heads,
             "scale": _number(op, "scale")}  # fmt: skip
    limits = {n: op.attributes[n] for n in ("window", "softcap") if n in op.attributes}
    per = "T"
    if at.n_tokens == 1:  # cut at segments, so that a long context keeps every thread busy
        per = "S"
        kernel = attention_split.attend_split(
            head_dim=head_dim, group=group, kv_type="f16", **limits
        )
        args |= {"partials": at.cache.partials_address, "arrived": at.cache.arrived_address,
                 "n_segments": "S", "max_segments": at.cache.max_segments}  # fmt: skip
    else:
        kernel = attention.attend(head_dim=head_dim, group=group, kv_type="f16", **limits)
    return [Launch(op, kernel, args, units=n_heads // group, per=per, shared=True,
                   reads=_cached(op) | set(_operands(op, "q")), writes=frozenset({op.result}),
                   scratch_nbytes=attention.attend_scratch_nbytes(group, head_dim))]  # fmt: skip


def _pages(op: Operation, at: Surroundings, n_kv_heads: int) -> dict[str, Argument]:
    """Where the KV cache of the op's layer and the step's tokens lie."""
    return {
        "base": at.cache.base(_count(op, "layer")), "positions": at.tables.address("positions"),
        "slots": at.tables.address("slots"), "pages": at.cache.table_address,
        "pages_per_slot": at.cache.pages_per_slot, "n_pages": at.cache.n_pages,
        "n_kv_heads": n_kv_heads,
    }  # fmt: skip


def _cached(op: Operation) -> frozenset[Hashable]:
    return frozenset({("kv cache", op.attributes["layer"])})


def _operands(op: Operation, *names: str) -> list[Value]:
    return [value for name in names if (value := op.operand(name)) is not None]


def _matmul(op: Operation, at: Surroundings) -> list[Launch]:
    return [_product(op, at)]


def _matmul_group(op: Operation, at: Surroundings) -> list[Launch]:
    """A launch a member, side by side in one step."""
    assert isinstance(op, MatmulGroup)
    launches = []
    for (weight, bias), result in zip(op.members, op.results, strict=True):
        operands = {"x": op.x, "weight": weight, "bias": bias}
        part = Matmul.create(operands, {}, [result.name])
        launches += [replace(launch, op=op, part=part) for launch in _matmul(part, at)]
    return launches


def _logits(op: Operation, at: Surroundings) -> list[Launch]:
    """The product, then the cap over it in place where there is one."""
    launches = _matmul(op, at)
    if "softcap" in op.attributes:
        n = _width(op)
        n_chunks = -(-n // elementwise.CHUNK)
        args: dict[str, Argument] = {
            "x": at.address(op.result), "n": n, "n_chunks": n_chunks, "cap": _number(op, "softcap")
        }  # fmt: skip
        both = frozenset({op.result})
        launches.append(Launch(op, elementwise.softcap(), args, n_chunks, both, both, per="R",
                               shared=True, stage=1))  # fmt: skip
    return launches


def _product(op: Operation, at: Surroundings) -> Launch:
    """A matmul, or the logits of selected rows."""
    rows = _rows(op)
    weight = op.operand("weight")
    assert weight is not None
    n_rows, n_values = (int(n) for n in weight.type.shape)
    args: dict[str, Argument] = {
        "weight": at.weights[weight.name], "x": at.operand(op, "x"),
        "y": at.address(op.result), "n_rows": n_rows, "n_values": n_values,
        "bias": at.operand(op, "bias") if op.name == "matmul" else None,
        "residual": at.operand(op, "residual") if op.name == "matmul" else None,
    }  # fmt: skip
    format = weight.type.dtype
    single = (at.n_tokens if rows == "T" else at.n_logits) == 1
    if format not in BLOCK_FORMATS:
        unit_rows = _DECODE_UNIT_ROWS if single else matmul_float.UNIT_ROWS
        args |= {"rows": _selection(op, at), "n_tokens": rows, "unit_rows": unit_rows}
        row_nbytes = BLOCKS[format].row_nbytes(n_values)
        return _launch(op, matmul_float.matmul_float(format=format), args, -(-n_rows // unit_rows),
                       gate=rows, shared=True, scratch_nbytes=64,
                       grain=_grain(unit_rows * row_nbytes) if single else 0)  # fmt: skip
    packed = weight.type.layout == PANELS
    if single and not packed:
        kernel = matmul.matmul_rows(format=format)
    else:
        family = matmul.matmul_packed if packed else matmul.matmul_mapped
        kernel = family(format=format)
        args |= {"n_tokens": rows}
    grain = _grain(panels.FORMATS[format].panel_nbytes(n_values)) if single else 0
    scratch = matmul.SUMS_NBYTES if packed else matmul.scratch_nbytes(format, n_values)
    return _launch(op, kernel, args, -(-n_rows // ROWS), gate=rows, shared=True,
                   scratch_nbytes=scratch, grain=grain)  # fmt: skip


def _grain(unit_nbytes: int) -> int:
    """Units of a chunk that is long enough for the processor's prefetching to pay."""
    return max(1, _GRAIN_NBYTES // unit_nbytes)


def _selection(op: Operation, at: Surroundings) -> int:
    """The table that names the row of the op's x that each row of its result reads."""
    (x,) = _operands(op, "x")
    selects = _rows(op) == "R" and x.type.shape[0] == "T"
    return at.tables.address("logit_rows" if selects else "rows")


def _count(op: Operation, name: str) -> int:
    return int(op.attributes[name])  # type: ignore[arg-type]


def _number(op: Operation, name: str) -> float:
    return float(op.attributes[name])  # type: ignore[arg-type]


_LOWERINGS: Mapping[str, Callable[[Operation, Surroundings], list[Launch]]] = {
    "normalize": _normalize, "scale": _scale, "rmsnorm": _rmsnorm, "rope": _rope, "add": _add,
    "mul": _mul, "silu": _silu, "swiglu": _swiglu, "quantize": _quantize,
    "attention": _attention, "rope_store": _rope_store, "attend": _attend,
    "matmul": _matmul, "matmul_group": _matmul_group, "logits": _logits,
    "gelu": _gelu, "geglu": _geglu, "scale_by": _scale_by, "columns": _columns,
}  # fmt: skip
