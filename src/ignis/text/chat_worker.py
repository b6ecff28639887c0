"""Renders chat templates in a process of its own; run as a script by `ignis.text.chat`.

A template comes from an untrusted file. Jinja's sandbox keeps it from our objects, but not from
looping for ever or filling memory, and no hook inside the interpreter stops `"a" * 10**10` or a
sum that doubles a thousand times. A process can be limited from outside, and killed.

Every character of the template's own text is *sealed*: replaced by a private code point that no
message contains. What the template does with the text of a message (cut, join, change case) cannot
make a sealed character of it, so after rendering it is known which characters are the template's,
and only they can form a control token.

Says "ready", then reads one JSON object a line and answers with one: {"text": ...},
{"refused": ...} or {"error": ...}. Imports nothing
but the standard library and Jinja, so that it starts fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[1:]  # where Jinja and MarkupSafe lie: -I -S leaves nothing else

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_NBYTES = 1 << 30
SECONDS = 3  # the parent is more strict; this stops a worker that lost its parent

Seal = dict[int, str]


class Sealed(str):
    """Trusted text: sealed where it is printed, itself where the template compares it."""

    _plain: str
    _seal: Seal
    __slots__ = ("_plain", "_seal")

    def __new__(cls, plain: str, seal: Seal) -> Sealed:
        self = super().__new__(cls, plain.translate(seal))
        self._plain, self._seal = plain, seal
        return self

    def __eq__(self, other: object) -> bool:
        return bool(self._plain == _plain(other))

    def __ne__(self, other: object) -> bool:
        return bool(self._plain != _plain(other))

    def __hash__(self) -> int:
        return hash(self._plain)

    def __contains__(self, part: object) -> bool:
        return isinstance(part, str) and _plain(part) in self._plain

    def __getitem__(self, index: Any) -> Sealed:
        return Sealed(self._plain[index], self._seal)

    def __iter__(self) -> Iterator[str]:
        return (Sealed(character, self._seal) for character in self._plain)

    def __add__(self, other: str) -> str:
        both = isinstance(other, Sealed)
        return Sealed(self._plain + _plain(other), self._seal) if both else super().__add__(other)

    def __mod__(self, values: Any) -> str:
        # Its `%s` must not be sealed; the result is not trusted.
        return str(self._plain % values)

    def startswith(self, *args: Any) -> bool:
        return self._plain.startswith(*map(_plain, args))

    def endswith(self, *args: Any) -> bool:
        return self._plain.endswith(*map(_plain, args))

    def _same(self, name: str, *args: Any) -> Sealed:
        return Sealed(getattr(self._plain, name)(*map(_plain, args)), self._seal)

    def upper(self) -> Sealed:
        return self._same("upper")

    def lower(self) -> Sealed:
        return self._same("lower")

    def capitalize(self) -> Sealed:
        return self._same("capitalize")

    def title(self) -> Sealed:
        return self._same("title")

    def strip(self, *args: Any) -> Sealed:
        return self._same("strip", *args)

    def lstrip(self, *args: Any) -> Sealed:
        return self._same("lstrip", *args)

    def rstrip(self, *args: Any) -> Sealed:
        return self._same("rstrip", *args)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value._plain if isinstance(value, Sealed) else value


class Generation(Extension):
    """`{% generation %}` marks what a model learns from in training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sealer:
    """Seals the constants of a template that can reach its output.

    Constants that are only compared, looked up, or given to a method or filter stay as they are:
    there they meet the text of messages. So do those that cannot be part of a control token. Where
    this guesses wrong, the text of a control token stays plain text; never the other way round.
    """

    def __init__(self, seal: Seal, control: list[str]) -> None:
        self.seal, self.control = seal, control
        self.beginnings = {token[:n] for token in control for n in range(1, len(token))}
        self.endings = {token[n:] for token in control for n in range(1, len(token))}
        self.names: dict[str, Sealed] = {}

    def visit(self, node: nodes.Node, printed: bool = True) -> nodes.Node:
        """Seal below `node`; returns the node to stand in its place.

        `printed`: whether the value of `node` may reach the output.
        """
        if isinstance(node, nodes.TemplateData):
            node.data = node.data.translate(self.seal)
        elif isinstance(node, nodes.Const):
            text = node.value
            if printed and isinstance(text, str) and self._contributes(text):
                return self._sealed(node)
        elif isinstance(node, nodes.Operand) and isinstance(node.expr, nodes.Const):
            # A sealed role may be looked for in any constant: `message.role in 'user tool'`.
            if isinstance(node.expr.value, str):
                node.expr = self._sealed(node.expr)
        else:
            for field, value in node.iter_fields():
                inherits = _prints(node, field, printed)
                if isinstance(value, list):
                    value[:] = [self.visit(v, inherits) if isinstance(v, nodes.Node) else v
                                for v in value]  # fmt: skip
                elif isinstance(value, nodes.Node):
                    setattr(node, field, self.visit(value, inherits))
        return node

    def _sealed(self, node: nodes.Const) -> nodes.Expr:
        name = f"_sealed_{len(self.names)}"
        self.names[name] = Sealed(node.value, self.seal)
        return nodes.Name(name, "load", lineno=node.lineno)

    def _contributes(self, text: str) -> bool:
        """Whether `text` holds a control token, ends or starts inside one, or lies within one."""
        cuts = range(1, len(text) + 1)
        return (
            any(text[-n:] in self.beginnings or text[:n] in self.endings for n in cuts)
            or any(token in text or text in token for token in self.control if text)
        )  # fmt: skip


def _prints(node: nodes.Node, field: str, printed: bool) -> bool:
    """Whether what stands in `field` can be (part of) the value of `node`, or of what follows."""
    if isinstance(node, nodes.Stmt):
        return field not in ("test", "target")
    if isinstance(node, nodes.Operand):  # the right side of a comparison
        return True
    if isinstance(node, (nodes.Compare, nodes.Test, nodes.Slice)):
        return False
    if isinstance(node, nodes.CondExpr):
        return printed and field != "test"
    if isinstance(node, nodes.Getitem):
        return printed and field == "node"
    if isinstance(node, nodes.Getattr):  # a method of a literal, such as `format`, must see it
        return printed and not isinstance(node.node, nodes.Const)
    if isinstance(node, nodes.Pair):
        return printed and field == "value"
    if isinstance(node, nodes.Filter):
        return printed and (field == "node" or node.name in ("default", "d", "join"))
    if isinstance(node, nodes.Call):  # a macro or `namespace`, but not a method of some text
        return printed and (field == "node" or isinstance(node.node, nodes.Name))
    return printed


class Environment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, sealing what it parses."""

    def __init__(self, sealer: Sealer) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        self._sealer = sealer
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(str(_plain(form)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self._sealer.visit(tree)
        return tree


def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As Hugging Face's templates expect it: no escapes for HTML, none for Unicode."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


class RefusedError(TemplateError):
    """The template called `raise_exception`."""


def refuse(message: str) -> None:
    raise RefusedError(str(_plain(message)))


def render(job: dict[str, Any]) -> dict[str, str]:
    """One answer: the rendered text, still sealed, or what went wrong."""
    seal = {ord(plain): sealed for plain, sealed in job["seal"].items()}
    unseal = {ord(sealed): plain for plain, sealed in job["seal"].items()}
    try:
        sealer = Sealer(seal, job["control"])
        template = Environment(sealer).from_string(job["source"])
        known = {name: Sealed(text, seal) for name, text in job["trusted"].items()}
        for message in job["messages"]:
            if message["role"] in job["roles"]:
                message["role"] = Sealed(message["role"], seal)
        variables = {**job["variables"], **known, **sealer.names, "messages": job["messages"]}
        pieces, room = [], job["max_characters"]
        for piece in template.generate(variables):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                return {"error": f"its output is longer than {job['max_characters']} characters"}
        return {"text": "".join(pieces)}
    except RefusedError as error:
        return {"refused": str(error).translate(unseal)}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except Exception as error:  # whatever a template can provoke is its fault
        line = getattr(error, "lineno", None)
        place = f" in line {line}" if line else ""
        return {"error": f"{type(error).__name__}{place}: {error}".translate(unseal)}


def main() -> None:
    with suppress(ImportError):  # POSIX only
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import signal

    Environment(Sealer({}, [])).from_string("")  # has the lexer compile its patterns now
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        if hasattr(signal, "alarm"):
            signal.alarm(SECONDS)
        try:
            answer = json.dumps(render(json.loads(line)))
        except MemoryError:
            answer = json.dumps({"error": "it needs too much memory"})
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
