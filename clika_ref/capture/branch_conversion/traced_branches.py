"""Trace both branches of a condition: find the tensors that they read, then add the condition to the trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode

from clika_ref.capture.attribute_snapshot import AttributeSnapshot
from clika_ref.capture.branch_conversion.merging import MergePlan
from clika_ref.capture.branch_conversion.site_record import SiteRecord
from clika_ref.capture.branch_conversion.traced_values import is_number_tensor, mark_as_number, mark_result
from clika_ref.capture.messages import BranchConversionError
from clika_ref.capture.origins import find_calling_line, format_line, is_model_file
from clika_ref.capture.saved_tensors import storage_id
from clika_ref.torch_internals.operators import cond_op, set_grad_enabled
from clika_ref.torch_internals.tensors import (
    DisableTorchFunction,
    detect_fake_mode,
    get_version,
    is_functorch_wrapped_tensor,
)
from clika_ref.torch_internals.tracing import ENTER_AUTOCAST, EXIT_AUTOCAST
from clika_ref.torch_internals.trees import pytree

if TYPE_CHECKING:
    import sympy

    from clika_ref.capture.branch_conversion.variables import Branch

SYMBOL_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

MAX_UNROLLED_CONDITIONS = 2000
"""Maximum number of conditions that run the rest of a loop, counting each run of a branch."""

MODE_FUNCTIONS = frozenset({set_grad_enabled, ENTER_AUTOCAST, EXIT_AUTOCAST})
"""Functions that traces record although they compute nothing."""


class ProbeScope(TorchFunctionMode):
    """Records the tensors and symbols that a branch reads from outside, and its writes to them."""

    def __init__(self, given: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.outer: dict[int, torch.Tensor] = {}
        """The tensors from outside, by id."""
        self.symbols: dict[sympy.Symbol, None] = {}
        """The symbols of sizes and numbers in calls."""
        self._made = {id(tensor): tensor for tensor in given}
        """The tensors that the branch gets or computes; keeps them alive, so that ids are not reused."""
        self._versions: dict[int, int] = {}
        self._write_lines: dict[int, str] = {}
        self.has_transforms = False
        """Whether the branch calls ``torch.vmap`` or another transform, whose tensors are no operands."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in MODE_FUNCTIONS:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        self.read(leaves)
        versions = [(leaf, get_version(leaf)) for leaf in leaves if id(leaf) in self.outer or id(leaf) in self._made]
        result = func(*args, **kwargs)
        for leaf, version in versions:
            if get_version(leaf) != version:
                self._write_lines.setdefault(storage_id(leaf), find_calling_line(sys._getframe(1)))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self.outer:
                self._made[id(leaf)] = leaf
        mark_result(result, leaves)
        return result

    def read(self, leaves: Iterable[Any]) -> None:
        """Record the tensors and symbols among the operands of a call."""
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and is_functorch_wrapped_tensor(leaf):
                self.has_transforms = True
            elif isinstance(leaf, torch.Tensor) and id(leaf) not in self._made and id(leaf) not in self.outer:
                self.outer[id(leaf)], self._versions[id(leaf)] = leaf, get_version(leaf)
            elif isinstance(leaf, SYMBOL_TYPES):
                self.symbols.update(dict.fromkeys(leaf.node.expr.free_symbols))

    def add_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record tensors that an inner loop computes without a call."""
        self._made.update({id(tensor): tensor for tensor in tensors})

    def find_writes(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Yield the tensors from outside that the branch wrote to, with the line of the write."""
        for key, tensor in self.outer.items():
            if get_version(tensor) != self._versions[key]:
                yield tensor, self._write_lines.get(storage_id(tensor), "")


class OperandScope(TorchFunctionMode):
    """Replaces tensors from outside by the operands of the condition in a trace of a branch."""

    def __init__(self, operands: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._operands = operands

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.resolve, (args, kwargs or {}))
        result = func(*args, **kwargs)
        mark_result(result, pytree.tree_leaves((args, kwargs)))
        return result

    def resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the operand for a tensor from outside, and any other tensor unchanged."""
        return self._operands.get(id(tensor), tensor)


@dataclass(frozen=True)
class Probe:
    """The value of a branch, computed outside of the trace, and what the branch reads."""

    value: Any
    outer: dict[int, torch.Tensor]
    symbols: dict[sympy.Symbol, None]


@dataclass
class BranchTracer:
    """Adds conditions and loops to the trace of a module."""

    module: torch.nn.Module
    scopes: list[ProbeScope | OperandScope] = field(default_factory=list[ProbeScope | OperandScope])
    """The branches that are being run, from the outermost one."""
    unrolled: int = 0
    """The number of conditions so far, in the branches of which the rest of a loop runs."""

    def trace_condition(
        self,
        site: SiteRecord,
        predicate: torch.Tensor | torch.SymBool,
        when_true: Branch,
        when_false: Branch,
    ) -> Any:
        """Add a condition to the trace; return the merged value of its branches.

        Raises:
            BranchConversionError: a branch has effects besides its value, or the values cannot be merged.
        """
        cases = (("if the condition is true", when_true), ("if the condition is false", when_false))
        probes = [self.probe(site, branch, case) for case, branch in cases]
        plan = MergePlan.of(site, *(probe.value for probe in probes))
        self.read([predicate])
        if self.is_probing:
            return plan.rebuild(plan.convert(probes[0].value))
        if not plan.output_count:
            return plan.rebuild(())
        tensors, symbols = self.select_operands(probes)

        def make_body(branch: Branch) -> Callable[..., tuple[torch.Tensor, ...]]:
            def body(*operands: Any) -> tuple[torch.Tensor, ...]:
                with self.use_operands(tensors, operands):
                    return plan.convert(self.resolve_leaves(branch.run()))

            return body

        operands = (*map(self.resolve, tensors), *symbols)
        results = cond_op(self.resolve(predicate), make_body(when_true), make_body(when_false), operands)
        return plan.rebuild(results)

    def count_unrolled(self, site: SiteRecord) -> None:
        """Count a condition in the branches of which the rest of a loop runs.

        Raises:
            BranchConversionError: there are too many, since several branches of an iteration go on with the next one.
        """
        self.unrolled += 1
        if self.unrolled > MAX_UNROLLED_CONDITIONS:
            raise site.reject(
                f"the graph would repeat the rest of the loop more than {MAX_UNROLLED_CONDITIONS} times. Leave the "
                "loop in one place, or use fewer iterations"
            )

    @property
    def is_probing(self) -> bool:
        """Whether a branch around the current code runs outside of the trace."""
        return bool(self.scopes) and isinstance(self.scopes[-1], ProbeScope)

    def probe(self, site: SiteRecord, branch: Branch, case: str, given: Sequence[torch.Tensor] = ()) -> Probe:
        """Run a branch outside of the trace; ``given`` are tensors that do not come from outside.

        Raises:
            BranchConversionError: the branch changes attributes or tensors from outside, or raises an error.
        """
        scope, mode = ProbeScope(given), detect_fake_mode()
        environment = mode.shape_env if mode is not None else None
        known = set() if environment is None else set(environment.var_to_range)
        ignored = contextlib.nullcontext() if environment is None else environment.ignore_fresh_unbacked_symbols()
        with self._reject_changes(site, branch, case), disable_proxy_modes_tracing(), ignored, self._enter(scope):
            value = self._run(site, branch, case)
            scope.read(pytree.tree_leaves(value))
        if scope.has_transforms:
            raise site.reject(f"{case}, it calls torch.vmap or torch.func. Move the call out of the branch")
        for tensor, line in scope.find_writes():
            raise site.reject(
                f"{case}, {line or 'a call'} writes to {self._find_name(tensor, branch)} in place. Compute a new "
                "tensor instead, such as x = x + 1 for x += 1"
            )
        return Probe(value, scope.outer, {s: None for s in scope.symbols if s in known})

    def _run(self, site: SiteRecord, branch: Branch, case: str) -> Any:
        try:
            return branch.run()
        except BranchConversionError:
            raise
        except Exception as error:
            line = _find_raising_line(error.__traceback__)
            if not line:
                raise
            raise site.reject(
                f"{case}, {line} raises {type(error).__name__}: {error}. Check values before the call of the model, "
                "and remove the branch"
            ) from error

    @contextlib.contextmanager
    def _reject_changes(self, site: SiteRecord, branch: Branch, case: str) -> Iterator[None]:
        """Reject a branch that changes attributes, or containers and globals that it reads."""
        if self.scopes:  # the outer branch is checked
            yield
            return
        before = AttributeSnapshot(self.module)
        before.add_outer_scopes(branch.function)
        yield
        changed = [name for name in before.find_changes() if not self._is_cache_of_torch(name)]
        if changed:
            before.restore()
            raise site.reject(
                f"{case}, it changes {', '.join(changed)}, and a graph has no such effects. Move the change out of the "
                "branch"
            )

    def _is_cache_of_torch(self, name: str) -> bool:
        """Whether an attribute belongs to a module of PyTorch, such as the weights that ``nn.LSTM`` collects."""
        path = name.removeprefix("self.").rpartition(".")[0]
        part = dict(self.module.named_modules()).get(path)
        return part is not None and type(part).__module__.startswith("torch.")

    def _find_name(self, tensor: torch.Tensor, branch: Branch) -> str:
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        function = branch.function
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable without a value
                named.append((name, cell.cell_contents))
        return next((name for name, value in named if value is tensor), "a tensor from outside")

    @contextlib.contextmanager
    def _enter(self, scope: ProbeScope | OperandScope) -> Iterator[None]:
        self.scopes.append(scope)
        try:
            with scope:
                yield
        finally:
            self.scopes.pop()

    def use_operands(
        self, tensors: Sequence[torch.Tensor], operands: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Run a branch on the operands of its condition or loop, in place of the tensors from outside."""
        pairs = [*zip(tensors, operands, strict=False)]  # symbols follow, which traces know by themselves
        for tensor, operand in pairs:
            if is_number_tensor(tensor):
                mark_as_number(operand)
        return self._enter(OperandScope({id(tensor): operand for tensor, operand in pairs}))

    def resolve(self, value: Any) -> Any:
        """Return the operand of the current branch for a tensor from outside, and any other value unchanged."""
        if isinstance(value, torch.Tensor) and self.scopes and isinstance(self.scopes[-1], OperandScope):
            return self.scopes[-1].resolve(value)
        return value

    def resolve_leaves(self, value: Any) -> Any:
        """Return a value with `resolve` applied to its tensors."""
        return pytree.tree_map_only(torch.Tensor, self.resolve, value)

    def read(self, leaves: Iterable[Any]) -> None:
        """Record values that the current branch reads without a call."""
        if self.is_probing:
            self.scopes[-1].read(leaves)  # type: ignore[union-attr]

    def make_tensors(self, types: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors of the given types, whose elements are not known, outside of the trace."""
        with DisableTorchFunction(), disable_proxy_modes_tracing():
            made = [torch.empty_like(type_) for type_ in types]
        for scope in self.scopes:
            if isinstance(scope, ProbeScope):
                scope.add_made(made)
        return made

    def select_operands(self, probes: Sequence[Probe]) -> tuple[list[torch.Tensor], list[Any]]:
        """Return the tensors from outside that branches read, and the symbols that are no dims of these."""
        tensors = {key: tensor for probe in probes for key, tensor in probe.outer.items()}
        sizes = (size for tensor in tensors.values() for size in tensor.shape)
        known = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
        needed = dict.fromkeys(symbol for probe in probes for symbol in probe.symbols if symbol not in known)
        return list(tensors.values()), [_make_number(symbol) for symbol in needed]


def _make_number(symbol: sympy.Symbol) -> Any:
    mode = detect_fake_mode()
    assert mode is not None
    assert mode.shape_env is not None
    return mode.shape_env.create_symintnode(symbol, hint=None)


def _find_raising_line(trace: TracebackType | None) -> str:
    """Return the line that raised an error if it is a line of the model."""
    line = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        line = format_line(file, trace.tb_lineno) if is_model_file(file) else ""
        trace = trace.tb_next
    return line
