"""`Operator`, and `operator`, the decorator that declares one: schema, trait, error class, lowering, samples."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# The type of an overload is in the private module torch._ops, and its schema is private.

from __future__ import annotations

import functools
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from clika_ref.core.accuracy import COMPOSE, ErrorClass
from clika_ref.core.errors import PluginError
from clika_ref.core.samples import Call
from clika_ref.core.traits import KEEP_FLOAT, QuantizationTrait
from clika_ref.torch_internals.operators import OpOverload, get_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Body: TypeAlias = "Callable[..., tuple[torch.Tensor, ...]]"
"""The function of a body (`Node.bodies`): operands of the node to tensors. Annotate keyword-only parameters with it."""

IGNORED_ARGUMENTS = frozenset(
    {"layout", "pin_memory", "memory_format", "non_blocking", "copy", "cudnn_enabled", "cudnn_enable"}
)
"""ATen arguments that change the storage of a result but no element: dropped unless an operator declares them."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An operand in the schema of an operator. Its attributes are a dict of defaults instead, `Operator.attributes`."""

    name: str
    """The name of the parameter of the reference."""
    optional: bool
    """Whether None is allowed."""
    variadic: bool
    """Whether it takes any number of tensors."""
    literal: bool
    """Whether a Python number is allowed instead of a tensor."""


class Operator:
    """A declared operator. A call runs its reference, an eager function.

    `operator` creates it. The decorators ``onnx``, ``samples``, ``types``, ``write_back`` and ``from_torch`` complete
    the declaration.

    Args:
        reference: the eager function; it gives the operator its name and signature.
        overloads: ATen calls of this operator with the same argument names.
        quant: its quantization trait.
        error: the error class of its results.
        random: whether two equal calls may differ, or the name of the attribute that decides it.
    """

    __match_args__ = ("name",)
    name: str
    __name__: str
    __qualname__: str

    def __init__(
        self,
        reference: Callable[..., Any],
        overloads: tuple[OpOverload, ...],
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
        self.operands, self.attributes, self.required = _parse_schema(reference)
        self.bodies = _list_bodies(reference)
        self.lowering: Callable[..., Any] | None = None
        self.sampler: Callable[..., Call] | None = None
        self.type_rule: Callable[..., Any] | None = None
        self.write_back_rule: Callable[..., Any] | None = None
        self.converters: dict[OpOverload | str, Callable[..., Call]] = {}
        for overload in overloads:
            self.converters[overload] = _Binder(self, overload)

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """Run the eager reference."""
        return self.reference(*operands, **attrs)

    def __repr__(self) -> str:
        return f"<operator {self.name}>"

    def __reduce__(self) -> str:
        return self.__qualname__

    @property
    def returns_tuple(self) -> bool:
        """Whether the reference returns several tensors, or a list of tensors with a length set by attributes."""
        return "tuple" in str(self.reference.__annotations__.get("return", ""))

    @property
    def takes_device(self) -> bool:
        """Whether the operator has an attribute ``device``, on which it creates a tensor."""
        return "device" in self.attributes

    def call(self, *operands: Any, **attrs: Any) -> Call:
        """Return a call of this operator on ``operands`` by position, with ``attrs`` and the defaults of all others.

        Raises:
            PluginError: an attribute is unknown or missing.
        """
        unknown = attrs.keys() - self.attributes.keys()
        missing = self.required - attrs.keys()
        if unknown or missing:
            problem = f"has no attribute {sorted(unknown)}" if unknown else f"requires the attribute {sorted(missing)}"
            raise PluginError(
                f"call of {self.name} with the attributes {sorted(attrs)}: it {problem}. Give attributes of "
                f"{self.name}({', '.join(self.attributes)})."
            )
        absent = (None,) * sum(p.optional and not p.variadic for p in self.operands[len(operands) :])
        return Call((*operands, *absent), {**self.attributes, **attrs})

    def convert_call(self, overload: OpOverload, *args: Any, **kwargs: Any) -> Call:
        """Convert a PyTorch call, an ATen ``overload`` with its ``args`` and ``kwargs``, to a call of this operator."""
        convert = self.converters.get(overload) or self.converters.get(str(overload), self.call)
        return convert(*args, **kwargs)

    def onnx(self, lowering: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the ONNX ``lowering``: ``(op, *operands, **attributes)`` to one value or a tuple of values."""
        self.lowering = lowering
        return lowering

    def samples(self, sampler: Callable[..., Call]) -> Callable[..., Call]:
        """Declare legal calls: ``(draw, s)`` to ``s.call(...)``."""
        self.sampler = sampler
        return sampler

    def types(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the type rule if fake tensors cannot infer it: operand types and attributes to output types."""
        self.type_rule = rule
        return rule

    def write_back(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare a view by its write-back rule: ``(build, base, new, **attributes)`` to ``base`` with ``new`` written.

        ``new`` are all elements of the view after a write to it.
        """
        self.write_back_rule = rule
        return rule

    def from_torch(self, *overloads: OpOverload | str) -> Callable[[Callable[..., Call]], Callable[..., Call]]:
        """Declare how to convert ATen ``overloads`` with other arguments, by a function of these arguments.

        It returns ``operator.call(...)``.

        Give an overload of another library by name, since that library may not be installed:
        ``"transformers.grouped_mm_fallback.default"``.
        """

        def declare(converter: Callable[..., Call]) -> Callable[..., Call]:
            for overload in overloads:
                self.converters[overload] = converter
            return converter

        return declare


def operator(
    *overloads: OpOverload,
    quant: QuantizationTrait = KEEP_FLOAT,
    error: ErrorClass = COMPOSE,
    random: bool | str = False,
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare an operator by its eager reference.

    The signature of the decorated function is the schema. Positional parameters are operands: ``Tensor | None`` is
    optional, ``Tensor | Number`` also takes a Python number, and ``*xs`` is variadic. Keyword-only parameters are
    attributes, except those of type `Body`: the bodies of control flow.

    Args:
        overloads: ATen calls that need no conversion: arguments with the name of an attribute bind to it, the others to
            the operands, in order.
        quant: the quantization trait; see `clika_ref.core.traits`.
        error: the class of its rounding error; see `clika_ref.core.accuracy`.
        random: whether two calls with equal operands may differ, or the name of the attribute that decides it.
    """

    def declare(reference: Callable[..., Any]) -> Operator:
        return Operator(reference, overloads, quant, error, random=random)

    return declare


def _list_bodies(reference: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of a reference that take bodies."""
    return tuple(p.name for p in inspect.signature(reference).parameters.values() if _is_body(p))


def _is_body(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation) in ("Body", str(Body))


def _parse_schema(reference: Callable[..., Any]) -> tuple[tuple[Parameter, ...], dict[str, Any], frozenset[str]]:
    """Return the operands of a reference, its attributes with their defaults, and the attributes without one."""
    operands: list[Parameter] = []
    attributes: dict[str, Any] = {}
    required: set[str] = set()
    for p in inspect.signature(reference).parameters.values():
        if _is_body(p):
            continue
        if p.kind is p.KEYWORD_ONLY:
            attributes[p.name] = None if p.default is p.empty else p.default
            if p.default is p.empty:
                required.add(p.name)
        elif p.kind is p.VAR_KEYWORD:
            raise PluginError(
                f"operator {reference.__qualname__}{inspect.signature(reference)}: **{p.name} is not supported. Write "
                "each attribute as a parameter."
            )
        else:
            kinds = set(re.findall(r"\w+", str(p.annotation)))  # a string, or a type without PEP 563
            literal = not kinds.isdisjoint({"Number", "int", "float", "bool"})
            operands.append(Parameter(p.name, "None" in kinds, p.kind is p.VAR_POSITIONAL, literal))
    return tuple(operands), attributes, frozenset(required)


def _to_tuple(default: Any) -> Any:
    """Return the default of an ATen argument in the form of an attribute."""
    return tuple(default) if isinstance(default, list) else default


class _Binder:
    """Binds the arguments of one ATen overload to an operator's schema: attributes by name, operands in order."""

    def __init__(self, op: Operator, overload: OpOverload) -> None:
        self.operator = op
        self.names = [a.name for a in get_schema(overload).arguments]
        self.defaults = {a.name: _to_tuple(a.default_value) for a in get_schema(overload).arguments}
        others = [n for n in self.names if n not in op.attributes]
        self.variadic = bool(op.operands) and op.operands[-1].variadic
        count = len(op.operands)
        self.operand_names, self.undeclared_names = others[:count], others[count:]
        missing = op.required - set(self.names)
        if len(self.operand_names) < sum(not p.optional for p in op.operands) or missing:
            raise PluginError(
                f"operator {op.name}{inspect.signature(op.reference)}: the signature does not match "
                f"{overload}{get_schema(overload)}. Give its attributes ATen's names, or declare "
                f"@{op.name}.from_torch({overload})."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Call:
        bound = dict(self.defaults)
        bound.update(zip(self.names, args, strict=False))
        bound.update(kwargs)
        for name in self.undeclared_names:
            if name not in IGNORED_ARGUMENTS and bound[name] != self.defaults[name]:
                raise PluginError(
                    f"operator {self.operator.name}: the argument {name!r} is {bound[name]!r}, but the operator has "
                    f"no such attribute. Leave it at its default {self.defaults[name]!r}."
                )
        operands = [bound[name] for name in self.operand_names]
        if self.variadic:
            *single, tensors = operands
            operands = [*single, *tensors]
        attrs = {name: bound[name] for name in self.operator.attributes if name in bound}
        return Call(tuple(operands), {**self.operator.attributes, **attrs})


def format_schema(op: Operator) -> str:
    """Return the name and signature of an operator in one line, as in `clika-ref explain`."""
    return f"{op.name}{inspect.signature(op.reference)}"


def index_by_overload(operators: Iterable[Operator]) -> Mapping[OpOverload | str, Operator]:
    """Index ``operators`` by the ATen overloads that they represent; overloads of other libraries are names."""
    return {overload: op for op in operators for overload in op.converters}
