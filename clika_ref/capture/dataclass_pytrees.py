"""Register the user's dataclasses as pytree nodes, so that they are flattened and rebuilt unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from clika_ref.torch_internals.trees import get_node_type, pytree

AttributeNames = list[list[str]]
"""Attribute names of one object: those with a value, and those that are None."""


def register_dataclasses(value: Any) -> None:
    """Register all dataclasses in a nested value as pytree nodes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            register_dataclass(type(value))
        for name in _attributes(value):
            register_dataclasses(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            register_dataclasses(item)
    elif isinstance(value, list | tuple):
        for item in value:
            register_dataclasses(item)


def iter_leaves_with_path(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the path and the value of each leaf, as `pytree.tree_leaves_with_path` does.

    Classes may be registered without the keys of their children, as those of diffusers: mappings then give their own
    keys, and others indices.
    """
    node = pytree.SUPPORTED_NODES.get(get_node_type(value))
    if node is None:
        yield path, value
        return
    if node.flatten_with_keys_fn is not None:
        children: Iterable[tuple[Any, Any]] = node.flatten_with_keys_fn(value)[0]
    elif isinstance(value, Mapping):
        children = [
            (pytree.MappingKey(key), child) for key, child in zip(value, node.flatten_fn(value)[0], strict=True)
        ]
    else:
        children = [(pytree.SequenceKey(index), child) for index, child in enumerate(node.flatten_fn(value)[0])]
    for key, child in children:
        yield from iter_leaves_with_path(child, (*path, key))


def register_dataclass(cls: type[Any]) -> None:
    """Register a dataclass as a pytree node that is rebuilt without calling the class.

    ``torch.export.register_dataclass`` calls the class, so that a ``__post_init__`` that changes a field changes it
    twice. Here every attribute is restored, including those that are no fields.
    """

    def flatten(value: Any) -> tuple[list[Any], AttributeNames]:
        names = _attributes(value)
        present = [n for n in names if getattr(value, n) is not None]
        return [getattr(value, n) for n in present], [present, [n for n in names if n not in present]]

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], AttributeNames]:
        leaves, context = flatten(value)
        return [(pytree.GetAttrKey(n), leaf) for n, leaf in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Iterable[Any], context: AttributeNames) -> Any:
        present, empty = context
        value = object.__new__(cls)
        for name, leaf in [*zip(present, leaves, strict=True), *((n, None) for n in empty)]:
            object.__setattr__(value, name, leaf)  # bypasses __setattr__ of frozen classes
        return value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _attributes(value: Any) -> list[str]:
    """Return the attribute names of an object: fields in order, then other attributes, without cached properties."""
    fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    others = [n for n in getattr(value, "__dict__", ()) if n not in fields]
    return fields + [n for n in others if not isinstance(getattr(type(value), n, None), cached_property)]
