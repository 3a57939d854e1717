"""Monte Carlo arithmetic in float64: random rounding errors show how a composition amplifies them."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# PyTorch keeps overloads and their decompositions in torch._ops and torch._decomp.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from clika_ref.core.accuracy import EXACT, ErrorClass, ulp
from clika_ref.core.registry import load_registry
from clika_ref.torch_internals.operators import decomposition_table, get_schema, has_kernel
from clika_ref.torch_internals.tensors import TorchDispatchMode
from clika_ref_conformance.judging import bounds as formulas
from clika_ref_conformance.judging.formats import Formats
from clika_ref_conformance.judging.rounding import (
    AnyFormat,
    ConcreteCall,
    flatten_operands,
    is_float,
    limits_of,
    map_floats,
    rounding_unit_of,
    ulp_of,
)

JITTER_RUNS = 8
"""Number of jittered runs. The largest of so many uniform draws is below half the bound once in 256."""
SAFETY_FACTOR = 2
"""Factor on the largest deviation of the runs, which sample the worst case and rarely reach it."""
FINAL_ULPS = 2
"""Added to the jitter bound for the last rounding, of the target and of eager."""
MIN_JUMP_GAP = 0.9
"""Minimum gap between the deviations of runs that indicates a step, as a share of the largest deviation."""
MIN_JUMP_ULPS = 64
"""Smaller steps are rounding itself, for instance of a cast to a coarser dtype, judged in the finer one."""
VARIANCE_OVERLOADS = frozenset({"var", "std", "var_mean", "std_mean"})
# fmt: off
DATA_MOVEMENT_OVERLOADS = frozenset({
    "_to_copy", "_unsafe_view", "broadcast_in_dim", "clone", "convert_element_type", "copy", "detach", "empty",
    "empty_like", "empty_strided", "fill", "full", "index", "lift_fresh", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "pad", "resize", "scalar_tensor", "select", "slice", "split", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view", "view_of", "where", "zeros", "zeros_like",
})
# fmt: on
"""Undeclared overloads that only move elements; all other undeclared overloads are assumed to round."""


@dataclass(frozen=True, slots=True)
class JitterNoise:
    """Random errors: their generator, and the number of runs."""

    generator: torch.Generator
    runs: int = JITTER_RUNS


@dataclass(slots=True)
class LocalBounds:
    """Results of analyzing one call: a bound per result (None if nothing rounds), and the data they are based on."""

    bounds: list[torch.Tensor | None]
    runs: list[list[torch.Tensor]] = field(default_factory=list[list[torch.Tensor]])
    """Jittered results, if the bounds are based on them."""
    dot_statistics: list[formulas.DotStatistics] = field(default_factory=list[formulas.DotStatistics])


def bound_call(
    call: ConcreteCall, error: ErrorClass, results: Sequence[torch.Tensor], formats: Formats, noise: JitterNoise
) -> LocalBounds:
    """Bound the results of one call in ``formats`` by the class of its operator."""
    if error.kind == "exact" or not any(map(is_float, results)):
        return LocalBounds([torch.zeros_like(r) if is_float(r) else None for r in results])
    found = _bound_rounding(call, error, results, formats, noise)
    if formats.rounds_operands and error.kind != "dot":
        _add_operand_rounding(found, call, results, formats, noise)
    if limits_of(formats.stored).max < limits_of(formats.dtype).max:
        found.bounds = [_relax_overflow(b, r, formats.stored) for b, r in zip(found.bounds, results, strict=True)]
    return found


def _bound_rounding(
    call: ConcreteCall, error: ErrorClass, results: Sequence[torch.Tensor], formats: Formats, noise: JitterNoise
) -> LocalBounds:
    if call.name in VARIANCE_OVERLOADS and error.kind == "norm":
        limits = formulas.bound_variance(call, list(results), formats.of(error.kind))
        return LocalBounds(list(limits), _make_infinite_mean_runs(call, results, noise.runs))
    if error.kind in ("compose", "norm"):
        return _bound_composition(call, results, formats, noise)
    if error.kind == "interpolation" and len(call.floats) > 1:
        return _bound_sampling(call, results, formats.of(error.kind), noise)
    return _bound_by_formula(call, error, results, formats)


def _make_infinite_mean_runs(
    call: ConcreteCall, results: Sequence[torch.Tensor], runs: int
) -> list[list[torch.Tensor]]:
    """Return runs with a mean that is infinite if a term is infinite, as in a sum; none if all results are finite.

    Depending on the position of the infinity, eager returns NaN or the infinity. Both are correct, and so are results
    computed from them.
    """
    if len(results) == 1 or bool(results[1].isfinite().all()):
        return []
    first, mean = results
    plain = call.first.mean(formulas.get_variance_dims(call), keepdim=mean.ndim == call.first.ndim).reshape(mean.shape)
    return [[first, torch.where(mean.isfinite(), mean, plain)]] * runs


def _add_operand_rounding(
    found: LocalBounds, call: ConcreteCall, results: Sequence[torch.Tensor], formats: Formats, noise: JitterNoise
) -> None:
    """Increase the bounds of a call by the effect of rounding its operands."""
    runs = [call.run(lambda t: formats.add_rounding_noise(t, noise.generator)) for _ in range(noise.runs)]
    for i, (bound, result) in enumerate(zip(found.bounds, results, strict=True)):
        if bound is not None:
            found.bounds[i] = bound + bound_from_runs(result, [run[i] for run in runs], formats.dtype)
    found.runs = [*found.runs, *runs]


def _relax_overflow(bound: torch.Tensor | None, result: torch.Tensor, stored: AnyFormat) -> torch.Tensor | None:
    """Make the bound infinite for elements that may overflow in the format of the results."""
    return bound if bound is None else torch.where(result.abs() + bound > limits_of(stored).max, math.inf, bound)


def _bound_by_formula(
    call: ConcreteCall, error: ErrorClass, results: Sequence[torch.Tensor], formats: Formats
) -> LocalBounds:
    """Bound a call by the formula of its class; other calls are assumed to round once per summed element."""
    if error.kind == "dot":
        found = formulas.compute_dot_statistics(call, list(results), formats)
        limits = [formulas.bound_dot(p, r) if is_float(r) else None for p, r in zip(found, results, strict=True)]
        return LocalBounds(list(limits), dot_statistics=found)
    dtype = formats.of(error.kind)
    formula = {"softmax": formulas.bound_softmax, "interpolation": formulas.bound_interpolation}.get(
        error.kind, _bound_sum
    )
    if error.kind == "ulp":
        formula = functools.partial(formulas.bound_ulps, error=error)
    return LocalBounds([formula(call, r, dtype) if is_float(r) else None for r in results])


def _bound_sum(call: ConcreteCall, result: torch.Tensor, dtype: AnyFormat) -> torch.Tensor:
    terms = max((t.numel() for t in call.floats), default=1) / max(result.numel(), 1)
    return (terms * rounding_unit_of(dtype)) * result.abs() + 8 * ulp_of(result, dtype)


def add_noise(tensor: torch.Tensor, bound: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """Add an error drawn uniformly from ``[-bound, bound]`` to every finite element of a tensor."""
    if bound is None or not tensor.numel():
        return tensor
    return tensor + draw_noise(bound, generator)


def draw_noise(bound: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw errors uniformly from ``[-bound, bound]``, and 0 where the bound is infinite or NaN."""
    uniform = torch.empty(bound.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
    return uniform.mul_(bound).nan_to_num_(0.0, 0.0, 0.0)


def bound_from_runs(exact: torch.Tensor, runs: Sequence[torch.Tensor], dtype: AnyFormat) -> torch.Tensor:
    """Return ``2 max_j |R_j - R| + 2 ulp`` over the runs with a finite element; infinite if there are none."""
    worst = torch.zeros_like(exact)
    lost = exact.isfinite() & bool(runs)
    for run in runs:
        off = (run - exact).abs()
        lost &= ~off.isfinite()
        worst = torch.maximum(worst, off.nan_to_num_(0.0, 0.0))
    worst = torch.where(lost, math.inf, worst)
    return SAFETY_FACTOR * worst + FINAL_ULPS * ulp_of(exact, dtype)


def detect_jumps(
    exact: torch.Tensor, runs: Sequence[torch.Tensor], bound: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Distinguish jumps from errors: `floor` of jittered values is one of two values and never between them.

    An element jumps if the deviations of its runs have a gap of nine tenths of the largest. Eight uniform draws have
    such a gap once in ten million. If all runs are beyond the gap, they must also agree: a step leads to one value, but
    noise larger than its operand leads to nearly one value.

    Returns:
        The bound, reduced at jumps to the errors before the gap, and the tolerance around runs after it (NaN for
        elements that do not jump, None if none does).
    """
    if not runs or not exact.numel():
        return bound, None
    off = torch.stack([(run - exact).abs() for run in runs])
    least = MIN_JUMP_ULPS * ulp_of(exact, dtype)
    special = ~off.isfinite()
    if not bool(((off > least) & ~special).any()):
        return bound, None
    usual = torch.where(special, math.nan, off).nanmedian(0).values
    off = torch.where(special, usual, off).nan_to_num_(0.0)  # infinities and NaN carry no information on steps
    off = torch.cat([torch.zeros_like(exact)[None], off.sort(0).values])
    gap, at = off.diff(dim=0).max(0)
    below, above = off.gather(0, at[None])[0], off.gather(0, at[None] + 1)[0]
    drowned = (at == 0) & ((off[-1] - above > least) | special.any(0))
    jumps = (gap > MIN_JUMP_GAP * off[-1]) & (gap > least) & ~drowned
    narrow = SAFETY_FACTOR * below + FINAL_ULPS * ulp_of(exact, dtype)
    slack = narrow + SAFETY_FACTOR * (off[-1] - above) + FINAL_ULPS * ulp_of(off[-1] + exact.abs(), dtype)
    if not bool(jumps.any()):
        return bound, None
    return torch.where(jumps, narrow, bound), torch.where(jumps, slack, math.nan)


def _bound_composition(
    call: ConcreteCall, results: Sequence[torch.Tensor], formats: Formats, noise: JitterNoise
) -> LocalBounds:
    """Record the ATen calls that a reference consists of, and replay them with jitter."""
    recorder = AtenRecorder(formats, noise.generator)
    with recorder:
        base = call.run()
    count = noise.runs
    runs = [recorder.replay(base) for _ in range(count)]
    if any(entry.is_variance for entry in recorder.entries):
        runs += [recorder.replay(base, with_variances=False) for _ in range(count)]
    base, *runs = ([t.reshape(r.shape) for t, r in zip(run, results, strict=True)] for run in (base, *runs))
    found = _bound_by_runs(call, results, base, runs, formats.of("compose"))
    runs = runs[:count]  # mixing runs with and without variance errors would look like jumps
    found.runs = [[_recenter_run(r, *pair) for r, *pair in zip(results, base, run, strict=True)] for run in runs]
    return found


def _recenter_run(result: torch.Tensor, base: torch.Tensor, run: torch.Tensor) -> torch.Tensor:
    """Shift a run from the result of the parts to that of the whole call, as parts may compute something else.

    The parts of `multilabel_margin_loss` count the first class once more for each position after the first -1.
    """
    if not is_float(result):
        return run
    return torch.where(base.isfinite() & result.isfinite(), result + (run - base), run)


def _bound_sampling(
    call: ConcreteCall, results: Sequence[torch.Tensor], dtype: AnyFormat, noise: JitterNoise
) -> LocalBounds:
    """Bound sampling at points that are themselves rounded: rounding decides which neighbor is nearest."""
    x, points, *rest = call.operands
    longest = max(x.shape[2:])
    off = 2 * formulas.COORDINATE_ULPS * rounding_unit_of(dtype) * points.abs().clamp(min=1, max=float(longest))
    moved = [add_noise(points, off, noise.generator) for _ in range(noise.runs)]
    runs = [ConcreteCall(call.name, call.function, (x, p, *rest), call.attrs).run() for p in moved]
    found = _bound_by_runs(call, results, results, runs, dtype)
    top = float(x.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if x.numel() else 0.0
    found.bounds = [
        b + 2 * formulas.INTERPOLATION_TAPS * rounding_unit_of(dtype) * top if b is not None else b
        for b in found.bounds
    ]
    return found


def _bound_by_runs(
    call: ConcreteCall,
    results: Sequence[torch.Tensor],
    base: Sequence[torch.Tensor],
    runs: list[list[torch.Tensor]],
    dtype: AnyFormat,
) -> LocalBounds:
    """Bound results by jittered runs around ``base``; by the number of terms where only one of the two is finite."""
    limits: list[torch.Tensor | None] = []
    for i, (result, centre) in enumerate(zip(results, base, strict=True)):
        if not is_float(result):
            limits.append(None)
            continue
        bound = bound_from_runs(centre, [run[i] for run in runs], dtype)
        limits.append(torch.where(centre.isfinite() == result.isfinite(), bound, _bound_sum(call, result, dtype)))
    return LocalBounds(limits, runs)


@dataclass
class _BoundedCall:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    bounds: list[torch.Tensor | None]
    is_variance: bool = False

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether every tensor is a positional argument itself, and none is in a list or a keyword argument."""
        nested = [*(a for a in self.args if isinstance(a, list | tuple)), *self.kwargs.values()]
        return not any(isinstance(item, torch.Tensor) for item in flatten_operands(nested))


class AtenRecorder(TorchDispatchMode):
    """Records every ATen call in its context, with its bound in ``formats``; `replay` repeats them with errors."""

    def __init__(self, formats: Formats, generator: torch.Generator) -> None:
        super().__init__()
        self.formats = formats
        self.generator = generator
        self.entries: list[_BoundedCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute one call in float64 and record it."""
        name, error = _classify_overload(func)
        whole = (error.kind in ("compose", "norm") or error is _UNDECLARED_ERROR) and name not in VARIANCE_OVERLOADS
        parts = _decomposition_of(func) if whole and _has_elements(args) else None
        known = len(self.entries)
        if parts is not None:
            try:
                with self:
                    return parts(*args, **(kwargs or {}))
            except RuntimeError:  # parts may reject sizes without elements that the whole call accepts
                del self.entries[known:]
        kwargs = {k: torch.float64 if _is_floating(v) else v for k, v in (kwargs or {}).items()}
        mutates = get_schema(func).is_mutable and error.kind != "exact"
        before = map_floats(args, torch.clone) if mutates else args
        result = func(*args, **kwargs)
        found: list[torch.Tensor | None] = []
        if error.kind != "exact":
            found = self._bounds(ConcreteCall(name, func, before, kwargs), error, result, mutates=mutates)
        self.entries.append(
            _BoundedCall(func, args, kwargs, flatten_operands([result]), found, is_variance=name in VARIANCE_OVERLOADS)
        )
        return result

    @functools.cached_property
    def _limits(self) -> tuple[list[int], torch.Tensor]:
        """Number of elements of each recorded bound, and all bounds concatenated, to draw the noise at once."""
        every = [b.reshape(-1) for entry in self.entries for b in entry.bounds if b is not None]
        return [b.numel() for b in every], torch.cat([torch.zeros(0, dtype=torch.float64), *every])

    def _bounds(
        self, call: ConcreteCall, error: ErrorClass, result: Any, *, mutates: bool
    ) -> list[torch.Tensor | None]:
        results = [r for r in flatten_operands([result]) if isinstance(r, torch.Tensor)]
        if error.kind == "norm" and call.name in VARIANCE_OVERLOADS:
            return list(formulas.bound_variance(call, results, self.formats.of(error.kind)))
        if mutates:  # a second call would change the operands: use a formula that makes none
            error = error if error.kind == "ulp" else _UNDECLARED_ERROR
        return _bound_by_formula(call, error, results, self.formats).bounds

    def replay(self, requested: Sequence[torch.Tensor], *, with_variances: bool = True) -> list[torch.Tensor]:
        """Repeat the recorded calls with an error after each call that rounds; return the new tensors of ``requested``.

        If the mean is far from zero, the error of a variance may exceed the variance itself. Dividing by such an
        overestimate hides the error of the mean; runs without variance errors show it.
        """
        now: dict[int, Any] = {}
        sizes, limits = self._limits
        errors = iter(draw_noise(limits, self.generator).split(sizes))
        for entry in self.entries:
            if entry.is_flat:
                args, kwargs = [now.get(id(a), a) for a in entry.args], entry.kwargs
            else:
                args, kwargs = _substitute_tensors(entry.args, now), _substitute_tensors(entry.kwargs, now)
            result = entry.function(*args, **kwargs)
            results = [result] if isinstance(result, torch.Tensor) else flatten_operands([result])
            for position, (new, bound) in enumerate(zip(results, entry.bounds, strict=False)):
                error = None if bound is None else next(errors)
                if error is not None and (with_variances or not entry.is_variance or position):
                    new.add_(error.view(new.shape))
            for old, new in zip(entry.results, results, strict=True):
                now[id(old)] = new
        return [now.get(id(t), t) for t in requested]


def _has_elements(args: tuple[Any, ...]) -> bool:
    """Return whether there are elements to round; without any, parts may reject operands of a legal call."""
    tensors = [item for item in flatten_operands(args) if isinstance(item, torch.Tensor)]
    return not tensors or any(tensor.numel() for tensor in tensors)


@functools.cache
def _decomposition_of(func: Any) -> Callable[..., Any] | None:
    """Return a function that makes the calls that an overload decomposes into; None if it is primitive."""
    if func in decomposition_table:
        return decomposition_table[func]
    is_composite = has_kernel(func, "CompositeImplicitAutograd")
    return func.decompose if is_composite else None


def _is_floating(item: Any) -> bool:
    return isinstance(item, torch.dtype) and item.is_floating_point


def _substitute_tensors(items: Any, now: Mapping[int, Any]) -> Any:
    """Return recorded arguments with each tensor replaced by its counterpart of this run."""
    if isinstance(items, dict):
        return {k: _substitute_tensors(v, now) for k, v in cast("dict[str, Any]", items).items()}
    if isinstance(items, list | tuple):
        return type(items)([_substitute_tensors(item, now) for item in items])
    return now.get(id(items), items) if isinstance(items, torch.Tensor) else items


_UNDECLARED_ERROR = ulp()


@functools.cache
def _load_error_classes() -> tuple[Mapping[Any, ErrorClass], Mapping[str, ErrorClass]]:
    """Return the error classes of the declared operators, by overload and by the name of the overload's packet."""
    overloads = load_registry().overloads
    by_name = {_get_plain_name(f): op.error for f, op in overloads.items() if not isinstance(f, str)}
    return {f: op.error for f, op in overloads.items()}, by_name


@functools.cache
def _classify_overload(func: Any) -> tuple[str, ErrorClass]:
    """Return an overload's plain name, and the error class of the operator that declares it or a related overload."""
    by_overload, by_name = _load_error_classes()
    name = _get_plain_name(func)
    exact = func.is_view or name in DATA_MOVEMENT_OVERLOADS
    return name, EXACT if exact else by_overload.get(func) or by_name.get(name, _UNDECLARED_ERROR)


def _get_plain_name(func: Any) -> str:
    """Return the name of an overload without namespace, overload name, ``native_`` and underscores."""
    name = get_schema(func).name.rpartition("::")[2]
    return name if name in DATA_MOVEMENT_OVERLOADS else name.strip("_").removeprefix("native_")
