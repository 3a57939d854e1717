"""The contents of a report: plain data without references to a graph, all of it serializable as JSON.

Unknown numbers, and numbers that JSON lacks, are None. Fields refer to nodes and values by index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from clika_ref.export.target_comparison import TargetFacts
from clika_ref.quantization.decision import ThresholdPrediction

REPORT_VERSION = 1
"""Version of the data format, increased with each incompatible change."""

NodeState = Literal["quantized", "weight_only", "not_quantized", "kept_in_float", "fused", "float"]
"""Outcome for a node, shown as a color.

``quantized``: runs in INT8. ``weight_only``: runs in float with a low-bit weight. ``not_quantized``: planned as one of
these, but runs in float. ``kept_in_float``: a layer kept in float for a reason. ``fused``: fused into another node.
``float``: all others.
"""


@dataclass(frozen=True, slots=True)
class HistogramRecord:
    """Element counts: ``counts[i]`` covers ``start + i * width`` up to the next bin."""

    start: float
    width: float
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class ObservedRange:
    """Observed range of an activation during calibration. The histogram is sampled; all other fields are exact."""

    low: float
    high: float
    batches: int
    histogram: HistogramRecord
    source: str = ""
    """The observed activation, if this one only reorders its elements; empty if it was observed itself."""


@dataclass(frozen=True, slots=True)
class QuantizedRange:
    """The range that a quantized activation can represent."""

    low: float
    high: float
    scale: float
    zero_point: int
    levels: int
    observer: str
    """The observer that chose the range; empty if unknown."""
    clipped_share: float | None
    """Share of the observed elements outside the range, which are clipped."""


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """An activation of the graph."""

    name: str
    type: str
    """``float32[4, 64, 8, 8]``."""
    producer: int | None
    """Index of the node that computes it; None for an input."""
    observed: ObservedRange | None = None
    quantized: QuantizedRange | None = None
    """None if it stays float."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of the lowered graph, and its outcome."""

    name: str
    scope: str
    operator: str
    line: str
    state: NodeState
    planned: str
    runs: str | None
    """Precision that the runtime reports; None if there is no report."""
    reason: str
    """Why it is float, if known."""
    macs: int
    """MACs of a call on the example; 0 if the node is not a layer."""
    bits: tuple[int, int] | None
    """Bits of its weight and of its input; None without a weight."""
    bytes_before: int
    """Size of its weight in float."""
    bytes_after: int
    sensitivity: float | None
    """Relative squared error of the outputs if only this layer is quantized; None if not estimated."""
    seconds: float | None
    """Time in a call; None if the runtime reports none, as for a fused node."""
    inputs: Sequence[int]
    outputs: Sequence[int]


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module of the model, with sums over its nodes, including those of submodules."""

    scope: str
    """Module path; empty for the model itself."""
    parent: int | None
    nodes: Sequence[int]
    """Nodes directly in it, not in a submodule."""
    count: int
    layers: int
    quantized_layers: int
    """Number of layers in INT8 or with low-bit weights."""
    bytes_before: int
    bytes_after: int
    macs: int
    quantized_macs: int
    """MACs of nodes in INT8 or with low-bit weights: as the runtime reports, or else as planned."""
    seconds: float | None
    sensitivity: float | None
    """Maximum over its nodes."""


@dataclass(frozen=True, slots=True)
class ChosenRow:
    """The configuration that was chosen."""

    threshold: float | None
    """None without a threshold, for example if everything supported is quantized."""
    layers: int
    total_layers: int
    bytes: int
    sqnr: float | None


@dataclass(frozen=True, slots=True)
class LatencyRecord:
    """Time of a call, from the runtime's profile of its nodes."""

    seconds: float
    """Total, including time of nodes that belong to no node of the graph."""
    unassigned: float
    """Time of such nodes: layout changes, and conversions between float and INT8."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """Data to reproduce the run."""

    settings: str
    """All settings as YAML for `Settings.load_from_path`."""
    code: str
    """Python code that compiles with these settings."""
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    seconds: Mapping[str, float]
    """Seconds of each compilation stage."""


@dataclass(frozen=True, slots=True)
class ReportContents:
    """The complete contents of a report."""

    model: str
    target: str
    created: str
    """Creation time with UTC offset: ``2026-11-25T20:15:00+00:00``."""
    summary: str
    """The quantization result in one line; empty without one."""
    inputs: Sequence[str]
    outputs: Sequence[str]
    example: Sequence[str]
    """Dtypes and shapes of the inputs for counting MACs and measuring times."""
    parameters: int
    bytes_before: int
    """Size of all weights and constants in float."""
    bytes_after: int
    bytes_of_file: int | None
    """Size of the artifact; None if the target writes none."""
    modules: Sequence[ModuleRecord]
    nodes: Sequence[NodeRecord]
    values: Sequence[ValueRecord]
    what_if: Sequence[ThresholdPrediction]
    chosen: ChosenRow | None
    targets: Sequence[TargetFacts]
    latency: LatencyRecord | None
    warnings: Sequence[str]
    reproduction: Reproduction
    unavailable: Mapping[str, str] = field(default_factory=dict[str, str])
    """Reasons for empty parts, by name: ``sensitivity``, ``what_if``, ``values``, ``runtime``, ``latency``,
    ``targets``. For ``reproduction``, steps that the settings do not include.
    """
    version: int = REPORT_VERSION

    def to_json(self) -> dict[str, Any]:
        """Return the contents as dicts, lists and numbers that JSON supports."""
        return to_plain_data(asdict(self))


def to_plain_data(data: Any) -> Any:
    """Return nested data with tuples as lists, and None for numbers that JSON lacks.

    >>> to_plain_data({"sqnr": (float("inf"), 31.5)})
    {'sqnr': [None, 31.5]}
    """
    if isinstance(data, Mapping):
        return {str(name): to_plain_data(item) for name, item in data.items()}
    if isinstance(data, list | tuple):
        return [to_plain_data(item) for item in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
