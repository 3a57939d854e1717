"""Map a call of the model to the inputs of its graph, and the outputs of the graph to the model's return value."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from clika_ref.capture.caches import (
    CacheKey,
    CacheTree,
    contains_cache_tree,
    fill_empty,
    flatten_caches,
    rebuild_caches,
)
from clika_ref.capture.callables import spell_out_keywords
from clika_ref.capture.dataclass_pytrees import iter_leaves_with_path, register_dataclasses
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.symbols import resolve
from clika_ref.torch_internals.trees import pytree

LIST_ARGUMENT_HINT = (
    ". A list is one argument, also if it comes from a DataLoader over a TensorDataset: data_transform_fn=tuple "
    "passes its items as separate arguments, and data_transform_fn=lambda batch: batch[0] passes only the first."
)
"""Appended to a message if a list does not fit a call."""

EXTRA_KEYS_HINT = (
    ". The dict is passed as one argument, since {keys} is no argument: forward takes {arguments}. Leave it out, for "
    "example with data_transform_fn=lambda batch: {{key: batch[key] for key in batch if key not in ({keys},)}}"
)
"""How to pass a batch of keyword arguments that has other entries, such as labels."""

DICT_ARGUMENT_HINT = (
    ". A dict with keys that are no arguments is one argument: data_transform_fn=lambda batch: batch[{key!r}] passes "
    "only that entry."
)
"""The same for a dict, such as a batch with labels."""


PAST, PRESENT = "past_key_values", "present"
"""The name of a cache among the arguments of a language model, and that of a returned one in files."""


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor of a call, which becomes an input of the graph."""

    name: str


@dataclass(frozen=True)
class ComplexLeaf:
    """A complex tensor of a call: the graph takes its parts as a real input, with a last dim of size 2."""

    name: str


@dataclass(frozen=True)
class NumberLeaf:
    """A Python integer that differs between calls, which becomes a 0-d int64 input of the graph."""

    name: str


@dataclass(frozen=True)
class ConstantLeaf:
    """Any other value: it is part of the graph, so a call with another value is rejected."""

    name: str
    value: Any


@dataclass(frozen=True)
class UnsavedDefault:
    """Placeholder for the default of a parameter in a loaded signature: a function or a class has no saved form."""

    text: str

    def __repr__(self) -> str:
        return self.text


Leaf = TensorLeaf | ComplexLeaf | NumberLeaf | ConstantLeaf


@dataclass(frozen=True)
class OutputLeaf:
    """One leaf of the model's return value: output ``index`` of the graph, or a number, expression or constant.

    ``name`` is built from the keys that lead to the leaf; it is empty if the leaf is the whole return value.
    """

    index: int | None
    value: Any = None
    name: str = ""
    is_complex: bool = False
    """Whether the last dim of the graph's output, of size 2, holds the parts of complex numbers."""

    def read(self, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the leaf from the outputs of the graph."""
        assert self.index is not None
        result = outputs[self.index]
        return torch.view_as_complex(result.contiguous()) if self.is_complex else result


@dataclass
class Signature:
    """The call form of a model as traced.

    ``parameters`` is the signature of the original ``forward``. ``arguments`` has the names of the given arguments, and
    ``specs`` the structure of each value. ``leaves`` has the leaves of all arguments in order.
    """

    parameters: inspect.Signature
    arguments: tuple[str, ...]
    specs: tuple[pytree.TreeSpec, ...]
    leaves: tuple[Leaf, ...]
    output_spec: pytree.TreeSpec | None = None
    outputs: tuple[OutputLeaf, ...] = field(default=())
    autocast: str | None = None
    """The autocast regions around the compilation, if these or regions of the model became casts in the graph; "" for
    none around. None if the graph contains no such casts: then autocast around a call applies as to the original.
    """

    def __post_init__(self) -> None:
        spec = self.output_spec
        self._has_size = _contains_size(spec)
        self.takes_caches = any(map(contains_cache_tree, self.specs))
        self._returns_caches = contains_cache_tree(spec)
        self._is_plain_tuple = spec is not None and spec.type is tuple and all(c.is_leaf() for c in spec.children())

    @property
    def call_signature(self) -> inspect.Signature:
        """The parameters of a call, without ``**kwargs``: each traced keyword argument has a parameter of its own.

        Other arguments are rejected, but callers that see ``**kwargs`` pass them, as the trainer of transformers does.
        """
        return spell_out_keywords(self.parameters, self.arguments)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of a call, in the order of ``leaves``.

        Raises:
            ModelError: the call does not have the traced structure.
        """
        try:
            given = bind(self.parameters, args, kwargs)
        except ModelError as error:
            if len(args) != 1 or not isinstance(args[0], dict):
                raise
            raise ModelError(f"{error}{_describe_batch(args[0], self.arguments)}") from error
        flat: list[Any] = []
        if self.takes_caches:
            given = self._fill_empty_caches(flatten_caches(given))
        for name, spec in zip(self.arguments, self.specs, strict=True):
            if name not in given:
                given[name] = self._default(name)
            leaves, found = pytree.tree_flatten(given.pop(name))
            if found != spec:
                given_as, traced_as = _describe_structure(found), _describe_structure(spec)
                msg = f"argument {name!r} is {given_as}, but the model was compiled for {traced_as}"
                if len(args) == 1 and found.type is not spec.type:
                    msg += _describe_batch(args[0], self.arguments)
                raise ModelError(msg)
            flat += leaves
        for name, value in given.items():
            default = self.parameters.parameters.get(name)
            if default is not None and isinstance(default.default, UnsavedDefault):
                raise ModelError(
                    f"argument {name!r} was omitted when the model was compiled, and its default {default.default} is "
                    "not stored in a copied or saved model. Omit it, or include it in the tracing inputs."
                )
            if default is None or not is_same_constant(value, default.default):
                raise ModelError(
                    f"argument {name!r} was omitted when the model was compiled. To use it, include it in the tracing "
                    "inputs."
                )
        return flat

    def graph_inputs(self, leaves: Sequence[Any]) -> list[torch.Tensor]:
        """Return the tensors of a call that the graph takes; check that all other leaves have their traced values.

        Raises:
            ModelError: an input has the wrong type, or a constant has another value.
        """
        tensors: list[torch.Tensor] = []
        for leaf, value in zip(self.leaves, leaves, strict=True):
            if isinstance(leaf, ConstantLeaf):
                if not is_same_constant(value, leaf.value):
                    raise ModelError(
                        f"argument {leaf.name!r} is {value!r}, but the graph was compiled for {leaf.value!r}. Compile "
                        "again with that value, or give tracing inputs with several integers."
                    )
            elif isinstance(leaf, NumberLeaf) and isinstance(value, int):
                tensors.append(torch.tensor(value))
            elif isinstance(leaf, ComplexLeaf) and isinstance(value, torch.Tensor):
                if not value.is_complex():
                    raise ModelError(
                        f"argument {leaf.name!r} is a tensor of {value.dtype}, but the model expects complex numbers. "
                        "Pass torch.complex(real, imag)."
                    )
                tensors.append(torch.view_as_real(value.resolve_conj()))
            elif isinstance(value, torch.Tensor):
                tensors.append(value)
            else:
                shown = f"{value!r}, a {type(value).__name__}"
                if hasattr(value, "__array__"):
                    shown = f"a {type(value).__name__} of {value.dtype}"
                hint = " Pass torch.from_numpy(...) of it." if hasattr(value, "__array__") else ""
                raise ModelError(f"argument {leaf.name!r} is {shown}, but the model expects a tensor.{hint}")
        return tensors

    def unflatten(self, results: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Any:
        """Return the model's return value, from the outputs of the graph."""
        leaves = [resolve(o.value, sizes) if o.index is None else o.read(results) for o in self.outputs]
        assert self.output_spec is not None
        if self._is_plain_tuple:
            return tuple(leaves)
        if self._has_size:
            return _unflatten(iter(leaves), self.output_spec)
        result = pytree.tree_unflatten(leaves, self.output_spec)
        return rebuild_caches(result) if self._returns_caches else result

    def to_arguments(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return leaves as a call: values by the names of their arguments."""
        return nest(self.arguments, self.specs, leaves)

    def output_names(self, taken: Iterable[str] = ()) -> tuple[str, ...]:
        """Return a unique name for each output of the graph that is not among ``taken``."""
        used = set(taken)
        names: dict[int, str] = {}
        for output in self.outputs:
            if output.index is not None:
                name = output.name
                if not name or name[0].isdigit():
                    name = f"output_{name}".rstrip("_")
                names[output.index] = _find_free_name(name, used)
                used.add(names[output.index])
        return tuple(names[i] for i in sorted(names))

    @property
    def needs_sizes(self) -> bool:
        """Whether an output is a size expression."""
        return any(isinstance(o.value, sympy.Basic) for o in self.outputs)

    def _fill_empty_caches(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return arguments with an empty cache in place of None where the traced calls have a cache."""
        forms = {name: s.context for name, s in zip(self.arguments, self.specs, strict=True) if s.type is CacheTree}
        return {**given, **{name: fill_empty(given.get(name), form, given) for name, form in forms.items()}}

    def _default(self, name: str) -> Any:
        parameter = self.parameters.parameters.get(name)
        if parameter is None or parameter.default is inspect.Parameter.empty:
            raise ModelError(
                f"argument {name!r} is missing. The model was compiled for forward({', '.join(self.arguments)})."
            )
        if isinstance(parameter.default, UnsavedDefault) and name in self.arguments:
            raise ModelError(
                f"argument {name!r} is missing, and its default {parameter.default} is not stored in a copied or "
                "saved model. Pass it."
            )
        return parameter.default


def bind(parameters: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments by name; ``*args`` as a tuple and ``**kwargs`` spread.

    Raises:
        ModelError: the call does not fit the signature.
    """
    try:
        bound = parameters.bind(*args, **kwargs)
    except TypeError as error:
        shown = [type(a).__name__ for a in args] + [f"{k}: {type(v).__name__}" for k, v in kwargs.items()]
        msg = f"inputs ({', '.join(shown)}) do not match forward{parameters}: {error}"
        if len(args) > 1 and len(parameters.parameters) == 1 and all(isinstance(a, torch.Tensor) for a in args):
            msg += ". If a batch is (inputs, labels), pass data_transform_fn=lambda batch: batch[0]"
        raise ModelError(msg) from error
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        else:
            given[name] = value
    return given


def nest(arguments: Sequence[str], specs: Sequence[pytree.TreeSpec], leaves: Sequence[Any]) -> dict[str, Any]:
    """Rebuild the arguments of a call from leaves and specs; the inverse of `flatten_call`."""
    position, given = 0, {}
    for name, spec in zip(arguments, specs, strict=True):
        given[name] = pytree.tree_unflatten(list(leaves[position : position + spec.num_leaves]), spec)
        position += spec.num_leaves
    return given


def as_call(parameters: inspect.Signature, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return named arguments as args and kwargs, in the order of the signature, positional if possible."""
    known = {n: given[n] for n in parameters.parameters if n in given}
    extra = {n: v for n, v in given.items() if n not in parameters.parameters}
    if extra:  # collected by ``**kwargs``, which `bind` has spread
        catch_all = next(n for n, p in parameters.parameters.items() if p.kind is p.VAR_KEYWORD)
        known[catch_all] = extra
    bound = inspect.BoundArguments(parameters, known)  # type: ignore[arg-type]
    return bound.args, bound.kwargs


def flatten_call(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[pytree.TreeSpec, ...], list[str], list[Any]]:
    """Return argument names, their structures, and the names and values of all leaves of one call."""
    given = bind(parameters, args, kwargs)
    specs: list[pytree.TreeSpec] = []
    names: list[str] = []
    leaves: list[Any] = []
    for argument, value in given.items():
        register_dataclasses(value)
        paths = [*iter_leaves_with_path(value)]
        specs.append(pytree.tree_structure(value))
        names += [".".join([argument, *map(_key_text, path)]) for path, _ in paths]
        leaves += [leaf for _, leaf in paths]
    return tuple(given), tuple(specs), names, leaves


def leaf_names(value: Any) -> list[str]:
    """Return the name of each leaf of a nested value: its keys, joined; ``present.0.key`` for those of a cache."""
    return ["_".join(_join_cache_key([*map(_key_text, path)], path)) for path, _ in iter_leaves_with_path(value)]


def _join_cache_key(texts: list[str], path: tuple[Any, ...]) -> list[str]:
    if not path or not isinstance(path[-1], CacheKey):
        return texts
    *outer, key = texts
    prefixes = [PRESENT if text == PAST else text for text in outer] or [PRESENT]
    return [f"{'_'.join(prefixes)}.{key}"]


def _contains_size(spec: pytree.TreeSpec | None) -> bool:
    return spec is not None and (spec.type is torch.Size or any(map(_contains_size, spec.children())))


def _unflatten(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    """Unflatten leaves and keep each ``torch.Size``, which PyTorch's own function turns into a plain tuple."""
    if spec.is_leaf():
        return next(leaves)
    children = [_unflatten(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _find_free_name(name: str, used: Collection[str]) -> str:
    spellings = itertools.chain([name, f"{name}_output"], (f"{name}_{i}" for i in itertools.count(1)))
    return next(spelling for spelling in spellings if spelling not in used)


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_same_constant(value: Any, traced: Any) -> bool:
    """Whether a constant is the traced one: ``1``, ``1.0`` and ``True`` are three constants, NaN equals itself."""
    if value is traced:
        return True
    if isinstance(value, torch.Tensor) or isinstance(traced, torch.Tensor) or type(value) is not type(traced):
        return False
    return bool(value == traced) or (value != value and traced != traced)  # noqa: PLR0124 - NaN


def _describe_structure(spec: pytree.TreeSpec) -> str:
    """Return the structure of a nested value in words, for example ``a list of 2 values``."""
    if spec.is_leaf():
        return "one value"
    children = spec.children()
    if spec.type is CacheTree:
        return f"a {CacheTree(spec.context, ()).label} of {format_count(len(children), 'value')}"
    name = getattr(spec.type, "__name__", str(spec.type))
    if not children:
        return f"an empty {name}"
    if issubclass(spec.type, dict):
        parts = [f"{key!r}: {_describe_structure(child)}" for key, child in zip(spec.context, children, strict=True)]
        return f"a {name} with {', '.join(parts)}"
    if all(child.is_leaf() for child in children):
        return f"a {name} of {format_count(len(children), 'value')}"
    return f"a {name} of ({', '.join(map(_describe_structure, children))})"


def _describe_batch(given: Any, arguments: Collection[str]) -> str:
    """Return how to pass a batch as a call, if an argument may be one: a list or a dict."""
    if isinstance(given, list):
        return LIST_ARGUMENT_HINT
    extra = [key for key in given if key not in arguments] if isinstance(given, dict) else []
    if extra and len(extra) < len(given):
        return EXTRA_KEYS_HINT.format(keys=", ".join(map(repr, extra)), arguments=", ".join(arguments))
    return DICT_ARGUMENT_HINT.format(key=next(iter(given))) if isinstance(given, dict) and given else ""
