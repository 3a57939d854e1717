"""The parameters and buffers of a ``ClikaModule``: registered under the original's names, and bound to the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.torch_internals.modules import get_buffers, get_parameters, get_submodules, get_unsaved_buffers

PARTS_SHARDED = (
    "the weights of a submodule are sharded on their own, and cannot be gathered: the graph computes, not its "
    "submodules. Shard the module as a whole: fully_shard(module)."
)

WEIGHT_MISSING = (
    "the module no longer has {!r}, which its graph uses: a parametrization or torch.nn.utils.prune may have "
    "replaced it. Apply these to the model before compilation, or remove them."
)

WEIGHT_SHARDED = (
    "the weight {!r} is sharded over processes, but the whole weight is needed. Call module.clika_gather() on "
    "all ranks, and use the module that it returns."
)


class WeightScope(nn.Module):
    """An inner module in the tree of names; it holds weights and has no computation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: the graph of the ClikaModule computes, not its submodules."""
        raise NotImplementedError("a submodule of a ClikaModule only holds weights. Call the ClikaModule itself.")


class Weights:
    """The weights of a module as seen by generated code: ``constant_<i>`` is constant ``i`` of the graph.

    Raises:
        ModelError: a weight has another dtype than the graph was traced with, or is missing.
    """

    def __init__(self, module: nn.Module, paths: Sequence[WeightPath]) -> None:
        for name, (*scopes, leaf), dtype in paths:
            part: Any = module
            for scope in scopes:
                part = get_submodules(part)[scope]
            weight = _find_weight(part, leaf)
            if weight is None:
                raise ModelError(WEIGHT_MISSING.format(".".join((*scopes, leaf))))
            if isinstance(weight, DTensor):
                raise ModelError(PARTS_SHARDED)
            if weight.dtype is not dtype:
                raise weight_dtype_error(".".join((*scopes, leaf)), weight.dtype, dtype)
            setattr(self, name, weight)


def _find_weight(part: nn.Module, leaf: str) -> Any:
    for holder in (get_parameters(part), _replicated_parameters(part), get_buffers(part)):
        if leaf in holder:
            return holder[leaf]
    return None


def _replicated_parameters(part: nn.Module) -> dict[str, Any]:
    """Return the parameters of a replica that ``DataParallel`` made: it has no ``nn.Parameter``."""
    return part.__dict__.get("_former_parameters", {})


WeightPath = tuple[str, tuple[str, ...], torch.dtype]
"""The name of a constant in generated code, its path in the module, and its dtype."""


def weight_paths(graph: Graph) -> list[WeightPath]:
    """Return the path of each constant of the fast form of a graph, in a module that registered its weights."""
    named = enumerate(graph.constants.items())
    return [(f"constant_{i}", tuple(name.split(".")), value.type.dtype) for i, (name, value) in named]


def weight_dtype_error(name: str, found: torch.dtype, traced: torch.dtype) -> ModelError:
    """Return the error for a weight that was converted after the graph was traced."""
    return ModelError(
        f"the weights were cast after compilation ({name!r} is {found} now), but the graph computes in the traced "
        f"types, here {traced}. Convert the original model, model.to({found}), and compile it. The module can "
        "still be moved to another device."
    )


def register_weights(module: nn.Module, graph: Graph, persistent: frozenset[str]) -> None:
    """Register the constants of a graph under their qualified names, tied ones under each of their names."""
    for name, source in {**{name: name for name in graph.constants}, **graph.aliases}.items():
        data = graph.constants[source].data
        assert data is not None
        register_weight(module, name, data, is_saved=name in persistent)


def register_weight(module: nn.Module, name: str, data: torch.Tensor, *, is_saved: bool) -> None:
    """Register one tensor under its qualified name, as a parameter or a buffer."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in get_submodules(module):
            get_submodules(module)[step] = WeightScope()
        module = get_submodules(module)[step]  # type: ignore[assignment]
    if isinstance(data, nn.Parameter):
        get_parameters(module)[leaf] = data
    else:
        get_buffers(module)[leaf] = data
        if not is_saved:
            get_unsaved_buffers(module).add(leaf)


@torch.inference_mode(mode=False)
def set_parameters(module: nn.Module, scopes: Sequence[str], parameters: Mapping[str, torch.Tensor]) -> None:
    """Make the parameters of a module under some scopes exactly those of ``parameters``.

    Existing parameters stay the same objects for optimizers, and lose their gradients.
    """
    device = device_of_weights(module)
    before = parameters_under(module, scopes)
    for scope in scopes:
        outer, _, inner = scope.rpartition(".")
        if outer in get_submodules(module):
            get_submodules(module.get_submodule(outer)).pop(inner, None)
    for name, data in parameters.items():
        parameter = before.get(name)
        if parameter is None or parameter.shape != data.shape:
            parameter = nn.Parameter(data.to(device, copy=True))
        else:
            parameter.data.copy_(data)
            parameter.grad = None
        register_weight(module, name, parameter, is_saved=True)


def parameters_under(module: nn.Module, scopes: Sequence[str]) -> dict[str, Any]:
    """Return the parameters under some scopes, by their qualified names."""
    found: dict[str, Any] = {}
    for scope in scopes:
        part: Any = module
        for step in scope.split("."):
            part = part and get_submodules(part).get(step)
        found |= {f"{scope}.{name}": parameter for name, parameter in _named_parameters(part)} if part else {}
    return found


def _named_parameters(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every parameter by name, tied ones under each of their names, also those of a replica."""
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, parameter in {**get_parameters(part), **_replicated_parameters(part)}.items():
            if parameter is not None:
                yield (f"{prefix}.{name}" if prefix else name), parameter


def device_of_weights(module: nn.Module) -> torch.device:
    """Return the device of a module's weights."""
    tensors = chain((parameter for _, parameter in _named_parameters(module)), module.buffers())
    return next((t.device for t in tensors), torch.device("cpu"))


def device_of_constants(graph: Graph) -> torch.device:
    """Return the device of the constants of a graph."""
    return next((v.data.device for v in graph.constants.values() if v.data is not None), torch.device("cpu"))


def tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by name, tied ones under each of their names."""
    return {**dict(_named_parameters(module)), **dict(module.named_buffers(remove_duplicate=False))}


def non_persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the non-persistent buffers, which a state dict leaves out."""
    found: dict[str, torch.Tensor] = {}
    for prefix, part in module.named_modules():
        for name in sorted(get_unsaved_buffers(part)):
            buffer = get_buffers(part).get(name)
            if buffer is not None:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def weights_of(module: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    """Return the current parameters and buffers of a module, by the names of the constants of its graph.

    Raises:
        ModelError: a weight is sharded over processes, or is missing.
    """
    tensors = tensors_by_name(module)
    for name in graph.constants:
        if name not in tensors:
            raise ModelError(WEIGHT_MISSING.format(name))
        if isinstance(tensors[name], DTensor):
            raise ModelError(WEIGHT_SHARDED.format(name))
    return {name: tensors[name] for name in graph.constants}


def clone_with_weights(graph: Graph, weights: Mapping[str, torch.Tensor]) -> Graph:
    """Return a clone of a graph with its constants bound to weights."""
    clone = graph.clone()
    for name, value in clone.constants.items():
        value.data = weights[name]
    return clone


def clone_without_weights(graph: Graph) -> Graph:
    """Return a clone of a graph with constants that have types and no tensors."""
    clone = graph.clone()
    for value in clone.constants.values():
        value.data = None
    return clone
