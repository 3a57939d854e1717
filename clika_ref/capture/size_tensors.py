"""Sizes that forward computes with 0-d tensors: buffers outside the state dict, combined with lengths of inputs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clika_ref.torch_internals.modules import get_buffers, get_unsaved_buffers

INTEGER_DTYPES = (torch.int64, torch.int32)

VALUE_ATTRIBUTE = "clika_size_value"
"""The attribute of a traced tensor that holds its value."""


@dataclass(frozen=True)
class SizeRatio:
    """The exact value ``numerator / denominator`` of a 0-d tensor, and how often the tensor was rounded."""

    numerator: Any
    denominator: int = 1
    roundings: int = 0

    def is_exact_in(self, dtype: torch.dtype) -> bool:
        """Whether the next integers of the exact and of the rounded value agree; adds guards on the size.

        Each rounding changes a value by at most ``eps / 2`` of it. A value that is not whole is at least
        ``1 / denominator`` from any integer.
        """
        if not self.roundings:
            return True
        limit = int(2 / torch.finfo(dtype).eps)
        scaled = (self.roundings + 1) * self.numerator
        return bool(scaled < limit) and bool(scaled > -limit)


def _add(a: SizeRatio, b: SizeRatio) -> SizeRatio:
    if a.denominator == b.denominator:
        return SizeRatio(a.numerator + b.numerator, a.denominator)
    return SizeRatio(a.numerator * b.denominator + b.numerator * a.denominator, a.denominator * b.denominator)


def _subtract(a: SizeRatio, b: SizeRatio) -> SizeRatio:
    return _add(a, replace(b, numerator=-b.numerator))


def _multiply(a: SizeRatio, b: SizeRatio) -> SizeRatio:
    return SizeRatio(a.numerator * b.numerator, a.denominator * b.denominator)


def _divide(a: SizeRatio, b: SizeRatio) -> SizeRatio | None:
    if not isinstance(b.numerator, int) or b.numerator <= 0:
        return None
    return SizeRatio(a.numerator * b.denominator, a.denominator * b.numerator)


def _divide_whole(a: SizeRatio, b: SizeRatio) -> SizeRatio | None:
    ratio = None if a.roundings or b.roundings else _divide(a, b)
    return None if ratio is None else SizeRatio(ratio.numerator // ratio.denominator)


def _find_extremum(symbolic: Callable[[Any, Any], Any]) -> Callable[[SizeRatio, SizeRatio], SizeRatio]:
    def find(a: SizeRatio, b: SizeRatio) -> SizeRatio:
        numerator = symbolic(a.numerator * b.denominator, b.numerator * a.denominator)
        return SizeRatio(numerator, a.denominator * b.denominator)

    return find


def _reverse(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(b, a)


ARITHMETIC: Mapping[str, Callable[[SizeRatio, SizeRatio], SizeRatio | None]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), _add),
    **dict.fromkeys(("sub", "__sub__"), _subtract),
    **dict.fromkeys(("rsub", "__rsub__"), _reverse(_subtract)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), _multiply),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _divide),
    **dict.fromkeys(("floor_divide", "__floordiv__"), _divide_whole),
    "maximum": _find_extremum(torch.sym_max),
    "minimum": _find_extremum(torch.sym_min),
}
"""The functions of two numbers that are computed exactly, by their names in calls."""

ROUNDINGS: Mapping[str, Callable[[SizeRatio], Any]] = {
    "ceil": lambda x: -(-x.numerator // x.denominator),
    "floor": lambda x: x.numerator // x.denominator,
}

COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, plain) for plain in ("lt", "le", "gt", "ge", "eq", "ne") for name in (plain, f"__{plain}__")
}

CASTS = ("to", "long", "int", "float", "double")


@dataclass(frozen=True)
class SizeBuffer:
    """A 0-d buffer, by its name among those of a module, and its value."""

    owner: Mapping[str, Tensor | None]
    name: str
    value: int


def find_size_buffers(module: torch.nn.Module, written: Collection[str]) -> list[SizeBuffer]:
    """Return the 0-d buffers of integers outside the state dict, except those that forward writes to.

    Args:
        module: the model.
        written: the qualified names of buffers that forward writes to.
    """
    return [
        SizeBuffer(get_buffers(part), name, int(buffer))
        for path, part in module.named_modules()
        for name, buffer in get_buffers(part).items()
        if buffer is not None and buffer.dim() == 0 and buffer.dtype in INTEGER_DTYPES and not buffer.is_meta
        if name in get_unsaved_buffers(part) and f"{path}.{name}".lstrip(".") not in written
    ]


class _SizeTensors(TorchFunctionMode):
    """Computes the values of 0-d tensors next to a trace, and returns them where Python reads a number."""

    def __init__(self, buffers: Collection[SizeBuffer]) -> None:
        super().__init__()
        self.buffers = buffers
        self.writes = 0
        """The number of writes to single elements: a value is unknown after one, as tensors may share memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", ""), kwargs or {}
        if len(args) == 1 and isinstance(args[0], Tensor) and not given:
            number = self._read_number(name, args[0])
            if number is not None:
                return number
        if func is F.pad or func is torch.Tensor.__getitem__:
            args = (args[0], *(self._replace_sizes(arg, is_size=func is F.pad) for arg in args[1:]))
        result = func(*args, **given)
        if "out" in given or (_is_in_place(name) and args and _has_one_element(args[0])):
            self.writes += 1
        elif isinstance(result, Tensor) and result.dim() == 0:
            value = self._compute(name, args, given, result.dtype)
            if value is not None:
                setattr(result, VALUE_ATTRIBUTE, (self.writes, value))
        return result

    def _find_value(self, x: Any) -> Any:
        """Return the value of a number or 0-d tensor: a `SizeRatio`, or the result of a comparison; None if unknown."""
        if isinstance(x, int | torch.SymInt):
            return None if isinstance(x, bool) else SizeRatio(x)
        if not isinstance(x, Tensor) or x.dim():
            return None
        writes, value = getattr(x, VALUE_ATTRIBUTE, (None, None))
        if writes == self.writes:
            return value
        known = (SizeRatio(b.value) for b in self.buffers if b.owner.get(b.name) is x)
        return next(known, None)

    def _find_size(self, x: Tensor) -> Any:
        """Return the size in a 0-d tensor of integers; None if it is unknown."""
        value = self._find_value(x) if x.dtype in INTEGER_DTYPES else None
        return value.numerator if isinstance(value, SizeRatio) else None

    def _read_number(self, name: str, x: Tensor) -> Any:
        """Return the number that Python reads from a tensor; None for other calls, and for unknown values."""
        if name == "__bool__":
            value = self._find_value(x)
            return None if value is None else bool(value.numerator != 0 if isinstance(value, SizeRatio) else value)
        size = self._find_size(x) if name in {"item", "__int__", "__index__"} else None
        return size if name == "item" or isinstance(size, int) else None

    def _replace_sizes(self, arg: Any, *, is_size: bool) -> Any:
        """Replace tensors in sizes and in the ends of slices by their values."""
        if isinstance(arg, slice):
            return slice(*(self._replace_sizes(end, is_size=True) for end in (arg.start, arg.stop, arg.step)))
        if isinstance(arg, tuple | list):
            return type(arg)(self._replace_sizes(item, is_size=is_size) for item in arg)
        size = self._find_size(arg) if is_size and isinstance(arg, Tensor) else None
        return arg if size is None else size

    def _compute(self, name: str, args: Sequence[Any], options: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """Return the value of the result of a call; None if it is unknown."""
        count = 1 if name in ROUNDINGS or name in CASTS else 2
        values = [self._find_value(arg) for arg in args[:count]]
        if len(values) != count or not all(isinstance(value, SizeRatio) for value in values):
            return None
        if count == 1:
            return _round(name, values[0], args[0].dtype, dtype)
        if options or len(args) != count:
            return None
        if name in COMPARISONS:
            a, b = values
            exact = not a.roundings and not b.roundings
            return COMPARISONS[name](a.numerator * b.denominator, b.numerator * a.denominator) if exact else None
        value = ARITHMETIC[name](*values) if name in ARITHMETIC else None
        if value is None or not dtype.is_floating_point:
            return value
        return replace(value, roundings=1 + sum(v.roundings for v in values))


def _round(name: str, x: SizeRatio, source: torch.dtype, dtype: torch.dtype) -> SizeRatio | None:
    """Return the value of a number after rounding to an integer or a cast; None if it is unknown."""
    if name in CASTS and dtype.is_floating_point:
        return replace(x, roundings=x.roundings + 1)
    if (name in CASTS and x.denominator != 1) or not x.is_exact_in(source):
        return None
    return SizeRatio(x.numerator if name in CASTS else ROUNDINGS[name](x))


def _has_one_element(x: Any) -> bool:
    return isinstance(x, Tensor) and all(isinstance(size, int) and size == 1 for size in x.shape)


def _is_in_place(name: str) -> bool:
    is_operator = name.startswith("__i") and name not in {"__int__", "__index__", "__invert__"}
    return is_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


@contextlib.contextmanager
def trace_size_tensors(module: torch.nn.Module, written: Collection[str]) -> Iterator[None]:
    """Make 0-d tensors of sizes and of buffers outside the state dict count as sizes while the context lasts.

    Such buffers hold settings of a layer, for example a stride. Their values become constants of the trace.

    Args:
        module: the model.
        written: the qualified names of buffers that forward writes to.
    """
    buffers = find_size_buffers(module, written)
    with _SizeTensors(buffers) if buffers else contextlib.nullcontext():
        yield
