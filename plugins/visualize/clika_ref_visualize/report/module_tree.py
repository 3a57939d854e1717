"""Build the module tree of a model, with sums over the nodes of each module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clika_ref_visualize.report.contents import ModuleRecord, NodeRecord

QUANTIZED_STATES = frozenset({"quantized", "weight_only"})
"""States of nodes that run in INT8 or with low-bit weights."""


@dataclass
class _Module:
    """A module and the nodes found in it so far."""

    scope: str
    parent: int | None
    own_indices: list[int] = field(default_factory=list[int])
    """Indices of the nodes directly in it, not in a submodule."""
    all_nodes: list[NodeRecord] = field(default_factory=list[NodeRecord])
    """All nodes in it, including those of submodules."""


def build_module_records(nodes: Sequence[NodeRecord]) -> list[ModuleRecord]:
    """Return the model and its modules in execution order, each after its parent."""
    modules = [_Module("", None)]
    indices = {"": 0}
    for index, node in enumerate(nodes):
        modules[0].all_nodes.append(node)
        for scope in _list_enclosing_scopes(node.scope):
            if scope not in indices:
                indices[scope] = len(modules)
                modules.append(_Module(scope, indices[scope.rpartition(".")[0]]))
            modules[indices[scope]].all_nodes.append(node)
        modules[indices[node.scope]].own_indices.append(index)
    return [_make_record(module) for module in modules]


def _list_enclosing_scopes(scope: str) -> list[str]:
    """Return the module paths that contain a scope, outermost first, and the scope itself.

    >>> _list_enclosing_scopes("encoder.layers.0")
    ['encoder', 'encoder.layers', 'encoder.layers.0']
    """
    parts = scope.split(".") if scope else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def _make_record(module: _Module) -> ModuleRecord:
    """Sum the facts of the nodes of a module."""
    nodes = module.all_nodes
    layers = [node for node in nodes if node.bits is not None]
    seconds = [node.seconds for node in nodes if node.seconds is not None]
    return ModuleRecord(
        scope=module.scope,
        parent=module.parent,
        nodes=module.own_indices,
        count=len(nodes),
        layers=len(layers),
        quantized_layers=sum(node.state in QUANTIZED_STATES for node in layers),
        bytes_before=sum(node.bytes_before for node in nodes),
        bytes_after=sum(node.bytes_after for node in nodes),
        macs=sum(node.macs for node in nodes),
        quantized_macs=sum(node.macs for node in nodes if node.state in QUANTIZED_STATES),
        seconds=sum(seconds) if seconds else None,
        sensitivity=max((node.sensitivity for node in nodes if node.sensitivity is not None), default=None),
    )
