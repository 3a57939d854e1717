"""Run the original model without side effects: weights, attributes, random state and inputs are preserved."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from clika_ref.capture.aten_schemas import METADATA_MUTATIONS, find_written_arguments
from clika_ref.capture.attribute_snapshot import AttributeSnapshot, can_assign
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.dataclass_pytrees import register_dataclasses
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.inputs_catcher import copy_leaf
from clika_ref.capture.memory_limits import release_freed_memory
from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.capture.saved_tensors import SavedTensor, is_same, narrow_to_stored, save_tensor, storage_id
from clika_ref.capture.state import WrittenAttributesError, collect_state, find_attribute_tensors
from clika_ref.core.comparison import describe_differences
from clika_ref.core.errors import ModelError
from clika_ref.core.types import TensorType
from clika_ref.torch_internals.modules import get_buffers
from clika_ref.torch_internals.operators import OpOverload, get_schema
from clika_ref.torch_internals.tensors import TorchDispatchMode, is_any_autocast_enabled
from clika_ref.torch_internals.trees import pytree


@dataclass(frozen=True)
class ModuleSnapshot:
    """A snapshot of a module, taken by `preserve_module`."""

    attributes: AttributeSnapshot
    tensors: list[SavedTensor]

    def find_writes(self) -> list[str]:
        """Return the attributes whose tensors were written to, except parameters and buffers."""
        return list(dict.fromkeys(t.name for t in self.tensors if not t.is_state and t.is_changed()))

    def find_new_elements(self) -> list[str]:
        """Return those of `find_writes` whose tensors only have other elements than before."""
        return [t.name for t in self.tensors if not t.is_state and t.has_new_elements()]

    def restore(self, *, state: bool = True) -> None:
        """Restore attributes and their tensors; parameters and buffers only with ``state``."""
        self.attributes.restore(state=state)
        with torch.no_grad():
            for tensor in self.tensors:
                if state or not tensor.is_state:
                    tensor.restore()


@dataclass(frozen=True)
class EagerRun:
    """The result of one eager call: its leaves and their structure; tensors are copies."""

    leaves: list[Any]
    structure: pytree.TreeSpec
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """The values, after the call, of the parameters and buffers that it writes to or rebinds."""
    changed: tuple[str, ...] = ()
    """The plain attributes that it changes, all of them caches."""
    unfit: str = ""
    """Rebindings to another shape or dtype that the next call does not read."""
    is_rerun: bool = False
    """Whether the model ran twice, because it has autocast regions."""


MISSING_HISTORY_ERROR = "does not require grad"
"""A part of PyTorch's error about a model that differentiates itself while no gradients are recorded."""


def run_eager(callee: TracedCallable, call: ModelCall) -> EagerRun:
    """Run a model on a call, without recording gradients unless it differentiates itself.

    Raises:
        ModelError: the model replaces the ``.data`` of a parameter or buffer. Or the next call reads an attribute that
            it changed, or a buffer that it rebound to another shape or dtype.
        WrittenAttributesError: the model writes to tensors that could be buffers.
    """
    try:
        return _run_recorded(callee, call, keeps_history=False)
    except RuntimeError as error:
        if not torch.is_grad_enabled() or MISSING_HISTORY_ERROR not in str(error):
            raise
    return _run_recorded(callee, call, keeps_history=True)


def _run_recorded(callee: TracedCallable, call: ModelCall, *, keeps_history: bool) -> EagerRun:
    """Run a model on a call, with gradients if ``keeps_history``."""
    recorder = _WriteRecorder(callee.module)
    with (
        release_freed_memory(),
        callee.as_module() as module,
        preserve_module(callee) as before,
        torch.no_grad(),
        recorder.undo_on_exit(),
    ):
        with _record_autocast_regions() as entered, torch.set_grad_enabled(keeps_history):
            run = _compute_results(module, call, recorder)
        if entered or is_any_autocast_enabled():
            before.restore()
            recorder.undo()
            history = torch.set_grad_enabled(keeps_history)
            run = replace(_compute_results(module, call, history), is_rerun=True)
        recorder.check_own_data()
        state, unfit = recorder.state(before), recorder.unfit()
        if tensors := find_attribute_tensors(callee.module, before.find_new_elements()):
            raise WrittenAttributesError(tensors)
        changed = [*before.attributes.find_changes(), *before.find_writes()]
        first = None if state else run
        if (unfit or changed) and _depends_on_attributes(before, callee, module, call, first):
            raise ModelError(_make_unfit_message(unfit) if unfit else _make_changed_message(callee, changed))
        return replace(run, state=state, changed=tuple(changed), unfit=unfit)


def _compute_results(
    module: torch.nn.Module, call: ModelCall, mode: contextlib.AbstractContextManager[Any]
) -> EagerRun:
    copy = call.copy()
    with call_without_dynamo(), mode, disable_fast_path():
        result = copy.run(module)
    register_dataclasses(result)
    leaves, spec = pytree.tree_flatten(result)
    # Clone: a buffer may be among the results, and is restored on exit.
    return EagerRun([copy_leaf(leaf) for leaf in leaves], spec)


@contextlib.contextmanager
def _record_autocast_regions() -> Iterator[list[torch.autocast]]:
    """Yield the autocast regions that are entered while the context lasts.

    Under a dispatch mode, autocast does not reach calls inside PyTorch's kernels, such as the matrix products of a
    bilinear layer. Detecting writes requires the mode, and correct numbers require running without it.
    """
    entered: list[torch.autocast] = []
    enter = torch.autocast.__enter__

    def record_and_enter(region: torch.autocast) -> Any:
        entered.append(region)
        return enter(region)

    with patch_attributes({(torch.autocast, "__enter__"): only_in_this_thread(record_and_enter, enter)}):
        yield entered


def _depends_on_attributes(
    before: ModuleSnapshot, callee: TracedCallable, module: torch.nn.Module, call: ModelCall, first: EagerRun | None
) -> bool:
    """Whether a second call returns other results with the attributes of the first call than with the original ones.

    If not, they are caches, and a graph computes them again. Parameters and buffers have the values of the second call
    in both runs, as a graph keeps their changes, except for values that no state can hold. ``first`` is the first call
    if it changed none of these: a second one with the same results needs no run with the original attributes.
    """

    def rerun() -> EagerRun:
        recorder = _WriteRecorder(callee.module)
        with preserve_module(callee), recorder.undo_on_exit():
            return _compute_results(module, call, recorder)

    try:
        found = rerun()
        if first is not None and _has_same_results(first, found):
            return False
        before.restore(state=False)
        fresh = rerun()
    except Exception:  # noqa: BLE001 - a model may raise anything, such as on a shape mismatch
        return True
    return not _has_same_results(fresh, found)


def _has_same_results(run: EagerRun, other: EagerRun) -> bool:
    return run.structure == other.structure and not describe_differences(run.leaves, other.leaves)


def _make_unfit_message(unfit: str) -> str:
    return (
        f"forward assigns {unfit}, and the next call reads it, but the state of a graph has a fixed shape and dtype. "
        "Register the buffer in its final shape and dtype and write to a part of it, or take it as an input and "
        "return it."
    )


def _make_changed_message(callee: TracedCallable, changed: list[str]) -> str:
    names = ", ".join(changed)
    return (
        f"{callee.name} returns a different result when it is called again with the same input: forward changes "
        f"{names}, and a graph does not keep attributes. Make it a buffer (self.register_buffer) of a fixed shape "
        "that forward writes to. If only the first call sets it, call the model once before you compile it."
    )


@contextlib.contextmanager
def disable_fast_path() -> Iterator[None]:
    """Make ``torch.nn``'s transformers compute call by call, as they do when gradients are recorded.

    Without gradients, eager makes one opaque call per encoder layer. It zeroes padded positions if the padding is at
    the end, so the result for a position depends on the values of the mask.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


FAST_PATH_WARNING = (
    "nn.TransformerEncoder returns zeros at padded positions in eval mode without gradients. The compiled module "
    "returns what it computes there, as eager does with gradients. Leave them out before you reduce over positions."
)
"""The difference between a compiled ``nn.TransformerEncoder`` and eager."""


def find_fast_path_difference(callee: TracedCallable, call: ModelCall, run: EagerRun) -> list[str]:
    """Return a warning if eager, without gradients, returns other results than its run: see `disable_fast_path`."""
    has_fast_path = any(isinstance(part, torch.nn.TransformerEncoderLayer) for part in callee.module.modules())
    if not has_fast_path or callee.module.training or not torch.backends.mha.get_fastpath_enabled():
        return []
    copy = call.copy()
    with callee.as_module() as module, preserve_module(callee), torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors", UserWarning)
        with call_without_dynamo():
            fast = EagerRun(*pytree.tree_flatten(copy.run(module)))
    return [] if _has_same_results(run, fast) else [FAST_PATH_WARNING]


@contextlib.contextmanager
def isolate_writes(module: torch.nn.Module) -> Iterator[None]:
    """Make calls with gradients write to copies of buffers, and undo their writes to parameters.

    Enter it within `preserve_module`, which binds the original buffers again: a buffer that was written to is no longer
    a leaf.
    """
    recorder = _WriteRecorder(module)
    for part in module.modules():
        buffers = get_buffers(part)
        buffers.update({n: b.detach().clone() for n, b in buffers.items() if b is not None})
    with recorder.undo_on_exit(), call_without_dynamo(), recorder:
        yield


def call_without_dynamo() -> contextlib.AbstractContextManager[None]:
    """Run compiled functions, and those of `torch.cond` and other control flow, in plain Python.

    Under a dispatch mode, Dynamo skips their code, and would skip it for the rest of the process.
    """
    return torch.compiler.set_stance("force_eager")


class _WriteRecorder(TorchDispatchMode):
    """Copies each parameter before a call writes to it, and copies nothing for a model without such writes."""

    supports_higher_order_operators = True

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module
        self._written: set[str] = set()
        """The parameters that were written to."""
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before = collect_state(module)
        self._tensors = {n: (t, t.detach()) for n, t in self._before.items() if t is not None}
        self._watched: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in module.named_parameters():
            self._watched.setdefault(storage_id(parameter), []).append((name, parameter.detach()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and get_schema(func).is_mutable and func not in METADATA_MUTATIONS:
            for written in pytree.tree_leaves(find_written_arguments(func, args, kwargs or {})):
                for name, data in self._watched.pop(storage_id(written), ()):
                    self._written.add(name)
                    self._copies.append((data, data.clone()))
        return func(*args, **(kwargs or {}))

    def check_own_data(self) -> None:
        """Reject replaced ``.data`` of parameters and buffers, unless it holds the same elements."""
        for name, (tensor, data) in self._tensors.items():
            if storage_id(tensor) != storage_id(data) and not is_same(tensor, data):
                raise ModelError(
                    f"forward assigns to the .data of {name!r}, which a graph cannot represent. Write to it in place: "
                    f"with torch.no_grad(): self.{name}.copy_(...)"
                )

    def state(self, before: ModuleSnapshot) -> dict[str, torch.Tensor]:
        """Return the values of parameters and buffers that were rebound or written to, that is, that changed.

        Raises:
            ModelError: an expanded tensor was rebound; its memory cannot hold arbitrary values.
        """
        for name, old, new in self._pairs():
            if new is not old and can_assign(old, new) and narrow_to_stored(old) is not old:
                raise ModelError(
                    f"forward assigns to {name!r}, which was registered as an expanded tensor: its elements share "
                    "memory, and a graph cannot write to it. Register a copy of it: tensor.clone(), or contiguous()."
                )
        buffers = [t for t in before.tensors if t.is_state and not isinstance(t.tensor, torch.nn.Parameter)]
        # _WriteRecorder watches parameters itself.
        changed = {id(buffer.tensor) for buffer in buffers if buffer.is_changed()}
        changed |= {id(self._before[name]) for name in self._written}  # by id, to include tied names
        return {
            name: new.detach().clone()
            for name, old, new in self._pairs()
            if can_assign(old, new) and (new is not old or id(old) in changed)
        }

    def unfit(self) -> str:
        """Describe rebindings to another shape or dtype, which state cannot hold; "" if there are none."""
        return ", ".join(
            f"{n!r} to {_format_type(new)} from {_format_type(old)}"
            for n, old, new in self._pairs()
            if not can_assign(old, new)
        )

    def _pairs(self) -> Iterator[tuple[str, Any, Any]]:
        after = collect_state(self._module)
        return ((name, old, after.get(name)) for name, old in self._before.items())

    @contextlib.contextmanager
    def undo_on_exit(self) -> Iterator[None]:
        """Undo writes to parameters on exit."""
        try:
            yield
        finally:
            self.undo()

    def undo(self) -> None:
        """Undo the writes to parameters so far."""
        for data, copy in self._copies:
            data.copy_(copy)


def _format_type(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else str(TensorType.of(tensor))


@contextlib.contextmanager
def preserve_module(callee: TracedCallable, *, outside: bool = False) -> Iterator[ModuleSnapshot]:
    """Restore written, rebound and cached values, and the random state, on exit.

    With ``outside``, also restore globals and closures: a tracer leaves traced values there, while eager's results may
    stay.

    Attributes, and the data of buffers and plain tensors, are always restored. Parameters, and tensors in their memory,
    are restored if the user keeps the model, as this takes a second copy of them: `_WriteRecorder` copies only written
    ones.
    """
    attributes = AttributeSnapshot(callee.module)
    parameters, buffers = dict(callee.module.named_parameters()), dict(callee.module.named_buffers())
    storages = {storage_id(t) for t in (*parameters.values(), *buffers.values())}
    tensors = [
        *(save_tensor(n, t, is_state=True) for n, t in buffers.items()),
        *(save_tensor(n, t, is_state=True, copied=callee.is_preserved) for n, t in parameters.items()),
        *(_save_plain_tensor(n, t, callee, storages) for n, t in attributes.tensors),
    ]
    if outside:
        attributes.add_outer_scopes(callee.function)
    before = ModuleSnapshot(attributes, tensors)
    with torch.random.fork_rng(devices=[]):
        try:
            yield before
        finally:
            before.restore()


def _save_plain_tensor(name: str, tensor: torch.Tensor, callee: TracedCallable, storages: set[int]) -> SavedTensor:
    is_state = storage_id(tensor) in storages
    return save_tensor(name, tensor, is_state=is_state, copied=callee.is_preserved or not is_state)
