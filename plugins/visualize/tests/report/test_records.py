"""Records of a report: merged histograms, sums of modules, JSON that is safe in HTML."""

import json

import pytest
import torch
from clika_ref_visualize.report.contents import to_plain_data
from clika_ref_visualize.report.module_tree import build_module_records
from clika_ref_visualize.report.node_records import find_state
from clika_ref_visualize.report.page import render_report, to_script_json
from clika_ref_visualize.report.value_records import MAX_BINS, merge_bins
from reported_nets import make_contents, make_large_contents, make_node

from clika_ref.quantization.calibration.histogram import Histogram as Full


def make_full_statistics(*elements):
    full = Full()
    full.add(torch.tensor(elements, dtype=torch.float32))
    return full


@pytest.mark.parametrize("reach", [1.0, 3.7, 1000.0, 2.0**-140])
def test_merge_bins_keeps_all_elements_in_few_bins(reach):
    """The merged histogram contains all elements in few bins, between the min and the max."""
    elements = (torch.rand(5000, generator=torch.Generator().manual_seed(0)) * 2 - 0.7) * reach
    full = make_full_statistics(*elements.tolist())
    found = merge_bins(full)
    assert len(found.counts) <= MAX_BINS
    assert sum(found.counts) == full.total == 5000
    assert found.counts[0] > 0
    assert found.counts[-1] > 0
    assert found.start <= float(elements.min())
    assert float(elements.max()) < found.start + len(found.counts) * found.width
    assert (found.start / found.width).is_integer()  # 0 is the border of two bins


def test_merge_bins_elements_stay_in_their_bin():
    """Each element is counted in its own bin."""
    full = make_full_statistics(-0.9, -0.01, 0.0, 0.01, 0.5, 0.99)
    found = merge_bins(full)
    for element in (-0.9, -0.01, 0.0, 0.01, 0.5, 0.99):
        assert found.counts[int((element - found.start) // found.width)] > 0
    assert found.counts[int((0.25 - found.start) // found.width)] == 0


def test_merge_bins_empty_and_constant_tensor():
    """An empty histogram has no bins, a constant one has one."""
    assert merge_bins(Full()).counts == []
    assert merge_bins(make_full_statistics(0.0, 0.0)).counts == [2]


@pytest.mark.parametrize(
    ("planned", "runs", "is_kept", "state"),
    [
        ("int8", "int8", False, "quantized"),
        ("int8", None, False, "quantized"),
        ("int8", "fused", False, "quantized"),
        ("int4 weights", "int4 weights", False, "weight_only"),
        ("int8", "float", False, "not_quantized"),
        ("int4 weights", "not reported by the runtime", False, "not_quantized"),
        ("float", "float", True, "kept_in_float"),
        ("float", "fused", False, "fused"),
        ("float", "float", False, "float"),
    ],
)
def test_state_of_planned_and_real_precision(planned, runs, is_kept, state):
    """The state of a node follows from its planned and real precision."""
    assert find_state(planned, runs, is_kept=is_kept) == state


def test_module_records_sorted_and_summed():
    """Modules follow their parents, with the sums of their nodes."""
    layer = {"bits": (8, 8), "bytes_before": 40, "bytes_after": 10, "macs": 3, "state": "quantized"}
    nodes = [
        make_node("a", "encoder.layers.0.fc", **layer, sensitivity=0.1, seconds=2.0),
        make_node("b", "encoder", operator="add"),
        make_node("c", "", operator="mul", seconds=1.0),
        make_node("d", "encoder.layers.1", **{**layer, "state": "not_quantized"}, sensitivity=0.3),
    ]
    found = build_module_records(nodes)
    assert [m.scope for m in found] == [
        "",
        "encoder",
        "encoder.layers",
        "encoder.layers.0",
        "encoder.layers.0.fc",
        "encoder.layers.1",
    ]
    assert [m.parent for m in found] == [None, 0, 1, 2, 3, 2]
    assert [m.nodes for m in found] == [[2], [1], [], [], [0], [3]]
    whole, encoder = found[:2]
    assert (whole.count, whole.layers, whole.quantized_layers, whole.quantized_macs) == (4, 2, 1, 3)
    assert (encoder.count, encoder.bytes_before, encoder.bytes_after, encoder.macs) == (3, 80, 20, 6)
    assert (whole.seconds, encoder.seconds, found[5].seconds) == (3.0, 2.0, None)
    assert (whole.sensitivity, found[3].sensitivity) == (0.3, 0.1)


def test_to_plain_data_nan_and_inf_become_null():
    """NaN and inf become null."""
    found = to_plain_data({"a": [float("nan"), 1.5, (float("-inf"), 2)]})
    assert found == {"a": [None, 1.5, [None, 2]]}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "&lt;b&gt;",
    "\u2028\u2029",
    "a\x00b",
    "${x}`",
    "\ud800",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_to_script_json_hostile_name_stays_data(name):
    """A name with HTML stays data and does not end the script."""
    text = to_script_json({"name": name})
    assert "<" not in text
    assert ">" not in text
    assert json.loads(text)["name"] == name
    page = render_report(make_contents([make_node(name, name, reason=name)], model=name)).decode()
    assert page.count("</script>") == 2
    assert "alert(1)</script>" not in page


def test_render_report_two_thousand_nodes_below_3_mb():
    """A report of 2,000 nodes is smaller than 3 MB."""
    assert len(render_report(make_large_contents(2000))) < 3e6
