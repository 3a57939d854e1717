"""First driver: a few calls that cover all pairwise combinations of a sampler's options."""

from __future__ import annotations

import inspect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from clika_ref.core.operators import Operator
from clika_ref.core.samples import Call, Choice, FloatRange, IntegerRange, TensorDescription, TensorSample
from clika_ref_conformance.drawing.calls.drawn_call import DrawnCall
from clika_ref_conformance.drawing.calls.dtypes import DtypeSelector, has_dtype, has_dtype_choices
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedDtypeError, draw_call

MAX_OPTIONS_PER_CHOICE = 8
"""Maximum number of options of one choice; a longer list is thinned out, except for its first and last option."""

EQUAL_WEIGHTS = (1, 1, 1)
"""Weights of three equally frequent options; ranks have other weights, as low ranks show few faults."""

SQUARE_SHARE = 1 / 4
"""Share of tensors with two equal last dims; some faults, such as a transposed mask, need this."""

EMPTY_DIM_ROWS = 10
"""Number of calls drawn with a dim of size 0; the simplest may have rank 0 or no free shape."""

ZERO_NUMBER_ROWS = 3
"""Number of calls drawn with each number as 0; most numbers occur on every path, or are not lengths."""

MAX_IDLE_ROWS = 4
"""Consecutive rows without a new pair that end the cover; a sampler's paths are only found by running it."""


@dataclass
class PairCoverage:
    """Combinations of options that have occurred; a decision is identified by its position in the sampler's code."""

    random: random.Random
    pairs: set[tuple[Any, Any]] = field(default_factory=set[tuple[Any, Any]])
    triples: set[tuple[Any, Any, Any]] = field(default_factory=set[tuple[Any, Any, Any]])
    used: Counter[Any] = field(default_factory=Counter[Any])

    def choose_option(self, row: Sequence[Any], key: Any, weights: Sequence[int]) -> int:
        """Return an unused option, or the option with the most new pairs in a row.

        The new pairs of an option of weight 2 count twice. Ties go to the option with the most new triples, and then to
        the least used one relative to its weight.
        """

        def rank(i: int) -> tuple[Any, ...]:
            used = self.used[key, i]
            fresh = sum((other, (key, i)) not in self.pairs for other in row)
            met = sum((*pair, (key, i)) not in self.triples for pair in itertools.combinations(row, 2))
            return min(used, 1), -fresh * weights[i], -met * weights[i], used / weights[i], i

        return min(range(len(weights)), key=rank)

    def add(self, row: Sequence[Any]) -> bool:
        """Record a row and return whether it has anything new."""
        before = len(self.pairs), len(self.used)
        self.pairs.update(itertools.combinations(row, 2))
        self.triples.update(itertools.combinations(row, 3))
        self.used.update(row)
        return (len(self.pairs), len(self.used)) != before


class CoveringDraw:
    """The ``draw`` argument of a sampler for one row, which favours options missing from the cover."""

    def __init__(
        self, cover: PairCoverage, axis: DtypeSelector, *, empty: int | None = None, zero: int | None = None
    ) -> None:
        self.cover = cover
        self.axis = axis
        self.empty = empty
        """Index, from the last dim, of the dim set to 0 in the first tensor of free shape."""
        self.zero = zero
        """Index of the positive number set to 0; given shapes are computed from such numbers."""
        self.numbers = 0
        """Number of positive numbers drawn so far."""
        self.row: list[Any] = []
        self.seen: Counter[Any] = Counter()

    def __call__(self, description: Any, /) -> Any:
        """Decide a description."""
        caller = inspect.currentframe().f_back  # pyright: ignore[reportOptionalMemberAccess] - CPython has frames
        assert caller is not None
        call_site = (caller.f_code, caller.f_lasti)
        self.seen[call_site] += 1
        key = (*call_site, self.seen[call_site])
        description = self.axis.narrow(description)
        if _is_positive(description):
            self.numbers += 1
            if self.zero == self.numbers - 1:
                return 0
        match description:
            case Choice(options):
                shown = _count_distinct_options(options)
                return shown[self._pick(key, [weight for _, weight in shown])][0]
            case IntegerRange(low, high):
                return self._draw_integer(key, low, high)
            case FloatRange(low, high):
                options = (low + (high - low) * 0.5, low, high) if high > low else (low,)
                return options[self._pick(key, EQUAL_WEIGHTS[: len(options)])]
            case TensorDescription():
                return self._draw_tensor(key, description)
            case _:
                raise TypeError(f"cannot draw {description!r}: it is not a description made with `s`")

    def _draw_tensor(self, key: Any, d: TensorDescription) -> TensorSample:
        dtypes = tuple(dict.fromkeys(d.dtypes))
        dtype = dtypes[self._pick((*key, "dtype"), [1] * len(dtypes))]
        shape = d.shape
        if shape is None:
            rank = self._draw_integer((*key, "rank"), *d.rank, weights=(2, 1, 2))
            sizes = [self.cover.random.randint(*d.size) for _ in range(rank)]
            low = d.size[0]
            if rank > 1 and self.cover.random.random() < SQUARE_SHARE:
                sizes[-2] = sizes[-1]
            if rank and low <= 1 and self._pick((*key, "one"), (2, 1)):
                sizes[self.cover.random.randrange(rank)] = max(low, 1)
            if rank and self.empty is not None:
                sizes[-1 - self.empty % rank] = 0
                self.empty = None
            shape = tuple(sizes)
        return d.make_sample(dtype, shape)

    def _draw_integer(self, key: Any, low: int, high: int, weights: Sequence[int] = EQUAL_WEIGHTS) -> int:
        """Decide an integer of ``[low, high]``: a middle one, the lowest or the highest, with these weights.

        Raises:
            ValueError: the range is empty, which a dim of size 0 may cause.
        """
        if low > high:
            raise ValueError(f"cannot draw an integer: [{low}, {high}] is empty")
        middle = self.cover.random.randint(low + 1, high - 1) if high - low > 1 else None
        options = [(n, weight) for n, weight in zip((middle, low, high), weights, strict=True) if n is not None]
        return options[self._pick(key, [weight for _, weight in options[: None if low < high else 1]])][0]

    def _pick(self, key: Any, weights: Sequence[int]) -> int:
        if len(weights) == 1:
            return 0
        index = self.cover.choose_option(self.row, key, weights)
        self.row.append((key, index))
        return index


def _is_positive(description: Any) -> bool:
    """Return whether a description only allows positive integers."""
    match description:
        case IntegerRange(low, _):
            return low > 0
        case Choice(options):
            return all(type(option) is int and option > 0 for option in options)
        case _:
            return False


def _count_distinct_options(options: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the distinct options, at most `MAX_OPTIONS_PER_CHOICE`, and the number of times that each is listed."""
    kinds = [(type(o), repr(o)) for o in options]
    counts = Counter(kinds)
    different = list({kind: (o, counts[kind]) for kind, o in zip(kinds, options, strict=True)}.values())
    if len(different) <= MAX_OPTIONS_PER_CHOICE:
        return different
    return [different[i * (len(different) - 1) // (MAX_OPTIONS_PER_CHOICE - 1)] for i in range(MAX_OPTIONS_PER_CHOICE)]


def draw_covering_calls(op: Operator, dtype: torch.dtype, seed: int, limit: int = 16) -> list[DrawnCall]:
    """Return at most ``limit`` calls that use ``dtype``, the simplest first.

    Raises:
        UnjudgedDtypeError: all calls drawn have dtypes that are not judged.
        SampleError: the sampler raises.
    """
    cover, rows, idle = _make_coverage(op, dtype, seed), list[DrawnCall](), 0
    problem: UnjudgedDtypeError | None = None
    while len(rows) < limit and idle < MAX_IDLE_ROWS:
        axis = DtypeSelector(dtype, choices=bool(has_dtype_choices(op, dtype)))
        draw = CoveringDraw(cover, axis)
        try:
            call = draw_call(op, draw)
        except UnjudgedDtypeError as error:
            call, problem = None, error
        new = cover.add(draw.row)
        idle = 0 if new else idle + 1
        if call and (new or not rows) and (has_dtype(call, dtype) or has_dtype_choices(op, dtype) is None):
            rows.append(DrawnCall(call, has_unlisted_dtype=axis.has_unlisted_dtype))
        if not draw.row:
            break
    if problem is not None and not rows:
        raise problem
    return rows


def draw_empty_calls(
    op: Operator, dtype: torch.dtype, seed: int, results: Callable[[Call], Sequence[torch.Tensor] | None]
) -> list[DrawnCall]:
    """Return calls with a dim of size 0, as far as the sampler and eager accept them.

    Samples describe sizes from 1 up, and not every call makes sense without elements. Rejected calls, where ``results``
    is None, are left out. In a free shape, the last dim, the one before it or the first is emptied; one call is kept
    for each distinct effect on such tensors. In a given shape, each number that it is computed from is set to 0; one
    call is kept for each set of emptied dims and each set of attributes.
    """
    found: dict[Any, DrawnCall] = {}
    numbers = 0

    def keep_call(draw: CoveringDraw, call: Call, place: object) -> None:
        made = results(call) if _locate_empty_dims(call) and has_dtype(call, dtype) else None
        if made is not None:
            found.setdefault(
                (place, _classify_empty_dim_effect(call, made), _tensor_operands(call)),
                DrawnCall(call, has_unlisted_dtype=draw.axis.has_unlisted_dtype),
            )

    free = _make_coverage(op, dtype, seed, "free")
    for size in (0, 1, 3):
        for draw, call in _draw_rows(op, dtype, free, EMPTY_DIM_ROWS, empty=size):
            numbers = max(numbers, draw.numbers)
            if call is not None:
                keep_call(draw, call, size)
    for number in range(numbers):
        for draw, call in _draw_rows(op, dtype, _make_coverage(op, dtype, seed, number), ZERO_NUMBER_ROWS, zero=number):
            if call is not None:
                keep_call(draw, call, (_locate_empty_dims(call), repr(call.attrs)))
    return list({repr(row.call): row for row in found.values()}.values())


def _make_coverage(op: Operator, dtype: torch.dtype, *names: object) -> PairCoverage:
    return PairCoverage(random.Random("/".join(map(str, (op.name, dtype, *names)))))  # noqa: S311 - no secret


def _draw_rows(
    op: Operator, dtype: torch.dtype, cover: PairCoverage, count: int, **which: int
) -> Iterator[tuple[CoveringDraw, Call | None]]:
    """Yield drawn calls, or None where the samples cannot make one, such as when only length 0 was offered."""
    for _ in range(count):
        draw = CoveringDraw(cover, DtypeSelector(dtype, choices=bool(has_dtype_choices(op, dtype))), **which)
        try:
            call = draw_call(op, draw)
        except SampleError:
            call = None
        cover.add(draw.row)
        yield draw, call


def _locate_empty_dims(call: Call) -> tuple[tuple[int, int], ...]:
    """Return the operand index and the dim of each dim of size 0."""
    samples = [(i, o) for i, o in enumerate(call.operands) if isinstance(o, TensorSample)]
    return tuple((i, dim) for i, o in samples for dim in _find_empty_dims(o.shape))


def _tensor_operands(call: Call) -> tuple[Any, ...]:
    """Return the dtype of each tensor operand, and whether it is a vector."""
    return tuple((o.dtype, o.rank == 1) if isinstance(o, TensorSample) else None for o in call.operands)


def _classify_empty_dim_effect(call: Call, results: Sequence[torch.Tensor]) -> str:
    """Return the effect of a call on its dims of size 0; a mean gives NaN where a sum gives 0."""
    positions = [_find_empty_dims(o.shape) for o in call.operands if isinstance(o, TensorSample) and 0 in o.shape]
    if all(0 not in result.shape for result in results):
        return "gone, NaN" if any(result.isnan().any() for result in results) else "gone"
    return "kept" if any(_find_empty_dims(result.shape) in positions for result in results) else "elsewhere"


def _find_empty_dims(shape: Sequence[int]) -> list[int]:
    return [i for i, size in enumerate(shape) if size == 0]
