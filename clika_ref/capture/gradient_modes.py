"""Make PyTorch's tracers see regions with and without gradients correctly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from clika_ref.capture.patching import only_in_this_thread, patch_attributes
from clika_ref.torch_internals.operators import set_grad_enabled
from clika_ref.torch_internals.tracing import APPLY_AUTOGRAD_FUNCTION, ENTER_AUTOCAST, FIND_FIRST_MODE_CHANGE


@contextlib.contextmanager
def trace_gradient_modes() -> Iterator[None]:
    """Make a trace record every region with and without gradients as eager trains it."""
    with _replace_inference_mode(), _find_regions_in_autocast(), _inline_autograd_functions():
        yield


@contextlib.contextmanager
def _replace_inference_mode() -> Iterator[None]:
    """Make tracers treat ``torch.inference_mode`` as ``torch.set_grad_enabled``, the only such region they support."""
    mode: Any = torch.inference_mode

    def enter(self: Any) -> None:
        self.gradients = torch.set_grad_enabled(not self.mode)  # inference_mode(False) enables gradients in any context

    def leave(self: Any, *error: Any) -> None:
        self.gradients.__exit__(*error)

    methods = {"__enter__": enter, "__exit__": leave}
    with patch_attributes({(mode, n): only_in_this_thread(method, getattr(mode, n)) for n, method in methods.items()}):
        yield


@contextlib.contextmanager
def _find_regions_in_autocast() -> Iterator[None]:
    """Make export see no_grad regions inside autocast regions, since it does not detect their start."""
    # Export splits a graph at each mode change, and detects a region by the first call of a part. Inside autocast, each
    # part starts by entering autocast again, so skip that call.
    first = getattr(*FIND_FIRST_MODE_CHANGE)

    def skip_autocast_entry(nodes: Any, is_meant: Callable[[fx.Node], bool]) -> fx.Node | None:
        return first(nodes, lambda node: is_meant(node) and node.target is not ENTER_AUTOCAST)

    with patch_attributes({FIND_FIRST_MODE_CHANGE: skip_autocast_entry}):
        yield


@contextlib.contextmanager
def _inline_autograd_functions() -> Iterator[None]:
    """Make a trace inline the forward of a ``torch.autograd.Function`` as calls of the model, outside any region.

    Gradients are off inside such a forward, and inside hooks of saved tensors, but a trace does not see that. On
    leaving, a region in there would restore the mode that it was entered in, and turn gradients off for all later
    calls. The backward of a reentrant checkpoint calls its function again, with gradients and with the regions in it.
    """
    within: list[Any] = []
    note = PreDispatchTorchFunctionMode.__torch_function__

    def apply_inline(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.is_grad_enabled():
            function, _preserves_random_state, *operands = args
            return function(*operands)
        within.append(cls)
        try:
            return _call_apply(cls, *args, **kwargs)
        finally:
            within.pop()

    def skip_or_record(tracing: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is set_grad_enabled and (within or args[0] == torch.is_grad_enabled()):
            return func(*args)
        return note(tracing, func, types, args, kwargs)

    with patch_attributes(
        {
            APPLY_AUTOGRAD_FUNCTION: classmethod(only_in_this_thread(apply_inline, _call_apply)),
            (PreDispatchTorchFunctionMode, "__torch_function__"): only_in_this_thread(skip_or_record, note),
        }
    ):
        yield


def _call_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    inherited: Any = super(APPLY_AUTOGRAD_FUNCTION[0], cls)
    return inherited.apply(*args, **kwargs)
