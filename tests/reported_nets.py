"""Shared by tests of reports: a small network in modules, compiled in several ways, and the contents of its report."""

import dataclasses
import json
import re

import torch
from clika_ref_visualize.report.contents import (
    ChosenRow,
    HistogramRecord,
    NodeRecord,
    ObservedRange,
    ReportContents,
    Reproduction,
    ValueRecord,
)
from clika_ref_visualize.report.module_tree import build_module_records
from seeded_tensors import randn
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.quantization.decision import ThresholdPrediction

HERE = DeploymentSettings_ONNXRuntime_ONNX()
X = randn(4, 3, 8, 8)


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(self.second(nn.functional.hardswish(self.first(x))) + x)


class Small(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).flatten(1))


def compile_float(model=None):
    """Compile the network in float."""
    return clika_compile((model or Small()).eval(), tracing_inputs=[X, X[:2]], deployment_settings=HERE)


def compile_int8(model=None, *, layers=None, deployment=HERE, **settings):
    """Compile the network in INT8."""
    return clika_compile(
        (model or Small()).eval(),
        calibration_inputs=[X, X[:2]],
        quantization_settings=QuantizationSettings(**settings),
        layer_quantization_settings=layers,
        deployment_settings=deployment,
    )


def compile_int4():
    """Compile the network with INT4 weights and float activations."""
    settings = {"weights_num_bits": 4, "weights_only_quantization_block_size": 32}
    return compile_int8(prefer_weights_only_quantization=True, automatic_skip_quantization=False, **settings)


def read_contents(path):
    """Read the contents of a report from its page."""
    (data,) = re.findall(rb'<script id="contents" type="application/json">(.*?)</script>', path.read_bytes(), re.DOTALL)
    return json.loads(data)


def make_node(name, scope="", operator="conv2d", **facts):
    """Return a node record with the given facts; all others are empty."""
    none = dict.fromkeys(("line", "reason"), "") | dict.fromkeys(("macs", "bytes_before", "bytes_after"), 0)
    none |= dict.fromkeys(("runs", "bits", "sensitivity", "seconds"))
    return NodeRecord(
        **{**none, "name": name, "scope": scope, "operator": operator, "state": "float", "planned": "float"}
        | {"inputs": [], "outputs": [], **facts}
    )


def make_contents(nodes, values=(), **facts):
    """Return report contents from node records, without a model."""
    contents = {of.name: [] for of in dataclasses.fields(ReportContents)}
    contents |= {"model": "Made", "target": "onnxruntime", "created": "2026-11-25T20:00:00+00:00", "summary": "made up"}
    contents |= {"parameters": 0, "bytes_before": 100, "bytes_after": 50, "bytes_of_file": None, "latency": None}
    contents |= {"modules": build_module_records(nodes), "nodes": nodes, "values": values}
    contents |= {"unavailable": {}, "version": 1}
    contents |= {
        "chosen": None,
        "reproduction": Reproduction("a: 1\n", "pass\n", {"torch": "2.13.0"}, {"system": "none"}, {}),
    }
    return ReportContents(**{**contents, **facts})


def make_large_contents(count):
    """Return contents with many nodes, each with a sensitivity, a time and an activation with a histogram."""
    nodes, values, rows = [], [], []
    for index in range(count):
        layer = {
            "bits": (8, 8),
            "bytes_before": 4000 + index,
            "bytes_after": 1000 + index,
            "seconds": 1e-6 * (index + 1),
        }
        state, inputs = ("quantized", [index - 1] if index else [])
        scope = f"stage.{index // 100}.block.{index // 10 % 10}"
        facts = {**layer, "sensitivity": 1e-6 * (1 + index * 7919 % count), "macs": 1000, "inputs": inputs}
        facts |= {"state": state, "planned": "int8", "runs": "int8", "outputs": [index]}
        nodes.append(make_node(f"conv2d_{index}", scope, **facts))
        histogram = HistogramRecord(-1.0, 1 / 32, [index * i % 97 for i in range(64)])
        values.append(
            ValueRecord(f"conv2d_{index}", "float32[1, 8, 4, 4]", index, ObservedRange(-1.0, 1.0, 2, histogram))
        )
        rows.append(ThresholdPrediction(1e-6 * (index + 1), index + 1, 10_000_000 - 3000 * index, 60 - index / 100))
    chosen = ChosenRow(1e-6 * count, count, count, 4_000_000, 40.0)
    return make_contents(nodes, values, what_if=rows, chosen=chosen, bytes_before=10_000_000, bytes_after=4_000_000)
