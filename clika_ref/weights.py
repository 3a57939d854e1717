"""The parameters and buffers of a ``ClikaModule``: under the original's names, tied ones shared, found by the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from clika_ref.core.ir import Graph


class Scope(nn.Module):
    """A place in the tree of names; it holds weights and computes nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the graph of the ClikaModule computes, not its parts."""
        msg = "a part of a ClikaModule only holds weights; call the ClikaModule itself"
        raise NotImplementedError(msg)


class Weights:
    """How generated code sees the weights of a module: ``constant_<i>`` is the one that the graph lists at ``i``."""

    def __init__(self, module: nn.Module, paths: Mapping[str, tuple[str, ...]]) -> None:
        for name, (*scopes, leaf) in paths.items():
            part: Any = module
            for scope in scopes:
                part = part._modules[scope]
            setattr(self, name, _held(part, leaf))


def _held(part: nn.Module, leaf: str) -> Any:
    for holder in (part._parameters, part._buffers):
        if leaf in holder:
            return holder[leaf]
    return part.__dict__[leaf]  # in a replica that DataParallel made, weights are plain attributes


def weight_paths(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return where each constant of the fast form of a graph lies in a module that registered its weights."""
    return {f"constant_{i}": tuple(name.split(".")) for i, name in enumerate(graph.constants)}


def register_weights(module: nn.Module, graph: Graph, persistent: frozenset[str]) -> None:
    """Register the constants of a graph under their qualified names, tied ones under each of their names."""
    for name, value in graph.constants.items():
        assert value.data is not None
        register_weight(module, name, value.data, is_saved=name in persistent)
    for alias, name in graph.aliases.items():
        data = graph.constants[name].data
        assert data is not None
        register_weight(module, alias, data, is_saved=alias in persistent)


def register_weight(module: nn.Module, name: str, data: torch.Tensor, *, is_saved: bool) -> None:
    """Register one tensor under its qualified name, as a parameter or a buffer."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in module._modules:
            module._modules[step] = Scope()
        module = module._modules[step]  # type: ignore[assignment]
    if isinstance(data, nn.Parameter):
        module._parameters[leaf] = data
    else:
        module._buffers[leaf] = data
        if not is_saved:
            module._non_persistent_buffers_set.add(leaf)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, tied ones under each of their names."""
    parameters: Mapping[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}


def non_persistent(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict leaves out."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for name in sorted(part._non_persistent_buffers_set):
            buffer = part._buffers.get(name)
            if buffer is not None:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def bind_weights(module: nn.Module, graph: Graph) -> None:
    """Let the constants of a graph be the module's current parameters and buffers, as moves and loads replace them."""
    tensors = named_tensors(module)
    for name, value in graph.constants.items():
        value.data = tensors[name]
