"""Time per graph node, from ONNX Runtime's own profile of several calls."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import onnx

from clika_ref_onnxruntime.explaining import RECREATED_SUFFIX, OnnxGraph

KERNEL_TIME_SUFFIX = "_kernel_time"
"""Suffix of profile events that report the compute time of a node."""

NCHWC_SUFFIX = "_nchwc"
"""Suffix of nodes in the blocked NCHWc layout; the prefix is the name of their output."""

REORDER_OPERATORS = frozenset({"ReorderInput", "ReorderOutput"})
"""Layout changes that the runtime inserts. They may have the name of the tensor."""

PROFILED_CALLS = 12
"""Number of profiled calls: enough for a median that ignores the first ones, which allocate."""


def seconds_of_nodes(written: OnnxGraph, fused: OnnxGraph, optimized: Path, profile: Path) -> dict[str, float]:
    """Return the seconds of each graph node in a call; ``""`` is the time that belongs to no node.

    Args:
        written: the file.
        fused: the optimized graph before layout changes, with original node names.
        optimized: the executed graph, as written by its session.
        profile: the profile written by that session.
    """
    taken: dict[str, list[float]] = {}
    for event in json.loads(profile.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL_TIME_SUFFIX):
            name = event["name"].removesuffix(KERNEL_TIME_SUFFIX)
            taken.setdefault(name, []).append(event["dur"] * 1e-6)  # from microseconds
    makers = {name: written.owner_of(node) for node in fused.nodes for name in node.output}
    nodes = [node for node in OnnxGraph(optimized).nodes if node.op_type not in REORDER_OPERATORS]
    owners = {node.name: makers.get(nchwc_output(node)) or written.owner_of(node) or "" for node in nodes}
    found: dict[str, float] = {}
    for name, seconds in taken.items():
        owner = owners.get(name, "")
        found[owner] = found.get(owner, 0.0) + statistics.median(seconds)
    return found


def nchwc_output(node: onnx.NodeProto) -> str:
    """Return the output that a node in the blocked layout is named after; empty for other nodes."""
    name = RECREATED_SUFFIX.sub("", node.name)
    return name.removesuffix(NCHWC_SUFFIX) if name.endswith(NCHWC_SUFFIX) else ""
