"""The module tree of a model, with sums over the nodes of each module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clika_ref_visualize.report.contents import ModuleRecord, NodeRecord

QUANTIZED_STATES = frozenset({"quantized", "weight_only"})
"""States of nodes that run in INT8 or with low-bit weights."""


@dataclass
class _Module:
    """A module of the tree under construction."""

    scope: str
    parent: int | None
    nodes: list[int] = field(default_factory=list[int])
    inside: list[NodeRecord] = field(default_factory=list[NodeRecord])
    """All nodes in it, including those of submodules."""


def build_module_records(nodes: Sequence[NodeRecord]) -> list[ModuleRecord]:
    """Return the model and its modules in execution order, each after its parent."""
    modules = [_Module("", None)]
    indices = {"": 0}
    for index, node in enumerate(nodes):
        for scope in _list_paths(node.scope):
            if scope not in indices:
                indices[scope] = len(modules)
                modules.append(_Module(scope, indices[scope.rpartition(".")[0]]))
            modules[indices[scope]].inside.append(node)
        modules[0].inside.append(node)
        modules[indices[node.scope]].nodes.append(index)
    return [_sum_module(module) for module in modules]


def _list_paths(scope: str) -> list[str]:
    """Return the paths of a module's ancestors, outermost first, and its own.

    >>> _list_paths("encoder.layers.0")
    ['encoder', 'encoder.layers', 'encoder.layers.0']
    """
    parts = scope.split(".") if scope else []
    return [".".join(parts[: depth + 1]) for depth in range(len(parts))]


def _sum_module(module: _Module) -> ModuleRecord:
    inside = module.inside
    layers = [node for node in inside if node.bits is not None]
    seconds = [node.seconds for node in inside if node.seconds is not None]
    return ModuleRecord(
        module.scope,
        module.parent,
        module.nodes,
        len(inside),
        len(layers),
        sum(node.state in QUANTIZED_STATES for node in layers),
        sum(node.bytes_before for node in inside),
        sum(node.bytes_after for node in inside),
        sum(node.macs for node in inside),
        sum(node.macs for node in inside if node.state in QUANTIZED_STATES),
        sum(seconds) if seconds else None,
        max((node.sensitivity for node in inside if node.sensitivity is not None), default=None),
    )
