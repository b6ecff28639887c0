"""Which tokens go to which experts: chosen, then grouped so that an expert's weights are read once.

A value of type `experts[T,J]`, n = T * J words of i32 each:

    | chosen[n] | entries[n] (token, slot) | active[n] | starts[n + 1] | n_active |

`chosen` has each token's experts in ascending order. `active` lists the experts that any token has
chosen, ascending; the entries of the a-th are those from starts[a] to starts[a + 1], tokens
ascending.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ignis.kernels import math
from ignis.kernels.lang import Builder, Value, f32, i32, i64, kernel, ptr
from ignis.kernels.vectors import LANES, Part, parts

_WORD = 4
_ENTRY_NBYTES = 2 * _WORD
_LEAST = -(2**31)


@dataclass(frozen=True, slots=True)
class Group:
    """The tokens of one expert."""

    routing: Routing
    expert: Value  # index, i64
    first: Value  # number of its first entry, i64
    count: Value  # of entries: at least one, at most one a token

    def entry(self, i: Value) -> tuple[Value, Value]:
        """Token and slot of the group's i-th entry, i64."""
        place = self.routing.entries.at((self.first + i) * _ENTRY_NBYTES)
        return place.load(i32).to(i64), place.at(_WORD).load(i32).to(i64)


class Routing:
    """The tables of `n_tokens` tokens that have chosen `n_used` experts each."""

    def __init__(self, k: Builder, base: Value, n_tokens: Value, n_used: Value) -> None:
        self.k, n = k, n_tokens * n_used
        self.n_tokens, self.n_used, self.n_entries = n_tokens, n_used, n
        self.chosen = base
        self.entries = base.at(n * _WORD)
        self.active = base.at(n * (3 * _WORD))
        self.starts = base.at(n * (4 * _WORD))
        self._n_active = base.at((n * 5 + 1) * _WORD)

    def groups(self) -> Iterator[Group]:
        """Each expert that is chosen at all, in ascending order."""
        for a in self.k.range(self._n_active.load(i32).to(i64)):
            start = self.starts.at(a * _WORD)
            first, last = (start.at(at).load(i32).to(i64) for at in (0, _WORD))
            expert = self.active.at(a * _WORD).load(i32).to(i64)
            yield Group(self, expert, first, last - first)

    def add_group(self, a: Value, expert: Value, start: Value) -> None:
        """Say that the a-th group is that of `expert`, with entries from `start` on."""
        self.active.at(a * _WORD).store(expert.to(i32))
        self.starts.at(a * _WORD).store(start.to(i32))

    def add_entry(self, i: Value, token: Value, slot: Value) -> None:
        place = self.entries.at(i * _ENTRY_NBYTES)
        place.store(token.to(i32))
        place.at(_WORD).store(slot.to(i32))

    def end(self, n_active: Value) -> None:
        """Close the last of `n_active` groups."""
        self.starts.at(n_active * _WORD).store(self.n_entries.to(i32))
        self._n_active.store(n_active.to(i32))


def route_scratch_nbytes(n_experts: int) -> int:
    """Scratch of `route`: the experts' keys and powers."""
    return 2 * -(-n_experts // LANES) * LANES * f32.nbytes


@kernel(logits=ptr, experts=ptr, gates=ptr, n_experts=i64, n_used=i64, n_tokens=i64, scale=f32)
def route(
    k: Builder, *, logits: Value, experts: Value, gates: Value, n_experts: Value, n_used: Value,
    n_tokens: Value, scale: Value, begin: Value, end: Value, scratch: Value, among: str,
) -> None:  # fmt: skip
    """Choose experts by logits f32[T, E], and compute their gates f32[T, J]. A unit is a token.

    p = exp(logit - maximum); a gate is p / sum, then times `scale`. The sum is that of all experts
    (16 lanes by index, then the tree) or of the chosen ones (ascending).

    Results are written once and not read: for one token every thread writes them, perhaps to one
    place.
    """
    routing = Routing(k, experts, n_tokens, n_used)
    powers = scratch.at((n_experts + (LANES - 1)) // LANES * (LANES * f32.nbytes))
    for token in k.range(begin, end):
        total = _softmax(k, logits.at(token * n_experts * f32.nbytes), n_experts, scratch, powers)
        row = token * n_used * _WORD
        chosen = routing.chosen.at(row)
        found, chosen_total = k.var(k.const(i64, 0)), k.var(k.const(f32, 0.0))
        for expert in k.range(n_experts):
            for _ in k.when(_rank(k, scratch, expert, n_experts) < n_used):
                power = powers.at(expert * f32.nbytes).load(f32)
                chosen.at(found.get() * _WORD).store(expert.to(i32))
                powers.at(found.get() * f32.nbytes).store(power)  # found <= expert
                chosen_total.set(chosen_total.get() + power)
                found.set(found.get() + 1)
        divisor = total if among == "all" else chosen_total.get()
        for slot in k.range(n_used):
            power = powers.at(slot * f32.nbytes).load(f32)
            gates.at(row + slot * f32.nbytes).store(power / divisor * scale)


@kernel(experts=ptr, n_experts=i64, n_used=i64, n_tokens=i64)
def group_experts(
    k: Builder, *, experts: Value, n_experts: Value, n_used: Value, n_tokens: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """Fill in the tables behind `chosen`, by counting. There is one unit; scratch is i64[E]."""
    routing = Routing(k, experts, n_tokens, n_used)
    for expert in k.range(n_experts):
        scratch.at(expert * i64.nbytes).store(k.const(i64, 0))
    for i in k.range(routing.n_entries):
        cell = scratch.at(_chosen(routing, i) * i64.nbytes)
        cell.store(cell.load(i64) + 1)
    n_active, start = k.var(k.const(i64, 0)), k.var(k.const(i64, 0))
    for expert in k.range(n_experts):
        cell = scratch.at(expert * i64.nbytes)
        n_entries = cell.load(i64)
        cell.store(start.get())  # from here on, where the expert's next entry goes
        for _ in k.when(n_entries > 0):
            routing.add_group(n_active.get(), expert, start.get())
            n_active.set(n_active.get() + 1)
            start.set(start.get() + n_entries)
    routing.end(n_active.get())
    for token in k.range(n_tokens):
        for slot in k.range(n_used):
            cell = scratch.at(_chosen(routing, token * n_used + slot) * i64.nbytes)
            place = cell.load(i64)
            routing.add_entry(place, token, slot)
            cell.store(place + 1)


@kernel(branch=ptr, x=ptr, weight=ptr, y=ptr, n=i64, n_values=i64)
def row_gate(
    k: Builder, *, branch: Value, x: Value, weight: Value, y: Value, n: Value, n_values: Value,
    begin: Value, end: Value, scratch: Value,
) -> None:  # fmt: skip
    """y = branch * sigmoid(x . weight); branch f32[T, n], x f32[T, n_values]. A unit is a token.

    The product is summed as a matmul of floats is (NUMERICS 3). y may be branch.
    """
    for token in k.range(begin, end):
        sums = k.var(k.const(f32.x(LANES), 0.0))
        row = x.at(token * n_values * f32.nbytes)
        for part in parts(k, n_values):
            sums.set(k.fma(part.load(row), part.load(weight), sums.get()))
        gate = math.sigmoid(k, k.tree_sum(sums.get())).splat(LANES)
        source, target = (p.at(token * n * f32.nbytes) for p in (branch, y))
        for part in parts(k, n):
            part.store(target, part.load(source) * gate)


def _chosen(routing: Routing, i: Value) -> Value:
    return routing.chosen.at(i * _WORD).load(i32).to(i64)


def _softmax(k: Builder, logits: Value, n_experts: Value, keys: Value, powers: Value) -> Value:
    """exp(logit - maximum) of every expert to `powers`; the sum. The order of logits to `keys`."""
    largest = k.var(k.const(f32.x(LANES), float("-inf")))
    for part in parts(k, n_experts):
        x = part.load(logits)
        largest.set(k.maximum(largest.get(), k.select(_inside(k, part), x, float("-inf"))))
        key = k.select(_inside(k, part), _key(x), _LEAST)
        keys.at(part.first * f32.nbytes).store(key)
    maximum = k.tree_max(largest.get()).splat(LANES)
    sums = k.var(k.const(f32.x(LANES), 0.0))
    for part in parts(k, n_experts):
        power = k.select(_inside(k, part), math.exp(k, part.load(logits) - maximum), 0.0)
        powers.at(part.first * f32.nbytes).store(power)
        sums.set(sums.get() + power)
    return k.tree_sum(sums.get())


def _inside(k: Builder, part: Part) -> Value:
    """Which lanes of a part lie inside its row."""
    lanes = k.const(i32.x(LANES), list(range(LANES)))
    count = k.const(i64, LANES) if part.count is None else part.count
    return lanes < count.to(i32).splat(LANES)


def _key(x: Value) -> Value:
    """Integers in the order of the floats: a total one, NaNs included, for both zeros the same."""
    pattern = (x + 0.0).bits(i32.x(x.type.lanes))
    return pattern ^ (pattern.sar(31) & 0x7FFFFFFF)


def _rank(k: Builder, keys: Value, expert: Value, n_experts: Value) -> Value:
    """How many experts come before this one: those of larger keys, and equal ones before it."""
    lanes = k.const(i32.x(LANES), list(range(LANES)))
    own = keys.at(expert * f32.nbytes).load(i32).splat(LANES)
    number = expert.to(i32)
    before = k.var(k.const(i32.x(LANES), 0))
    for first in k.range(0, n_experts, LANES):
        others = keys.at(first * f32.nbytes).load(i32.x(LANES))
        earlier = lanes < (number - first.to(i32)).splat(LANES)
        ahead = (others > own) | ((others == own) & earlier)
        before.set(before.get() + k.select(ahead, k.const(i32.x(LANES), 1), 0))
    return k.tree_sum(before.get()).to(i64)
