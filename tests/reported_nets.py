"""What tests of reports share: a small network in modules, compiled in each way, and what its report holds."""

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
    WhatIfRecord,
)
from clika_ref_visualize.report.module_tree import module_records
from torch import nn

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

HERE = DeploymentSettings_ONNXRuntime_ONNX()
X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Two convolutions beside what they read."""

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


def in_float(model=None):
    """The network in float."""
    return clika_compile((model or Small()).eval(), tracing_inputs=[X, X[:2]], deployment_settings=HERE)


def in_integers(model=None, *, layers=None, deployment=HERE, **settings):
    """The network in integers."""
    return clika_compile(
        (model or Small()).eval(),
        calibration_inputs=[X, X[:2]],
        quantization_settings=QuantizationSettings(**settings),
        layer_quantization_settings=layers,
        deployment_settings=deployment,
    )


def in_four_bits():
    """The network with weights of four bits, and values in float."""
    settings = {"weights_num_bits": 4, "weights_only_quantization_block_size": 32}
    return in_integers(prefer_weights_only_quantization=True, automatic_skip_quantization=False, **settings)


def told_in(path):
    """The contents that a page holds."""
    (data,) = re.findall(rb'<script id="contents" type="application/json">(.*?)</script>', path.read_bytes(), re.DOTALL)
    return json.loads(data)


def node(name, scope="", operator="conv2d", **facts):
    """A record of a node, of which only what is given is said."""
    none = dict.fromkeys(("line", "reason"), "") | dict.fromkeys(("products", "bytes_before", "bytes_after"), 0)
    none |= dict.fromkeys(("runs", "bits", "sensitivity", "seconds"))
    return NodeRecord(
        **{**none, "name": name, "scope": scope, "operator": operator, "state": "float", "planned": "float"}
        | {"reads": [], "makes": [], **facts}
    )


def made_up(nodes, values=(), **facts):
    """Contents of a model that nobody has compiled."""
    told = {of.name: [] for of in dataclasses.fields(ReportContents)}
    told |= {"model": "Made", "target": "onnxruntime", "made": "2026-11-25T20:00:00+00:00", "summary": "made up"}
    told |= {"parameters": 0, "bytes_before": 100, "bytes_after": 50, "bytes_of_file": None, "latency": None}
    told |= {"modules": module_records(nodes), "nodes": nodes, "values": values, "missing": {}, "version": 1}
    told |= {"chosen": None, "repeat": Reproduction("a: 1\n", "pass\n", {"torch": "2.13.0"}, {"system": "none"}, {})}
    return ReportContents(**{**told, **facts})


def large(count):
    """Contents of as many nodes, each with a sensitivity, a time and a value with a histogram."""
    nodes, values, rows = [], [], []
    for place in range(count):
        layer = {
            "bits": (8, 8),
            "bytes_before": 4000 + place,
            "bytes_after": 1000 + place,
            "seconds": 1e-6 * (place + 1),
        }
        state, reads = ("integers", [place - 1] if place else [])
        scope = f"stage.{place // 100}.block.{place // 10 % 10}"
        facts = {**layer, "sensitivity": 1e-6 * (1 + place * 7919 % count), "products": 1000, "reads": reads}
        nodes.append(node(f"conv2d_{place}", scope, state=state, planned="int8", runs="int8", makes=[place], **facts))
        histogram = HistogramRecord(-1.0, 1 / 32, [place * i % 97 for i in range(64)])
        values.append(
            ValueRecord(f"conv2d_{place}", "float32[1, 8, 4, 4]", place, ObservedRange(-1.0, 1.0, 2, histogram))
        )
        rows.append(WhatIfRecord(1e-6 * (place + 1), place + 1, 10_000_000 - 3000 * place, 60 - place / 100))
    chosen = ChosenRow(1e-6 * count, count, count, 4_000_000, 40.0)
    return made_up(nodes, values, what_if=rows, chosen=chosen, bytes_before=10_000_000, bytes_after=4_000_000)
