"""Forms of PyTorch functions that keep dynamic sizes: PyTorch's own take each size as a number, and fix it."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clika_ref.capture.forms.fourier_functions import list_frequencies
from clika_ref.capture.forms.fourier_transforms import istft
from clika_ref.capture.forms.loss_forms import UNCHECKED_LOSSES
from clika_ref.capture.patching import (
    import_in_context,
    only_in_this_thread,
    only_outside_dynamo,
    patch_attributes,
)
from clika_ref.torch_internals.operators import INDUCTOR_DECOMPOSITIONS, OpOverload, decomposition_table
from clika_ref.torch_internals.tracing import COMPUTE_FFT_STRIDES, COUNT_POOLING_WINDOWS, SORT_FFT_DIMS
from clika_ref.torch_internals.trees import pytree

aten = torch.ops.aten

_LIBRARY = torch.library.Library("clika_ref", "DEF")
_LIBRARY.define(
    "linspace(Scalar start, Scalar end, SymInt steps, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
)

DYNAMIC_OVERLOADS: Mapping[Any, OpOverload] = {
    torch.ops.clika_ref.linspace.default: aten.linspace.default,
}
"""Calls with sizes that a trace contains, and the calls of PyTorch that they stand for."""


@torch.library.impl(_LIBRARY, "linspace", "CompositeExplicitAutograd")
def _make_spaced(_start: Any, _end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a tensor of the shape and dtype of the result; only traces call it."""
    return torch.empty((steps,), dtype=dtype or torch.get_default_dtype(), device=device)


def _linspace(start: Any, end: Any, steps: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return torch.ops.clika_ref.linspace(start, end, steps, dtype=dtype, device=device)


def _tensor(data: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    """Return a tensor of nested lists of numbers, some of which are sizes."""
    if dtype is None:
        is_whole = all(isinstance(n, int | torch.SymInt) for n in pytree.tree_leaves(data))
        dtype = torch.int64 if is_whole else torch.get_default_dtype()
    if isinstance(data, Sequence):
        return torch.stack([_tensor(part, dtype, device) for part in data])
    return torch.scalar_tensor(data, dtype=dtype, device=device)


def make_complex(real: Tensor, imag: Tensor) -> Tensor:
    """Return ``torch.complex`` of two tensors, whose own kernel for fake tensors fixes their sizes."""
    return torch.view_as_complex(torch.stack(torch.broadcast_tensors(real, imag), -1)).clone()


DYNAMIC_FORMS: Mapping[Any, Callable[..., Tensor]] = {
    torch.linspace: _linspace,
    torch.tensor: _tensor,
    torch.as_tensor: _tensor,
    torch.fft.fftfreq: list_frequencies,
    torch.fft.rfftfreq: functools.partial(list_frequencies, is_half=True),
}
"""Functions of Python, and their forms for sizes."""


def _mean(z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return make_complex(z.real.mean(*args, **kwargs), z.imag.mean(*args, **kwargs))


COMPLEX_FORMS: Mapping[Any, Callable[..., Tensor]] = {
    torch.complex: make_complex,
    torch.istft: istft,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
}
"""Functions of complex tensors that fix their sizes, and their forms."""


class _KeepSizes(TorchFunctionMode):
    """Replaces `DYNAMIC_FORMS` in calls whose arguments contain sizes, `COMPLEX_FORMS` and `UNCHECKED_LOSSES`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in COMPLEX_FORMS and not given.get("out"):
            if func is torch.complex or any(isinstance(a, Tensor) and a.is_complex() for a in args):
                return COMPLEX_FORMS[func](*args, **given)
        elif func in UNCHECKED_LOSSES:
            return UNCHECKED_LOSSES[func](*args, **given)
        elif func in DYNAMIC_FORMS:
            leaves = pytree.tree_leaves((args, given))
            has_sizes = any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves)
            if has_sizes and not any(isinstance(leaf, Tensor) for leaf in leaves):
                return DYNAMIC_FORMS[func](*args, **given)
        return func(*args, **given)


def _keep_extremum_dynamic(plain: Callable[..., Any], symbolic: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return Python's ``min`` or ``max`` with a size as result, if it is called with sizes.

    Python's own compares the sizes, and adds a guard for their order. torch.export replaces it for two numbers only.
    """

    def find(*args: Any, **options: Any) -> Any:
        values = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        has_sizes = len(values) > 1 and any(isinstance(v, torch.SymInt | torch.SymFloat) for v in values)
        if options or not has_sizes or not all(isinstance(v, SIZE_TYPES) for v in values):
            return plain(*args, **options)
        return functools.reduce(symbolic, values)

    return only_in_this_thread(find, plain)


SIZE_TYPES = (int, float, torch.SymInt, torch.SymFloat)


def _count_windows(  # noqa: PLR0917 - PyTorch's
    size: Any,
    kernel: int,
    before: int,
    after: int,
    stride: int,
    dilation: int,
    ceil_mode: bool,  # noqa: FBT001
) -> Any:
    """Return the number of windows of a pooling; with ``ceil_mode``, the last one starts inside or in the left padding.

    PyTorch's own function branches on the latter.
    """
    span = size + before + after - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    return torch.sym_min((span + stride - 1) // stride + 1, (size + before - 1) // stride + 1)


def _make_grid(theta: Tensor, size: Sequence[Any], _align_corners: bool) -> Tensor:  # noqa: FBT001 - ATen's
    """Return a grid of the shape of `affine_grid`'s result, without computing it."""
    return theta.new_empty((size[0], *size[2:], len(size) - 2))


@contextlib.contextmanager
def keep_dynamic_sizes() -> Iterator[None]:
    """Replace functions that fix sizes while the context lasts."""
    shapes: Any = decomposition_table
    overload = aten.affine_grid_generator.default
    plain = shapes[overload]
    forms: Mapping[tuple[Any, str], Callable[..., Any]] = {
        COUNT_POOLING_WINDOWS: _count_windows,
        COMPUTE_FFT_STRIDES: lambda out, *_, **__: out,
        SORT_FFT_DIMS: lambda _x, dim, *_, **__: list(dim),
    }
    replaced = {place: only_in_this_thread(form, getattr(*place)) for place, form in forms.items()}
    own = {overload: only_in_this_thread(_make_grid, plain)}
    kept = import_in_context(INDUCTOR_DECOMPOSITIONS, lambda: _set_entries(shapes, {overload: plain}))
    with _KeepSizes(), patch_attributes(replaced), kept, _set_entries(shapes, own):
        yield


@contextlib.contextmanager
def _set_entries(table: dict[Any, Any], entries: Mapping[Any, Any]) -> Iterator[None]:
    before = {key: table[key] for key in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


PYTHON_RANGE = builtins.range
"""Python's ``range``, also while a trace replaces the name."""


class _RangeType(type):
    """The type of `_SizedRange`: its instances are those of Python's ``range``."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, PYTHON_RANGE)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, PYTHON_RANGE)

    def __call__(cls, *ends: Any) -> Any:
        """Return a list of sizes if the step is a size; Python's own ``range`` reads it as a number."""
        if len(ends) != 3 or not isinstance(ends[2], torch.SymInt):
            return PYTHON_RANGE(*ends)
        start, stop, step = ends
        if step <= 0:
            return PYTHON_RANGE(*ends)
        count: Any = torch.sym_max((stop - start + step - 1) // step, 0)
        return [start + position * step if position else start for position in PYTHON_RANGE(count)]


class _SizedRange(metaclass=_RangeType):
    """Python's ``range``, with steps that are sizes."""


@contextlib.contextmanager
def keep_builtins_dynamic(module: torch.nn.Module) -> Iterator[None]:
    """Make ``min``, ``max`` and ``range`` of sizes, and ``len`` of tensors, return sizes while the context lasts.

    Dynamo does so by itself. ``len`` and ``range`` are replaced in the files of the model: PyTorch calls them often.
    """
    patched: dict[tuple[Any, str], Any] = {
        (builtins, "min"): _keep_extremum_dynamic(min, torch.sym_min),
        (builtins, "max"): _keep_extremum_dynamic(max, torch.sym_max),
    }
    names = {type(part).__module__ for part in module.modules()} | {getattr(module.forward, "__module__", None)}
    for name in names:
        file = sys.modules.get(name or "")
        if file is not None and not f"{name}.".startswith(("torch.", "builtins.")):
            patched[file, "len"] = only_outside_dynamo(_count_elements, vars(file).get("len", len))
            if "range" not in vars(file):
                patched[file, "range"] = _SizedRange
    with patch_attributes(patched):
        yield


def _count_elements(value: Any) -> Any:
    """Return Python's ``len``, which for a tensor is a size."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)
