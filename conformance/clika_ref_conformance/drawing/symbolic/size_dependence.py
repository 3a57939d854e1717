"""Repeated draws of a call with other sizes, to find out how its shapes and numbers depend on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

import sympy
import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import (
    Call,
    Choice,
    IntegerRange,
    TensorDescription,
    TensorSample,
    random_draw,
)
from clika_ref.core.symbols import evaluate, make_symbol
from clika_ref.torch_internals.operators import get_schema
from clika_ref_conformance.drawing.sampling import SampleError, draw_call
from clika_ref_conformance.eager_calls import call_eagerly

SIZE_ARGUMENT = re.compile(r"\bSymInt(?:\[\d*\])?\??\s+(\w+)")
"""Matches the arguments of an ATen schema that may be size expressions."""

LAYER_SIZE_ARGUMENTS = frozenset(
    {"stride", "dilation", "groups", "padding", "output_padding", "padding_idx", "ignore_index", "storage_offset"}
)
"""Size arguments by schema only: they configure a layer, and models do not compute them from sizes."""


class SizeDecision(NamedTuple):
    """A numeric decision: the ``at``-th of a draw, which is an integer, or dim ``dim`` of the tensor drawn there."""

    at: int
    dim: int | None

    @property
    def symbol(self) -> sympy.Symbol:
        """The symbol of the size decided here."""
        return make_symbol(f"s{self.at}" if self.dim is None else f"s{self.at}_{self.dim}")


Sizes = Mapping[SizeDecision, int]


@dataclass
class ResizedDraw:
    """Driver of one draw: repeats the known decisions, with other sizes where given; the rest is random.

    ``decided`` has each description and its value, in order.
    """

    known: Sequence[tuple[Any, Any]]
    sizes: Sizes
    random: Random
    decided: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def __call__(self, description: Any, /) -> Any:
        """Decide one description."""
        at = len(self.decided)
        before = self.known[at] if at < len(self.known) else None
        if before is not None and _is_compatible(before[0], description):
            value = _repeat_decision(description, *before)
        else:
            value = random_draw(self.random)(_restrict_to_float32(description))
        match description:
            case TensorDescription(shape=None):
                sizes = tuple(self.sizes.get(SizeDecision(at, d), size) for d, size in enumerate(value.shape))
                value = replace(value, shape=sizes)
            case IntegerRange() | Choice():
                value = self.sizes.get(SizeDecision(at, None), value)
            case _:
                pass
        self.decided.append((description, value))
        return value

    def ranges(self) -> dict[SizeDecision, tuple[int, int]]:
        """Return every decided number that may be a size, with its range."""
        found: dict[SizeDecision, tuple[int, int]] = {}
        for at, (description, value) in enumerate(self.decided):
            match description:
                case IntegerRange(low, high) if low < high:
                    found[SizeDecision(at, None)] = (low, high)
                case Choice(options) if all(map(_is_integer, options)) and min(options) < max(options):
                    found[SizeDecision(at, None)] = (min(options), max(options))
                case TensorDescription(shape=None, size=(low, high)) if low < high:
                    found |= {SizeDecision(at, dim): (low, high) for dim in range(value.rank)}
                case _:
                    pass
        return found


def _restrict_to_float32(description: Any) -> Any:
    """Restrict a description to float32 if possible; other dtypes are tested elsewhere."""
    match description:
        case TensorDescription(dtypes=dtypes) if torch.float32 in dtypes:
            return replace(description, dtypes=(torch.float32,))
        case Choice(options) if torch.float32 in options and all(_is_floating(o) for o in options):
            return Choice((torch.float32,))
        case _:
            return description


def _is_floating(option: Any) -> bool:
    return isinstance(option, torch.dtype) and option.is_floating_point


def _is_compatible(before: Any, description: Any) -> bool:
    match before, description:
        case TensorDescription(), TensorDescription():
            return (before.shape is None) == (description.shape is None)
        case _:
            return type(before) is type(description)


def _repeat_decision(description: Any, before: Any, value: Any) -> Any:
    """Repeat a decision, clamped to the description's range, which may depend on a size."""
    match description:
        case Choice(options):
            position = next(i for i, option in enumerate(before.options) if option is value)
            return options[min(position, len(options) - 1)]
        case TensorDescription():
            shape = value.shape if description.shape is None else description.shape
            return description.make_sample(value.dtype, shape)
        case _:
            return min(max(value, description.low), description.high)


@dataclass(frozen=True)
class ReplayableCall:
    """A drawn call, the decisions that produced it, and the ranges of those that may be sizes."""

    op: Operator
    seed: str
    call: Call
    decided: Sequence[tuple[Any, Any]]
    ranges: Mapping[SizeDecision, tuple[int, int]]

    def redraw_with_sizes(self, sizes: Sizes) -> ReplayableCall | None:
        """Return the draw repeated with other sizes, or None if the samples fail or draw a different call."""
        try:
            found = draw_replayable_call(self.op, self.seed, self.decided, sizes)
        except SampleError:  # the samples need not support these sizes
            return None
        is_alike = len(found.decided) == len(self.decided) and get_size_independent_parts(
            found.call
        ) == get_size_independent_parts(self.call)
        return found if is_alike else None

    def call_eagerly(self, operands: Sequence[Any]) -> list[torch.Tensor]:
        """Return eager's results for operands with elements."""
        return call_eagerly(self.op, operands, self.call.attrs)

    def size(self, decision: SizeDecision) -> int:
        """Return the number of a decision."""
        value = self.decided[decision.at][1]
        return value if decision.dim is None else value.shape[decision.dim]


def draw_replayable_call(
    op: Operator, seed: str, known: Sequence[tuple[Any, Any]] = (), sizes: Sizes | None = None
) -> ReplayableCall:
    """Draw a call of an operator with samples; equal arguments draw equal calls.

    Raises:
        SampleError: the sampler raises.
    """
    draw = ResizedDraw(known, sizes or {}, Random(f"{op.name}-{seed}"))  # noqa: S311 - draws tests, not keys
    return ReplayableCall(op, seed, draw_call(op, draw), draw.decided, draw.ranges())


def flatten_call(call: Call) -> Iterable[Any]:
    """Yield the parts of a call in a fixed order; a tensor gives its dtype and its dims."""
    for operand in call.operands:
        if isinstance(operand, TensorSample | torch.Tensor):
            yield operand.dtype
            yield from operand.shape
        else:
            yield operand
    for name in sorted(call.attrs):
        yield from _flatten(call.attrs[name])


def _flatten(item: Any) -> Iterable[Any]:
    if isinstance(item, tuple):
        yield len(item)
        for part in item:
            yield from _flatten(part)
    else:
        yield item


def get_size_independent_parts(call: Call) -> list[Any]:
    """Return the parts that must not change with a size: all but integers, with the ranks and tuple lengths."""
    ranks = [len(o.shape) if isinstance(o, TensorSample | torch.Tensor) else -1 for o in call.operands]
    parts = [int if _is_integer(leaf) else repr(leaf) for leaf in flatten_call(call)]
    lengths = [len(v) if isinstance(v, tuple) else -1 for _, v in sorted(call.attrs.items())]
    return [ranks, parts, lengths]


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def infer_size_expressions(base: ReplayableCall) -> dict[int, sympy.Basic]:
    """Return the integers of a call as expressions of its sizes, by their index among `flatten_call`.

    Each number that may be a size is varied on its own. An integer that depends on one size is assumed to be linear,
    one that depends on several their sum or product. `is_explained` checks this.
    """
    here, counts = list(flatten_call(base.call)), find_size_numbers(base)
    slopes: dict[int, dict[SizeDecision, tuple[int, int]]] = {}
    for decision, (low, high) in base.ranges.items():
        value = base.size(decision)
        other = high if value != high else max(low, high - 1)
        twin = base.redraw_with_sizes({decision: other})
        if twin is None:
            continue
        pairs = enumerate(zip(here, flatten_call(twin.call), strict=True))
        moved = {position: b - a for position, (a, b) in pairs if a != b}
        if _get_operand_shapes(twin.call) == _get_operand_shapes(base.call) and not moved.keys() <= counts:
            continue  # the number is not a size
        for position, step in moved.items():
            slopes.setdefault(position, {})[decision] = (other - value, step)
    return {position: _fit_expression(here[position], found, base) for position, found in slopes.items()}


def find_size_numbers(drawing: ReplayableCall) -> set[int]:
    """Return the indices among `flatten_call` of numbers that may be sizes without being a dim of an operand.

    These are the attributes that ATen's schema declares as sizes, or all numbers of a call without tensor operands.
    """
    call = drawing.call
    if not _get_operand_shapes(call):
        return set(range(len(list(flatten_call(call)))))
    found: set[int] = set()
    start = len(list(flatten_call(Call(call.operands, {}))))
    for name in sorted(call.attrs):
        end = start + len(list(_flatten(call.attrs[name])))
        found.update(range(start, end) if name in _find_size_attributes(drawing.op) else ())
        start = end
    return found


@lru_cache(maxsize=1024)
def _find_size_attributes(op: Operator) -> frozenset[str]:
    overloads = [o for o in op.converters if not isinstance(o, str)]
    schemas = [str(get_schema(o)) for o in overloads]
    names = {name for schema in schemas for name in SIZE_ARGUMENT.findall(schema)}
    return frozenset(names & op.attributes.keys()) - LAYER_SIZE_ARGUMENTS


def _get_operand_shapes(call: Call) -> list[Any]:
    return [tuple(o.shape) for o in call.operands if isinstance(o, TensorSample | torch.Tensor)]


def _fit_expression(here: int, slopes: Mapping[SizeDecision, tuple[int, int]], base: ReplayableCall) -> sympy.Basic:
    """Return the linear expression, sum or product of sizes with the value ``here``."""
    steps = {decision: sympy.Rational(b, a) for decision, (a, b) in slopes.items()}
    product = sympy.Mul(*(base.size(decision) for decision in slopes))
    if len(slopes) > 1 and product and all(s * base.size(p) == here for p, s in steps.items()):
        return sympy.Rational(here, product) * sympy.Mul(*(decision.symbol for decision in slopes))
    offset = here - sum(s * base.size(p) for p, s in steps.items())
    return sympy.Add(offset, *(s * decision.symbol for decision, s in steps.items()))


def is_explained(expressions: Mapping[int, sympy.Basic], base: ReplayableCall, drawing: ReplayableCall) -> bool:
    """Return whether the expressions give every integer of a call drawn with other sizes."""
    values = {decision.symbol.name: drawing.size(decision) for decision in base.ranges}
    here = list(flatten_call(base.call))
    return all(
        leaf == (evaluate(expressions[i], values) if i in expressions else here[i])
        for i, leaf in enumerate(flatten_call(drawing.call))
        if _is_integer(leaf)
    )
