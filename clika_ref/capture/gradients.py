"""Gradient behavior that a trace loses: custom backwards (``torch.autograd.Function``), hooks, and gradient checks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks

from clika_ref.capture.caches import run_with_caches
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.eager import isolate_writes, preserve_module
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.memory_limits import release_freed_memory
from clika_ref.capture.origins import format_line, is_model_frame
from clika_ref.capture.patching import only_in_this_thread, patch_attributes, patch_functions
from clika_ref.torch_internals.modules import has_backward_hooks, has_gradient_hooks
from clika_ref.torch_internals.tracing import get_autograd_function
from clika_ref.torch_internals.trees import pytree

DIFFERENTIATING_MODULES = ("torch.utils.checkpoint", "torch._higher_order_ops")
"""Modules whose backward is that of the calls in the forward, so that a trace loses nothing."""

OWN_PACKAGE = "clika_ref"
"""The package whose classes with a custom backward only compiled modules call."""


def find_custom_gradients(callee: TracedCallable, call: ModelCall) -> list[str]:
    """Return one warning for each class with a custom backward on the gradient path of the model's results.

    Eager runs once more with gradients, on one sample if the model accepts it, and PyTorch's record of the run shows
    the classes under any name. Nothing runs if no such class is defined: those of clika_ref count only for a model that
    contains a compiled module. The search does not find calls inside ``checkpoint(use_reentrant=True)``, and models
    that cannot be differentiated.
    """
    parts = (part for part in callee.module.modules() if part is not callee.module)
    ignored = {"torch", *({OWN_PACKAGE} - {_package_of(type(part)) for part in parts})}
    if not any(_package_of(cls) not in ignored for cls in _iterate_subclasses(Function)):
        return []
    shorter = _take_first_sample(call)
    for given in (call,) if shorter is call else (shorter, call):
        with contextlib.suppress(Exception):  # a model may raise anything; an untrainable one loses nothing
            nodes = _find_function_calls(callee, given)
            found = {get_autograd_function(node): None for node in nodes}
            return [_make_warning(cls) for cls in found if not cls.__module__.startswith(DIFFERENTIATING_MODULES)]
    return []


def _take_first_sample(call: ModelCall) -> ModelCall:
    """Return a call with the first element along dim 0 of each tensor; the call itself if their lengths differ."""
    tensors = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor)]
    if len({x.shape[:1] for x in tensors}) != 1:
        return call
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda x: x[:1] if x.ndim else x, (call.args, call.kwargs))
    return ModelCall(args, kwargs)


def _iterate_subclasses(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _iterate_subclasses(derived)


def _is_user_class(cls: type) -> bool:
    return _package_of(cls) != "torch"


def _package_of(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _find_function_calls(callee: TracedCallable, call: ModelCall) -> list[BackwardCFunction]:
    """Return the recorded calls of a ``Function``, in the order of a search from the results."""
    inputs = pytree.tree_map_only(torch.Tensor, _make_differentiable, (call.args, call.kwargs))
    dropped = saved_tensors_hooks(_discard, _discard)  # the backward never runs, so drop the activations
    own = isolate_writes(callee.module)
    with (
        release_freed_memory(),
        preserve_module(callee),
        own,
        callee.as_module() as module,
        torch.enable_grad(),
        dropped,
    ):
        results = pytree.tree_leaves(run_with_caches(module, *inputs))
    waiting: list[Node | None] = [r.grad_fn for r in results if isinstance(r, torch.Tensor)]
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in reversed(node.next_functions)]
    return [node for node in seen if isinstance(node, BackwardCFunction)]


def _discard(_: Any) -> Any:
    return None


def _make_differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that passes gradients and that the model may overwrite, which it may not do to a leaf."""
    differentiates = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(differentiates).clone()


def _make_warning(cls: type[Any]) -> str:
    code = getattr(cls.forward, "__code__", None)
    defined = (
        f" defined at {format_line(code.co_filename, code.co_firstlineno)}" if code and _is_user_class(cls) else ""
    )
    name = cls.__name__ if _is_user_class(cls) else "a class that Dynamo does not name"  # Dynamo substitutes its own
    return (
        f"the compiled module ignores the backward of {name}, a torch.autograd.Function{defined}: in training it "
        "differentiates the forward itself, which gives no gradient where that rounds or compares. Results and "
        "exports are not affected. To train with that gradient, write it as operations, such as x + (round(x) - "
        "x).detach()."
    )


def find_lost_hooks(callee: TracedCallable) -> list[str]:
    """Return warnings about gradient hooks, one for those on modules and one for those on parameters.

    Parameters keep their hooks in the compiled module, unless it gets copies, which have none.
    """
    called = {name or callee.name: m for name, m in callee.module.named_modules()}
    modules = [name for name, m in called.items() if has_backward_hooks(m)]
    copied = callee.module.named_parameters() if callee.is_preserved else ()
    parameters = [n for n, p in copied if has_gradient_hooks(p)]
    texts = [
        (modules, "register them on its parameters"),
        (parameters, "register them on the parameters of the compiled module"),
    ]
    return [
        f"Gradient hooks on {', '.join(names)} are lost: in training the compiled module does not call them. Results "
        f"and exports are not affected. To train with them, {advice}."
        for names, advice in texts
        if names
    ]


@dataclass
class GradientQueries:
    """Warnings about reads of gradient state in forward (``questions``), and hooks that it registers (``hooks``)."""

    queries: dict[str, None] = field(default_factory=dict)
    hooks: dict[str, None] = field(default_factory=dict)

    def watch(self, function: Callable[..., Any], about: str) -> Callable[..., Any]:
        """Wrap a function that reads gradient state, recording the lines of the model that call it."""
        text = (
            f"forward checks at {{}} {about}, and the compiled module always uses the answer of the trace. Pass it as "
            "an argument of forward instead."
        )
        return _record_lines(function, text, self.queries)

    def wrap_hook_registration(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that registers hooks, recording the lines of the model that call it."""
        text = (
            "The gradient hook that forward registers at {} is lost: in training the compiled module does not call "
            "it. Results and exports are not affected."
        )
        return _record_lines(function, text, self.hooks)


@contextlib.contextmanager
def record_gradient_queries() -> Iterator[GradientQueries]:
    """Yield warnings about lines of a model that check whether gradients are recorded, or that register gradient hooks.

    The result of such a check depends on the caller, and a graph keeps only one. Checks of parameters do not count:
    they keep their result after compilation.
    """
    asked, tensor = GradientQueries(), torch.Tensor
    replacements: dict[tuple[Any, str], Any] = {
        (tensor, "register_hook"): asked.wrap_hook_registration(tensor.register_hook)
    }
    for name, about in _GRADIENT_PROPERTIES.items():
        inherited = getattr(tensor, name)
        replacements[tensor, name] = property(asked.watch(inherited.__get__, about), inherited.__set__)
    replacements[tensor, "is_inference"] = asked.watch(tensor.is_inference, _GRADIENT_FUNCTIONS["is_inference"])
    functions = {getattr(torch, name): about for name, about in _GRADIENT_FUNCTIONS.items()}
    watching = {function: asked.watch(function, about) for function, about in functions.items()}
    with patch_attributes(replacements), patch_functions(watching):
        yield asked


_GRADIENT_PROPERTIES = {
    "requires_grad": "whether a tensor requires gradients",
    "grad_fn": "whether a tensor has a grad_fn",
    "is_leaf": "whether a tensor is a leaf",
}
"""Properties of tensors that depend on gradient state, and their description in warnings."""

_GRADIENT_FUNCTIONS = {
    "is_grad_enabled": "whether gradients are recorded",
    "is_inference_mode_enabled": "whether it is called in inference mode",
    "is_inference": "whether a tensor was made in inference mode",
}
"""Functions of PyTorch that depend on gradient state, and their description in warnings."""


def _record_lines(function: Callable[..., Any], text: str, texts: dict[str, None]) -> Callable[..., Any]:
    """Wrap a function to add ``text``, formatted with the calling line of the model, to ``texts``."""

    def record_and_call(*args: Any, **kwargs: Any) -> Any:
        line = _calling_line(*args)
        if line:
            texts[text.format(line)] = None
        return function(*args, **kwargs)

    return only_in_this_thread(record_and_call, function)


def _calling_line(*asked: Any) -> str:
    """Return the line of the model that calls; "" if other code does, or if the argument is a parameter."""
    frame = sys._getframe(3)  # skip the two wrappers
    asks = is_model_frame(frame) and not any(isinstance(a, torch.nn.Parameter) for a in asked)
    return format_line(frame.f_code.co_filename, frame.f_lineno) if asks else ""
