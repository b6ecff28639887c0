"""Values, and the base of all ops.

An op is declared once, as a subclass of `Operation` with its operands and attributes as class
attributes; builder method, printer, parser, verifier and interpreter follow from that class:

    class Scale(Operation):
        "Multiply each row by a gain."
        name = "scale"
        x = Operand("f32")
        gain = Operand("f32", weight=True)

        def infer(self) -> TensorType: ...
        def evaluate(self, step: Evaluation) -> Array: ...

Values and operations are immutable and compare by content. Names are unique in a graph, so an
op that takes over another's result simply carries the same value: nothing needs renaming.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Self,
    TypeAlias,
    TypeVar,
    overload,
)

from ignis.errors import GraphError
from ignis.graph.ir.schedule import ROWS, Stage
from ignis.graph.ir.types import TensorType

if TYPE_CHECKING:
    from ignis.graph.ir.evaluation import Array, Evaluation

AttributeValue: TypeAlias = int | float | str | tuple[int, ...]
A = TypeVar("A", bound=AttributeValue)


class Value(NamedTuple):
    """An SSA value: the input, an op's result (`%name`), or a weight (`@name`).

    `splat` is the number that all elements of a weight are known to be, where it is known.
    """

    name: str
    type: TensorType
    is_weight: bool = False
    splat: float | None = None

    def __str__(self) -> str:
        return f"{'@' if self.is_weight else '%'}{self.name}"

    @property
    def weight_name(self) -> str:
        """The GGUF tensor that a weight refers to."""
        assert self.is_weight, f"{self} is not a weight"
        return self.name


class Operand:
    """Declares a required operand of an op: which element types it takes, weight or activation."""

    optional: ClassVar[bool] = False

    def __init__(self, *dtypes: str, weight: bool = False) -> None:
        self.dtypes, self.weight = dtypes, weight
        self.name, self.index = "", -1

    def __set_name__(self, owner: type[Operation], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, op: None, owner: type[Operation]) -> Self: ...
    @overload
    def __get__(self, op: Operation, owner: type[Operation]) -> Value: ...
    def __get__(self, op: Operation | None, owner: type[Operation]) -> Self | Value:
        if op is None:
            return self
        value = op.arguments[self.index]
        if value is None:
            raise GraphError(f"operand '{self.name}' is missing", where=op.name)
        return value

    def check(self, op: Operation, value: Value | None) -> None:
        """Raise GraphError unless `value` fits this declaration."""
        if value is None:
            if not self.optional:
                raise GraphError(f"operand '{self.name}' is missing", where=op.name)
            return
        if value.is_weight != self.weight:
            kinds = ("an activation", "a weight")
            raise GraphError(
                f"operand '{self.name}' is of the wrong kind",
                where=op.name,
                got=f"{kinds[value.is_weight]} {value}",
                wanted=kinds[self.weight],
            )
        if value.type.dtype not in self.dtypes:
            raise GraphError(
                f"operand '{self.name}' has an unfit element type",
                where=op.name,
                got=f"{value}: {value.type}",
                wanted=" or ".join(self.dtypes),
            )


class OptionalOperand(Operand):
    """Declares an operand that may be left out; it is always written with its name."""

    optional: ClassVar[bool] = True

    @overload  # type: ignore[override]  # an optional operand reads as Value | None
    def __get__(self, op: None, owner: type[Operation]) -> Self: ...
    @overload
    def __get__(self, op: Operation, owner: type[Operation]) -> Value | None: ...
    def __get__(self, op: Operation | None, owner: type[Operation]) -> Self | Value | None:
        return self if op is None else op.arguments[self.index]


class Attribute(Generic[A]):
    """Declares a compile-time parameter of an op: its type, which values are valid, a default."""

    def __init__(
        self, kind: type[A], *, valid: Callable[[A], bool], wanted: str, default: A | None = None
    ) -> None:
        self.kind, self.valid, self.wanted, self.default = kind, valid, wanted, default
        self.name = ""

    def __set_name__(self, owner: type[Operation], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, op: None, owner: type[Operation]) -> Self: ...
    @overload
    def __get__(self, op: Operation, owner: type[Operation]) -> A: ...
    def __get__(self, op: Operation | None, owner: type[Operation]) -> Self | A:
        if op is None:
            return self
        value: Any = op.attributes[self.name]
        return value  # type: ignore[no-any-return]  # `check` has seen its type

    def check(self, op: Operation) -> None:
        """Raise GraphError unless the op's value for this attribute is there and valid."""
        value: Any = op.attributes.get(self.name)
        if type(value) is not self.kind or not self.valid(value):
            raise GraphError(
                f"attribute '{self.name}' is {'missing' if value is None else 'invalid'}",
                where=op.name,
                got=None if value is None else repr(value),
                wanted=self.wanted,
            )


class OptionalAttribute(Attribute[A]):
    """Declares an attribute that may be left out: it then reads as None and is not printed."""

    @overload  # type: ignore[override]  # an optional attribute reads as A | None
    def __get__(self, op: None, owner: type[Operation]) -> Self: ...
    @overload
    def __get__(self, op: Operation, owner: type[Operation]) -> A | None: ...
    def __get__(self, op: Operation | None, owner: type[Operation]) -> Self | A | None:
        if op is None:
            return self
        value: Any = op.attributes.get(self.name)
        return value  # type: ignore[no-any-return]  # `check` has seen its type

    def check(self, op: Operation) -> None:
        """Raise GraphError if the op has an invalid value for this attribute."""
        if self.name in op.attributes:
            super().check(op)


def optional(spec: Attribute[A]) -> OptionalAttribute[A]:
    """The same attribute, but it may be left out."""
    return OptionalAttribute(spec.kind, valid=spec.valid, wanted=spec.wanted)


def count() -> Attribute[int]:
    """An attribute that is a positive number of things."""
    return Attribute(int, valid=lambda n: n > 0, wanted="an integer above 0")


def index() -> Attribute[int]:
    """An attribute that counts from zero."""
    return Attribute(int, valid=lambda n: n >= 0, wanted="an integer, 0 or above")


def positive() -> Attribute[float]:
    """An attribute that is a finite number above zero."""
    return Attribute(float, valid=lambda x: 0 < x < math.inf, wanted="a finite number above 0")


def choice(*names: str, default: str | None = None) -> Attribute[str]:
    """An attribute that is one of some names."""
    wanted = " or ".join(f'"{name}"' for name in names)
    return Attribute(str, valid=lambda name: name in names, wanted=wanted, default=default)


@dataclass(frozen=True)  # not slotted: what passes ask for often is cached on the instance
class Operation:
    """One node of a graph. `arguments` are in the declared order, None where left out."""

    arguments: tuple[Value | None, ...]
    attributes: Mapping[str, AttributeValue] = field(hash=False)
    results: tuple[Value, ...]

    name: ClassVar[str]
    in_place: ClassVar[tuple[str, ...]] = ()
    """Operands whose memory the result may take over, when they die here."""
    share: ClassVar[str] = ROWS
    """How threads share the op's work: by `rows` or in `chunks`; see `Stage`."""
    operand_specs: ClassVar[tuple[Operand, ...]] = ()
    operand_names: ClassVar[tuple[str, ...]] = ()
    attribute_specs: ClassVar[tuple[Attribute[Any], ...]] = ()
    attribute_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        declared = tuple(vars(cls).values())
        cls.operand_specs = tuple(d for d in declared if isinstance(d, Operand))
        cls.operand_names = tuple(spec.name for spec in cls.operand_specs)
        cls.attribute_specs = tuple(d for d in declared if isinstance(d, Attribute))
        cls.attribute_names = tuple(spec.name for spec in cls.attribute_specs)
        for position, spec in enumerate(cls.operand_specs):
            spec.index = position

    def infer(self) -> TensorType | tuple[TensorType, ...]:
        """The result's type (a tuple of types for several results), or GraphError."""
        raise NotImplementedError

    def evaluate(self, step: Evaluation) -> Array | tuple[Array, ...]:
        """What the op means, in float64 NumPy."""
        raise NotImplementedError

    @property
    def effect(self) -> str | None:
        """The state that the op writes, if it does: such ops are never removed or reordered."""
        return None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The parts of the op that run one after the other; most ops have one."""
        reads = [value for value in self.operands if not value.is_weight]
        writes = [*self.results] if self.effect is None else [*self.results, self.effect]
        return (self.stage(self.share, reads, writes),)

    def stage(self, share: str, reads: Iterable[Hashable], writes: Iterable[Hashable]) -> Stage:
        """A stage of this op; its rows are those of the result."""
        axis = str(self.results[0].type.shape[0])
        return Stage(share, frozenset(reads), frozenset(writes), axis)

    @cached_property
    def operands(self) -> tuple[Value, ...]:
        """The operands that are there, in declared order."""
        return tuple(value for value in self.arguments if value is not None)

    def operand(self, name: str) -> Value | None:
        """An operand by its declared name; None where it is optional and left out."""
        for spec in self.operand_specs:
            if spec.name == name:
                return self.arguments[spec.index]
        raise KeyError(f"{self.name} has no operand {name!r}")

    @property
    def matrices(self) -> tuple[Value, ...]:
        """The weight matrices that the op multiplies by; those of all experts are one value."""
        return tuple(v for v in self.operands if v.is_weight and len(v.type.shape) >= 2)

    @property
    def result(self) -> Value:
        """The only result."""
        (result,) = self.results
        return result

    @cached_property
    def kind(self) -> str:
        """The op's name and the activations fused into it: `matmul+residual`."""
        extra = (s.name for s in self.operand_specs if s.optional and not s.weight)
        return "+".join([self.name, *(n for n in extra if self.operand(n) is not None)])

    @classmethod
    def create(
        cls,
        operands: Mapping[str, Value | None],
        attributes: Mapping[str, AttributeValue],
        result_names: Sequence[str],
    ) -> Self:
        """A checked op with inferred result types, or GraphError."""
        op = cls.unnamed(operands, attributes)
        types = op.result_types()
        if len(types) != len(result_names):
            raise GraphError(
                "wrong number of results", where=cls.name, got=len(result_names), wanted=len(types)
            )
        return op.with_results(result_names, types)

    @classmethod
    def unnamed(
        cls,
        operands: Mapping[str, Value | None],
        attributes: Mapping[str, AttributeValue],
    ) -> Self:
        """A checked op whose results have no names yet."""
        known = cls.operand_names
        for name in operands:
            if name not in known:
                raise GraphError(
                    "unknown operand", where=cls.name, got=name, wanted=" or ".join(known)
                )
        arguments = tuple(map(operands.get, known))
        op = cls(arguments, MappingProxyType(cls._complete(attributes)), ())
        op.check()
        return op

    def with_results(self, names: Iterable[str], types: Iterable[TensorType]) -> Self:
        """The same op with results of these names and types, which `result_types` has inferred."""
        return type(self)(self.arguments, self.attributes, tuple(map(Value, names, types)))

    def with_operands(self, **operands: Value | None) -> Self:
        """The same op reading other values: checked again, results of the same names."""
        named = dict(zip(self.operand_names, self.arguments, strict=True))
        names = [result.name for result in self.results]
        return self.create({**named, **operands}, self.attributes, names)

    def result_types(self) -> tuple[TensorType, ...]:
        """What `infer` says, always as a tuple."""
        types = self.infer()
        return (types,) if isinstance(types, TensorType) else types

    def check(self) -> None:
        """Raise GraphError unless operands and attributes fit the declaration."""
        if len(self.arguments) != len(self.operand_specs):
            raise GraphError(
                "wrong number of operands",
                where=self.name,
                got=len(self.arguments),
                wanted=len(self.operand_specs),
            )
        for operand, value in zip(self.operand_specs, self.arguments, strict=True):
            operand.check(self, value)
        self.check_attributes()

    def check_attributes(self) -> None:
        """Raise GraphError unless exactly the declared attributes are there, all valid."""
        known = self.attribute_names
        for name in self.attributes:
            if name not in known:
                raise GraphError(
                    "unknown attribute",
                    where=self.name,
                    got=name,
                    wanted=" or ".join(known) or "none",
                )
        for attribute in self.attribute_specs:
            attribute.check(self)

    @classmethod
    def _complete(cls, attributes: Mapping[str, AttributeValue]) -> dict[str, AttributeValue]:
        """Add defaults, let integers stand for floats, and bring into declared order."""
        given = dict(attributes)
        completed: dict[str, AttributeValue] = {}
        for spec in cls.attribute_specs:
            value = given.pop(spec.name, spec.default)
            if value is not None:
                if spec.kind is float and isinstance(value, int) and abs(value) < 2**53:
                    value = float(value)
                completed[spec.name] = value
        return completed | given
