"""Complex numbers in a trace: each becomes a pair of real tensors, so that no value of a graph is complex."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from clika_ref.capture import complex_functions as functions
from clika_ref.capture.complex_functions import Complex, real_dtype, to_complex
from clika_ref.capture.forms import fourier_transforms as fourier
from clika_ref.torch_internals.operators import OpOverload
from clika_ref.torch_internals.trees import pytree

aten = torch.ops.aten

Rule = Callable[..., Any]

INDEX_DTYPES = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64})
"""The dtypes of indices and masks."""


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


def _joining(target: Any, indices: frozenset[torch.dtype] = frozenset({torch.bool})) -> Rule:
    """Apply a call to both parts, with real tensors as complex ones, except those of the dtypes of indices."""
    apply = _linear(target)

    def run(*args: Any, **kwargs: Any) -> Any:
        def widen(a: Any) -> Any:
            return to_complex(a) if isinstance(a, Tensor) and a.dtype not in indices else a

        return apply(*pytree.tree_map(widen, args, is_leaf=lambda a: isinstance(a, Complex)), **kwargs)

    return run


def _bilinear(target: Any) -> Rule:
    """Apply a product, such as a matrix product, to all combinations of parts."""
    return functools.partial(functions.multiply_parts, target)


def _einsum(equation: str, operands: Sequence[Any], **_options: Any) -> Complex:
    """Contract the first two operands until one or two remain; the order of PyTorch's own is the same."""
    terms, _, result = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if "->" not in equation:
        letters = sorted(c for c in set(terms) if c.isalpha() and terms.count(c) == 1)
        result = ("..." if "..." in terms else "") + "".join(letters)
    remaining = list(operands)
    while len(remaining) > 2:
        read = "".join([*names[2:], result])
        kept = dict.fromkeys(c for c in "".join(names[:2]) if c.isalpha() and c in read)
        joined = ("..." if "..." in "".join(names[:2]) else "") + "".join(kept)
        remaining[:2] = [_contract(f"{names[0]},{names[1]}->{joined}", *remaining[:2])]
        names[:2] = [joined]
    if len(remaining) == 1:
        return remaining[0].map(lambda part: torch.einsum(equation, part))
    return _contract(f"{names[0]},{names[1]}->{result}", *remaining)


def _contract(equation: str, a: Any, b: Any) -> Any:
    if not isinstance(a, Complex) and not isinstance(b, Complex):
        return torch.einsum(equation, a, b)
    return functions.multiply_parts(lambda x, y: torch.einsum(equation, x, y), a, b)


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


def _creating(target: Any, number: int | None = None) -> Rule:
    """Create a complex tensor by a call whose last positional argument is the element, unless ``number`` is it."""

    def make(*args: Any, **kwargs: Any) -> Complex:
        source = args[0] if args and isinstance(args[0], Tensor | Complex) else None
        part = source.real if isinstance(source, Complex) else source
        default = torch.get_default_dtype() if part is None else part.dtype
        own = {**kwargs, "dtype": real_dtype(kwargs.get("dtype") or default)}
        if part is not None:
            args = (part, *args[1:])
        if number is not None:
            return to_complex(target(*args, **own))
        *others, element = args
        return Complex(target(*others, element.real, **own), target(*others, element.imag, **own))

    return make


def _fill(z: Any, value: Any) -> Complex:
    x, number = to_complex(z), to_complex(value)
    return Complex(aten.fill(x.real, number.real), aten.fill(x.imag, number.imag))


def _copy(x: Any, source: Any, _non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002 - ATen's
    """Return the source in the dtype of ``x``, in its own shape."""
    return _to(source, _complex_dtype(x) if isinstance(x, Complex) else x.dtype)


def _complex_dtype(z: Complex) -> torch.dtype:
    return z.real.dtype.to_complex()


def _masked_fill(z: Any, mask: Tensor, value: Any) -> Complex:
    x, number = to_complex(z), to_complex(value)
    return Complex(x.real.masked_fill(mask, number.real), x.imag.masked_fill(mask, number.imag))


def _pad(z: Complex, pad: Sequence[int], value: Any = 0, *, mode: str = "constant") -> Complex:
    numbers = (value.real, value.imag) if mode == "constant" else (None, None)
    return Complex(*(aten.pad(x, pad, mode, n) for x, n in zip((z.real, z.imag), numbers, strict=True)))


def _multiply_add(target: Any) -> Rule:
    """``beta bias + alpha (a @ b)``."""

    def run(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Complex:
        own = to_complex(bias) if beta == 1 else functions.multiply(bias, beta)
        return functions.add(own, functions.multiply_parts(target, a, b), alpha=alpha)

    return run


def _linear_layer(x: Any, weight: Any, bias: Any = None) -> Complex:
    transposed = weight.map(Tensor.t) if isinstance(weight, Complex) else weight.t()
    product = functions.multiply_parts(torch.matmul, x, transposed)
    return product if bias is None else functions.add(product, bias)


def _lerp(start: Any, end: Any, weight: Any) -> Complex:
    return functions.add(start, functions.multiply(functions.subtract(end, start), weight))


LINEAR_CALLS = (
    *("alias", "as_strided", "clone", "contiguous", "cumsum", "detach", "diagonal", "expand"),
    *("expand_as", "flatten", "flip", "gather", "index", "index_select", "lift_fresh_copy", "mean", "nan_to_num"),
    *("movedim", "narrow", "neg", "permute", "repeat", "repeat_interleave", "reshape", "roll", "select"),
    *(
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "sum",
        "swapaxes",
        "t",
        "take_along_dim",
        "tile",
        "transpose",
        "unbind",
    ),
    *("unflatten", "unfold", "unsqueeze", "view", "_unsafe_view", "chunk", "positive", "trace", "tril", "triu"),
)
"""Calls that treat both parts alike."""

JOINING_CALLS = ("cat", "stack", "where", "concat", "hstack", "vstack", "slice_scatter", "select_scatter")
"""Calls that treat both parts alike, and may combine complex and real tensors."""

BILINEAR_CALLS = ("mul", "matmul", "mm", "bmm", "mv", "dot", "outer", "multiply")

INDEXED_CALLS = ("index_put", "index_add", "index_copy", "scatter", "scatter_add")
"""Calls that treat both parts alike, and take integer tensors as indices."""

CREATING_CALLS = {
    **dict.fromkeys(("full", "full_like", "new_full")),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), 1),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"), 0),
}
"""Calls that create tensors, and their element; None if it is an argument. Empty ones have any element."""

RULES: Mapping[Any, Rule] = {
    **{getattr(aten, name): _linear(getattr(aten, name)) for name in LINEAR_CALLS if hasattr(aten, name)},
    **{getattr(aten, name): _joining(getattr(aten, name)) for name in JOINING_CALLS if hasattr(aten, name)},
    **{getattr(aten, name): _joining(getattr(aten, name), INDEX_DTYPES) for name in INDEXED_CALLS},
    **{getattr(aten, name): _bilinear(getattr(aten, name)) for name in BILINEAR_CALLS},
    **{getattr(aten, name): _creating(getattr(aten, name), number) for name, number in CREATING_CALLS.items()},
    aten._conj: functions.conjugate,
    aten._conj_physical: functions.conjugate,
    aten._fft_c2c: lambda z, dim, norm, forward: Complex(
        *fourier.transform(z.real, z.imag, dim, norm, is_forward=forward)
    ),
    aten._fft_c2r: lambda z, dim, norm, size: fourier.invert_to_real(
        to_complex(z).real, to_complex(z).imag, dim, norm, size
    ),
    aten._fft_r2c: lambda x, dim, norm, onesided: Complex(*fourier.transform_real(x, dim, norm, is_half=onesided)),
    aten._to_copy: _to,
    aten.abs: functions.absolute,
    aten.add: functions.add,
    aten.addcdiv: lambda z, a, b, *, value=1: functions.add(z, functions.divide(a, b), alpha=value),
    aten.addcmul: lambda z, a, b, *, value=1: functions.add(z, functions.multiply(a, b), alpha=value),
    aten.addmm: _multiply_add(torch.matmul),
    aten.addmv: _multiply_add(torch.matmul),
    aten.angle: functions.angle,
    aten.baddbmm: _multiply_add(torch.matmul),
    aten.complex: Complex,
    aten.conj: functions.conjugate,
    aten.constant_pad_nd: _pad,
    aten.conj_physical: functions.conjugate,
    aten.copy: _copy,
    aten.cos: functions.of_rotated(functions.cosh, rotates_back=False),
    aten.cosh: functions.cosh,
    aten.div: functions.divide,
    aten.einsum: _einsum,
    aten.eq: functions.is_equal,
    aten.exp: functions.exp,
    aten.expm1: functions.expm1,
    aten.fill: _fill,
    aten.imag: lambda z: z.imag,
    aten.isfinite: functions.is_each(torch.isfinite),
    aten.isinf: functions.is_any(torch.isinf),
    aten.isnan: functions.is_any(torch.isnan),
    aten.lerp: _lerp,
    aten.linear: _linear_layer,
    aten.log: functions.log,
    aten.log10: lambda z: functions.log(z, 10),
    aten.log1p: functions.log1p,
    aten.log2: lambda z: functions.log(z, 2),
    aten.masked_fill: _masked_fill,
    aten.ne: functions.is_different,
    aten.pad: lambda z, pad, mode="constant", value=None: _pad(z, pad, value or 0, mode=mode),
    aten.polar: functions.polar,
    aten.pow: functions.power,
    aten.real: lambda z: z.real if isinstance(z, Complex) else z,
    aten.reciprocal: lambda z: functions.divide(1.0, z),
    aten.resolve_conj: lambda z: z,
    aten.resolve_neg: lambda z: z,
    aten.rsqrt: lambda z: functions.divide(1.0, functions.sqrt(z)),
    aten.rsub: lambda a, b, alpha=1: functions.subtract(b, a, alpha=alpha),
    aten.sgn: functions.sign,
    aten.sigmoid: functions.sigmoid,
    aten.sin: functions.of_rotated(functions.sinh, rotates_back=True),
    aten.sinh: functions.sinh,
    aten.sqrt: functions.sqrt,
    aten.square: lambda z: functions.multiply(z, z),
    aten.std: functions.standard_deviation,
    aten.sub: functions.subtract,
    aten.tan: functions.of_rotated(functions.tanh, rotates_back=True),
    aten.tanh: functions.tanh,
    aten.to: _to,
    aten.view_as_complex: lambda x: Complex(x.select(-1, 0), x.select(-1, 1)),
    aten.view_as_real: lambda z: torch.stack([z.real, z.imag], -1),
    aten.var: functions.variance,
    aten.zero: _creating(aten.zeros_like, 0),
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
    """Whether a program has calls on complex tensors."""
    return any(
        is_complex_call(node)
        for module in program.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


@dataclass(frozen=True)
class ComplexCall:
    """A call on complex tensors, in its functional form."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def rule(self) -> Rule | None:
        """Its rule, if there is one."""
        return RULES.get(self.target.overloadpacket)


def pair_call(call: ComplexCall, operands: Sequence[fx.Node]) -> tuple[Callable[..., list[Tensor]], list[Any]]:
    """Return a call with a rule as a function of real operands, and their fake values: two for each complex operand.

    The function returns two tensors for each complex result.
    """
    rule = call.rule
    assert rule is not None
    fakes = [part for n in operands for part in _split_fake(n.meta["val"])]

    def run(*values: Any) -> list[Tensor]:
        remaining = iter(values)
        given: dict[fx.Node, Any] = {
            n: Complex(next(remaining), next(remaining)) if is_complex(n) else next(remaining) for n in operands
        }
        args, kwargs = fx.map_arg((call.args, call.kwargs), lambda n: given.get(n, n.meta.get("val")))
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
