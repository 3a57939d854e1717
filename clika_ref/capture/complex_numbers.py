"""Complex numbers in a trace: each becomes a pair of real tensors, so that no value of a graph is complex."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from clika_ref.capture import fourier_transforms as fourier
from clika_ref.capture.aliasing import find_written_storages
from clika_ref.capture.saved_tensors import storage_id

aten = torch.ops.aten

Rule = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Complex:
    """A complex tensor as its real and imaginary parts."""

    real: Tensor
    imag: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Complex:
        """Apply a linear function with real coefficients."""
        return Complex(function(self.real), function(self.imag))


def to_complex(value: Any) -> Complex:
    """Return a complex or real tensor, or a number, as a pair."""
    if isinstance(value, Complex):
        return value
    if isinstance(value, Tensor):
        return Complex(value, torch.zeros_like(value))
    return Complex(value.real, value.imag)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parts of a complex dtype, and real dtypes unchanged."""
    return dtype.to_real() if dtype.is_complex else dtype


def _linear(target: Any) -> Rule:
    """Apply a call to both parts; the other tensors, such as indices, are arguments of both."""

    def run(*args: Any, **kwargs: Any) -> Any:
        def call(part: str) -> Any:
            own = pytree.tree_map(lambda a: getattr(a, part) if isinstance(a, Complex) else a, (args, kwargs))
            return target(*own[0], **own[1])

        real, imag = call("real"), call("imag")
        if isinstance(real, Tensor):
            return Complex(real, imag)
        return tuple(Complex(r, i) for r, i in zip(real, imag, strict=True))

    return run


def _joining(target: Any) -> Rule:
    """Apply a call to both parts, with real tensors as complex ones."""
    apply = _linear(target)

    def run(*args: Any, **kwargs: Any) -> Any:
        def widen(a: Any) -> Any:
            return to_complex(a) if isinstance(a, Tensor) and a.dtype != torch.bool else a

        return apply(*pytree.tree_map(widen, args, is_leaf=lambda a: isinstance(a, Complex)), **kwargs)

    return run


def _bilinear(target: Any) -> Rule:
    """Apply a product, such as a matrix product, to all combinations of parts."""

    def run(a: Any, b: Any, *rest: Any) -> Complex:
        if not isinstance(a, Complex) and not isinstance(a, complex):
            return to_complex(b).map(lambda part: target(part, a, *rest) if _is_number(a) else target(a, part, *rest))
        if not isinstance(b, Complex) and not isinstance(b, complex):
            return to_complex(a).map(lambda part: target(part, b, *rest))
        x, y = to_complex(a), to_complex(b)
        real = target(x.real, y.real, *rest) - target(x.imag, y.imag, *rest)
        return Complex(real, target(x.real, y.imag, *rest) + target(x.imag, y.real, *rest))

    return run


def _is_number(value: Any) -> bool:
    return not isinstance(value, Tensor | Complex)


def _einsum(equation: str, operands: Any, **_: Any) -> Complex:
    if len(operands) == 1:
        return operands[0].map(lambda part: torch.einsum(equation, part))
    if len(operands) > 2:
        raise NotImplementedError("einsum of more than two operands. Write it as products of two")
    return _bilinear(lambda a, b: torch.einsum(equation, a, b))(*operands)


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Complex:
    x, y = to_complex(a), to_complex(b)
    scaled = y.map(lambda part: part * alpha) if alpha != 1 else y
    return Complex(x.real + scaled.real, x.imag + scaled.imag)


def _subtract(a: Any, b: Any, *, alpha: Any = 1) -> Complex:
    return _add(a, b, alpha=-alpha)


def _multiply_conjugate(x: Complex) -> Complex:
    return Complex(x.real, -x.imag)


def _divide(a: Any, b: Any) -> Complex:
    """``a / b = a conj(b) / |b|^2``."""
    if not isinstance(b, Complex | complex):
        return to_complex(a).map(lambda part: part / b)
    y = to_complex(b)
    square = y.real * y.real + y.imag * y.imag
    return _bilinear(torch.mul)(a, _multiply_conjugate(y)).map(lambda part: part / square)


def _abs(z: Complex) -> Tensor:
    """``sqrt(re^2 + im^2)``, with the gradient 0 at 0."""
    square = z.real * z.real + z.imag * z.imag
    is_zero = square == 0
    return square.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


def _angle(z: Complex) -> Tensor:
    return torch.atan2(z.imag, z.real)


def _sgn(z: Complex) -> Complex:
    size = _abs(z)
    return z.map(lambda part: part / size.masked_fill(size == 0, 1))


def _power(z: Any, exponent: Any) -> Complex:
    if isinstance(exponent, int) and 0 <= exponent <= 8:
        result: Any = to_complex(torch.ones_like(z.real))
        for _ in range(exponent):
            result = _bilinear(torch.mul)(result, z)
        return result
    if isinstance(exponent, int | float):
        return _polar(_abs(z) ** exponent, _angle(z) * exponent)
    raise NotImplementedError("a power with a tensor as exponent. Write it as exp(exponent * log(x))")


def _polar(size: Tensor, angle: Tensor) -> Complex:
    return Complex(size * angle.cos(), size * angle.sin())


def _exp(z: Complex) -> Complex:
    return _polar(z.real.exp(), z.imag)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Cast: a real tensor to complex, a complex one to the precision of another dtype, or to its real part."""
    given = [kwargs.get("dtype"), *args]
    dtype = next((a for a in given if isinstance(a, torch.dtype)), None)
    if dtype is None:
        return x
    if not dtype.is_complex:
        return (x.real if isinstance(x, Complex) else x).to(dtype)
    part = real_dtype(dtype)
    return x.map(lambda t: t.to(part)) if isinstance(x, Complex) else to_complex(x.to(part))


def _fill_like(number: float) -> Rule:
    def make(x: Any, *_: Any, **kwargs: Any) -> Any:
        part = x.real if isinstance(x, Complex) else x
        dtype = real_dtype(kwargs.get("dtype") or part.dtype)
        return to_complex(torch.full_like(part, number, dtype=dtype))

    return make


def _creating(target: Any) -> Rule:
    """Create a complex tensor of real numbers."""

    def make(*args: Any, **kwargs: Any) -> Complex:
        dtype = real_dtype(kwargs.get("dtype") or torch.get_default_dtype())
        return to_complex(target(*args, **{**kwargs, "dtype": dtype}))

    return make


def _full(size: Any, number: Any, **kwargs: Any) -> Complex:
    dtype = real_dtype(kwargs.get("dtype") or torch.complex64)
    own = {**kwargs, "dtype": dtype}
    return Complex(torch.full(size, number.real, **own), torch.full(size, number.imag, **own))


def _masked_fill(z: Any, mask: Tensor, value: Any) -> Complex:
    x, number = to_complex(z), to_complex(value)
    return Complex(x.real.masked_fill(mask, number.real), x.imag.masked_fill(mask, number.imag))


def _pad(z: Complex, pad: Sequence[int], value: Any = 0, *, mode: str = "constant") -> Complex:
    numbers = (value.real, value.imag) if mode == "constant" else (None, None)
    return Complex(*(aten.pad(x, pad, mode, n) for x, n in zip((z.real, z.imag), numbers, strict=True)))


def _multiply_add(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Complex:
    product = _bilinear(torch.matmul)(a, b)
    return _add(to_complex(bias).map(lambda part: part * beta), product, alpha=alpha)


def _linear_layer(x: Any, weight: Any, bias: Any = None) -> Complex:
    transposed = weight.map(Tensor.t) if isinstance(weight, Complex) else weight.t()
    product = _bilinear(torch.matmul)(x, transposed)
    return product if bias is None else _add(product, bias)


LINEAR_CALLS = (
    *("alias", "as_strided", "clone", "contiguous", "cumsum", "detach", "diagonal", "expand"),
    *("expand_as", "flatten", "flip", "gather", "index", "index_select", "lift_fresh_copy", "mean"),
    *("movedim", "narrow", "neg", "permute", "repeat", "repeat_interleave", "reshape", "roll", "select"),
    *("slice", "split", "split_with_sizes", "squeeze", "sum", "swapaxes", "t", "tile", "transpose", "unbind"),
    *("unflatten", "unfold", "unsqueeze", "view", "_unsafe_view", "chunk", "positive", "trace", "tril", "triu"),
)
"""Calls that treat both parts alike."""

JOINING_CALLS = ("cat", "stack", "where", "concat", "hstack", "vstack", "index_put", "slice_scatter", "select_scatter")
"""Calls that treat both parts alike, and may combine complex and real tensors."""

BILINEAR_CALLS = ("mul", "matmul", "mm", "bmm", "mv", "dot", "outer", "multiply")

RULES: Mapping[Any, Rule] = {
    **{getattr(aten, name): _linear(getattr(aten, name)) for name in LINEAR_CALLS if hasattr(aten, name)},
    **{getattr(aten, name): _joining(getattr(aten, name)) for name in JOINING_CALLS if hasattr(aten, name)},
    **{getattr(aten, name): _bilinear(getattr(aten, name)) for name in BILINEAR_CALLS},
    aten._conj: _multiply_conjugate,
    aten._conj_physical: _multiply_conjugate,
    aten._fft_c2c: lambda z, dim, norm, forward: Complex(
        *fourier.transform(z.real, z.imag, dim, norm, is_forward=forward)
    ),
    aten._fft_c2r: lambda z, dim, norm, size: fourier.invert_to_real(
        to_complex(z).real, to_complex(z).imag, dim, norm, size
    ),
    aten._fft_r2c: lambda x, dim, norm, onesided: Complex(*fourier.transform_real(x, dim, norm, is_half=onesided)),
    aten._to_copy: _to,
    aten.abs: _abs,
    aten.add: _add,
    aten.addmm: _multiply_add,
    aten.angle: _angle,
    aten.complex: Complex,
    aten.conj: _multiply_conjugate,
    aten.constant_pad_nd: _pad,
    aten.conj_physical: _multiply_conjugate,
    aten.div: _divide,
    aten.einsum: _einsum,
    aten.exp: _exp,
    aten.full: _full,
    aten.imag: lambda z: z.imag,
    aten.linear: _linear_layer,
    aten.log: lambda z: Complex(_abs(z).log(), _angle(z)),
    aten.masked_fill: _masked_fill,
    aten.ones: _creating(torch.ones),
    aten.ones_like: _fill_like(1),
    aten.pad: lambda z, pad, mode="constant", value=None: _pad(z, pad, value or 0, mode=mode),
    aten.polar: _polar,
    aten.pow: _power,
    aten.real: lambda z: z.real if isinstance(z, Complex) else z,
    aten.reciprocal: lambda z: _divide(1.0, z),
    aten.resolve_conj: lambda z: z,
    aten.resolve_neg: lambda z: z,
    aten.rsub: lambda a, b, alpha=1: _subtract(b, a, alpha=alpha),
    aten.sgn: _sgn,
    aten.square: lambda z: _bilinear(torch.mul)(z, z),
    aten.sub: _subtract,
    aten.to: _to,
    aten.view_as_complex: lambda x: Complex(x.select(-1, 0), x.select(-1, 1)),
    aten.view_as_real: lambda z: torch.stack([z.real, z.imag], -1),
    aten.zeros: _creating(torch.zeros),
    aten.zeros_like: _fill_like(0),
}
"""The rule of each ATen call: its arguments and results, with pairs of real tensors instead of complex ones."""


def is_complex_call(node: fx.Node) -> bool:
    """Whether a call takes or returns complex tensors."""
    return any(fake.is_complex() for fake in _list_fakes(node))


def _list_fakes(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors that a call takes and returns."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def has_complex_calls(program: fx.GraphModule) -> bool:
    """Whether a program has calls on complex tensors, none of which it writes in place."""
    calls = [
        node
        for module in program.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
        if is_complex_call(node)
    ]
    fakes = [f for node in calls for f in _list_fakes(node)]
    if not fakes:
        return False
    return {storage_id(f) for f in fakes if f.is_complex()}.isdisjoint(find_written_storages(program))


def pair_call(node: fx.Node, operands: Sequence[fx.Node]) -> tuple[Callable[..., list[Tensor]], list[Any]]:
    """Return a call as a function of real operands, and their fake values: two for each complex operand.

    The function returns two tensors for each complex result.
    """
    target: Any = node.target
    rule = RULES[target.overloadpacket]
    fakes = [part for n in operands for part in _split_fake(n.meta["val"])]

    def run(*values: Any) -> list[Tensor]:
        remaining = iter(values)
        given: dict[fx.Node, Any] = {
            n: Complex(next(remaining), next(remaining)) if is_complex(n) else next(remaining) for n in operands
        }
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given.get(n, n.meta.get("val")))
        results = rule(*args, **kwargs)
        return [part for r in (results if isinstance(results, tuple | list) else [results]) for part in _split(r)]

    return run, fakes


def is_complex(node: fx.Node) -> bool:
    """Whether a call returns a complex tensor."""
    fake = node.meta.get("val")
    return isinstance(fake, Tensor) and fake.is_complex()


def _split(result: Any) -> list[Tensor]:
    return [result.real, result.imag] if isinstance(result, Complex) else [result]


def _split_fake(fake: Any) -> list[Any]:
    if not isinstance(fake, Tensor) or not fake.is_complex():
        return [fake]
    dtype = real_dtype(fake.dtype)
    return [torch.empty(fake.shape, dtype=dtype, device=fake.device) for _ in range(2)]
