"""Graph signatures as JSON: parameters, leaves, and nested structures."""

from __future__ import annotations

import dataclasses
import inspect
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from typing import Any

import torch

from clika_ref.capture.dataclass_pytrees import register_dataclass
from clika_ref.capture.signature import (
    ComplexLeaf,
    ConstantLeaf,
    Leaf,
    NumberLeaf,
    OutputLeaf,
    Signature,
    TensorLeaf,
    UnsavedDefault,
)
from clika_ref.core.errors import ModelError
from clika_ref.serialization.class_lookup import class_name, find_imported, unknown_class_error
from clika_ref.serialization.graph_format import decode, encode
from clika_ref.serialization.vocabulary import LeafKind, SignatureKey
from clika_ref.torch_internals.trees import pytree

LEAF_TYPES: dict[str, type] = {
    LeafKind.TENSOR: TensorLeaf,
    LeafKind.COMPLEX: ComplexLeaf,
    LeafKind.NUMBER: NumberLeaf,
    LeafKind.CONSTANT: ConstantLeaf,
}

CONTAINER_TYPES: dict[str, Any] = {
    kind.__name__: kind for kind in (tuple, list, dict, OrderedDict, defaultdict, deque, torch.Size)
}

DEFAULT_FACTORIES: dict[str, Any] = {
    "None": None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, tuple)},
}
"""Allowed default factories of a saved defaultdict."""


def signature_to_json(signature: Signature) -> dict[str, Any]:
    """Return a signature as JSON; defaults that cannot be serialized become their text."""
    return {
        SignatureKey.PARAMETERS: [
            [p.name, int(p.kind), _encode_default(p.default)] for p in signature.parameters.parameters.values()
        ],
        SignatureKey.ARGUMENTS: list(signature.arguments),
        SignatureKey.SPECS: [structure_to_json(s) for s in signature.specs],
        SignatureKey.LEAVES: [_encode_leaf(leaf) for leaf in signature.leaves],
        SignatureKey.OUTPUT_SPEC: structure_to_json(signature.output_spec)
        if signature.output_spec is not None
        else None,
        SignatureKey.OUTPUTS: [
            [o.index, encode(o.value), o.name, *([True] if o.is_complex else [])] for o in signature.outputs
        ],
        SignatureKey.AUTOCAST: signature.autocast,
    }


def signature_from_json(document: Mapping[str, Any]) -> Signature:
    """Decode the result of `signature_to_json`."""
    kinds = {int(k): k for k in inspect._ParameterKind}  # noqa: SLF001 - the enum of the public kinds
    parameters = [
        inspect.Parameter(name, kinds[kind], default=_decode_default(default))
        for name, kind, default in document[SignatureKey.PARAMETERS]
    ]
    return Signature(
        inspect.Signature(parameters),
        tuple(document[SignatureKey.ARGUMENTS]),
        tuple(map(structure_from_json, document[SignatureKey.SPECS])),
        tuple(LEAF_TYPES[kind](name, *map(decode, rest)) for kind, name, *rest in document[SignatureKey.LEAVES]),
        structure_from_json(document[SignatureKey.OUTPUT_SPEC])
        if document[SignatureKey.OUTPUT_SPEC] is not None
        else None,
        tuple(OutputLeaf(index, decode(value), *rest) for index, value, *rest in document[SignatureKey.OUTPUTS]),
        document[SignatureKey.AUTOCAST],
    )


def _encode_default(default: Any) -> list[Any]:
    if default is inspect.Parameter.empty:
        return []
    if isinstance(default, UnsavedDefault):
        return [{SignatureKey.UNSAVED_DEFAULT: default.text}]
    try:
        return [encode(default)]
    except ModelError:
        return [{SignatureKey.UNSAVED_DEFAULT: repr(default)}]


def _decode_default(saved: list[Any]) -> Any:
    if not saved:
        return inspect.Parameter.empty
    (default,) = saved
    if isinstance(default, dict) and SignatureKey.UNSAVED_DEFAULT in default:
        return UnsavedDefault(default[SignatureKey.UNSAVED_DEFAULT])
    try:
        return decode(default)
    except ModelError:  # such as an enum that is not imported: only a call that passes one needs it
        return UnsavedDefault(str(default))


def _encode_leaf(leaf: Leaf) -> list[Any]:
    kind = next(name for name, cls in LEAF_TYPES.items() if isinstance(leaf, cls))
    return [kind, leaf.name, *([encode(leaf.value)] if isinstance(leaf, ConstantLeaf) else [])]


def structure_to_json(spec: pytree.TreeSpec) -> Any:
    """Return a nested structure as JSON; "*" is a leaf.

    Raises:
        ModelError: a part of it cannot be serialized.
    """
    if spec.is_leaf():
        return "*"
    children = [structure_to_json(child) for child in spec.children()]
    kind, context = spec.type, spec.context
    if kind is defaultdict:
        factory, keys = context
        context = [getattr(factory, "__name__", str(factory)), keys]
    if kind in CONTAINER_TYPES.values():
        return [kind.__name__, encode(context), children]
    named = kind is namedtuple or _is_named_tuple(kind)  # noqa: PYI024 - PyTorch's key for all named tuples
    cls = context if named and isinstance(context, type) else kind
    return [class_name(cls), None if named else encode(context), children]


def structure_from_json(item: Any) -> pytree.TreeSpec:
    """Decode the result of `structure_to_json`. Classes must already be imported.

    Raises:
        ModelError: a class is not found.
    """
    if item == "*":
        return pytree.treespec_leaf()
    name, saved, children = item
    specs, context = [structure_from_json(child) for child in children], decode(saved)
    if name == "defaultdict":
        context = [DEFAULT_FACTORIES[context[0]], context[1]]
    if name in CONTAINER_TYPES:
        return pytree.TreeSpec(CONTAINER_TYPES[name], context, specs)
    cls = _find_class(name)
    if _is_named_tuple(cls) and cls not in pytree.SUPPORTED_NODES:
        return pytree.TreeSpec(namedtuple, cls, specs)  # noqa: PYI024 - as above
    return pytree.TreeSpec(cls, cls if _is_named_tuple(cls) else context, specs)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and kind is not tuple


def _find_class(name: str) -> Any:
    found = find_imported(name)
    known = isinstance(found, type) and (
        found in pytree.SUPPORTED_NODES or _is_named_tuple(found) or dataclasses.is_dataclass(found)
    )
    if not known:
        raise unknown_class_error("takes or returns", name)
    if found not in pytree.SUPPORTED_NODES and not _is_named_tuple(found):
        register_dataclass(found)
    return found
