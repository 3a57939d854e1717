"""What a trace loses of gradients: the backward of a ``torch.autograd.Function``, hooks, and who asks for them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import _pytree as pytree

from clika_ref.capture.callables import Callee
from clika_ref.capture.catching import is_models
from clika_ref.capture.eager import on_copies, unchanged
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.memory import trimmed
from clika_ref.capture.origins import short_line
from clika_ref.capture.replacing import in_this_thread, replaced

RECOMPUTING = "torch.utils.checkpoint"
"""The module whose backward only computes the forward again: nothing is lost with it."""


def custom_gradients(callee: Callee, call: ModelCall) -> list[str]:
    """Return what to warn of, one text for each class whose backward the gradients of the model's results pass.

    PyTorch is asked, which records what was called under whatever name: eager runs once more, with gradients. Nothing
    runs where nobody defined such a class. What ``checkpoint(use_reentrant=True)`` calls is not recorded, nor a model
    that fails when it is to be differentiated.
    """
    if not any(map(_is_users, _derived(Function))):
        return []
    try:
        found = {type(node)._forward_cls: None for node in _recorded(callee, call)}  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - a model may raise anything; one that cannot be trained loses nothing
        return []
    return [_warning(cls) for cls in found if cls.__module__ != RECOMPUTING]


def _derived(cls: type) -> Iterator[type]:
    for derived in cls.__subclasses__():
        yield derived
        yield from _derived(derived)


def _is_users(cls: type) -> bool:
    return cls.__module__.partition(".")[0] != "torch"


def _recorded(callee: Callee, call: ModelCall) -> list[BackwardCFunction]:
    """Return what PyTorch recorded of calls of a ``Function``, in the order in which it is reached from the results."""
    inputs = pytree.tree_map_only(torch.Tensor, _differentiable, (call.args, call.kwargs))
    dropped = saved_tensors_hooks(_nothing, _nothing)  # the backward never runs: no activation is kept
    own = on_copies(callee.module)
    with trimmed(), unchanged(callee), own, callee.as_module() as module, torch.enable_grad(), dropped:
        results = pytree.tree_leaves(module(*inputs[0], **inputs[1]))
    waiting: list[Node | None] = [r.grad_fn for r in results if isinstance(r, torch.Tensor)]
    seen: dict[Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen[node] = None
            waiting += [following for following, _ in reversed(node.next_functions)]
    return [node for node in seen if isinstance(node, BackwardCFunction)]


def _nothing(_: Any) -> Any:
    return None


def _differentiable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy through which gradients pass, and to which a model may write, as it may not to a leaf."""
    differentiates = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(differentiates).clone()


def _warning(cls: type[Any]) -> str:
    code = getattr(cls.forward, "__code__", None)
    defined = f" defined at {short_line(code.co_filename, code.co_firstlineno)}" if code and _is_users(cls) else ""
    name = cls.__name__ if _is_users(cls) else "A class that Dynamo does not name"  # it puts one of PyTorch's in place
    return (
        f"{name}, a torch.autograd.Function{defined}, keeps its forward and loses its backward: in training the "
        "compiled module differentiates the forward itself, which gives no gradient where that rounds or compares. "
        "Results and exports are not affected; to train with that gradient, write it as operations, such as "
        "x + (round(x) - x).detach()"
    )


def lost_hooks(callee: Callee) -> list[str]:
    """Return what to warn of, one text for the modules and one for the parameters whose gradients pass through hooks.

    Parameters pass into the compiled module with their hooks, unless it gets copies, which have none.
    """
    called = {name or callee.name: m for name, m in callee.module.named_modules()}
    modules = [name for name, m in called.items() if m._backward_hooks or m._backward_pre_hooks]
    copied = callee.module.named_parameters() if callee.stays else ()
    parameters = [n for n, p in copied if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    texts = [(modules, "put them on its parameters"), (parameters, "put them on those of the compiled module")]
    return [
        f"Hooks of gradients on {', '.join(names)} are lost: in training the compiled module does not call them. "
        f"Results and exports are not affected; to train with them, {advice}"
        for names, advice in texts
        if names
    ]


@dataclass
class Asked:
    """What forward asks of gradients, and the hooks that it registers: texts of warnings, each once."""

    questions: dict[str, None] = field(default_factory=dict)
    hooks: dict[str, None] = field(default_factory=dict)

    def watch(self, function: Callable[..., Any], about: str) -> Callable[..., Any]:
        """Return a function that asks something, noting the lines of the model that call it."""
        text = (
            f"forward asks at {{}} {about}: the compiled module keeps one answer, whatever it is called with; "
            "let it be an argument of forward instead"
        )
        return _noting_lines(function, text, self.questions)

    def watch_hooks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that registers hooks, noting the lines of the model that call it."""
        text = (
            "The hook of gradients that forward registers at {} is lost: in training the compiled module does not "
            "call it. Results and exports are not affected"
        )
        return _noting_lines(function, text, self.hooks)


@contextlib.contextmanager
def asked_for_gradients() -> Iterator[Asked]:
    """Yield what to warn of: each line of a model that asks whether gradients are recorded, or hooks into them.

    The answer depends on who calls, and a graph keeps one. Parameters answer as they do when they are compiled.
    """
    asked, tensor = Asked(), torch.Tensor
    replacements: dict[tuple[Any, str], Any] = {(tensor, "register_hook"): asked.watch_hooks(tensor.register_hook)}
    for name, about in _PROPERTIES.items():
        inherited = getattr(tensor, name)
        replacements[tensor, name] = property(asked.watch(inherited.__get__, about), inherited.__set__)
    replacements[tensor, "is_inference"] = asked.watch(tensor.is_inference, _FUNCTIONS["is_inference"])
    functions = {getattr(torch, name): about for name, about in _FUNCTIONS.items()}
    watching = {id(function): asked.watch(function, about) for function, about in functions.items()}
    replacements |= {(module, name): watching[found] for module, name, found in _names_of(watching)}
    with replaced(replacements):
        yield asked


_PROPERTIES = {
    "requires_grad": "whether a tensor requires gradients",
    "grad_fn": "for the history of a tensor",
    "is_leaf": "whether a tensor has a history",
}
"""What a model asks of a tensor, and what it asks thereby."""

_FUNCTIONS = {
    "is_grad_enabled": "whether gradients are recorded",
    "is_inference_mode_enabled": "whether it is called in inference mode",
    "is_inference": "whether a tensor was made in inference mode",
}
"""What a model asks of PyTorch."""


def _names_of(ids: Container[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """Yield what names functions have in modules, PyTorch's own or such as import them from it."""
    for module in [*sys.modules.values()]:
        if type(module) is ModuleType:  # others may load what they are asked for
            yield from ((module, name, id(value)) for name, value in [*vars(module).items()] if id(value) in ids)


def _noting_lines(function: Callable[..., Any], text: str, texts: dict[str, None]) -> Callable[..., Any]:
    """Return a function that adds the text, with the line of the model that calls it, to others."""

    def noting(*args: Any, **kwargs: Any) -> Any:
        line = _asking_line(*args)
        if line:
            texts[text.format(line)] = None
        return function(*args, **kwargs)

    return in_this_thread(noting, function)


def _asking_line(*asked: Any) -> str:
    """Return the line of the model that asks, of a tensor or in general; "" where others do, or it asks a parameter."""
    frame = sys._getframe(3)  # above the function that watches, and the one that knows the thread
    asks = is_models(frame) and not any(isinstance(a, torch.nn.Parameter) for a in asked)
    return short_line(frame.f_code.co_filename, frame.f_lineno) if asks else ""
