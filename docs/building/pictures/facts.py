"""The facts that pictures show: measured ones are recorded in `facts.json`, since they differ slightly between CPUs.

`make pictures` records them again. A test compares the recorded facts with new ones: texts, counts and decisions must
be equal, other numbers within `MAX_DIFFERENCE`.
"""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from clika_ref_visualize.report.contents import to_plain_data
from clika_ref_visualize.report.report_builder import build_contents
from torch import Tensor

from clika_ref import ClikaCompileOptions, ModelError, QuantizationSettings, Settings, clika_compile
from clika_ref.core.ir import Node
from clika_ref.export.visualization import ReportFacts
from clika_ref.pruning.dependency_tracing import build_dependency_graph
from clika_ref.pruning.groups import find_groups
from clika_ref.quantization.calibration.observers import (
    Range,
    least_error,
    mean_min_max,
    min_max,
    quantization_error,
)
from clika_ref.quantization.calibration.statistics import Statistics, measure_tensor
from clika_ref.reporting.tables import HasTables, format_cell
from clika_ref.stages import ExportConfiguration, explain, load_registry
from docs.building.pictures.networks import (
    Coupled,
    Separable,
    capture_network,
    make_images,
    quantize_network,
    randomize_separable,
)
from docs.building.pictures.pool import Pool

RECORDED_PATH = Path(__file__).with_name("facts.json")

MAX_DIFFERENCE = 0.05
"""Relative difference of a number on another CPU: its sums have other orders, and its observers see other ties."""

SENSITIVITY_THRESHOLD = 8e-5
"""A threshold between the sensitivities of `Separable`, so that two layers stay in float."""

CONFORMANCE_OPERATORS = (
    "conv2d",
    "matmul",
    "softmax",
    "layer_norm",
    "gelu",
    "max_pool2d",
    "sort",
    "lstm",
    "embedding_bag",
    "bernoulli",
    "scaled_dot_product_attention",
)
"""Operators of the matrix: layers, a pooling, an order, a recurrent network, an index, a random one."""

Facts = dict[str, Any]


def read_facts() -> Facts:
    """Return the recorded facts."""
    return json.loads(RECORDED_PATH.read_text(encoding="utf-8"))


def record_facts() -> None:
    """Measure all facts and write them to `RECORDED_PATH`."""
    text = json.dumps(measure_facts(), indent=1, ensure_ascii=False)
    RECORDED_PATH.write_text(f"{text}\n", encoding="utf-8")


def measure_facts() -> Facts:
    """Return the facts that depend on the CPU: of a quantized network, and of a run of the conformance suite."""
    return {**measure_network(), "conformance": run_conformance()}


def measure_network() -> Facts:
    """Return the summary, the explanation and the report of `Separable`, quantized for ONNX Runtime."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = Separable()
    randomize_separable(model, generator)
    batches = [make_images(16, generator) for _ in range(4)]
    settings = QuantizationSettings(quantization_sensitivity_threshold=SENSITIVITY_THRESHOLD)
    network = quantize_network(model, batches, settings, ClikaCompileOptions())
    form, example = ExportConfiguration(), [batches[0]]
    explanation = explain(network.captured, network.found.plan, network.target, network.registry, example, form=form)
    subject = ReportFacts(
        network.captured,
        network.target,
        network.registry,
        form,
        example,
        Settings(global_quantization_settings=settings),
        network.found.plan,
        network.found,
        network.table,
    )
    return {
        "summary": _read_parts(network.found),
        "explanation": _read_parts(explanation),
        "report": _read_report(subject),
    }


def _read_parts(result: HasTables) -> list[Any]:
    """Return the printed tables and lines of a result."""
    return [
        part
        if isinstance(part, str)
        else {"columns": [*part.columns], "rows": [[format_cell(cell) for cell in row] for row in part.cells()]}
        for part in result.parts()
    ]


def _read_report(subject: ReportFacts) -> Facts:
    """Return the contents of a report without times, versions and histograms."""
    contents = build_contents(subject, lambda _: None)
    fields = ("model", "target", "summary", "bytes_before", "bytes_after", "bytes_of_file", "warnings")
    found: Facts = {name: getattr(contents, name) for name in fields}
    found["threshold"] = contents.chosen.threshold if contents.chosen else None
    found["sqnr"] = contents.chosen.sqnr if contents.chosen else None
    dropped = {"seconds", "line", "reads", "makes"}
    for name in ("nodes", "modules", "what_if"):
        records = [asdict(record) for record in getattr(contents, name)]
        found[name] = [{key: value for key, value in record.items() if key not in dropped} for record in records]
    found["values"] = [
        {
            "name": v.name,
            "low": v.observed.low,
            "high": v.observed.high,
            "scale": v.quantized.scale,
            "observer": v.quantized.observer,
        }
        for v in contents.values
        if v.observed and v.quantized
    ]
    return to_plain_data(found)


def run_conformance() -> Facts:
    """Return the verdict and the number of checks of each operator and task, in ONNX Runtime with profile quick."""
    names = [argument for name in CONFORMANCE_OPERATORS for argument in ("-k", f"/{name}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clika_ref", "conformance", "run", "--target", "onnxruntime", *names]
        subprocess.run([*command, "--out", folder], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
        report = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))
    found: Facts = {name: {} for name in CONFORMANCE_OPERATORS}
    for task in report["tasks"]:
        if task["subject"] in found and task["level"] != "blocks":
            column = f"{task['level']} {task['dtype']}" if task["level"] == "operators" else task["level"]
            found[task["subject"]][column] = [task["verdict"], sum(task["verdicts"].values())]
    return found


def find_dynamic_facts() -> Facts:
    """Return the symbols and the guard of `Pool`, and the results of calls with other shapes."""
    tracing = [(1, 16, 8), (4, 32, 8)]
    module = clika_compile(Pool(), tracing_inputs=[torch.zeros(shape) for shape in tracing])
    graph = module.graph
    guard = next(guard for guard in graph.guards if guard.line)
    calls: list[tuple[str, str]] = []
    for shape in ((7, 64, 8), (2, 100, 8), (2, 16, 9)):
        x = torch.ones(shape).cumsum(1)  # integers have exact means
        try:
            result = (
                "accepted: equal to the model" if torch.equal(module(x), Pool()(x)) else "accepted, with another result"
            )
        except ModelError as error:
            result = str(error)
        calls.append((str(list(shape)), result))
    return {
        "tracing": tracing,
        "type": [str(dim) for dim in graph.inputs[0].type.shape],
        "dynamic": [axis for axis, dim in enumerate(graph.inputs[0].type.shape) if not isinstance(dim, int)],
        "branch": inspect.getsource(Pool.forward).splitlines()[-1].partition("#")[0].strip(),
        "guard": str(guard),
        "calls": calls,
    }


def find_pruning_facts() -> Facts:
    """Return the layers of `Coupled` with the groups of their channel dims, and indices that are removed together."""
    registry = load_registry()
    graph = capture_network(Coupled(), [torch.zeros(2, 3, 8, 8), torch.zeros(3, 3, 8, 8)], registry)
    found = build_dependency_graph(graph, dict.fromkeys(graph.symbols, 2))
    groups = find_groups(found)
    gone = frozenset(group.units[2 + 3 * number] for number, group in enumerate(groups))
    layers: list[Facts] = []
    for node, layer in found.layers.items():
        shape = [int(n) for n in layer.weight.type.shape[:2]]
        kept = found.remaining_indices(layer.weight, gone)
        removed = [
            sorted({*range(n)} - {*(kept[axis].tolist() if axis in kept else range(n))}) for axis, n in enumerate(shape)
        ]
        owners = [_find_owner(groups, node, "producers"), _find_owner(groups, node, "consumers")]
        layers.append(
            {"name": _scope_of(node), "operator": node.op_type, "shape": shape, "groups": owners, "removed": removed}
        )
    described = [
        {
            "kind": group.kind,
            "count": len(group.units),
            "producers": [_scope_of(node) for node in group.producers],
            "consumers": [_scope_of(node) for node in group.consumers],
        }
        for group in groups
    ]
    return {"layers": layers, "groups": described}


def _find_owner(groups: Sequence[Any], node: Node, side: str) -> int | None:
    return next((number for number, group in enumerate(groups) if node in getattr(group, side)), None)


def _scope_of(node: Node) -> str:
    return node.origin.scope or node.name


def find_histogram_facts() -> Facts:
    """Return a histogram of an activation with heavy tails, and the ranges that three observers choose, with errors.

    The elements are multiples of 1/4096, so that the histogram and the ranges are exact on every CPU.
    """
    generator = torch.Generator().manual_seed(0)
    statistics = Statistics()
    for _ in range(8):
        factors: Tensor = torch.randint(-64, 65, (2, 3, 4096), generator=generator).sum(1) / 64
        statistics.add(measure_tensor(factors.prod(0)))
    observers = {"min/max": min_max, "averaged min/max": mean_min_max, "MSE": least_error}
    ranges: dict[str, Range] = {name: observer(statistics) for name, observer in observers.items()}
    seen = statistics.histogram.counts.nonzero().squeeze(1)
    return {
        "centers": statistics.histogram.centers[seen].tolist(),
        "counts": statistics.histogram.counts[seen].tolist(),
        "ranges": {name: [r.low, r.high] for name, r in ranges.items()},
        "errors": {name: quantization_error(statistics, r) for name, r in ranges.items()},
    }


def find_differences(recorded: Any, measured: Any, path: str = "facts") -> Iterator[str]:
    """Yield a line for each difference of recorded and measured facts.

    >>> [*find_differences({"qs": [1.0, "a"]}, {"qs": [1.01, "b"]})]
    ["facts.qs[1]: 'a' is recorded, 'b' is measured"]
    """
    if isinstance(recorded, dict) and isinstance(measured, dict) and recorded.keys() == measured.keys():
        for name, value in recorded.items():
            yield from find_differences(value, measured[name], f"{path}.{name}")
    elif isinstance(recorded, list) and isinstance(measured, list) and len(recorded) == len(measured):
        for number, (one, other) in enumerate(zip(recorded, measured, strict=True)):
            yield from find_differences(one, other, f"{path}[{number}]")
    elif isinstance(recorded, float | str) and type(recorded) is type(measured):
        if not _is_close(str(recorded), str(measured)):
            yield f"{path}: {recorded!r} is recorded, {measured!r} is measured"
    elif recorded != measured:
        yield f"{path}: {recorded!r} is recorded, {measured!r} is measured"


def _is_close(recorded: str, measured: str) -> bool:
    """Return whether two texts are equal but for small differences of their decimal fractions."""
    pattern = re.compile(r"-?\d+(?:\.\d+)?e-?\d+|-?\d+\.\d+(?![\w.])")
    if pattern.sub("#", recorded) != pattern.sub("#", measured):
        return False
    pairs = zip(map(float, pattern.findall(recorded)), map(float, pattern.findall(measured)), strict=True)
    return all(abs(one - other) <= MAX_DIFFERENCE * max(abs(one), abs(other)) for one, other in pairs)
