"""Prepare the tracing calls: check their common structure, find the dims that differ, and run eager on each."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from clika_ref.capture.caches import BATCH, CacheTree, contains_cache_tree, fill_empty_caches, list_cache_dims
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.dataclass_pytrees import iter_leaves_with_path
from clika_ref.capture.dimensions import InputComparison, InputDim, compare_inputs
from clika_ref.capture.eager import EagerRun, run_eager
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.signature import LIST_ARGUMENT_HINT, as_call, bind, flatten_call, nest
from clika_ref.core.comparison import describe_differences
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.symbols import check
from clika_ref.torch_internals.trees import get_node_type, pytree

RETURNABLE_TYPES = (torch.Tensor, int, float, str, type(None))
"""Types that a model may return, in any nesting; torch.export takes no others."""

UNUSUAL_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8}
"""Dtypes of inputs to convert if the weights have another one; the others are indices, sizes or masks."""


@dataclass(frozen=True)
class TracedCalls:
    """The tracing calls, flattened: their leaves, and the eager results of each."""

    callee: TracedCallable
    comparison: InputComparison
    arguments: tuple[str, ...]
    specs: tuple[pytree.TreeSpec, ...]
    expected: list[EagerRun]

    @property
    def written(self) -> frozenset[str]:
        """The names of the parameters and buffers that eager writes to or rebinds."""
        return frozenset(name for run in self.expected for name in run.state)

    @property
    def cache_names(self) -> frozenset[str]:
        """The names of the attributes that eager keeps results in for later calls."""
        return frozenset(name for run in self.expected for name in run.changed)

    @property
    def parameters(self) -> inspect.Signature:
        """The signature of the traced function."""
        return self.callee.parameters

    @property
    def traceable_callee(self) -> TracedCallable:
        """The callable to pass to tracers."""
        explicit = self.callee.with_explicit_arguments(self.arguments)
        specs = (*self.specs, *(run.structure for run in self.expected))
        if not any(map(contains_cache_tree, specs)):
            return explicit
        equal = self._find_equal_dims()

        def declare_equal_sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = bind(explicit.parameters, args, kwargs)
            leaves = [leaf for name in self.arguments for leaf in pytree.tree_leaves(given[name])]
            for group in equal:
                first, *others = (leaves[leaf].shape[dim] for leaf, dim in group)
                for other in others:
                    check(first == other)

        return explicit.with_cache_trees(declare_equal_sizes)

    def _find_equal_dims(self) -> list[list[tuple[int, int]]]:
        """Return groups of leaves and dims with equal sizes in each call of a model with caches.

        The batch is that of all inputs, unless the calls differ. Otherwise each layer has a length of its own, and an
        artifact would depend on relations between them.
        """
        kinds = [dims for spec in self.specs for dims in list_cache_dims(spec)]
        found = defaultdict[tuple[int, str], list[tuple[int, int]]](list)
        for number, group in enumerate(self.comparison.groups):
            dims = [(d.leaf, d.dim) for d in group if d.dim is not None]
            is_batch = any(kinds[leaf].get(dim) == BATCH for leaf, dim in dims)
            for leaf, dim in dims:
                kind = kinds[leaf].get(dim, BATCH if is_batch and dim == 0 else "")
                if kind:
                    found[number, kind].append((leaf, dim))
        return [same for same in found.values() if len(same) > 1]

    def with_static_dims(self, dims: Collection[InputDim]) -> TracedCalls:
        """Return the calls with some dims static, at the size of the leaves that a trace gets."""
        sizes = {dim: lengths for dim, lengths in self.comparison.sizes.items() if dim not in dims}
        return replace(self, comparison=replace(self.comparison, sizes=sizes)) if dims else self

    def rebuild(self, leaves: Sequence[Any]) -> ModelCall:
        """Return a call made of the given leaves."""
        return ModelCall(*as_call(self.parameters, nest(self.arguments, self.specs, leaves)))

    def dynamic_shapes(self) -> dict[str, Any] | None:
        """Return the ``dynamic_shapes`` argument of torch.export."""
        if not self.comparison.sizes:
            return None
        dims: list[Any] = []
        for index, leaf in enumerate(self.comparison.calls[0]):
            differing_dims = [s.dim for s in self.comparison.sizes if s.leaf == index]
            if isinstance(leaf, torch.Tensor):
                dims.append({d: torch.export.Dim.AUTO for d in differing_dims if d is not None} or None)
            else:
                dims.append(torch.export.Dim.AUTO if differing_dims else None)
        call, remaining = self.rebuild(self.comparison.calls[0]), iter(dims)
        return {
            name: _replace_leaves(value, remaining)
            for name, value in self.traceable_callee.parameters.bind(*call.args, **call.kwargs).arguments.items()
        }


def _replace_leaves(value: Any, dims: Iterator[Any]) -> Any:
    """Return a nested value with its leaves replaced in order, in torch.export's format: user classes become lists."""
    kind = get_node_type(value)
    if kind not in pytree.SUPPORTED_NODES:
        return next(dims)
    node = pytree.SUPPORTED_NODES[kind]
    children, context = node.flatten_fn(value)
    replaced = [_replace_leaves(child, dims) for child in children]
    return node.unflatten_fn(replaced, context) if kind in pytree.BUILTIN_TYPES else type(children)(replaced)


def flatten_calls(callee: TracedCallable, calls: Sequence[ModelCall], *, dynamic: bool) -> TracedCalls:
    """Flatten calls, check that they have the same structure, and run eager on each.

    Raises:
        ModelError: the structures differ, or eager itself fails on an input.
    """
    given, calls = calls, _fill_empty_caches(callee, calls)
    flat = [_flatten(callee, call) for call in calls]
    arguments, specs, names, _ = flat[0]
    for call, other in zip(calls[1:], flat[1:], strict=True):
        if other[:2] != (arguments, specs):
            given, expected = (dict(zip(*parts, strict=True)) for parts in (other[:2], (arguments, specs)))
            raise ModelError(
                f"{call.label} has a different structure than {calls[0].label}: {given} instead of {expected}. Give "
                "inputs of one structure."
            )
    comparison = compare_inputs(names, [leaves for *_, leaves in flat], [call.label for call in calls], dynamic=dynamic)
    runs = [_run_original(callee, call, leaves) for call, (*_, leaves) in zip(calls, flat, strict=True)]
    for before, call, run in zip(given, calls, runs, strict=True):
        if call is not before:
            _check_filled_cache(callee, before, run)
    return TracedCalls(callee, comparison, arguments, specs, runs)


def _fill_empty_caches(callee: TracedCallable, calls: Sequence[ModelCall]) -> Sequence[ModelCall]:
    """Return calls with an empty cache in place of None where others have a filled one."""
    if not any(isinstance(value, CacheTree) for call in calls for value in (*call.args, *call.kwargs.values())):
        return calls
    given = [bind(callee.parameters, call.args, call.kwargs) for call in calls]
    filled = fill_empty_caches(given)
    return [
        call if all(after[name] is before.get(name) for name in after) else _replace_arguments(callee, call, after)
        for call, before, after in zip(calls, given, filled, strict=True)
    ]


def _replace_arguments(callee: TracedCallable, call: ModelCall, given: dict[str, Any]) -> ModelCall:
    args, kwargs = as_call(callee.parameters, given)
    return replace(call, args=args, kwargs=kwargs)


def _check_filled_cache(callee: TracedCallable, call: ModelCall, run: EagerRun) -> None:
    """Check that a model returns the same results for a call without a cache as with an empty one.

    Raises:
        ModelError: they differ.
    """
    expected = run_eager(callee, call)
    tensors = [[x for x in r.leaves if isinstance(x, torch.Tensor)] for r in (expected, run)]
    if len(tensors[0]) != len(tensors[1]) or describe_differences(tensors[0], tensors[1]):
        raise ModelError(
            f"{callee.name} returns other results for {call.label}, which has no cache, than with an empty cache, as "
            "one graph for all calls needs. Compile the first call and the following ones separately."
        )


def _flatten(
    callee: TracedCallable, call: ModelCall
) -> tuple[tuple[str, ...], tuple[pytree.TreeSpec, ...], list[str], list[Any]]:
    try:
        return flatten_call(callee.parameters, call.args, call.kwargs)
    except ModelError as error:
        stray = _suggest_arguments(callee, call)
        if not stray:
            raise
        raise ModelError(f"{error}{stray}") from error


def _suggest_arguments(callee: TracedCallable, call: ModelCall) -> str:
    """Return a hint for a failed call if its last argument was perhaps meant as several arguments or as keywords."""
    last = call.args[-1] if call.args and not call.kwargs else None
    if isinstance(last, list) and len(call.args) == 1:
        return LIST_ARGUMENT_HINT
    known = list(callee.parameters.parameters)
    stray = [key for key in last if key not in known] if isinstance(last, dict) else []
    if not stray:
        return ""
    keys = ", ".join(map(repr, stray))
    return f". No argument {keys}: forward takes {', '.join(known)}, so the dict is passed as one argument."


def _suggest_conversion(callee: TracedCallable, leaves: Sequence[Any]) -> str:
    """Return a hint for a failed call if an input has another dtype than the weights."""
    weights = {p.dtype for p in callee.module.parameters()}
    given = {x.dtype for x in leaves if isinstance(x, torch.Tensor)} & UNUSUAL_DTYPES - weights
    if len(weights) != 1 or not given:
        return ""
    (weight,), names = weights, " and ".join(sorted(map(str, given)))
    return (
        f". Its weights are {weight}, but inputs are {names}: convert these, for example with data_transform_fn="
        f"lambda batch: batch.to({weight})"
    )


def _run_original(callee: TracedCallable, call: ModelCall, leaves: Sequence[Any]) -> EagerRun:
    try:
        run = run_eager(callee, call)
    except ModelError:
        raise
    except Exception as error:
        msg = f"{callee.name} itself fails in eager mode on {call.label}: {type(error).__name__}: {error}"
        msg += _suggest_arguments(callee, call) or _suggest_conversion(callee, leaves)
        raise ModelError(msg) from error
    for path, leaf in iter_leaves_with_path(run.structure.unflatten(run.leaves)):
        if not isinstance(leaf, RETURNABLE_TYPES):
            location = pytree.keystr(path)
            msg = (
                f"{callee.name} returns a {type(leaf).__name__} (result{location}), but its tensors are not known to "
                "PyTorch. Return tensors in tuples, lists, dicts or dataclasses, or register the class with "
                "torch.utils._pytree.register_pytree_node."
            )
            if type(leaf).__name__.endswith("Cache"):
                msg += " Caches are supported if they derive from the class Cache of transformers."
            raise ModelError(msg)
    return run
