"""Types, builder, and the textual form: what is printed reads back to an equal graph."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ignis.errors import GraphError
from ignis.graph.ir import OPS, Builder, Graph, TensorType, parse_graph, print_graph, verify
from ignis.graph.ir.types import A8_BLOCK_NBYTES
from ignis.kernels import a8
from tests.graph.qwen_shape import qwen2_graph

SMALL = """\
graph(%x: f32[T,64]) {
  weights {
    @norm.weight: f32[64]
    @w: q4_1[96,64]
    @w.bias: f32[96]
  }
  %0 = rmsnorm(%x, @norm.weight) {eps = 1e-06} : f32[T,64]
  %0.a8 = quantize(%0) {rows = "T"} : a8[T,64]
  %1 = matmul(%0.a8, @w, bias=@w.bias) : f32[T,96]
  %2 = rope(%1) {style = "neox", head_dim = 32, n_rot = 16, base = 10000.0} : f32[T,96]
  return %2
}
"""


def test_text_round_trips_both_ways() -> None:
    """The printer and the parser would disagree on some part of the form."""
    graph = parse_graph(SMALL)
    assert print_graph(graph) == SMALL == str(graph)
    assert parse_graph(print_graph(graph)) == graph


def test_a_whole_model_round_trips() -> None:
    graph = qwen2_graph()
    assert parse_graph(print_graph(graph)) == graph


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False))
def test_floats_print_to_the_same_bits(eps: float) -> None:
    """An eps or scale that changes in its last bit would change logits."""
    b = Builder()
    graph = b.finish(b.normalize(b.input("x", TensorType("f32", ("T", 8))), eps=eps))
    assert parse_graph(print_graph(graph)) == graph


def test_graphs_that_differ_are_not_equal() -> None:
    """Equality that ignored attributes would make every round-trip test pass."""
    graph = parse_graph(SMALL)
    assert parse_graph(SMALL.replace("1e-06", "1e-05")) != graph
    assert parse_graph(SMALL.replace('"neox"', '"interleaved"')) != graph
    assert (
        parse_graph(
            SMALL.replace("bias=@w.bias", "residual=%r")
            .replace("    @w.bias: f32[96]\n", "")
            .replace("(%x: f32[T,64])", "(%x: f32[T,64], %r: f32[T,96])")
        )
        != graph
    )


def test_operands_by_name() -> None:
    matmul = parse_graph(SMALL).operations[2]
    bias = matmul.operand("bias")
    assert bias is not None
    assert bias.weight_name == "w.bias"
    assert matmul.operand("residual") is None
    assert [str(v) for v in matmul.operands] == ["%0.a8", "@w", "@w.bias"]
    with pytest.raises(KeyError):
        matmul.operand("gain")


def test_weights_are_listed_once_in_order_of_use() -> None:
    assert list(parse_graph(SMALL).weights) == ["norm.weight", "w", "w.bias"]
    assert "token_embd.weight" in qwen2_graph().weights


def test_a_graph_cannot_be_changed() -> None:
    graph = parse_graph(SMALL)
    with pytest.raises(AttributeError):
        graph.outputs = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        graph.operations[0].attributes["eps"] = 1.0  # type: ignore[index]


def test_sizes_of_activations() -> None:
    """The arena would be too small for what kernels write."""
    assert TensorType("f32", ("T", 896)).nbytes(3, 1) == 3 * 896 * 4
    assert TensorType("f32", ("R", 100)).nbytes(3, 2) == 2 * 100 * 4
    assert A8_BLOCK_NBYTES == a8.BLOCK_NBYTES
    for n_tokens, width in ((1, 32), (13, 896), (512, 4864)):
        quantized = TensorType("a8", ("T", width))
        assert quantized.nbytes(n_tokens, 1) == a8.nbytes(n_tokens, width)
    with pytest.raises(GraphError, match="only activations"):
        TensorType("q8_0", (32, 32)).nbytes(1, 1)


@pytest.mark.parametrize("text", ["f32", "f32[]", "f32[0]", "f32[-1]", "f32[S]", "f8[2]", "f32[2"])
def test_bad_types(text: str) -> None:
    with pytest.raises(GraphError):
        TensorType.parse(text)


def _builder() -> tuple[Builder, dict[str, object]]:
    b = Builder()
    return b, {
        "x": b.input("x", TensorType("f32", ("T", 64))),
        "y": b.input("y", TensorType("f32", ("T", 32))),
        "q": b.input("q", TensorType("a8", ("T", 64))),
        "odd": b.input("odd", TensorType("f32", ("T", 40))),
        "r": b.input("r", TensorType("f32", ("R", 64))),
        "w": b.weight("w", TensorType("q8_0", (32, 64))),
        "gain": b.weight("gain", TensorType("f32", (32,))),
    }


HEADS = {"layer": 0, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "scale": 1.0}
ROPE = {"style": "neox", "head_dim": 32, "n_rot": 32, "base": 1e4}


@pytest.mark.parametrize(
    ("op", "operands", "attributes", "message"),
    [
        ("normalize", "x", {"eps": 0.0}, "attribute 'eps' is invalid"),
        ("normalize", "x", {"eps": math.inf}, "attribute 'eps' is invalid"),
        ("normalize", "x", {}, "attribute 'eps' is missing"),
        ("normalize", "x", {"eps": 1e-6, "epsilon": 1}, "unknown attribute: got epsilon"),
        ("normalize", "q", {"eps": 1e-6}, "unfit element type: got %q: a8"),
        ("normalize", "", {"eps": 1e-6}, "operand 'x' is missing"),
        ("normalize", "x y", {"eps": 1e-6}, "too many operands"),
        ("scale", "x gain", {}, r"'gain' does not fit: got @gain: f32\[32\], wanted f32\[64\]"),
        ("scale", "x x", {}, "wrong kind: got an activation %x, wanted a weight"),
        ("matmul", "y w", {}, r"@w does not fit %y: f32\[T,32\]: got q8_0\[32,64\]"),
        ("matmul", "x w gain x", {}, "operand 'residual' does not fit"),
        ("logits", "x w", {"rows": "T"}, "attribute 'rows' is invalid"),
        ("add", "x y", {}, "operand 'b' does not fit"),
        ("mul", "x y", {}, "operand 'b' does not fit"),
        ("swiglu", "x y", {}, "operand 'up' does not fit"),
        ("quantize", "odd", {}, "not a number of A8 blocks: got 40"),
        ("quantize", "r", {"rows": "R"}, "only from all tokens: got f32"),
        ("rope", "x", ROPE | {"style": "gpt"}, "attribute 'style' is invalid"),
        ("rope", "x", ROPE | {"n_rot": 34}, "bad n_rot: got 34"),
        ("rope", "odd", ROPE, "not a number of heads: got 40"),
        ("rope", "x", ROPE | {"head_dim": True}, "attribute 'head_dim' is invalid"),
        ("attention", "x y y", HEADS | {"n_kv_heads": 3}, "can't be shared out"),
        ("attention", "x x y", HEADS, "operand 'k' does not fit"),
        ("attention", "x y y", HEADS | {"layer": -1}, "attribute 'layer' is invalid"),
    ],
)  # fmt: skip
def test_ops_refuse_what_does_not_fit(
    op: str, operands: str, attributes: dict[str, object], message: str
) -> None:
    """A wrong graph would be built and fail later, far from its cause."""
    b, values = _builder()
    with pytest.raises(GraphError, match=message):
        getattr(b, op)(*(values[name] for name in operands.split()), **attributes)


def test_the_builder_has_a_method_for_every_op_and_no_other() -> None:
    b = Builder()
    assert all(callable(getattr(b, name)) for name in OPS)
    with pytest.raises(AttributeError, match="convolve"):
        _ = b.convolve
    with pytest.raises(GraphError, match="not a name"):
        b.input("x y", TensorType("f32", (1,)))


def test_every_op_documents_itself() -> None:
    """The reference of ops is generated from the classes."""
    for op in OPS.values():
        assert op.__doc__
        assert op.operand_specs
        assert all(op.operand_specs[i].index == i for i in range(len(op.operand_specs)))


def test_naive_model_graph_verifies() -> None:
    graph = qwen2_graph()
    verify(graph)
    assert isinstance(graph, Graph)
    with pytest.raises(GraphError, match="rule V10"):
        verify(graph, legalized=True)
