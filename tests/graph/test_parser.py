"""Malformed IR: one clear error with the line, what was got and what was wanted."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ignis.errors import GraphError
from ignis.graph.ir import parse_graph

GOOD = """\
# A comment, and a blank line.

graph(%x: f32[T,64]) {
  weights {
    @w: f16[32,64]
  }
  %0 = matmul(%x, @w) : f32[T,32]   # another
  %1 = normalize(%0) {eps = 1e-06} : f32[T,32]
  return %1
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph(", "grph(", "line 3: cannot be read"),
        ("f32[T,64]) {", "f32[S,64]) {", "line 3: bad dimension in 'f32[S,64]'"),
        ("@w: f16", "@w: f17", "line 5: unknown element type"),
        ("matmul(", "matmull(", "line 7: unknown op: got matmull"),
        ("%x, @w", "%y, @w", "line 7: a value is not defined before its use: got %y"),
        ("%x, @w", "@w, %x", "line 7: matmul: operand 'x' is of the wrong kind"),
        ("%x, @w", "%x, @w, %x", "line 7: too many operands of matmul: got 3"),
        ("%x, @w", "%x, @w, bios=@w", "line 7: matmul: unknown operand: got bios"),
        ("%x, @w", "%x, x=%x", "line 7: an operand is given twice: got x"),
        ("%x, @w", "%x", "line 7: matmul: operand 'weight' is missing"),
        (": f32[T,32]   #", ": f32[T,33]   #", "line 7: the result has another type: got f32[T,"),
        (": f32[T,32]   #", "#", "line 7: cannot be read"),
        ("%1 = n", "%0 = n", "line 8: a value is defined twice: got %0"),
        ("%1 = n", "%x = n", "line 8: a value is defined twice: got %x"),
        ("eps = 1e-06", "eps = 1e-06, eps = 1.0", "line 8: an attribute is given twice"),
        ("eps = 1e-06", "eps = -1.0", "line 8: normalize: attribute 'eps' is invalid: got -1.0"),
        ("eps = 1e-06", "eps = nan", "line 8: bad attribute value"),
        ("eps = 1e-06", "eps = __import__('os')", "line 8: bad attribute value"),
        ("eps = 1e-06", "eps", "line 8: bad attributes"),
        (" {eps = 1e-06}", "", "line 8: normalize: attribute 'eps' is missing"),
        ("return %1", "return %2", "line 9: a value is not defined"),
        ("return %1", "return", "rule V7: the graph has no output"),
        ("return %1\n}", "return %1", "line 9: the text ends too early"),
        ("return %1\n}", "return %1\n}\nmore", "line 11: text after the graph: got more"),
        ("(%x, @w)", "(%x, @w, bias=@b)", "line 7: a value is not defined before its use: got @b"),
        ("@w: f16[32,64]", "@w: f16[32,64]\n@v: f32[1]", "a weight is declared but never read"),
        ("@w: f16[32,64]", "@w: f16[32,64]\n@w: f32[1]", "line 6: a value is declared twice"),
        ("@w: f16[32,64]", "@w: f16[T,64]", "line 7: matmul: @w does not fit"),
    ],
)  # fmt: skip
def test_errors_name_the_line(old: str, new: str, message: str) -> None:
    parse_graph(GOOD)
    assert old in GOOD
    with pytest.raises(GraphError) as caught:
        parse_graph(GOOD.replace(old, new, 1))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.data())
def test_mutated_text_parses_or_is_refused(data: st.DataObject) -> None:
    """A crash of any other kind than GraphError would reach the user as a traceback."""
    at = data.draw(st.integers(0, len(GOOD) - 1))
    junk = data.draw(st.text(max_size=6))
    cut = data.draw(st.integers(0, 5))
    with suppress(GraphError):
        parse_graph(GOOD[:at] + junk + GOOD[at + cut :])
