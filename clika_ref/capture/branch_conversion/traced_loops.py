"""Trace a loop whose condition depends on the values of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from clika_ref.capture.branch_conversion.merging import (
    NUMBER_TYPES,
    PLAIN_TYPES,
    describe_value,
    has_same_type,
    is_same_number,
)
from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.traced_values import (
    is_number_tensor,
    is_traced,
    number_dtype,
    number_to_tensor,
    restore_leaves,
    to_predicate,
)
from clika_ref.capture.branch_conversion.variables import Branch, SharedVariables, Unbound, reject_unbound
from clika_ref.capture.messages import BranchConversionError
from clika_ref.torch_internals.operators import while_loop_op
from clika_ref.torch_internals.trees import pytree

if TYPE_CHECKING:
    from clika_ref.capture.branch_conversion.traced_branches import BranchTracer, Probe


def trace_loop(
    site: SiteRecord,
    tracer: BranchTracer,
    variables: SharedVariables,
    test: FunctionType,
    body: FunctionType,
) -> None:
    """Add a loop to the trace, and set the variables to their values after it.

    Raises:
        BranchConversionError: an iteration has effects besides its variables, or changes their types.
    """
    variables.assign(_Loop(site, tracer, variables, test, body).trace())
    if site.description.tested:
        test()  # its last run assigns variables, which the condition of a loop cannot return


@dataclass
class _CarriedLeaf:
    """A leaf of the variables of a loop: a constant, or a tensor that iterations change."""

    initial: Any
    path: tuple[Any, ...]
    type: torch.Tensor | None = None
    """A tensor of the carried type; None for a constant."""
    is_number: bool = False
    """Whether it is a Python number in eager."""


class _Loop:
    def __init__(
        self,
        site: SiteRecord,
        tracer: BranchTracer,
        variables: SharedVariables,
        test: FunctionType,
        body: FunctionType,
    ) -> None:
        self._site, self._tracer, self._variables = site, tracer, variables
        self._test, self._body = test, body
        self._names = [name for name in variables.merged if name not in site.description.tested]
        before = {name: variables.read(name) for name in self._names}
        for name, value in before.items():
            if value is Unbound:
                raise reject_unbound(site, name, has_value="after an iteration of the loop")
        found, self._spec = pytree.tree_flatten_with_path(before)
        self._leaves = [_CarriedLeaf(leaf, path) for path, leaf in found]

    def trace(self) -> dict[str, Any]:
        """Return the variables after the loop."""
        with disable_proxy_modes_tracing():
            probes = self._find_carried()
        carried = [leaf for leaf in self._leaves if leaf.type is not None]
        tracer = self._tracer
        tracer.read(leaf.initial for leaf in carried)
        if tracer.is_probing:
            return self._rebuild(self._make_carried())
        tensors, symbols = tracer.select_operands(probes)

        def run_test(*operands: Any) -> torch.Tensor:
            with tracer.use_operands(tensors, operands[len(carried) :]), self._variables.preserve():
                self._variables.assign(self._rebuild(operands[: len(carried)]))
                return _to_tensor(tracer.resolve(to_predicate(self._test())))

        def run_body(*operands: Any) -> tuple[torch.Tensor, ...]:
            with tracer.use_operands(tensors, operands[len(carried) :]), self._variables.preserve():
                self._variables.assign(self._rebuild(operands[: len(carried)]))
                self._run_body()
                return self._read_carried(tracer.resolve)

        start: Any = tuple(_convert(tracer.resolve(leaf.initial), leaf.type) for leaf in carried)
        operands = (*map(tracer.resolve, tensors), *symbols)
        return self._rebuild(while_loop_op(run_test, run_body, start, operands))

    def _run_body(self) -> None:
        if self._site.description.tested:
            self._test()
        self._body()

    def _rebuild(self, tensors: Any) -> dict[str, Any]:
        """Return the variables with the given tensors as carried leaves."""
        leaves = [(leaf.initial, leaf.type is None, leaf.is_number) for leaf in self._leaves]
        return pytree.tree_unflatten(restore_leaves(leaves, tensors), self._spec)

    def _read_carried(self, resolve: Callable[[Any], Any]) -> tuple[torch.Tensor, ...]:
        leaves = pytree.tree_leaves({name: self._variables.read(name) for name in self._names})
        pairs = zip(self._leaves, leaves, strict=True)
        return tuple(_convert(resolve(leaf), known.type) for known, leaf in pairs if known.type is not None)

    def _find_carried(self) -> list[Probe]:
        """Find the leaves that iterations change, and their types, by runs of the body until nothing changes.

        A variable may change in a later iteration only, as it depends on another one.
        """
        while True:
            given = self._make_carried()
            iteration = Branch(self._body, partial(self._run_iteration, given))
            probe = self._tracer.probe(self._site, iteration, "in an iteration", given)
            condition, after = probe.value
            found, spec = pytree.tree_flatten(after)
            if spec != self._spec:
                raise self._reject_types(*_find_different_variables(self._initial_values(), after))
            changes = [self._update(leaf, new) for leaf, new in zip(self._leaves, found, strict=True)]
            if not any(changes):
                if not is_traced(condition):
                    raise self._site.reject(
                        "its condition is a tensor before the first iteration only. Compute it from tensors in each"
                    )
                return [probe]

    def _initial_values(self) -> dict[str, Any]:
        return pytree.tree_unflatten([leaf.initial for leaf in self._leaves], self._spec)

    def _make_carried(self) -> list[torch.Tensor]:
        return self._tracer.make_tensors([leaf.type for leaf in self._leaves if leaf.type is not None])

    def _run_iteration(self, carried: list[torch.Tensor]) -> tuple[Any, dict[str, Any]]:
        """Run the body and the test on tensors of the carried types."""
        variables = self._variables
        with variables.preserve():
            variables.assign(self._rebuild(carried))
            self._run_body()
            after = {name: variables.read(name) for name in self._names}
            return self._test(), after

    def _update(self, leaf: _CarriedLeaf, new: Any) -> bool:
        """Adapt the carried type of a leaf to its value after an iteration; return whether that changes it."""
        current = leaf.initial if leaf.type is None else leaf.type
        if leaf.type is None and (new is current or _is_equal(current, new)):
            return False
        found = _find_type(leaf.initial, new)
        if found is None:
            raise self._reject_types(leaf.path, leaf.initial, new)
        if leaf.type is not None and has_same_type(leaf.type, found):
            return False
        leaf.type = found
        leaf.is_number = all(isinstance(x, NUMBER_TYPES) or is_number_tensor(x) for x in (leaf.initial, new))
        return True

    def _reject_types(self, path: tuple[Any, ...], one: Any, other: Any) -> BranchConversionError:
        name = f"{getattr(path[0], 'key', path[0])}{pytree.keystr(path[1:])}"
        return self._site.reject(
            f"{name} is {describe_value(one)} before the loop, and {describe_value(other)} after an iteration. Keep "
            "one type and shape"
        )


def _find_different_variables(before: dict[str, Any], after: dict[str, Any]) -> tuple[tuple[Any, ...], Any, Any]:
    different = (n for n in before if pytree.tree_structure(before[n]) != pytree.tree_structure(after[n]))
    name = next(different)
    return (pytree.MappingKey(name),), before[name], after[name]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, NUMBER_TYPES) and isinstance(other, NUMBER_TYPES):
        return is_same_number(one, other)
    return type(one) is type(other) and isinstance(one, PLAIN_TYPES) and one == other


def _find_type(initial: Any, new: Any) -> torch.Tensor | None:
    """Return a tensor of the type that holds both the first and a later value of a variable; None if there is none."""
    if isinstance(initial, torch.Tensor):
        if isinstance(new, torch.Tensor):
            return initial if has_same_type(initial, new) else None
        is_number = isinstance(new, NUMBER_TYPES) and not initial.ndim
        return initial if is_number and _promote(initial.dtype, number_dtype(new)) == initial.dtype else None
    if not isinstance(initial, NUMBER_TYPES) or not isinstance(new, (torch.Tensor, *NUMBER_TYPES)):
        return None
    if isinstance(new, torch.Tensor) and new.ndim:
        return None
    dtype = new.dtype if isinstance(new, torch.Tensor) else number_dtype(new)
    return torch.empty((), dtype=_promote(number_dtype(initial), dtype))


def _promote(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return torch.promote_types(one, other)


def _convert(leaf: Any, type_: torch.Tensor | None) -> torch.Tensor:
    """Return a leaf as a tensor of the carried type, in memory of its own."""
    assert type_ is not None
    if not isinstance(leaf, torch.Tensor):
        return number_to_tensor(leaf, type_.dtype)
    return leaf.to(type_.dtype).clone(memory_format=torch.contiguous_format)


def _to_tensor(predicate: torch.Tensor | torch.SymBool) -> torch.Tensor:
    if isinstance(predicate, torch.SymBool):
        return number_to_tensor(predicate)
    return predicate.clone()
