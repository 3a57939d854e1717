"""What a report says: plain data, of which nothing refers to a graph, and all of which can be written as JSON.

A number that is not known, or is none that JSON has, is None. Nodes and values are referred to by their place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from clika_ref.target_comparison import TargetFacts

VERSION = 1
"""Of the form of the data, raised whenever a reader of older ones would be misled."""

State = Literal["integers", "weights", "missed", "kept", "fused", "float"]
"""What became of a node, as colours show it.

``integers`` compute in integers, ``weights`` in float with a weight of few bits; ``missed`` were planned to and run in
float, ``kept`` are layers that stay float for a reason; ``fused`` are parts of other nodes; ``float`` are all others.
"""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many elements lay where: ``counts[i]`` from ``start + i * width`` up to the next one."""

    start: float
    width: float
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a value held while data was run: all but the histogram is exact, which is of a sample."""

    low: float
    high: float
    batches: int
    histogram: Histogram
    source: str = ""
    """The value that it was seen of, where this one only has its elements in another order; nothing of its own."""


@dataclass(frozen=True, slots=True)
class Covered:
    """What the integers of a value stand for."""

    low: float
    high: float
    scale: float
    zero_point: int
    levels: int
    observer: str
    """What the range was chosen by; nothing where that is not known."""
    outside: float | None
    """The share of what was seen that lies beyond, and is cut off."""


@dataclass(frozen=True, slots=True)
class ValueRecord:
    """A value between nodes."""

    name: str
    type: str
    """``float32[4, 64, 8, 8]``."""
    maker: int | None
    """The node that makes it; None of an input."""
    seen: Seen | None = None
    covered: Covered | None = None
    """None where it stays float."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node of the graph as it is written, and what became of it."""

    name: str
    scope: str
    operator: str
    line: str
    state: State
    planned: str
    runs: str | None
    """What the runtime runs it in; None where it could not be asked."""
    reason: str
    """Why it is float, where anybody knows."""
    products: int
    """How many numbers it multiplies and adds up in a call on the example; 0 for what is no layer."""
    bits: tuple[int, int] | None
    """Of its weight and of what it reads; None of what has no weight."""
    bytes_before: int
    """Of its weight in float."""
    bytes_after: int
    sensitivity: float | None
    """The share of their square by which outputs change where this layer alone is quantized; None if not weighed."""
    seconds: float | None
    """In a call; None where the runtime tells none, as of a part of another node."""
    reads: Sequence[int]
    makes: Sequence[int]


@dataclass(frozen=True, slots=True)
class ModuleRecord:
    """A module of the model, with the sums of all nodes in it and in its modules."""

    scope: str
    """Its path, nothing of the model itself."""
    parent: int | None
    nodes: Sequence[int]
    """Those that no module in it holds."""
    count: int
    layers: int
    integers: int
    """Layers in integers, or with weights in few bits."""
    bytes_before: int
    bytes_after: int
    products: int
    products_in_integers: int
    """Those of nodes that run, or where nobody could be asked are planned, in integers or with few bits."""
    seconds: float | None
    sensitivity: float | None
    """The largest one in it."""


@dataclass(frozen=True, slots=True)
class WhatIfRecord:
    """What another threshold would give; ``sqnr`` in dB, None where nothing is changed."""

    threshold: float
    layers: int
    bytes: int
    sqnr: float | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen of these."""

    threshold: float | None
    """None where there is none, as where whatever can be is quantized."""
    layers: int
    of_layers: int
    bytes: int
    sqnr: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """What a call takes, as the runtime tells of its own nodes."""

    seconds: float
    """Of all, those included that belong to no node of the graph."""
    unnamed: float
    """Of those that belong to none: changes of layout between them, and from floats to integers and back."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """What the run can be repeated with."""

    settings: str
    """All of them as the YAML that `Settings.load_from_path` reads."""
    code: str
    """Python that compiles with these."""
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    seconds: Mapping[str, float]
    """What the stages of compilation took."""


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a report says."""

    model: str
    target: str
    made: str
    """When, with the offset of the clock: ``2026-11-25T20:15:00+00:00``."""
    summary: str
    """What was decided, in one line; nothing where nothing was."""
    inputs: Sequence[str]
    outputs: Sequence[str]
    example: Sequence[str]
    """The sides of the inputs with which products are counted and times taken."""
    parameters: int
    bytes_before: int
    """Of all weights and constants in float."""
    bytes_after: int
    bytes_of_file: int | None
    """Of the artifact; None where the target writes none."""
    modules: Sequence[ModuleRecord]
    nodes: Sequence[NodeRecord]
    values: Sequence[ValueRecord]
    what_if: Sequence[WhatIfRecord]
    chosen: Chosen | None
    targets: Sequence[TargetFacts]
    latency: Latency | None
    warnings: Sequence[str]
    repeat: Repeat
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why a part is empty, by its name: ``sensitivity``, ``what_if``, ``values``, ``runtime``, ``latency``,
    ``targets``; of ``repeat``, what its settings do not say."""
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        """Return it as dicts, lists and numbers that JSON has."""
        return plain(asdict(self))


def plain(found: Any) -> Any:
    """Return nested data with tuples as lists, and None for numbers that JSON does not have.

    >>> plain({"sqnr": (float("inf"), 31.5)})
    {'sqnr': [None, 31.5]}
    """
    if isinstance(found, Mapping):
        return {str(name): plain(held) for name, held in found.items()}
    if isinstance(found, list | tuple):
        return [plain(held) for held in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found
