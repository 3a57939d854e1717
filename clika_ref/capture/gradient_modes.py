"""Which calls of a trace gradients are recorded of: regions that PyTorch's tracers overlook or mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as gradient_pass
from torch.amp.autocast_mode import _enter_autocast
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from clika_ref.capture.replacing import in_this_thread, replaced


@contextlib.contextmanager
def gradient_modes() -> Iterator[None]:
    """Let a trace see every region with and without gradients as eager trains it."""
    with _inference_as_grad_mode(), _regions_within_autocast(), _functions_written_out():
        yield


@contextlib.contextmanager
def _inference_as_grad_mode() -> Iterator[None]:
    """Let tracers, which know no other such regions, take ``torch.inference_mode`` for ``torch.set_grad_enabled``."""
    mode: Any = torch.inference_mode

    def enter(self: Any) -> None:
        self.gradients = torch.set_grad_enabled(not self.mode)  # without the mode, within whatever, there are gradients

    def leave(self: Any, *error: Any) -> None:
        self.gradients.__exit__(*error)

    methods = {"__enter__": enter, "__exit__": leave}
    with replaced({(mode, n): in_this_thread(method, getattr(mode, n)) for n, method in methods.items()}):
        yield


@contextlib.contextmanager
def _regions_within_autocast() -> Iterator[None]:
    """Let export see the no_grad regions inside autocast regions, whose beginning it overlooks."""
    # It splits a graph at each change of the mode, and knows a region by the first call of a part; but within autocast
    # each part begins by entering that anew.
    own: Any = gradient_pass
    first = own.nodes_first

    def beyond(nodes: Any, is_meant: Callable[[fx.Node], bool]) -> fx.Node | None:
        return first(nodes, lambda node: is_meant(node) and node.target is not _enter_autocast)

    with replaced({(own, "nodes_first"): beyond}):
        yield


@contextlib.contextmanager
def _functions_written_out() -> Iterator[None]:
    """Let a trace take the forward of a ``torch.autograd.Function`` for calls of the model, outside any region.

    Gradients are off within one, and within hooks of saved tensors, of which a trace is not told: a region there, left
    for the mode that it was entered in, would turn them off for all that follows. What a reentrant checkpoint calls is
    called again by its backward, with gradients and with the regions in it.
    """
    within: list[Any] = []
    note = PreDispatchTorchFunctionMode.__torch_function__

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and torch.is_grad_enabled():
            function, _preserves_random_state, *operands = args
            return function(*operands)
        within.append(cls)
        try:
            return _apply(cls, *args, **kwargs)
        finally:
            within.pop()

    def noted(tracing: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled and (within or args[0] == torch.is_grad_enabled()):
            return func(*args)
        return note(tracing, func, types, args, kwargs)

    with replaced(
        {
            (_SingleLevelFunction, "apply"): classmethod(in_this_thread(applied, _apply)),
            (PreDispatchTorchFunctionMode, "__torch_function__"): in_this_thread(noted, note),
        }
    ):
        yield


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    inherited: Any = super(_SingleLevelFunction, cls)
    return inherited.apply(*args, **kwargs)
