"""From an op of the graph to kernel launches: one short function an op.

A `Launch` is a kernel, its arguments, and its units of work. Arguments that change from step to
step are the names of counts (`T`, `R`, `S`); all else is final.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from ignis.errors import GraphError
from ignis.gguf import BLOCKS
from ignis.graph.ir import Operation, Value
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.ir.ops import Matmul, MatmulGroup
from ignis.graph.ir.types import BLOCK_FORMATS, PANELS
from ignis.kernels import (
    attention,
    attention_split,
    elementwise,
    kv_pages,
    matmul,
    matmul_float,
    norm,
    panels,
)
from ignis.kernels.copy import UNIT_NBYTES, copy_bytes
from ignis.kernels.embed import embed
from ignis.kernels.lang import Kernel
from ignis.kernels.quantize import quantize
from ignis.kernels.rope import rope
from ignis.kernels.rope_store import rope_store, rope_store_scratch_nbytes
from ignis.kernels.rows import ROWS
from ignis.runtime import expert_launches
from ignis.runtime.launch import (
    Argument,
    Launch,
    Private,
    Surroundings,
    count_of,
    grain_of,
    launch_of,
    number_of,
    rows_of,
    unit_rows,
)
from ignis.runtime.memory import whole_pages
from ignis.runtime.weights import PackingPiece

__all__ = [
    "Argument", "Launch", "Private", "Surroundings", "embedding_launch", "lower", "pack_launch",
]  # fmt: skip

_MAX_GROUP = 8  # query heads that share each load of a key
# What shares tiles of keys and values at least: queries, and rows, which are heads of queries.
_ATTEND_QUERIES, _ATTEND_ROWS = 8, 32


def embedding_launch(weight: int, format: str, x: Value, at: Surroundings) -> Launch:
    """The graph's input: the rows of the step's tokens in the table at address `weight`."""
    args: dict[str, Argument] = {
        "ids": at.tables.address("ids"), "weight": weight, "y": at.address(x),
        "n_embd": int(x.type.shape[1]),
    }  # fmt: skip
    return Launch(None, embed(format=format), args, units=1, per="T", writes=frozenset({x}))


def pack_launch(piece: PackingPiece, source: int, target: int) -> Launch:
    """Some rows of the tensor at the address `source` -> its packed form at `target`.

    The file's pages are let go behind.
    """
    tensor = piece.tensor
    source, target = source + piece.offset_bytes, target + piece.packed_offset_bytes
    release = whole_pages(source, piece.nbytes)
    args: dict[str, Argument]
    if tensor.layout != PANELS:
        args = {"x": source, "y": target, "n_bytes": piece.nbytes}
        n_units = -(-piece.nbytes // UNIT_NBYTES)
        return Launch(None, copy_bytes(), args, n_units, shared=True, release=release)
    args = {"weight": source, "y": target, "n_rows": piece.n_rows, "n_values": tensor.n_values}
    kernel = matmul.pack_panels(format=tensor.format)
    return Launch(None, kernel, args, -(-piece.n_rows // ROWS), shared=True, release=release)


def lower(op: Operation, at: Surroundings) -> list[Launch]:
    """The launches that compute an op."""
    lowering = _LOWERINGS.get(op.name)
    if lowering is None:
        raise GraphError("no kernel computes this op", got=op.name, wanted=", ".join(_LOWERINGS))
    return lowering(op, at)


def _width(op: Operation) -> int:
    return int(op.result.type.shape[1])


def _by_token(
    op: Operation, at: Surroundings, kernel: Kernel, operands: tuple[str, ...], **args: Argument
) -> list[Launch]:
    """A kernel whose unit is a token and whose operands keep their names."""
    words: dict[str, Argument] = {name: at.operand(op, name) for name in operands}
    words |= {"y": at.address(op.result), "n": _width(op)} | args
    return [launch_of(op, kernel, words, units=1, per=rows_of(op))]


def _normalize(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, norm.normalize(), ("x",), **_groups(op), eps=number_of(op, "eps"))


def _scale(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(op, at, norm.scale(), ("x", "gain"), **_groups(op))


def _rmsnorm(op: Operation, at: Surroundings) -> list[Launch]:
    return _by_token(
        op, at, norm.rmsnorm(), ("x", "gain"), **_groups(op), eps=number_of(op, "eps")
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
    return _by_token(op, at, elementwise.scale_by(), ("x",), factor=number_of(op, "factor"))


def _columns(op: Operation, at: Surroundings) -> list[Launch]:
    (x,) = op.operands
    return _by_token(op, at, elementwise.columns(), ("x",), first=count_of(op, "first"),
                     width=int(x.type.shape[1]))  # fmt: skip


def _quantize(op: Operation, at: Surroundings) -> list[Launch]:
    args: dict[str, Argument] = {
        "x": at.operand(op, "x"), "y": at.address(op.result), "rows": _selection(op, at),
        "n": _width(op), "n_rows": rows_of(op),
    }  # fmt: skip
    return [launch_of(op, quantize(), args, units=1, per=rows_of(op))]


def _attention(op: Operation, at: Surroundings) -> list[Launch]:
    store = kv_pages.kv_store(head_dim=count_of(op, "head_dim"), kv_type=_kv_type(op))
    args = _pages(op, at, count_of(op, "n_kv_heads"))
    args |= {"k": at.operand(op, "k"), "v": at.operand(op, "v")}
    stored = Launch(op, store, args, units=1, per="T", writes=_cached(op),
                    reads=frozenset(_operands(op, "k", "v")))  # fmt: skip
    return [stored, *(launch._replace(stage=1) for launch in _attend(op, at))]


def _rope_store(op: Operation, at: Surroundings) -> list[Launch]:
    head_dim = count_of(op, "head_dim")
    kernel = rope_store(head_dim=head_dim, n_rot=count_of(op, "n_rot"),
                        style=op.attributes["style"], kv_type=_kv_type(op))  # fmt: skip
    (k,) = _operands(op, "k")
    args = _pages(op, at, int(k.type.shape[1]) // head_dim)
    args |= {name: at.operand(op, name) for name in ("q", "k", "v")}
    args |= {"y": at.address(op.result), "table": at.rope_table(op),
             "n_heads": _width(op) // head_dim}  # fmt: skip
    return [Launch(op, kernel, args, units=1, per="T", writes=_cached(op) | {op.result},
                   reads=frozenset(_operands(op, "q", "k", "v")),
                   scratch_nbytes=rope_store_scratch_nbytes(head_dim))]  # fmt: skip


def _attend(op: Operation, at: Surroundings) -> list[Launch]:
    n_heads, head_dim = count_of(op, "n_heads"), count_of(op, "head_dim")
    shared_heads = n_heads // count_of(op, "n_kv_heads")
    group = max(g for g in range(1, _MAX_GROUP + 1) if shared_heads % g == 0)
    args = _pages(op, at, count_of(op, "n_kv_heads"))
    args |= {"q": at.operand(op, "q"), "y": at.address(op.result), "n_heads": n_heads,
             "scale": number_of(op, "scale")}  # fmt: skip
    kv_type = _kv_type(op)
    limits = {n: op.attributes[n] for n in ("window", "softcap") if n in op.attributes}
    if at.n_tokens == 1:  # cut at segments, so that a long context keeps every thread busy
        per, grain = "S", 1
        kernel = attention_split.attend_split(
            head_dim=head_dim, group=group, kv_type=kv_type, **limits
        )
        scratch_nbytes = attention_split.attend_split_scratch_nbytes(group)
        args |= {"partials": at.cache.partials_address, "arrived": at.cache.arrived_address,
                 "n_segments": "S", "max_segments": at.cache.max_segments}  # fmt: skip
    else:
        per, grain = "T", max(_ATTEND_QUERIES, _ATTEND_ROWS // group)
        kernel = attention.attend(head_dim=head_dim, group=group, kv_type=kv_type, **limits)
        scratch_nbytes = attention.attend_scratch_nbytes(group, head_dim)
        args |= {"n_tokens": "T"}
    return [Launch(op, kernel, args, units=n_heads // group, per=per, shared=True, grain=grain,
                   reads=_cached(op) | set(_operands(op, "q")), writes=frozenset({op.result}),
                   scratch_nbytes=scratch_nbytes)]  # fmt: skip


def _pages(op: Operation, at: Surroundings, n_kv_heads: int) -> dict[str, Argument]:
    """Where the KV cache of the op's layer and the step's tokens lie."""
    return {
        "base": at.cache.base(count_of(op, "layer")), "positions": at.tables.address("positions"),
        "slots": at.tables.address("slots"), "pages": at.cache.table_address,
        "pages_per_slot": at.cache.pages_per_slot, "n_pages": at.cache.n_pages,
        "n_kv_heads": n_kv_heads,
    }  # fmt: skip


def _kv_type(op: Operation) -> str:
    return str(op.attributes.get("kv_type", DEFAULT_KV_TYPE))


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
        launches += [launch._replace(op=op, part=part) for launch in _matmul(part, at)]
    return launches


def _logits(op: Operation, at: Surroundings) -> list[Launch]:
    """The product, then the cap over it in place where there is one."""
    launches = _matmul(op, at)
    if "softcap" in op.attributes:
        n = _width(op)
        n_chunks = -(-n // elementwise.CHUNK)
        args: dict[str, Argument] = {
            "x": at.address(op.result), "n": n, "n_chunks": n_chunks,
            "cap": number_of(op, "softcap"),
        }  # fmt: skip
        both = frozenset({op.result})
        launches.append(Launch(op, elementwise.softcap(), args, n_chunks, both, both, per="R",
                               shared=True, stage=1))  # fmt: skip
    return launches


def _product(op: Operation, at: Surroundings) -> Launch:
    """A matmul, or the logits of selected rows."""
    rows = rows_of(op)
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
    single = at.is_single(rows)
    if format not in BLOCK_FORMATS:
        n_unit_rows = unit_rows(single)
        args |= {"rows": _selection(op, at), "n_tokens": rows, "unit_rows": n_unit_rows}
        row_nbytes = BLOCKS[format].row_nbytes(n_values)
        kernel = matmul_float.matmul_float(format=format)
        return launch_of(op, kernel, args, -(-n_rows // n_unit_rows), gate=rows, shared=True,
                         scratch_nbytes=matmul_float.scratch_nbytes(n_values),
                         grain=grain_of(n_unit_rows * row_nbytes) if single else 0)  # fmt: skip
    packed = weight.type.layout == PANELS
    if single and not packed:
        kernel = matmul.matmul_rows(format=format)
    else:
        family = matmul.matmul_packed if packed else matmul.matmul_mapped
        kernel = family(format=format)
        args |= {"n_tokens": rows}
    grain = grain_of(panels.FORMATS[format].panel_nbytes(n_values)) if single else 0
    scratch = matmul.SUMS_NBYTES if packed else matmul.scratch_nbytes(format, n_values)
    return launch_of(op, kernel, args, -(-n_rows // ROWS), gate=rows, shared=True,
                     scratch_nbytes=scratch, grain=grain)  # fmt: skip


def _selection(op: Operation, at: Surroundings) -> int:
    """The table that names the row of the op's x that each row of its result reads."""
    (x,) = _operands(op, "x")
    selects = rows_of(op) == "R" and x.type.shape[0] == "T"
    return at.tables.address("logit_rows" if selects else "rows")


_LOWERINGS: Mapping[str, Callable[[Operation, Surroundings], list[Launch]]] = {
    "normalize": _normalize, "scale": _scale, "rmsnorm": _rmsnorm, "rope": _rope, "add": _add,
    "mul": _mul, "silu": _silu, "swiglu": _swiglu, "quantize": _quantize,
    "attention": _attention, "rope_store": _rope_store, "attend": _attend,
    "matmul": _matmul, "matmul_group": _matmul_group, "logits": _logits,
    "gelu": _gelu, "geglu": _geglu, "scale_by": _scale_by, "columns": _columns,
    "route": expert_launches.route, "expert_matmul": expert_launches.expert_matmul,
    "expert_sum": expert_launches.expert_sum, "row_gate": expert_launches.row_gate,
}  # fmt: skip
