"""How long ONNX Runtime takes for each node of a graph, as its own profile of some calls tells."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import onnx

from clika_ref_onnxruntime.explaining import TOKEN, OnnxGraph

KERNEL = "_kernel_time"
"""What follows the name of a node in the events of a profile that say how long it was computed."""

BLOCKED = "_nchwc"
"""What ends the names of nodes that compute in blocks of channels; before it stands what they return."""

LAYOUTS = frozenset({"ReorderInput", "ReorderOutput"})
"""What the runtime adds to change the layout of a tensor, which may bear the name of that."""

CALLS = 12
"""That are profiled: so many that a median of times leaves out the first ones, which allocate."""


def seconds_of_nodes(written: OnnxGraph, fused: OnnxGraph, optimized: Path, profile: Path) -> dict[str, float]:
    """Return the seconds of a call that each node of a graph takes, and under ``""`` what belongs to none of them.

    Args:
        written: the file.
        fused: what the runtime makes of it before layouts change, so that nodes still have their names.
        optimized: the graph that ran, as its session wrote it.
        profile: of calls, as that session wrote it.
    """
    taken: dict[str, list[float]] = {}
    for event in json.loads(profile.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith(KERNEL):
            taken.setdefault(event["name"].removesuffix(KERNEL), []).append(event["dur"] * 1e-6)  # of microseconds
    makers = {name: written.owner_of(node) for node in fused.nodes for name in node.output}
    nodes = [node for node in OnnxGraph.read(optimized).nodes if node.op_type not in LAYOUTS]
    owners = {node.name: makers.get(blocked(node)) or written.owner_of(node) or "" for node in nodes}
    found: dict[str, float] = {}
    for name, seconds in taken.items():
        owner = owners.get(name, "")
        found[owner] = found.get(owner, 0.0) + statistics.median(seconds)
    return found


def blocked(node: onnx.NodeProto) -> str:
    """Return the result by which a node is named that computes in blocks of channels; nothing of others."""
    name = TOKEN.sub("", node.name)
    return name.removesuffix(BLOCKED) if name.endswith(BLOCKED) else ""
