"""All pictures, by the name of their file."""

from __future__ import annotations

import torch
from clika_ref_visualize.pictures.graph_drawing import build_drawing
from clika_ref_visualize.pictures.svg import write_svg

from clika_ref import QuantizationSettings
from docs.building.pictures.charts import draw_conformance, draw_histogram, draw_pruning_groups, draw_sensitivities
from docs.building.pictures.diagrams import ROOT, draw_dynamic_dims, draw_packages, draw_pipeline
from docs.building.pictures.facts import find_dynamic_facts, find_histogram_facts, find_pruning_facts, read_facts
from docs.building.pictures.networks import NO_ALGORITHMS, Branches, quantize_network
from docs.building.pictures.tables import draw_explanation, draw_report, draw_summary

FOLDER = ROOT / "docs/pictures"
"""The folder of the pictures."""


def draw_all() -> dict[str, bytes]:
    """Return each picture as SVG, by the name of its file."""
    facts = read_facts()
    return {
        "pipeline.svg": draw_pipeline(),
        "packages.svg": draw_packages(),
        **draw_graphs(),
        "histogram.svg": draw_histogram(find_histogram_facts()),
        "sensitivity.svg": draw_sensitivities(facts),
        "summary.svg": draw_summary(facts),
        "explanation.svg": draw_explanation(facts),
        "report.svg": draw_report(facts),
        "pruning-groups.svg": draw_pruning_groups(find_pruning_facts()),
        "dynamic-dims.svg": draw_dynamic_dims(find_dynamic_facts()),
        "conformance.svg": draw_conformance(facts),
    }


def draw_graphs() -> dict[str, bytes]:
    """Return the graph of `Branches` as captured, and as quantized for ONNX Runtime."""
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (4, 8, 8, 8), generator=generator) / 256 for _ in range(2)]
    network = quantize_network(Branches(), batches, QuantizationSettings(), NO_ALGORITHMS)
    before = build_drawing(network.captured, subtitle="as captured")
    after = build_drawing(network.quantized, network.found.plan, subtitle="as quantized for ONNX Runtime")
    return {"graph-captured.svg": write_svg(before), "graph-quantized.svg": write_svg(after)}
