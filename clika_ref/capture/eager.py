"""Run the original model without leaving a trace on it: weights, attributes, random state and inputs stay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from clika_ref.capture.attributes import Attributes
from clika_ref.capture.callables import Callee
from clika_ref.capture.calls import RESHAPES_ITSELF, written_arguments
from clika_ref.capture.inputs import ModelCall
from clika_ref.capture.memory import trimmed
from clika_ref.comparison import differences
from clika_ref.core.errors import ModelError
from clika_ref.structures import register_dataclasses

Results = tuple[list[Any], pytree.TreeSpec]
"""The leaves of what a call returns, and their structure."""


def run_eager(callee: Callee, call: ModelCall) -> Results:
    """Return the leaves and the structure of what the model returns for a call; tensors are copies."""
    with trimmed(), unchanged(callee):
        return _run(callee, call)[0]


def run_watched(callee: Callee, call: ModelCall) -> tuple[Results, list[str]]:
    """Return what `run_eager` does, and the names of the parameters and buffers of which a trace must show a write.

    Raises:
        ModelError: the model gives a parameter or buffer other data, through ``.data``, or its results depend on what
            an earlier call left in an attribute.
    """
    with trimmed(), unchanged(callee):
        before = Attributes(callee.module)
        found, written = _run(callee, call)
        changed, bound = before.changed(), before.bound_anew()
        if changed:
            _require_caches(callee, call, before, changed)
        return found, written + bound


def _require_caches(callee: Callee, call: ModelCall, before: Attributes, changed: list[str]) -> None:
    """Refuse attributes that forward changed, unless they are caches: with them and without, results are the same.

    A graph computes anew what a cache holds. Parameters and buffers, whose changes it keeps, are those of a second call
    both times.
    """
    with unchanged(callee):
        (found, structure), _ = _run(callee, call)
    before.restore(state=False)
    (fresh, expected), _ = _run(callee, call)
    if structure != expected or differences(fresh, found):
        names = ", ".join(f"self.{name}" for name in changed)
        msg = (
            f"{callee.name} returns something else when it is called again with the same input: forward changes {names}"
            ", and no graph keeps what an attribute holds. Make it a buffer (self.register_buffer) of one shape that "
            "forward writes to; what only the first call makes is kept where the model was called before it is compiled"
        )
        raise ModelError(msg)


def _run(callee: Callee, call: ModelCall) -> tuple[Results, list[str]]:
    """Run the model, and undo only what it wrote to parameters, whose names come with the results."""
    copy = call.copy()
    kept = _Kept(callee.module)
    with callee.as_module() as module, torch.no_grad(), kept.restored():
        with kept, without_fast_path():
            result = module(*copy.args, **copy.kwargs)
        kept.require_own_data()
        register_dataclasses(result)
        leaves, spec = pytree.tree_flatten(result)
        # A buffer may be among the results, and is about to be restored.
        return (
            [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
            spec,
        ), kept.names


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Let ``torch.nn``'s own transformers compute call by call, as they do wherever gradients are recorded.

    Without gradients eager takes one opaque call per encoder layer, which zeroes padded positions where the padding
    happens to stand at the end: which of the two results a position gets depends on the values of the mask.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


@contextlib.contextmanager
def on_copies(module: torch.nn.Module) -> Iterator[None]:
    """Let calls with gradients write to copies of buffers, and undo what they write to parameters.

    To be entered within `unchanged`, which binds the buffers again: one that was written to is no leaf any more.
    """
    kept = _Kept(module)
    for part in module.modules():
        part._buffers.update({n: b.detach().clone() for n, b in part._buffers.items() if b is not None})
    with kept.restored(), kept:
        yield


class _Kept(TorchDispatchMode):
    """Copies each parameter that a call is about to write to: of a model that writes to none, nothing is copied."""

    supports_higher_order_operators = True

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.names: list[str] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tensors = {n: (t, t.detach()) for n, t in [*module.named_parameters(), *module.named_buffers()]}
        self._watched: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, parameter in module.named_parameters():
            self._watched.setdefault(_memory(parameter), []).append((name, parameter.detach()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable and func not in RESHAPES_ITSELF:
            for written in pytree.tree_leaves(written_arguments(func, args, kwargs or {})):
                for name, data in self._watched.pop(_memory(written), ()):
                    self.names.append(name)
                    self._copies.append((data, data.clone()))
        return func(*args, **(kwargs or {}))

    def require_own_data(self) -> None:
        """Refuse other data than before, unless it is a copy."""
        for name, (tensor, data) in self._tensors.items():
            if _memory(tensor) != _memory(data) and not _same(tensor, data):
                msg = (
                    f"forward assigns to the .data of {name!r}, which no graph can hold; write to it in place: "
                    f"with torch.no_grad(): self.{name}.copy_(...)"
                )
                raise ModelError(msg)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Give parameters and buffers their data back on leaving, as it was."""
        try:
            yield
        finally:
            for tensor, data in self._tensors.values():
                if _memory(tensor) != _memory(data) and not _same(tensor, data):  # a copy may be made for good
                    tensor.data = data
            for data, copy in self._copies:
                data.copy_(copy)


def _memory(tensor: Any) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, AttributeError):  # a sparse tensor has none, nor has what is no tensor
        return 0


def _same(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    alike = (tensor.dtype, tensor.shape, tensor.device) == (data.dtype, data.shape, data.device)
    return alike and torch.equal(tensor.detach(), data)


@contextlib.contextmanager
def unchanged(callee: Callee) -> Iterator[None]:
    """Restore what was written to, bound anew or cached, and the state of the random generator, on leaving.

    Attributes and the data of buffers always; parameters where the model stays with its user, as it takes a second copy
    of them: `_Kept` takes one only of what is written to.
    """
    module = callee.module
    attributes = Attributes(module)
    kept = [_stored(t) for t in (*module.buffers(), *(module.parameters() if callee.stays else ()))]
    before = [(t, t.detach().clone()) for t in kept]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            attributes.restore()
            with torch.no_grad():
                for tensor, saved in before:
                    if not torch.equal(tensor, saved):  # ``.data`` and batch norm write without raising the version
                        tensor.data.copy_(saved)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or the part of an expanded one that memory holds: the whole cannot be written to."""
    for dim, (stride, length) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and length > 1:
            tensor = tensor.detach().narrow(dim, 0, 1)
    return tensor
