"""Input vectors that each call is run on; without them, mutants survive at any tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from clika_ref.core.samples import TensorSample, realize
from clika_ref_conformance.cases import CaseRun

SPECIAL_VALUES = {"nan": math.nan, "inf": math.inf, "minus-inf": -math.inf, "minus-zero": -0.0}
"""Values put into one element of one operand at a time, as two of them in one tensor would mask each other."""

NEAR_NUMBERS = "around"
"""The vector of elements close to the numbers among operands and attributes."""

Fill = Callable[[TensorSample, torch.Generator], torch.Tensor]


def make_typical_run(operands: Sequence[Any], seed: int) -> CaseRun:
    """Return the run of a call on typical elements."""
    tensors = enumerate(o for o in operands if isinstance(o, TensorSample | torch.Tensor))
    elements = (o if isinstance(o, torch.Tensor) else realize(o, _generator(seed, i)) for i, o in tensors)
    return CaseRun("typical", tuple(elements))


def make_runs(
    operands: Sequence[Any],
    seed: int,
    row: int = 0,
    *,
    attributes: Iterable[Any] = (),
    every_magnitude: bool = False,
    only: int | None = None,
) -> list[CaseRun]:
    """Return the runs of a call: one on typical elements, and one for each legal vector.

    A tensor that the sampler made itself is the same in all runs. Special values come first or last in one operand.
    ``row`` selects the position, so that consecutive rows of a cover alternate and `count_special_positions` of them
    cover all positions. With ``every_magnitude``, squares and products of the elements leave the range of the dtype in
    every other row; an operator with an elementwise bound must not overflow in between. Numbers among ``attributes``
    count as numbers of the call for the vector `NEAR_NUMBERS`. ``only`` selects at most one vector.
    """
    samples = _samples(operands)
    changes = _make_vector_fills(samples, row, _fill_vast if every_magnitude and row % 2 else _fill_wide)
    vectors = [
        (n, c) for n, c in (*changes, (NEAR_NUMBERS, _make_near_number_fills(samples, operands, attributes))) if c
    ]
    if only is not None:
        chosen = only % (len(vectors) + 1)
        vectors = vectors[chosen - 1 : chosen] if chosen else []
    return _make_vector_runs(operands, seed, vectors)


def make_runs_near_numbers(operands: Sequence[Any], seed: int, attributes: Iterable[Any] = ()) -> list[CaseRun]:
    """Return the runs of a call that depends on its numbers: typical elements, and elements near the numbers."""
    around = _make_near_number_fills(_samples(operands), operands, attributes)
    return _make_vector_runs(operands, seed, [(NEAR_NUMBERS, around)] if around else [])


def _samples(operands: Sequence[Any]) -> dict[int, TensorSample]:
    """Return the tensors to fill, by their index among all tensors of a call."""
    tensors = [o for o in operands if isinstance(o, TensorSample | torch.Tensor)]
    return {i: o for i, o in enumerate(tensors) if isinstance(o, TensorSample)}


def _make_vector_runs(
    operands: Sequence[Any], seed: int, vectors: Sequence[tuple[str, Mapping[int, Fill]]]
) -> list[CaseRun]:
    samples, typical = _samples(operands), make_typical_run(operands, seed)
    runs = [typical]
    for name, changed in vectors:
        filled = {i: fill(samples[i], _generator(seed, i)) for i, fill in changed.items()}
        runs.append(CaseRun(name, tuple(filled.get(i, t) for i, t in enumerate(typical.inputs))))
    return runs


def count_special_positions(operands: Sequence[Any]) -> int:
    """Return the number of rows that put special values first and last into every float operand."""
    return 2 * sum(isinstance(o, TensorSample) and o.dtype.is_floating_point for o in operands)


def _generator(seed: int, index: int) -> torch.Generator:
    """Return the generator for an operand of a call; unchanged operands have the same elements in all runs."""
    return torch.Generator().manual_seed(seed * 97 + index)


def _make_vector_fills(
    samples: Mapping[int, TensorSample], row: int, wide: Fill
) -> Iterator[tuple[str, dict[int, Fill]]]:
    """Yield the name of each vector and its fills by operand index; the fills are empty if it is illegal."""
    floats = [i for i, s in samples.items() if s.dtype.is_floating_point and math.prod(s.shape)]
    integers = [i for i, s in samples.items() if _is_integer(s) and math.prod(s.shape)]
    masks = [i for i, s in samples.items() if s.dtype == torch.bool and math.prod(s.shape)]
    for name, value in SPECIAL_VALUES.items() if floats else ():
        at, position = floats[row // 2 % len(floats)], row.bit_count() % 2  # bit_count: attributes alternate by row
        legal = _is_legal(samples[at], value)
        yield f"{name}-{('first', 'last')[position]}:x{at}", {at: _fill_with_special(value, -position)} if legal else {}
    crossed = [i for i in floats if not samples[i].unique]
    if len(crossed) > 1:
        yield "crossed", {i: _make_combined_fill(number, row) for number, i in enumerate(crossed)}
    wide_integers = [
        i for i in integers if samples[i].domain is None and _get_dtype_limits(samples[i])[1] > ODD_NUMBERS_CENTER
    ]
    mixed = [*crossed, *wide_integers]
    if len({samples[i].dtype for i in mixed}) > 1:
        yield "equal after rounding", dict.fromkeys(mixed, _fill_odd_numbers if wide_integers else _fill_tenths)
    for name, fill in {"wide": wide, **_MAGNITUDE_FILLS}.items() if floats else ():
        yield name, {i: fill for i in floats if not (samples[i].unique and name == "ties")}
    if floats:
        shift = (30.0, -50.0)[row % 2]
        yield f"offset{shift:+g}", {i: _fill_far_from_zero(shift) for i in floats if _is_shift_legal(samples[i], shift)}
    free = [i for i in integers if samples[i].domain is None]
    for name, fill in _INTEGER_FILLS.items() if free else ():
        at = free[row % len(free)]
        yield f"{name}:x{at}", {at: fill} if _is_useful(samples[at], name) else {}
    exact = [i for i in free if samples[i].dtype == torch.int64]
    if exact:
        yield "nearly equal", dict.fromkeys(exact, _fill_nearly_equal)
    bounded = [i for i in integers if samples[i].domain is not None and not samples[i].unique]
    for name, choose in _INDEX_VALUES.items() if bounded else ():
        yield name, {i: _fill_constant(choose(samples[i].domain)) for i in bounded if _is_legal_index(samples[i], name)}
    for name, fill in _MASK_FILLS.items() if masks else ():
        yield name, dict.fromkeys(masks, fill)


def _make_near_number_fills(
    samples: Mapping[int, TensorSample], operands: Sequence[Any], attributes: Iterable[Any]
) -> dict[int, Fill]:
    """Return fills with the numbers of a call, and the adjacent values of each.

    Integer zeros among the attributes are skipped. They are defaults, and runtimes treat the values next to them as 0.
    """
    numbers = [*_numbers(operands), *(n for n in _numbers(attributes) if n or type(n) is float)]
    numbers = [n for n in dict.fromkeys(numbers) if math.isfinite(n)]
    free = [i for i, s in samples.items() if s.domain is None and not s.unique and s.dtype != torch.bool]
    return {i: _fill_near(numbers) for i in free if numbers and math.prod(samples[i].shape)}


def _numbers(items: Iterable[Any]) -> Iterator[float]:
    """Yield ints and floats, including those within tuples."""
    for item in items:
        if isinstance(item, tuple):
            yield from _numbers(item)
        elif type(item) in (int, float):
            yield item


def _fill_near(numbers: Sequence[float]) -> Fill:
    def fill(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
        first = int(torch.randint(len(numbers), (), generator=generator))  # a tensor may have too few elements for all
        found = [
            near for number in (*numbers[first:], *numbers[:first]) for near in _compute_adjacent_values(number, sample)
        ]
        positions = torch.arange(math.prod(sample.shape)) % len(found)
        return torch.stack(found)[positions].reshape(sample.shape)

    return fill


def _compute_adjacent_values(number: float, sample: TensorSample) -> list[torch.Tensor]:
    """Return a number in a dtype, its negation and the adjacent values; integers are clamped to the dtype.

    Floats include three times the number, which rounds differently. Quotients are then integers, or nearly so.
    """
    if sample.dtype.is_floating_point:
        rounded, triple = torch.tensor([number, 3 * number], dtype=sample.dtype)
        infinities = torch.tensor([-math.inf, math.inf], dtype=sample.dtype)
        return [rounded, -rounded, *rounded.nextafter(infinities), triple]
    low, high = _get_dtype_limits(sample)
    whole = (int(number), -int(number), int(number) - 1, int(number) + 1)
    return [torch.tensor(min(max(n, low), high), dtype=sample.dtype) for n in whole]


def _is_integer(sample: TensorSample) -> bool:
    return not sample.dtype.is_floating_point and not sample.dtype.is_complex and sample.dtype != torch.bool


# Floats


def _is_legal(sample: TensorSample, value: float) -> bool:
    if math.isnan(value):
        return sample.nan
    return sample.domain is None or sample.domain[0] <= value <= sample.domain[1]


def _fill_with_special(value: float, position: int) -> Fill:
    """Return a fill with typical elements and ``value`` at a flat index."""

    def fill(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
        tensor = realize(sample, generator).contiguous()
        tensor.view(-1)[position] = value
        return tensor

    return fill


def _clamp_to_domain(sample: TensorSample, values: torch.Tensor) -> torch.Tensor:
    """Return values in the dtype of a sample, clamped to its domain."""
    if sample.domain is not None:
        values = values.clamp(*sample.domain)
    return values.to(sample.dtype)


def _make_combined_fill(number: int, row: int) -> Fill:
    """Return a fill that combines special values and ones of several operands at equal indices.

    In the first round all operands have the same value at an index; after that, other combinations, which change with
    ``row``. Only operands of equal shape have common indices. ``number`` is the index of the operand.
    """

    def fill(sample: TensorSample, _: torch.Generator) -> torch.Tensor:
        values = [v for v in (*SPECIAL_VALUES.values(), 0.0, 1.0, -1.0) if _is_legal(sample, v)]
        if not values:
            return torch.full(sample.shape, sample.low, dtype=sample.dtype)
        positions = torch.arange(math.prod(sample.shape))
        rounds = positions // len(values)
        apart = torch.where(rounds > 0, rounds + row, 0) * number
        return torch.tensor(values, dtype=sample.dtype)[(positions + row + apart) % len(values)].reshape(sample.shape)

    return fill


def _fill_tenths(sample: TensorSample, _: torch.Generator) -> torch.Tensor:
    """Fill all operands with the same tenths, which round differently in each dtype and are equal in the coarsest."""
    return _clamp_to_domain(sample, (torch.arange(math.prod(sample.shape)).double() * 0.3 + 0.1).reshape(sample.shape))


ODD_NUMBERS_CENTER = 2**13
"""Odd numbers around it are rounded in FP16 and BF16 and in no other dtype."""


def _fill_odd_numbers(sample: TensorSample, _: torch.Generator) -> torch.Tensor:
    """Fill all operands with the same odd numbers; FP16 and BF16 may be compared with integer operands, too."""
    return _clamp_to_domain(
        sample, (torch.arange(math.prod(sample.shape)).double() * 2 + ODD_NUMBERS_CENTER - 2001).reshape(sample.shape)
    )


def _fill_magnitudes(sample: TensorSample, generator: torch.Generator, reach: float) -> torch.Tensor:
    """Fill with magnitudes from ``2^-reach`` to ``2^reach`` of either sign."""
    exponents = reach * (2 * torch.rand(sample.shape, generator=generator, dtype=torch.float64) - 1)
    signs = torch.randint(0, 2, sample.shape, generator=generator) * 2 - 1
    return _clamp_to_domain(sample, signs * 2**exponents)


def _fill_wide(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    return _fill_magnitudes(sample, generator, 8)


def _fill_vast(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with three quarters of the exponent range: squares overflow or underflow, elements do not.

    Float64 has a smaller range, as no wider dtype can show whether eager or the target lost the digits.
    """
    reach = 8 if sample.dtype == torch.float64 else 0.75 * math.log2(torch.finfo(sample.dtype).max)
    return _fill_magnitudes(sample, generator, reach)


def _fill_ties(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with multiples up to ten of 1/2, 1/4, 1/8 and 5, to get rounding ties, integers and equal elements.

    Many of them, multiplied or divided by powers of ten, are halfway between two integers, too.
    """
    low = 0 if sample.domain is not None and sample.domain[0] >= 0 else -10
    units = torch.tensor([0.5, 0.25, 0.125, 5.0], dtype=torch.float64)
    chosen = units[torch.randint(0, len(units), sample.shape, generator=generator)]
    return _clamp_to_domain(sample, chosen * torch.randint(low, 11, sample.shape, generator=generator))


def _fill_tiny(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with a thousandth of typical elements."""
    return _clamp_to_domain(sample, realize(replace(sample, dtype=torch.float64), generator) * 1e-3)


def _fill_far_from_zero(shift: float) -> Fill:
    """Return a fill with typical elements far from 0: variances and sums that cancel show their rounding."""
    return lambda sample, generator: _clamp_to_domain(
        sample, realize(replace(sample, dtype=torch.float64), generator) / 3 + shift
    )


def _is_shift_legal(sample: TensorSample, shift: float) -> bool:
    return sample.domain is None or sample.domain[0] <= shift - 1 < shift + 1 <= sample.domain[1]


_MAGNITUDE_FILLS: dict[str, Fill] = {"ties": _fill_ties, "tiny": _fill_tiny}


# Integers


def _get_dtype_limits(sample: TensorSample) -> tuple[int, int]:
    info = torch.iinfo(sample.dtype)
    return info.min, info.max


def _fill_small(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with 0, 1 and, in a signed dtype, -1."""
    low = max(-1, _get_dtype_limits(sample)[0])
    return torch.randint(low, 2, sample.shape, generator=generator).to(sample.dtype)


def _fill_extremes(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with typical elements, with the dtype's minimum first and its maximum last."""
    tensor = realize(sample, generator).contiguous()
    tensor.view(-1)[0], tensor.view(-1)[-1] = _get_dtype_limits(sample)
    return tensor


def _fill_large(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with elements close to the int32 maximum, or to that of a narrower dtype, so that sums overflow."""
    top = min(_get_dtype_limits(sample)[1], 2**31 - 1)
    return torch.randint(top - top // 3, top, sample.shape, generator=generator).to(sample.dtype)


def _fill_nonzero(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with elements of either sign without 0: dividends and divisors in all sign combinations."""
    signs = torch.randint(0, 2, sample.shape, generator=generator) * 2 - 1
    return (signs * torch.randint(1, 10, sample.shape, generator=generator)).to(sample.dtype)


def _fill_beyond_32_bits(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with elements around 2^40 and 2^31 in turn, which neither int32 nor the fraction of float32 can hold."""
    positions = torch.arange(math.prod(sample.shape)).reshape(sample.shape)
    return torch.where(positions % 2 == 0, 2**40, 2**31) + torch.randint(-4, 5, sample.shape, generator=generator)


def _fill_nearly_equal(sample: TensorSample, generator: torch.Generator) -> torch.Tensor:
    """Fill with elements around 2^60, which are all the same number in float64."""
    count = math.prod(sample.shape)
    apart = torch.randperm(count, generator=generator)
    return 2**60 + (apart if sample.unique else apart % 9).reshape(sample.shape)


_INTEGER_FILLS: dict[str, Fill] = {
    "small": _fill_small,
    "extremes": _fill_extremes,
    "large": _fill_large,
    "signed": _fill_nonzero,
    "far": _fill_beyond_32_bits,
}


def _is_useful(sample: TensorSample, name: str) -> bool:
    """Return whether an integer vector is useful for a dtype and keeps elements distinct where required."""
    if sample.unique and name != "extremes":
        return False
    return {"signed": _get_dtype_limits(sample)[0] < 0, "far": sample.dtype == torch.int64}.get(name, True)


_INDEX_VALUES: dict[str, Callable[[Any], float]] = {
    "lowest": lambda domain: domain[0],
    "highest": lambda domain: domain[1],
    "minus-one": lambda _: -1,
}
"""Fills of index tensors: all elements at one bound of the domain, or -1, which also makes them duplicates."""


def _is_legal_index(sample: TensorSample, name: str) -> bool:
    assert sample.domain is not None
    value = _INDEX_VALUES[name](sample.domain)
    return (
        sample.domain[0] <= value <= sample.domain[1]
        and _get_dtype_limits(sample)[0] <= value <= _get_dtype_limits(sample)[1]
    )


def _fill_constant(value: float) -> Fill:
    return lambda sample, _: torch.full(sample.shape, int(value), dtype=sample.dtype)


# Masks


def _fill_false_row(sample: TensorSample, _: torch.Generator) -> torch.Tensor:
    """Fill with True, except for the first row along the last dim; a mask with one row is all False."""
    mask = torch.ones(sample.shape, dtype=torch.bool)
    mask.view(-1, sample.shape[-1] if sample.shape else 1)[0] = False
    return mask


_MASK_FILLS: dict[str, Fill] = {
    "all-true": lambda sample, _: torch.ones(sample.shape, dtype=torch.bool),
    "false-row": _fill_false_row,
}
