"""The first driver: few calls in which any two decisions of a sampler meet in every combination of their options."""

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
from clika_ref.core.samples import Call, Choice, Floats, Integers, TensorDescription, TensorSample
from clika_ref_conformance.drawing.calls.drawn import DrawnCall
from clika_ref_conformance.drawing.calls.dtypes import DtypeAxis, choices_count, shows
from clika_ref_conformance.drawing.sampling import SampleError, UnjudgedError, sampled

MOST_OPTIONS = 8
"""Options of one choice that are told apart; of a longer list the first and some others are taken."""

EQUAL = (1, 1, 1)
"""Weights of three options that are wanted equally often; where a tensor has no or short sides, little else shows."""

SQUARE = 1 / 4
"""Of tensors whose last two sides are the same: some faults, such as a transposed mask, fit nothing else."""

EMPTY_ROWS = 10
"""Calls drawn with a side of length 0: the plainest may have rank 0, or lie on a path without a free shape."""

ZERO_ROWS = 3
"""Calls drawn with each number of the samples as 0: most of these numbers are on every path, or no lengths at all."""

IDLE_ROWS = 4
"""Rows without a new pair after which the cover is taken as whole: paths of a sampler are found by walking them."""


@dataclass
class Cover:
    """Which options of which decisions have met. A decision is known by its place in the sampler's code."""

    random: random.Random
    pairs: set[tuple[Any, Any]] = field(default_factory=set[tuple[Any, Any]])
    triples: set[tuple[Any, Any, Any]] = field(default_factory=set[tuple[Any, Any, Any]])
    used: Counter[Any] = field(default_factory=Counter[Any])

    def best(self, row: Sequence[Any], key: Any, weights: Sequence[int]) -> int:
        """Return an option that was never used, or the one that meets the most options of a row for the first time.

        What an option of weight 2 meets counts twice. Of equals it is the one that meets the most pairs of options for
        the first time, and then the one used least for its weight.
        """

        def rank(i: int) -> tuple[Any, ...]:
            used = self.used[key, i]
            fresh = sum((other, (key, i)) not in self.pairs for other in row)
            met = sum((*pair, (key, i)) not in self.triples for pair in itertools.combinations(row, 2))
            return min(used, 1), -fresh * weights[i], -met * weights[i], used / weights[i], i

        return min(range(len(weights)), key=rank)

    def add(self, row: Sequence[Any]) -> bool:
        """Note a row; return whether anything in it is new."""
        before = len(self.pairs), len(self.used)
        self.pairs.update(itertools.combinations(row, 2))
        self.triples.update(itertools.combinations(row, 3))
        self.used.update(row)
        return (len(self.pairs), len(self.used)) != before


class CoveringDraw:
    """What a sampler is given for one row: decides each description by what the cover still lacks."""

    def __init__(self, cover: Cover, axis: DtypeAxis, *, empty: int | None = None, zero: int | None = None) -> None:
        self.cover = cover
        self.axis = axis
        self.empty = empty
        """The side that becomes 0 long in the first tensor whose shape is free, counted from its last."""
        self.zero = zero
        """Which of the positive numbers that the samples ask for becomes 0: sides of given shapes are made of them."""
        self.numbers = 0
        """How many of them there were."""
        self.row: list[Any] = []
        self.seen: Counter[Any] = Counter()

    def __call__(self, description: Any, /) -> Any:
        """Decide a description."""
        caller = inspect.currentframe().f_back  # pyright: ignore[reportOptionalMemberAccess] - CPython has frames
        assert caller is not None
        place = (caller.f_code, caller.f_lasti)
        self.seen[place] += 1
        key = (*place, self.seen[place])
        description = self.axis.narrow(description)
        if _is_positive(description):
            self.numbers += 1
            if self.zero == self.numbers - 1:
                return 0
        match description:
            case Choice(options):
                shown = _few(options)
                return shown[self._pick(key, [weight for _, weight in shown])][0]
            case Integers(low, high):
                return self._within(key, low, high)
            case Floats(low, high):
                options = (low + (high - low) * 0.5, low, high) if high > low else (low,)
                return options[self._pick(key, EQUAL[: len(options)])]
            case TensorDescription():
                return self._tensor(key, description)
            case _:
                msg = f"draw() takes a description made by `s`, not {description!r}"
                raise TypeError(msg)

    def _tensor(self, key: Any, d: TensorDescription) -> TensorSample:
        dtypes = tuple(dict.fromkeys(d.dtypes))
        dtype = dtypes[self._pick((*key, "dtype"), [1] * len(dtypes))]
        shape = d.shape
        if shape is None:
            rank = self._within((*key, "rank"), *d.rank, weights=(2, 1, 2))
            sides = [self.cover.random.randint(*d.side) for _ in range(rank)]
            low = d.side[0]
            if rank > 1 and self.cover.random.random() < SQUARE:
                sides[-2] = sides[-1]
            if rank and low <= 1 and self._pick((*key, "one"), (2, 1)):
                sides[self.cover.random.randrange(rank)] = max(low, 1)
            if rank and self.empty is not None:
                sides[-1 - self.empty % rank] = 0
                self.empty = None
            shape = tuple(sides)
        return d.decided(dtype, shape)

    def _within(self, key: Any, low: int, high: int, weights: Sequence[int] = EQUAL) -> int:
        """Decide an integer of ``[low, high]``: one from the middle, the lowest, or the highest, of these weights.

        Raises:
            ValueError: there is none, which a side of length 0 may bring about.
        """
        if low > high:
            msg = f"no integer lies in [{low}, {high}]"
            raise ValueError(msg)
        middle = self.cover.random.randint(low + 1, high - 1) if high - low > 1 else None
        options = [(n, weight) for n, weight in zip((middle, low, high), weights, strict=True) if n is not None]
        return options[self._pick(key, [weight for _, weight in options[: None if low < high else 1]])][0]

    def _pick(self, key: Any, weights: Sequence[int]) -> int:
        if len(weights) == 1:
            return 0
        index = self.cover.best(self.row, key, weights)
        self.row.append((key, index))
        return index


def _is_positive(description: Any) -> bool:
    """Whether a description is of a number from 1 up."""
    match description:
        case Integers(low, _):
            return low > 0
        case Choice(options):
            return all(type(option) is int and option > 0 for option in options)
        case _:
            return False


def _few(options: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return the options that differ, at most `MOST_OPTIONS` of them, with how often each is listed."""
    kinds = [(type(o), repr(o)) for o in options]
    counts = Counter(kinds)
    different = list({kind: (o, counts[kind]) for kind, o in zip(kinds, options, strict=True)}.values())
    if len(different) <= MOST_OPTIONS:
        return different
    return [different[i * (len(different) - 1) // (MOST_OPTIONS - 1)] for i in range(MOST_OPTIONS)]


def covering_calls(op: Operator, dtype: torch.dtype, seed: int, limit: int = 16) -> list[DrawnCall]:
    """Return calls that show ``dtype``, the plainest first, at most ``limit``.

    Raises:
        UnjudgedError: no call was drawn whose dtypes are judged.
        SampleError: the sampler raises.
    """
    cover, rows, idle = _cover(op, dtype, seed), list[DrawnCall](), 0
    problem: UnjudgedError | None = None
    while len(rows) < limit and idle < IDLE_ROWS:
        axis = DtypeAxis(dtype, choices=bool(choices_count(op, dtype)))
        draw = CoveringDraw(cover, axis)
        try:
            call = sampled(op, draw)
        except UnjudgedError as error:
            call, problem = None, error
        new = cover.add(draw.row)
        idle = 0 if new else idle + 1
        if call and (new or not rows) and (shows(call, dtype) or choices_count(op, dtype) is None):
            rows.append(DrawnCall(call, beyond=axis.beyond))
        if not draw.row:
            break
    if problem is not None and not rows:
        raise problem
    return rows


def empty_calls(
    op: Operator, dtype: torch.dtype, seed: int, results: Callable[[Call], Sequence[torch.Tensor] | None]
) -> list[DrawnCall]:
    """Return calls with a side of length 0, as far as the sampler and eager take them.

    Samples describe sides from 1 up, and not every call makes sense without elements: what is refused, of which
    ``results`` are None, is left out. Of shapes that are free it is the last side, one before or the first: there is
    one call for each thing that becomes of it with such tensors. Of shapes that are given it is each number they are
    made of: one call for each set of sides that it makes empty, with other attributes.
    """
    found: dict[Any, DrawnCall] = {}
    numbers = 0

    def keep(draw: CoveringDraw, call: Call, place: object) -> None:
        made = results(call) if _empty_places(call) and shows(call, dtype) else None
        if made is not None:
            found.setdefault((place, _fate(call, made), _tensors(call)), DrawnCall(call, beyond=draw.axis.beyond))

    free = _cover(op, dtype, seed, "free")
    for side in (0, 1, 3):
        for draw, call in _rows(op, dtype, free, EMPTY_ROWS, empty=side):
            numbers = max(numbers, draw.numbers)
            if call is not None:
                keep(draw, call, side)
    for number in range(numbers):
        for draw, call in _rows(op, dtype, _cover(op, dtype, seed, number), ZERO_ROWS, zero=number):
            if call is not None:
                keep(draw, call, (_empty_places(call), repr(call.attrs)))
    return list({repr(row.call): row for row in found.values()}.values())


def _cover(op: Operator, dtype: torch.dtype, *names: object) -> Cover:
    return Cover(random.Random("/".join(map(str, (op.name, dtype, *names)))))  # noqa: S311 - no secret


def _rows(
    op: Operator, dtype: torch.dtype, cover: Cover, count: int, **which: int
) -> Iterator[tuple[CoveringDraw, Call | None]]:
    """Draw calls, or None where the samples cannot make one: no length but 0 was offered."""
    for _ in range(count):
        draw = CoveringDraw(cover, DtypeAxis(dtype, choices=bool(choices_count(op, dtype))), **which)
        try:
            call = sampled(op, draw)
        except SampleError:
            call = None
        cover.add(draw.row)
        yield draw, call


def _empty_places(call: Call) -> tuple[tuple[int, int], ...]:
    """Return the operand and the dimension of each side of length 0."""
    samples = [(i, o) for i, o in enumerate(call.operands) if isinstance(o, TensorSample)]
    return tuple((i, dim) for i, o in samples for dim in _empty_sides(o.shape))


def _tensors(call: Call) -> tuple[Any, ...]:
    """Return the dtype of each operand that is a tensor, and whether it is a vector."""
    return tuple((o.dtype, o.rank == 1) if isinstance(o, TensorSample) else None for o in call.operands)


def _fate(call: Call, results: Sequence[torch.Tensor]) -> str:
    """Return what becomes of the sides of length 0 of a call: of a mean NaN, where a sum is 0."""
    places = [_empty_sides(o.shape) for o in call.operands if isinstance(o, TensorSample) and 0 in o.shape]
    if all(0 not in result.shape for result in results):
        return "gone, NaN" if any(result.isnan().any() for result in results) else "gone"
    return "kept" if any(_empty_sides(result.shape) in places for result in results) else "elsewhere"


def _empty_sides(shape: Sequence[int]) -> list[int]:
    return [i for i, side in enumerate(shape) if side == 0]
