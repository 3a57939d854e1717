"""Caches of transformers as pytrees: a call gets and returns their tensors, layer by layer, under the usual names.

Nothing is registered for the classes of transformers: a cache becomes a `CacheTree`, and is rebuilt for the model.
This module alone knows their attributes; its tests name the version that moved one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.trees import pytree

MODULE, BASE_CLASS = "transformers.cache_utils", "Cache"

PARTS: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    "keys": ("key",),
    "values": ("value",),
    "conv_states": ("conv",),
    "recurrent_states": ("recurrent",),
    "self_attention_cache": ("decoder",),
    "cross_attention_cache": ("encoder",),
}
"""Parts of the names of leaves, by attribute; others keep their names."""

LENGTH_TENSOR, LENGTH_NUMBER = "cumulative_length", "cumulative_length_int"
LENGTHS = frozenset({LENGTH_TENSOR, LENGTH_NUMBER})
"""Attributes that count the positions seen. Layers with both need the tensor only while the window is not full."""

GROWING = frozenset({"keys", "values"})
"""Attributes whose tensors grow along dim -2, except in layers of a maximum length."""

PAIR_PARTS = frozenset({"decoder", "encoder"})
"""Names of the two caches of a model with an encoder."""

MAX_LENGTH = "max_cache_len"
"""The attribute of layers whose tensors have one length."""

DERIVED: Mapping[str, Callable[[Any], Any]] = {
    "dtype": lambda layer: getattr(_find_tensor(layer), "dtype", None),
    "device": lambda layer: getattr(_find_tensor(layer), "device", None),
    "batch_size": lambda layer: layer.keys.shape[0],
    "num_heads": lambda layer: layer.keys.shape[1],
    "k_head_dim": lambda layer: layer.keys.shape[-1],
    "v_head_dim": lambda layer: layer.values.shape[-1],
    "_sliding_window_tensor": lambda layer: torch.tensor(layer.sliding_window),
}
"""Attributes of a layer that follow from its others."""

CROSS_CACHE, UPDATE_FLAGS = "cross_attention_cache", "is_updated"
"""The cache of what a decoder reads from its encoder, and the attribute with the layers that are filled."""

BATCH = "batch"
"""Name of the first dim of all tensors of a cache."""

IS_CROSS = "clika_ref_is_cross"
"""Set on a layer of such a cache in a trace of calls with filled and with empty ones: it serves both."""

FIXED_TYPES = bool | int | float | str | None
"""Types of attributes that are part of the structure of a cache."""


class CacheKey(pytree.MappingKey[str, Any]):
    """The key of a leaf among those of a cache, such as ``0.key``."""


class CacheTree:
    """A cache as a node of pytrees.

    Attributes:
        structure: its class and its attributes as JSON, with the name, dtype and static sizes of each leaf.
        leaves: its tensors and lengths.
    """

    def __init__(self, structure: str, leaves: Iterable[Any]) -> None:
        self.structure = structure
        self.leaves = [*leaves]

    @classmethod
    def of(cls, cache: Any) -> CacheTree:
        """Describe a cache.

        Raises:
            ModelError: it has an attribute that no graph can hold.
        """
        leaves: list[Any] = []
        return cls(json.dumps(_describe(cache, (), leaves)), leaves)

    @classmethod
    def empty(cls, structure: str, batch: int, device: torch.device) -> CacheTree:
        """Return the tree of a cache that has seen no positions."""
        leaves = [
            torch.zeros([batch if n is None else n for n in empty], dtype=getattr(torch, dtype), device=device)
            if dtype
            else 0
            for empty, dtype in ((leaf["empty"], leaf["dtype"]) for leaf in _list_leaves(json.loads(structure)))
        ]
        return cls(structure, leaves)

    @property
    def is_empty(self) -> bool:
        """Whether it has seen no positions: it has no tensors yet."""
        return not any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in self.leaves)

    @property
    def without_update_flags(self) -> str:
        """The structure without the attribute that differs between filled and empty layers."""
        return json.dumps(_drop_update_flags(json.loads(self.structure)))

    def with_tensors(self) -> CacheTree:
        """Return the tree with lengths as tensors, as a graph returns them."""
        return CacheTree(
            self.structure,
            (x if isinstance(x, torch.Tensor) else torch.scalar_tensor(x, dtype=torch.int64) for x in self.leaves),
        )

    @property
    def names(self) -> list[str]:
        """The name of each leaf."""
        return [leaf["leaf"] for leaf in _list_leaves(json.loads(self.structure))]

    @property
    def label(self) -> str:
        """The name of the class."""
        return json.loads(self.structure)["object"].rpartition(":")[2]

    def rebuild(self) -> Any:
        """Return a cache of the same class with the leaves."""
        return _rebuild(json.loads(self.structure), iter(self.leaves))


def _list_with_keys(tree: CacheTree) -> tuple[list[tuple[Any, Any]], str]:
    return [(CacheKey(name), leaf) for name, leaf in zip(tree.names, tree.leaves, strict=True)], tree.structure


pytree.register_pytree_node(
    CacheTree,
    lambda tree: (tree.leaves, tree.structure),
    lambda leaves, structure: CacheTree(structure, leaves),
    serialized_type_name=f"{CacheTree.__module__}.{CacheTree.__qualname__}",
    flatten_with_keys_fn=_list_with_keys,
)


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of transformers."""
    return any(c.__name__ == BASE_CLASS and c.__module__ == MODULE for c in type(value).__mro__)


def _is_tree(value: Any) -> bool:
    return isinstance(value, CacheTree)


def flatten_caches(value: Any) -> Any:
    """Return a nested value with a `CacheTree` in place of each cache."""
    return _replace(value, is_cache, CacheTree.of)


def rebuild_caches(value: Any) -> Any:
    """Return a nested value with a cache in place of each `CacheTree`; the inverse of `flatten_caches`."""
    return _replace(value, _is_tree, CacheTree.rebuild)


def _replace(value: Any, is_replaced: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    """Return a nested value with some parts replaced; the value itself if there are none."""
    if not any(map(is_replaced, pytree.tree_leaves(value, is_leaf=is_replaced))):
        return value
    return pytree.tree_map(lambda part: replace(part) if is_replaced(part) else part, value, is_leaf=is_replaced)


def run_with_caches(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with caches in place of trees, and return its result with trees in place of caches."""
    args, kwargs = rebuild_caches((args, kwargs))
    result = flatten_caches(function(*args, **kwargs))
    return _replace(result, _is_tree, CacheTree.with_tensors)


def update_caches(given: Any, result: Any) -> Any:
    """Return a result with the caches of the call, updated, in place of those of the result: a model returns these.

    Args:
        given: the arguments of the call.
        result: the result, with new caches.
    """
    waiting = [v for v in pytree.tree_leaves(given, is_leaf=is_cache) if is_cache(v)]

    def update(new: Any) -> Any:
        old = next((v for v in waiting if type(v) is type(new)), None) if is_cache(new) else None
        if old is None:
            return new
        waiting[:] = [v for v in waiting if v is not old]
        vars(old).clear()
        vars(old).update(vars(new))
        return old

    return pytree.tree_map(update, result, is_leaf=is_cache) if waiting else result


def fill_empty_caches(calls: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the arguments of calls with an empty cache of the same form where others have a filled one.

    Models accept None or a cache without tensors in the first call, whose structure differs.
    """
    filled = [dict(call) for call in calls]
    trees = {name: v for call in filled for name, v in call.items() if _is_tree(v) and not v.is_empty}
    for name, tree in trees.items():
        is_mixed = any(_is_empty(call.get(name)) for call in filled)
        form = tree.without_update_flags if is_mixed else tree.structure
        for call in filled:
            call[name] = fill_empty(call.get(name), form, call)
    return filled


def _is_empty(value: Any) -> bool:
    return value is None or (_is_tree(value) and value.is_empty)


def fill_empty(value: Any, structure: str, call: Mapping[str, Any]) -> Any:
    """Return a value, or an empty cache in place of None and of a cache without tensors.

    A filled cache gets the structure as well if that serves filled and empty ones.

    Args:
        value: an argument of a call.
        structure: that of a filled cache.
        call: all arguments; their first tensor has the size of the batch.
    """
    if not _is_empty(value):
        is_served = _is_tree(value) and value.structure != structure == value.without_update_flags
        return CacheTree(structure, value.leaves) if is_served else value
    first = next((x for x in pytree.tree_leaves(dict(call)) if isinstance(x, torch.Tensor) and x.ndim), None)
    if first is None:
        return value
    return CacheTree.empty(structure, first.shape[0], first.device)


@contextlib.contextmanager
def trace_caches() -> Iterator[None]:
    """Replace methods of caches that branch on the number of positions seen or added, in a trace."""
    module = sys.modules.get(MODULE)
    methods = {} if module is None else {(getattr(module, cls), name): form for (cls, name), form in FORMS.items()}
    with patch_attributes({key: _replace_in_this_thread(getattr(*key), form) for key, form in methods.items()}):
        yield


def _replace_in_this_thread(plain: Any, form: Callable[..., Any]) -> Any:
    """Return a method or property with another form in this thread and in Dynamo, which cannot trace thread numbers."""
    known = plain.fget if isinstance(plain, property) else plain
    assert known is not None
    own = only_in_this_thread(form, known)

    def choose(*args: Any, **kwargs: Any) -> Any:
        return form(*args, **kwargs) if torch.compiler.is_dynamo_compiling() else own(*args, **kwargs)

    return property(choose) if isinstance(plain, property) else choose


def _measure_mask(layer: Any, query_length: Any) -> tuple[Any, Any]:
    """Return the number of keys, and the position of the first one: a window keeps those that a later query sees."""
    kept = layer.keys.shape[-2] if layer.is_initialized else 0
    return kept + query_length, layer.cumulative_length - kept


def _measure_static_mask(layer: Any, query_length: Any) -> tuple[Any, Any]:
    seen, before = layer.cumulative_length_int, layer.max_cache_len - 1
    return torch.sym_min(seen, before) + query_length, torch.sym_max(seen - before, 0)


def _keep_last(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the last positions of ``x[batch, head, position, element]``: a trace fixes the length of ``-count:``."""
    return x[:, :, torch.sym_max(x.shape[2] - count, 0) :]


def _cut_first(x: torch.Tensor, count: Any) -> torch.Tensor:
    """Return ``x[batch, head, position, element]`` without the first positions, of which there may be fewer."""
    start: Any = torch.sym_min(count, x.shape[2])
    return x.narrow(2, start, x.shape[2] - start)


def _update_keys(
    layer: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to all positions; to those of an encoder only what is missing: nothing after the first call."""
    if not layer.is_initialized:
        layer.lazy_initialization(key_states, value_states)
    if IS_CROSS in vars(layer):
        key_states = _cut_first(key_states, layer.keys.shape[2])
        value_states = _cut_first(value_states, layer.values.shape[2])
    layer.keys, layer.values = (torch.cat(x, -2) for x in ((layer.keys, key_states), (layer.values, value_states)))
    return layer.keys, layer.values


def _update_window(
    layer: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to a window whose tensors grow up to its length; return all keys and values that a query sees."""
    if not layer.is_initialized:
        layer.lazy_initialization(key_states, value_states)
    layer.cumulative_length += key_states.shape[-2]
    keys, values = (torch.cat(x, -2) for x in ((layer.keys, key_states), (layer.values, value_states)))
    layer.keys, layer.values = (_keep_last(x, layer.sliding_window - 1) for x in (keys, values))
    return keys, values


def _update_static_window(
    layer: Any, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append to a window that is stored in tensors of constant length; return all keys and values that a query sees."""
    if not layer.is_initialized:
        layer.lazy_initialization(key_states, value_states)
    seen, length = layer.cumulative_length_int, layer.max_cache_len
    first = torch.sym_min(
        torch.sym_max(seen - length + 1, 0), 1
    )  # a full window has one element more than a query sees
    positions = torch.arange(torch.sym_min(seen, length - 1), device=layer.device) + first
    joined: list[torch.Tensor] = []
    for stored, new in ((layer.keys, key_states), (layer.values, value_states)):
        whole = torch.cat([stored.index_select(2, positions), new], 2)
        kept = _keep_last(whole, length)
        stored.copy_(torch.cat([kept, stored[:, :, kept.shape[2] :]], 2))
        joined.append(whole)
    layer.cumulative_length_int = seen + key_states.shape[2]
    return joined[0], joined[1]


FORMS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("DynamicLayer", "update"): _update_keys,
    ("DynamicSlidingWindowLayer", "get_mask_sizes"): _measure_mask,
    ("DynamicSlidingWindowLayer", "update"): _update_window,
    ("StaticSlidingWindowLayer", "get_mask_sizes"): _measure_static_mask,
    ("StaticSlidingWindowLayer", "update"): _update_static_window,
    ("Cache", "is_compileable"): lambda _: False,  # whether masks are made as for one token: a graph makes them all
}
"""Methods and properties by class and name, and the form of each, without branches."""


def list_cache_dims(spec: pytree.TreeSpec) -> list[dict[int, str]]:
    """Return the dims of each leaf of a structure that are as long as those of other leaves, with a name for these.

    Leaves of caches have the same batch, and layers of one kind have seen the same positions.
    """
    if spec.is_leaf():
        return [{}]
    if spec.type is not CacheTree:
        return [dims for child in spec.children() for dims in list_cache_dims(child)]
    leaves = _list_leaves(json.loads(spec.context))
    rank = [len(leaf["empty"]) for leaf in leaves]
    return [
        ({0: BATCH} if r else {}) | ({r - 2: leaf["grows_with"]} if "grows_with" in leaf else {})
        for leaf, r in zip(leaves, rank, strict=True)
    ]


def contains_cache_tree(spec: pytree.TreeSpec | None) -> bool:
    """Whether a structure contains a `CacheTree`."""
    return spec is not None and (spec.type is CacheTree or any(map(contains_cache_tree, spec.children())))


def _describe(value: Any, path: tuple[str, ...], leaves: list[Any]) -> Any:
    """Return a cache, a layer, or an attribute of these as JSON, and collect its leaves."""
    if isinstance(value, torch.Tensor | torch.SymInt):
        return _describe_leaf(value, path, leaves)
    if isinstance(value, FIXED_TYPES):
        return value
    if isinstance(value, type):
        return {"class": f"{value.__module__}:{value.__qualname__}"}
    if isinstance(value, list):
        return [_describe(item, (*path, str(index)), leaves) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {"dict": [[key, _describe(item, (*path, str(key)), leaves)] for key, item in value.items()]}
    if not hasattr(value, "__dict__"):
        raise ModelError(
            f"a cache has {'.'.join(path)}, a {type(value).__name__}, which no input of a graph can hold. Use a "
            "DynamicCache or a StaticCache."
        )
    grows = MAX_LENGTH not in vars(value)
    entries: dict[str, Any] = {}
    for name, item in vars(value).items():
        if name == IS_CROSS:
            continue
        inner = (*path, *PARTS.get(name, (name,)))
        if name in DERIVED or (name == LENGTH_TENSOR and LENGTH_NUMBER in vars(value)):
            entries[name] = None
        elif name in LENGTHS and isinstance(item, int):
            entries[name] = _describe_leaf(item, inner, leaves)
        else:
            entries[name] = _describe(item, inner, leaves)
            if grows and name in GROWING and entries[name] is not None:
                entries[name]["empty"][-2] = 0
                kind = [type(value).__qualname__, str(vars(value).get("sliding_window"))]
                entries[name]["grows_with"] = " ".join([*kind, *PAIR_PARTS.intersection(path)])
    return {"object": f"{type(value).__module__}:{type(value).__qualname__}", "attributes": entries}


def _describe_leaf(value: Any, path: tuple[str, ...], leaves: list[Any]) -> dict[str, Any]:
    leaves.append(value)
    if path[0] in PAIR_PARTS:  # Optimum's order: the layer first
        path = (path[1], path[0], *path[2:])
    described = {"leaf": ".".join(path), "dtype": "", "empty": list[Any]()}
    if isinstance(value, torch.Tensor):
        described["dtype"] = str(value.dtype).removeprefix("torch.")
        described["empty"] = [n if dim and isinstance(n, int) else None for dim, n in enumerate(value.shape)]
    return described


def _list_leaves(structure: Any) -> list[dict[str, Any]]:
    """Return the leaves of a structure in JSON, in order."""
    if isinstance(structure, dict):
        if "leaf" in structure:
            return [structure]
        structure = [*structure.values()]
    return [leaf for part in structure for leaf in _list_leaves(part)] if isinstance(structure, list) else []


def _rebuild(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return what a structure in JSON describes, with leaves in order."""
    if isinstance(structure, list):
        return [_rebuild(part, leaves) for part in structure]
    if not isinstance(structure, dict):
        return structure
    if "leaf" in structure:
        leaf = next(leaves)
        return leaf if structure["dtype"] or not isinstance(leaf, torch.Tensor) else int(leaf)
    if "class" in structure:
        return _load_class(structure["class"])
    if "dict" in structure:
        return {key: _rebuild(part, leaves) for key, part in structure["dict"]}
    cls = _load_class(structure["object"])
    value = cls.__new__(cls)
    described = structure["attributes"]
    vars(value).update({name: _rebuild(part, leaves) for name, part in described.items()})
    vars(value).update({name: DERIVED[name](value) for name in described if name in DERIVED})
    if CROSS_CACHE in described and described[UPDATE_FLAGS] is None:
        setattr(value, UPDATE_FLAGS, _find_filled_layers(getattr(value, CROSS_CACHE)))
    if LENGTH_NUMBER in described:
        seen = torch.sym_min(getattr(value, LENGTH_NUMBER), getattr(value, MAX_LENGTH))
        setattr(value, LENGTH_TENSOR, torch.scalar_tensor(seen, dtype=torch.int64))
    return value


def _drop_update_flags(structure: Any) -> Any:
    """Return a structure in JSON without `UPDATE_FLAGS`, which then follow from the lengths."""
    if isinstance(structure, list):
        return [_drop_update_flags(part) for part in structure]
    if not isinstance(structure, dict):
        return structure
    return {k: None if k == UPDATE_FLAGS else _drop_update_flags(part) for k, part in structure.items()}


def _find_filled_layers(cross: Any) -> dict[int, bool]:
    """Return which layers of an encoder's cache are filled; in a trace none, and a layer appends what is missing."""
    found: dict[int, bool] = {}
    for index, layer in enumerate(cross.layers):
        seen = 0 if layer.keys is None else layer.keys.shape[2]
        if isinstance(seen, torch.SymInt):
            setattr(layer, IS_CROSS, True)
        else:
            found[index] = seen > 0
    return found


def _load_class(name: str) -> Any:
    """Return a class of an imported module: a saved module imports nothing besides transformers' caches."""
    module, _, qualified = name.partition(":")
    found: Any = importlib.import_module(MODULE) if module == MODULE else sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ModelError(
            f"the cache that the model was compiled for contains {name}, which is not imported. Import it."
        )
    return found


def _find_tensor(layer: Any) -> torch.Tensor | None:
    """Return a tensor of a layer; None before the layer holds any."""
    parts = [part for value in vars(layer).values() for part in (value.values() if type(value) is dict else [value])]
    return next((part for part in parts if isinstance(part, torch.Tensor) and part.ndim), None)
