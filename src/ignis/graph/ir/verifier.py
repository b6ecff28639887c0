"""What every graph must satisfy, before and after each pass.

    V1   a name is defined once: inputs and results have different names
    V2   every operand is defined before its use, and carries the type of its definition
    V3   operands fit the op's declaration: count, weight or activation, element type
    V4   attributes are exactly the declared ones, and valid
    V5   results have the types that inference gives
    V6   a weight has one type throughout, no symbolic dimension, and one constant if any
    V7   there is an output, and every output is an activation that is defined
    V8   effects keep their order: the KV cache of a layer is written once, layers ascending
    V9   no result is a weight, and only weights are known constants
    V10  (legalized graphs only) block-quantized weights meet quantized activations
    V11  a KV cache is read only behind the op that writes it
    V12  inputs are one row a token: f32[T,D]
    V13  only matrices are packed: block-quantized ones in panels, others as rows
    V14  a schedule has an entry for each stage, repeats no chunks, and ends with a barrier
    V15  all that is in the KV cache is kept as one type

A result that nobody reads is not an error: removing it is the job of a pass, dead_code, which
may be switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ignis.errors import GraphError
from ignis.graph.ir import schedule as schedules
from ignis.graph.ir.graph import Graph
from ignis.graph.ir.kv_types import DEFAULT_KV_TYPE
from ignis.graph.ir.operation import Operation, Value
from ignis.graph.ir.ops import PRODUCTS, Attend, Attention, RopeStore
from ignis.graph.ir.types import BLOCK_FORMATS, MAPPED, PANELS, ROWS


def verify(graph: Graph, *, legalized: bool = False) -> None:
    """Raise GraphError with the number of the first broken rule.

    `legalized` adds the rules that hold once the required passes have run.
    """
    for rule, check in RULES.items():
        if rule != "V10" or legalized:
            try:
                check(graph)
            except GraphError as error:
                broken = GraphError(f"rule {rule}: {error}")
                broken.where = error.where
                raise broken from None


def defined_once(graph: Graph) -> None:
    """V1."""
    seen: set[str] = set()
    for value in graph.values:
        if value.name in seen:
            raise GraphError("a value is defined twice", got=value, wanted="one definition")
        seen.add(value.name)


def defined_before_use(graph: Graph) -> None:
    """V2."""
    defined = set(graph.inputs)
    for position, op in enumerate(graph.operations):
        for value in op.operands:
            if not value.is_weight and value not in defined:
                raise GraphError(
                    "an operand is not defined before its use",
                    where=_where(position, op),
                    got=f"{value}: {value.type}",
                )
        defined.update(op.results)


def operands_fit(graph: Graph) -> None:
    """V3."""
    for position, op in enumerate(graph.operations):
        if len(op.arguments) != len(op.operand_specs):
            raise GraphError(
                "wrong number of operands",
                where=_where(position, op),
                got=len(op.arguments),
                wanted=len(op.operand_specs),
            )
        for spec, value in zip(op.operand_specs, op.arguments, strict=True):
            spec.check(op, value)


def attributes_valid(graph: Graph) -> None:
    """V4."""
    for op in graph.operations:
        op.check_attributes()


def types_inferred(graph: Graph) -> None:
    """V5."""
    for position, op in enumerate(graph.operations):
        got, wanted = tuple(result.type for result in op.results), op.result_types()
        if got != wanted:
            raise GraphError(
                "a result has another type than inferred",
                where=_where(position, op),
                got=", ".join(map(str, got)),
                wanted=", ".join(map(str, wanted)),
            )


def weights_consistent(graph: Graph) -> None:
    """V6."""
    types: dict[str, Value] = {}
    for op in graph.operations:
        for value in op.operands:
            if not value.is_weight:
                continue
            if value.type.is_symbolic:
                raise GraphError("a weight has no fixed shape", where=value, got=value.type)
            first = types.setdefault(value.name, value)
            if first.type != value.type:
                raise GraphError(
                    "a weight has two types", where=value, got=value.type, wanted=first.type
                )
            if first.splat != value.splat:
                raise GraphError(
                    "a weight has two constants", where=value, got=value.splat, wanted=first.splat
                )


def outputs_defined(graph: Graph) -> None:
    """V7."""
    if not graph.outputs:
        raise GraphError("the graph has no output")
    defined = set(graph.values)
    for value in graph.outputs:
        if value not in defined:
            raise GraphError("an output is not defined", got=f"{value}: {value.type}")


def effects_in_order(graph: Graph) -> None:
    """V8."""
    last = -1
    for position, op in enumerate(graph.operations):
        if isinstance(op, Attention | RopeStore):
            if op.layer <= last:
                raise GraphError(
                    "a KV cache is written out of order",
                    where=_where(position, op),
                    got=f"layer {op.layer}",
                    wanted=f"a layer above {last}",
                )
            last = op.layer


def results_are_activations(graph: Graph) -> None:
    """V9."""
    for value in graph.values:
        if value.is_weight:
            raise GraphError("a weight is defined in the graph", got=value)
        if value.splat is not None:
            raise GraphError("an activation is called constant", where=value, got=value.splat)


def quantized_where_needed(graph: Graph) -> None:
    """V10."""
    for position, op in enumerate(graph.operations):
        if not isinstance(op, PRODUCTS):
            continue
        for weight in op.matrices:
            wanted = "a8" if weight.type.dtype in BLOCK_FORMATS else "f32"
            if op.x.type.dtype != wanted:
                raise GraphError(
                    f"activations do not fit weights of type {weight.type.dtype}",
                    where=_where(position, op),
                    got=op.x.type.dtype,
                    wanted=wanted,
                )


def caches_written_before_read(graph: Graph) -> None:
    """V11."""
    written: set[int] = set()
    for position, op in enumerate(graph.operations):
        if isinstance(op, RopeStore | Attention):
            written.add(op.layer)
        if isinstance(op, Attend) and op.layer not in written:
            raise GraphError(
                "a KV cache is read before the step has written it",
                where=_where(position, op),
                got=f"layer {op.layer}",
                wanted="a rope_store of that layer before it",
            )


def inputs_are_tokens(graph: Graph) -> None:
    """V12."""
    for value in graph.inputs:
        shape = value.type.shape
        if value.type.dtype != "f32" or len(shape) != 2 or shape[0] != "T":
            raise GraphError(
                "an input is not one row a token", where=value, got=value.type, wanted="f32[T,D]"
            )
        if not isinstance(shape[1], int):
            raise GraphError("an input has no fixed width", where=value, got=value.type)


def layouts_fit(graph: Graph) -> None:
    """V13."""
    matrices = {value for op in graph.operations for value in op.matrices}
    for value in (*graph.values, *graph.weights.values()):
        packed = PANELS if value.type.dtype in BLOCK_FORMATS else ROWS
        known = (MAPPED, packed) if value in matrices else (MAPPED,)
        if value.type.layout not in known:
            raise GraphError("this can't be packed so", where=value, got=value.type.layout,
                             wanted=" or ".join(known))  # fmt: skip


def schedule_fits(graph: Graph) -> None:
    """V14."""
    schedule = graph.schedule
    if schedule is None:
        return
    for entries in (schedule.repeated, schedule.meet_one, schedule.meet_many):
        if len(entries) != len(graph.stages):
            raise GraphError("the schedule does not fit the graph", got=f"{len(entries)} stages",
                             wanted=len(graph.stages))  # fmt: skip
    for stage, repeated in zip(graph.stages, schedule.repeated, strict=True):
        if repeated and stage.share == schedules.CHUNKS:
            raise GraphError("work that threads share in chunks is repeated by each",
                             where=", ".join(map(str, stage.writes)), wanted="work by row")
    if not (schedule.meet_one[-1] and schedule.meet_many[-1]):
        raise GraphError("threads do not meet at the end", wanted="a barrier before the return")


def caches_have_one_type(graph: Graph) -> None:
    """V15."""
    first: str | None = None
    for position, op in enumerate(graph.operations):
        if isinstance(op, RopeStore | Attention | Attend):
            kv_type = op.kv_type or DEFAULT_KV_TYPE
            first = first or kv_type
            if kv_type != first:
                raise GraphError("the KV cache can't be kept as two types",
                                 where=_where(position, op), got=kv_type, wanted=first)  # fmt: skip


RULES: Mapping[str, Callable[[Graph], None]] = MappingProxyType(
    {
        "V1": defined_once,
        "V2": defined_before_use,
        "V3": operands_fit,
        "V4": attributes_valid,
        "V5": types_inferred,
        "V6": weights_consistent,
        "V7": outputs_defined,
        "V8": effects_in_order,
        "V9": results_are_activations,
        "V10": quantized_where_needed,
        "V11": caches_written_before_read,
        "V12": inputs_are_tokens,
        "V13": layouts_fit,
        "V14": schedule_fits,
        "V15": caches_have_one_type,
    }
)
"""Every rule by its number, in the order of checking: later rules rely on earlier ones."""


def _where(position: int, op: Operation) -> str:
    return f"operation {position}, {op.name}"
