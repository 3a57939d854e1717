"""``Operator``, and the decorator that declares one: reference, schema, trait, error class, lowering, samples."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch._ops is where PyTorch keeps the type of an overload, and its schema is private.

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from clika_ref.core.accuracy import COMPOSE, ErrorClass
from clika_ref.core.errors import PluginError
from clika_ref.core.samples import Call
from clika_ref.core.traits import KEEP_FLOAT, QuantizationTrait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAKES_NO_DIFFERENCE = frozenset(
    {"layout", "pin_memory", "memory_format", "non_blocking", "copy", "cudnn_enabled", "cudnn_enable"}
)
"""ATen arguments that choose where or how a tensor is stored, never its elements: dropped where undeclared."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One operand of an operator's schema; attributes are kept as a plain dict of defaults."""

    name: str
    """Of the reference's own parameter."""
    optional: bool
    """Whether None may stand here."""
    variadic: bool
    """Whether it takes any number of tensors."""
    literal: bool
    """Whether a Python number may stand here instead of a tensor."""


class Operator:
    """A declared operator: a callable eager reference, and all other facts that the system needs of it.

    Made by `operator`. The slots ``onnx``, ``samples``, ``types``, ``write_back`` and ``from_torch`` are decorators
    that fill in the rest of the declaration.

    Args:
        reference: the eager function, whose name and signature are those of the operator.
        overloads: the ATen calls that become it.
        quant: how quantization passes through it.
        error: how far its results may lie from exact ones.
        random: whether two calls may differ, or the attribute that decides it.
    """

    __match_args__ = ("name",)
    name: str
    __name__: str
    __qualname__: str

    def __init__(
        self,
        reference: Callable[..., Any],
        overloads: tuple[torch._ops.OpOverload, ...],
        quant: QuantizationTrait,
        error: ErrorClass,
        *,
        random: bool | str,
    ) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__.rstrip("_")
        self.reference = reference
        self.trait = quant
        self.error = error
        self.random = random
        self.operands, self.attributes, self.required = _schema(reference)
        self.lowering: Callable[..., Any] | None = None
        self.sampler: Callable[..., Call] | None = None
        self.type_rule: Callable[..., Any] | None = None
        self.write_back_rule: Callable[..., Any] | None = None
        self.converters: dict[torch._ops.OpOverload | str, Callable[..., Call]] = {}
        for overload in overloads:
            self.converters[overload] = _Binder(self, overload)

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """Compute the eager reference."""
        return self.reference(*operands, **attrs)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __reduce__(self) -> str:
        return self.__qualname__

    @property
    def returns_tuple(self) -> bool:
        """Whether the reference returns several tensors, or a list whose length its attributes decide."""
        return "tuple" in str(self.reference.__annotations__.get("return", ""))

    @property
    def takes_device(self) -> bool:
        """Whether the operator makes a tensor from nothing, on a device that its caller chooses."""
        return "device" in self.attributes

    def call(self, *operands: Any, **attrs: Any) -> Call:
        """Return one call of this operator, on ``operands`` by position, with every attribute of ``attrs`` spelled out.

        Raises:
            PluginError: an attribute is unknown or missing.
        """
        unknown = attrs.keys() - self.attributes.keys()
        missing = self.required - attrs.keys()
        if unknown or missing:
            problem = f"has no attribute {sorted(unknown)}" if unknown else f"needs the attribute {sorted(missing)}"
            msg = f"operator {self.name}({', '.join(self.attributes)}) {problem}; called with {sorted(attrs)}"
            raise PluginError(msg)
        absent = (None,) * sum(p.optional and not p.variadic for p in self.operands[len(operands) :])
        return Call((*operands, *absent), {**self.attributes, **attrs})

    def converted(self, overload: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Call:
        """Return a PyTorch call, an ATen ``overload`` with its ``args`` and ``kwargs``, as one of this operator."""
        convert = self.converters.get(overload) or self.converters.get(str(overload), self.call)
        return convert(*args, **kwargs)

    def onnx(self, lowering: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the ONNX lowering: ``(op, *operands, **attributes)`` to one value or a tuple of values."""
        self.lowering = lowering
        return lowering

    def samples(self, sampler: Callable[..., Call]) -> Callable[..., Call]:
        """Declare legal calls: ``(draw, s)`` to ``s.call(...)``."""
        self.sampler = sampler
        return sampler

    def types(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the type rule where fake inference cannot find it: operand types and attributes to output types."""
        self.type_rule = rule
        return rule

    def write_back(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare a view: ``(build, base, new, **attributes)`` to what the base becomes when it becomes ``new``."""
        self.write_back_rule = rule
        return rule

    def from_torch(
        self, *overloads: torch._ops.OpOverload | str
    ) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
        """Declare how ATen calls of another form become this operator: ATen's arguments to ``operator.call(...)``.

        A call that a library adds to PyTorch is given by name, as the library need not be there:
        ``"transformers.grouped_mm_fallback.default"``.
        """

        def declare(converter: Callable[..., Call]) -> Callable[..., Call]:
            for overload in overloads:
                self.converters[overload] = converter
            return converter

        return declare


def operator(
    *overloads: torch._ops.OpOverload,
    quant: QuantizationTrait = KEEP_FLOAT,
    error: ErrorClass = COMPOSE,
    random: bool | str = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare an operator by its eager reference.

    The signature of the decorated function is the schema: positional parameters are operands (``Tensor | None`` is
    optional, ``Tensor | Number`` also takes a Python number, ``*xs`` is variadic), keyword-only ones are attributes.
    ``overloads`` are the ATen calls that it stands for when their arguments have the same names; ATen's leading
    tensors bind to the operands in order.

    Args:
        overloads: ATen calls mapped to this operator without conversion.
        quant: how quantization passes through; see `clika_ref.core.traits`.
        error: the class of its rounding error; see `clika_ref.core.accuracy`.
        random: whether two calls with equal operands may differ, or the name of the attribute that decides it.

    """

    def declare(reference: Callable[..., Any]) -> Operator:
        return Operator(reference, overloads, quant, error, random=random)

    return declare


def _schema(reference: Callable[..., Any]) -> tuple[tuple[Parameter, ...], dict[str, Any], frozenset[str]]:
    operands: list[Parameter] = []
    attributes: dict[str, Any] = {}
    required: set[str] = set()
    for p in inspect.signature(reference).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            attributes[p.name] = None if p.default is p.empty else p.default
            if p.default is p.empty:
                required.add(p.name)
        elif p.kind is p.VAR_KEYWORD:
            msg = f"operator {reference.__qualname__}{inspect.signature(reference)}: spell out **{p.name} as attributes"
            raise PluginError(msg)
        else:
            kinds = set(re.findall(r"\w+", str(p.annotation)))  # written as text or, without PEP 563, as a type
            literal = not kinds.isdisjoint({"Number", "int", "float", "bool"})
            operands.append(Parameter(p.name, "None" in kinds, p.kind is p.VAR_POSITIONAL, literal))
    return tuple(operands), attributes, frozenset(required)


def _frozen(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


class _Binder:
    """Binds the arguments of one ATen overload to an operator's schema: attributes by name, the rest in order."""

    def __init__(self, op: Operator, overload: torch._ops.OpOverload) -> None:
        self.operator = op
        self.names = [a.name for a in overload._schema.arguments]
        self.defaults = {a.name: _frozen(a.default_value) for a in overload._schema.arguments}
        rest = [n for n in self.names if n not in op.attributes]
        self.variadic = bool(op.operands) and op.operands[-1].variadic
        count = len(op.operands)
        self.positions, self.leftover = rest[:count], rest[count:]
        missing = op.required - set(self.names)
        if len(self.positions) < sum(not p.optional for p in op.operands) or missing:
            msg = (
                f"operator {op.name}{inspect.signature(op.reference)} does not fit {overload}{overload._schema}: "
                f"give ATen's names to its attributes, or declare @{op.name}.from_torch({overload})"
            )
            raise PluginError(msg)

    def __call__(self, *args: Any, **kwargs: Any) -> Call:
        bound = dict(self.defaults)
        bound.update(zip(self.names, args, strict=False))
        bound.update(kwargs)
        for name in self.leftover:
            if name not in MAKES_NO_DIFFERENCE and bound[name] != self.defaults[name]:
                msg = f"operator {self.operator.name} has no attribute {name!r} (here {bound[name]!r})"
                raise PluginError(msg)
        operands = [bound[name] for name in self.positions]
        if self.variadic:
            *single, many = operands
            operands = [*single, *many]
        attrs = {name: bound[name] for name in self.operator.attributes if name in bound}
        return Call(tuple(operands), {**self.operator.attributes, **attrs})


def schema_text(op: Operator) -> str:
    """Return the signature of an operator as one line, as `clika-ref explain` shows it."""
    return f"{op.name}{inspect.signature(op.reference)}"


def by_overload(operators: Iterable[Operator]) -> Mapping[torch._ops.OpOverload | str, Operator]:
    """Index operators by the ATen overloads that they claim, and by the names of other libraries' calls."""
    return {overload: op for op in operators for overload in op.converters}
