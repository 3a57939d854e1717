"""Derivatives in forward (``torch.func``, ``torch.autograd.grad``): a trace records the calls that compute them."""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, set_proxy_slot
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from clika_ref.capture.patching import only_outside_dynamo, patch_attributes, patch_functions
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.operators import OpOverload, get_schema, is_composite
from clika_ref.torch_internals.tensors import is_functorch_wrapped_tensor
from clika_ref.torch_internals.tracing import (
    FUNCTION_TRANSFORMS,
    VECTOR_JACOBIAN_PRODUCT,
    find_proxy_mode,
    pause_pre_dispatch_functions,
    pop_pre_dispatch_mode,
    pop_saved_tensors_hooks,
    push_pre_dispatch_mode,
    push_saved_tensors_hooks,
)
from clika_ref.torch_internals.trees import pytree

SIZE_CALLS = frozenset({torch.ops.aten.size.default, torch.ops.aten.stride.default})
"""Composite calls that return sizes, and no tensors."""


def _make_tangent(tangent: torch.Tensor, primal: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    return tangent.new_zeros([*tangent.shape[:self_num_batch_dims], *primal.shape])


TANGENT_FORMS: dict[OpOverload, Callable[..., torch.Tensor]] = {
    torch.ops.aten._efficientzerotensor.default: torch.zeros,
    torch.ops.aten._new_zeros_with_same_feature_meta.default: _make_tangent,
}
"""Forms of zero tangents, which have no storage, or the strides of another tensor."""


class CompositeRecordedError(RuntimeError):
    """``torch.autograd.grad`` differentiates composite calls, whose inner results the trace did not record."""


@contextlib.contextmanager
def trace_derivatives(*, decompose_composites: bool) -> Iterator[None]:
    """Make a trace record the calls that compute derivatives in forward, while the context lasts.

    Args:
        decompose_composites: whether to record composite calls as the calls that they make. The backward of
            ``torch.autograd.grad`` reads their results.
    """
    differentiate, vjp = torch.autograd.grad, getattr(*VECTOR_JACOBIAN_PRODUCT)
    saved = _SavedTensors() if decompose_composites else None

    def differentiate_or_restart(*args: Any, **kwargs: Any) -> Any:
        caller = _find_caller()
        if caller.startswith("torch.") and caller != "torch.autograd.functional":
            return differentiate(*args, **kwargs)  # PyTorch traces the backward of a body of control flow
        mode = find_proxy_mode()
        if mode is not None and mode.pre_dispatch and not decompose_composites:
            raise CompositeRecordedError("torch.autograd.grad in forward needs the calls inside composite calls")
        with _record_below_autograd(keeps_history=False):
            found = differentiate(*args, **kwargs)
        keeps_history = kwargs.get("create_graph", args[4] if len(args) > 4 else False)
        return found if keeps_history else tuple(g if g is None else g.detach() for g in found)

    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _record_below_autograd(), saved.pause() if saved else contextlib.nullcontext():
                return function(*args, **kwargs)

        return call

    def pull_back(*args: Any, **kwargs: Any) -> Any:
        results, function, *rest = transform(vjp)(*args, **kwargs)
        return results, transform(function), *rest

    replacements: dict[tuple[Any, str], Any] = {
        place: only_outside_dynamo(transform(getattr(*place)), getattr(*place)) for place in FUNCTION_TRANSFORMS
    }
    replacements[VECTOR_JACOBIAN_PRODUCT] = only_outside_dynamo(pull_back, vjp)
    backward = torch.autograd.backward
    functions = {
        differentiate: only_outside_dynamo(differentiate_or_restart, differentiate),
        backward: only_outside_dynamo(_reject_backward, backward),
    }
    if decompose_composites:
        record = ProxyTorchDispatchMode.__torch_dispatch__
        replacements[ProxyTorchDispatchMode, "__torch_dispatch__"] = only_outside_dynamo(
            _decompose_composites(record), record
        )
    with (
        patch_attributes(replacements),
        patch_functions(functions),
        saved.keep() if saved else contextlib.nullcontext(),
    ):
        yield


def _find_caller() -> str:
    """Return the module that calls a replaced function."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("clika_ref.capture."):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")


class _SavedTensors:
    """Keeps the tensors that autograd saves as the objects that the trace knows, not as copies without history."""

    def __init__(self) -> None:
        self.holders: list[list[torch.Tensor]] = []
        self.is_active = False

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Keep the tensors that are saved while the context lasts."""
        self.is_active = True
        try:
            with saved_tensors_hooks(self._pack, operator.itemgetter(0)):
                yield
        finally:
            self.is_active = False
            for holder in self.holders:  # a result refers to the call, which refers to the result
                holder.clear()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Leave saved tensors to PyTorch while the context lasts: transforms of functions support no hooks."""
        if not self.is_active:
            yield
            return
        self.is_active = False
        pop_saved_tensors_hooks()
        try:
            yield
        finally:
            push_saved_tensors_hooks(self._pack, operator.itemgetter(0))
            self.is_active = True

    def _pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.holders.append([tensor])
        return self.holders[-1]


def _reject_backward(*_args: Any, **_kwargs: Any) -> None:
    raise ModelError(
        "forward calls backward, which writes to the .grad of tensors, and a graph has no such writes. Call "
        "torch.autograd.grad(y, x), and use its results in place of x.grad."
    )


def _decompose_composites(record: Callable[..., Any]) -> Callable[..., Any]:
    def decompose_or_record(
        mode: ProxyTorchDispatchMode, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if mode.pre_dispatch and func not in SIZE_CALLS and is_composite(func):
            with mode, sdpa_kernel(SDPBackend.MATH):
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return record(mode, func, types, args, kwargs)

    return decompose_or_record


@contextlib.contextmanager
def _record_below_autograd(*, keeps_history: bool = True) -> Iterator[None]:
    """Make a trace record the calls that autograd and function transforms make, while the context lasts.

    Args:
        keeps_history: whether results computed under ``no_grad`` must have no history, in a model that trains.
    """
    outer = find_proxy_mode()
    if outer is None or not outer.pre_dispatch:
        yield
        return
    own = _RecordingBelowAutograd(outer.tracer, outer.tracing_mode, keeps_history and torch.is_grad_enabled())
    popped = pop_pre_dispatch_mode()
    try:
        # The fused attention kernels have a backward without a decomposition.
        with pause_pre_dispatch_functions(), own, _SeeModelCalls(own), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        push_pre_dispatch_mode(popped)


class _RecordingBelowAutograd(ProxyTorchDispatchMode):
    """Records calls below autograd, with a detach where the model detaches, and nowhere else."""

    def __init__(self, tracer: Any, tracing_mode: Any, detaches_results: bool) -> None:  # noqa: FBT001 - private
        super().__init__(tracer, tracing_mode)
        self.detaches_results = detaches_results
        self.is_detaching = False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default and not self.is_detaching:
            return self._take_saved(args[0])
        if func in TANGENT_FORMS:
            with self:
                return TANGENT_FORMS[func](*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.detaches_results and not torch.is_grad_enabled() and not get_schema(func).is_mutable:
            return pytree.tree_map_only(torch.Tensor, self._detach, result)
        return result

    def _take_saved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that autograd saved for the backward, without a call in the trace."""
        result = torch.ops.aten.detach.default(tensor)
        found = get_proxy_slot(tensor, self.tracer, None)
        if found is not None:
            set_proxy_slot(result, self.tracer, found)
        return result

    def _detach(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_floating_point() and not tensor.is_complex():
            return tensor
        return super().__torch_dispatch__(torch.ops.aten.detach.default, (), (tensor,))


class _SeeModelCalls(TorchFunctionMode):
    """Sees the calls of a model itself: it marks those that detach, and keeps the sizes of linear layers dynamic."""

    def __init__(self, recording: _RecordingBelowAutograd) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is linear and is_functorch_wrapped_tensor(args[0] if args else given["input"]):
            return _add_bias_last(*args, **given)
        marks = func in (torch.Tensor.detach, torch.detach)
        was, self.recording.is_detaching = self.recording.is_detaching, self.recording.is_detaching or marks
        try:
            return func(*args, **given)
        finally:
            self.recording.is_detaching = was


def _add_bias_last(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a linear layer: PyTorch's form for inputs of three dims with a bias fixes the sizes of wrapped tensors."""
    return linear(input, weight, bias) if bias is None or input.ndim == 2 else linear(input, weight) + bias
