"""Results of the interface as text, as HTML in notebooks, and as records for pandas."""

import json
import math

import pytest
import torch
from calibrated_nets import HERE, compile_net, make_batches, trace_net

from clika_ref import LoraSettings, PruningSettings
from clika_ref.reporting.tables import Table


@pytest.fixture(scope="module")
def module():
    return compile_net()


def prune_net():
    settings = PruningSettings(mask_type="structured", pruning_sensitivity_threshold=0.5)
    return trace_net().clika_prune(settings, calibration_inputs=make_batches())


RESULTS = {
    "summary": lambda module: module.clika_summary(),
    "explanation": lambda module: module.clika_explain(),
    "comparison": lambda module: module.clika_compare_targets(HERE),
    "pruning": lambda _: prune_net(),
    "adapters": lambda _: trace_net().clika_attach_lora(LoraSettings(rank=2)),
    "goal": lambda _: compile_net().clika_quantize_to_goal(lambda module: 1.0, 0.5),
}


@pytest.fixture(params=RESULTS.values(), ids=RESULTS.keys())
def result(request, module):
    return request.param(module)


def test_result_str_starts_with_table(result):
    """The text of each result starts with its table."""
    assert str(result).startswith(str(result.table))
    assert len(result.table) > 0


def test_result_repr_html_contains_table(result):
    """The HTML of each result contains its table."""
    assert result.table._repr_html_() in result._repr_html_()


def test_result_records_plain_and_uniform(result):
    """The records of each result have the same names and plain JSON values."""
    records = result.table.to_dict()
    assert len(records) == len(result.table)
    assert len({tuple(record) for record in records}) == 1
    json.dumps(records)  # which knows numbers, texts, lists and None only


def test_prediction_table_lists_thresholds(module):
    """The predictions for other thresholds are a table."""
    table = module.clika_summary().prediction_table
    assert isinstance(table, Table)
    records = table.to_dict()
    assert [*records[0]] == ["threshold", "layers", "bytes", "sqnr"]
    assert math.isfinite(records[0]["sqnr"])


def test_summary_records_match_table(module):
    """The records of layers equal the cells of their table."""
    found = module.clika_summary()
    (first, *_), (cells, *_) = found.table.to_dict(), found.table.cells()
    assert [first["scope"], first["operator"], *first["bits"]] == [*cells[:4]]
    assert [first["sensitivity"], first["bytes_before"], first["bytes_after"]] == [*cells[4:7]]


def test_explanation_records_cover_all_nodes(module):
    """The records of an explanation cover all nodes, also those that are not printed."""
    found = module.clika_explain()
    assert [record["name"] for record in found.table.to_dict()] == [node.name for node in found.nodes]
    assert torch.tensor([record["macs"] for record in found.table.to_dict()]).sum() > 0


def test_repr_html_quantized_counts_model_parameters_only(module):
    """A quantized module shows the parameters of the model, without its scales."""
    model = trace_net()
    own = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in module.parameters()) > own
    for shown in (model, module):
        assert f" nodes, {own:,} parameters" in shown._repr_html_()
