"""A model's tensors to a graph, every tensor checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ignis.errors import ModelFileError, UnsupportedModelError
from ignis.graph.ir import Builder, Graph, TensorType, Value
from ignis.graph.ir.rope import UNSCALED
from ignis.graph.ir.types import A8_BLOCK, BLOCK_FORMATS, WEIGHT_FORMATS

if TYPE_CHECKING:
    from ignis.graph.models.config import ModelConfig

_UNUSED_BY_DESIGN = ("attn_rot_embd",)
"""Tensors of old converters that hold what rope computes."""


class Format(Protocol):
    """How a tensor's elements are stored."""

    @property
    def name(self) -> str: ...


class Tensor(Protocol):
    """What lowering needs to know of a tensor: rows first, then the contiguous axis."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> Format: ...


Constants: TypeAlias = "Callable[[str], float | None]"
"""The number that all elements of an f32 vector are, by name; None where they differ."""


def _nothing_known(name: str) -> None:
    return None


class Lowering:
    """A graph being built for one model: the builder `b`, and its weights by GGUF name."""

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], constant: Constants
    ) -> None:
        self.config, self.b = config, Builder()
        self._tensors, self._constant = tensors, constant
        self._used: set[str] = set()

    def weight(self, name: str, shape: tuple[int, ...], formats: tuple[str, ...]) -> Value:
        """The weight of that name, or ModelFileError where it is missing or misshapen."""
        tensor = self._tensors.get(name)
        if tensor is None:
            wanted = f"{formats[0] if len(formats) == 1 else 'a weight'}{list(shape)}"
            raise ModelFileError(f"tensor {name} is missing", where=self.source, wanted=wanted)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"tensor {name} has the wrong shape",
                where=self.source,
                got=list(tensor.shape),
                wanted=list(shape),
            )
        if tensor.format.name not in formats:
            raise UnsupportedModelError(
                f"tensor {name} has an unsupported type",
                where=self.source,
                got=tensor.format.name,
                wanted=" or ".join(formats),
                hint="take the model in another quantization, such as Q4_K_M or Q8_0",
            )
        self._used.add(name)
        is_vector = len(shape) == 1 and tensor.format.name == "f32"
        splat = self._constant(name) if is_vector else None
        return self.b.weight(name, TensorType(tensor.format.name, shape), splat)

    def matrix(self, name: str, *shape: int) -> Value:
        """A weight matrix [N, K] of any format that matmuls read, or one an expert, [E, N, K]."""
        value = self.weight(name, shape, WEIGHT_FORMATS)
        if value.type.dtype in BLOCK_FORMATS and shape[-1] % A8_BLOCK:
            raise ModelFileError(
                f"tensor {name} has rows that are not whole blocks",
                where=self.source,
                got=shape[-1],
                wanted=f"a multiple of {A8_BLOCK}",
            )
        return value

    def row_weight(self, name: str, n: int) -> Value:
        """A vector of `n`, which some files keep as a matrix of one row."""
        tensor = self._tensors.get(name)
        is_matrix = tensor is not None and tuple(tensor.shape) == (1, n)
        return self.weight(name, (1, n) if is_matrix else (n,), ("f32",))

    def has(self, name: str) -> bool:
        """Whether the file has a tensor of that name."""
        return name in self._tensors

    def linear(
        self, x: Value, name: str, n_outputs: int, *, needs_bias: bool = False
    ) -> Value:
        """x times the weight `name`.weight, plus `name`.bias where there is one."""
        n_inputs = x.type.shape[1]
        assert isinstance(n_inputs, int)
        weight = self.matrix(f"{name}.weight", n_outputs, n_inputs)
        bias = None
        if needs_bias or self.has(f"{name}.bias"):
            bias = self.weight(f"{name}.bias", (n_outputs,), ("f32",))
        return self.b.matmul(x, weight, bias=bias)

    def norm(self, x: Value, name: str) -> Value:
        """RMSNorm by `name`.weight, as the two ops it consists of."""
        gain = self.weight(f"{name}.weight", (self.config.n_embd,), ("f32",))
        return self.b.scale(self.b.normalize(x, eps=self.config.norm_eps), gain)

    def head_norm(self, x: Value, name: str) -> Value:
        """RMSNorm of each head of q or k by `name`.weight."""
        c = self.config
        gain = self.weight(f"{name}.weight", (c.head_dim,), ("f32",))
        normalized = self.b.normalize(x, eps=c.norm_eps, group=c.head_dim)
        return self.b.scale(normalized, gain, group=c.head_dim)

    def scale_by(self, x: Value, factor: float) -> Value:
        """x times a number, or x itself where the number is 1."""
        return x if factor == 1 else self.b.scale_by(x, factor=factor)

    def rope(self, x: Value, layer: int) -> Value:
        """Rotate the heads of q or k, by the file's frequency factors where it has them."""
        c = self.config
        is_local = layer in c.local_layers and c.local_rope_base is not None
        scaling = UNSCALED if is_local else c.rope_scaling
        return self.b.rope(
            x,
            factors=self._rope_factors(),
            style=c.rope_style,
            head_dim=c.head_dim,
            n_rot=c.rope_dim,
            base=c.local_rope_base if is_local else c.rope_base,
            **scaling.attributes,
        )

    def _rope_factors(self) -> Value | None:
        """One set for all contexts, or one for short and one for long contexts."""
        shape = (self.config.rope_dim // 2,)
        if self.config.long_rope_above is not None:
            both = [
                self.weight(f"rope_factors_{name}.weight", shape, ("f32",))
                for name in ("short", "long")
            ]
            return both[self.config.is_long_context]
        if self.has("rope_freqs.weight"):
            return self.weight("rope_freqs.weight", shape, ("f32",))
        return None

    def finish(self, output: Value) -> Graph:
        """The graph, once every tensor of the file has found its place in it."""
        for name in self._tensors:
            if name not in self._used and not any(part in name for part in _UNUSED_BY_DESIGN):
                raise UnsupportedModelError(
                    f"tensor {name} has no place in architecture {self.config.architecture}",
                    where=self.source,
                    hint="the model has a part that Ignis does not know",
                )
        return self.b.finish(output)

    @property
    def source(self) -> str:
        """The file, for errors."""
        return self.config.source


def build_graph(
    config: ModelConfig, tensors: Mapping[str, Tensor], constant: Constants = _nothing_known
) -> Graph:
    """Lower a model to its plainest graph: f32 embedding rows `%x` [T, D] to logits [R, V].

    `constant` may look into vectors, so that fold_constants can drop those that change nothing.

    Raises: ModelFileError for a tensor that is missing or misshapen, UnsupportedModelError for
    an architecture, tensor type or tensor that cannot be run.
    """
    from ignis.graph.models.registry import find_architecture  # it imports the architectures

    architecture = find_architecture(config.architecture, config.source)
    m = Lowering(config, tensors, constant)
    embedding = m.matrix("token_embd.weight", config.n_vocab, config.n_embd)
    x = m.b.input("x", TensorType("f32", ("T", config.n_embd)))
    x = m.scale_by(x, config.embedding_scale)
    for i in range(config.n_layers):
        x = architecture.layer(m, i, x)
    x = m.scale_by(m.norm(x, "output_norm"), config.logit_scale)
    if config.tied_output:
        output = embedding
    else:
        output = m.matrix("output.weight", config.n_vocab, config.n_embd)
    if config.logit_softcap is not None:
        return m.finish(m.b.logits(x, output, softcap=config.logit_softcap))
    return m.finish(m.b.logits(x, output))
