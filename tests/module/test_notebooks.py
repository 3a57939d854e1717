"""What is returned to users shows itself: as text, as HTML in notebooks, and as records that pandas takes."""

import json
import math

import pytest
import torch
from calibrated_nets import HERE, batches, compiled, traced

from clika_ref import LoraSettings, PruningSettings
from clika_ref.reporting.tables import Table


@pytest.fixture(scope="module")
def module():
    return compiled()


def pruned():
    settings = PruningSettings(mask_type="structured", pruning_sensitivity_threshold=0.5)
    return traced().clika_prune(settings, calibration_inputs=batches())


RESULTS = {
    "summary": lambda module: module.clika_summary(),
    "explanation": lambda module: module.clika_explain(),
    "comparison": lambda module: module.clika_compare_targets(HERE),
    "pruning": lambda _: pruned(),
    "adapters": lambda _: traced().clika_attach_lora(LoraSettings(rank=2)),
    "goal": lambda _: compiled().clika_quantize_to_goal(lambda module: 1.0, 0.5),
}


@pytest.fixture(params=RESULTS.values(), ids=RESULTS.keys())
def result(request, module):
    return request.param(module)


def test_each_result_prints_its_table_first(result):
    assert str(result).startswith(str(result.table))
    assert len(result.table) > 0


def test_each_result_shows_its_table_in_notebooks(result):
    assert result.table._repr_html_() in result._repr_html_()


def test_each_result_gives_records_of_plain_values_with_the_same_names_in_each(result):
    records = result.table.to_dict()
    assert len(records) == len(result.table)
    assert len({tuple(record) for record in records}) == 1
    json.dumps(records)  # which knows numbers, texts, lists and None only


def test_what_another_threshold_would_give_is_a_table_as_well(module):
    table = module.clika_summary().prediction_table
    assert isinstance(table, Table)
    records = table.to_dict()
    assert [*records[0]] == ["threshold", "layers", "bytes", "sqnr"]
    assert math.isfinite(records[0]["sqnr"])


def test_the_records_of_layers_say_what_their_table_does(module):
    found = module.clika_summary()
    (first, *_), (cells, *_) = found.table.to_dict(), found.table.cells()
    assert [first["scope"], first["operator"], *first["bits"]] == [*cells[:4]]
    assert [first["sensitivity"], first["bytes_before"], first["bytes_after"]] == [*cells[4:7]]


def test_records_of_an_explanation_are_of_all_nodes_also_of_those_that_are_not_printed(module):
    found = module.clika_explain()
    assert [record["name"] for record in found.table.to_dict()] == [node.name for node in found.nodes]
    assert torch.tensor([record["products"] for record in found.table.to_dict()]).sum() > 0


def test_a_module_in_integers_shows_the_parameters_of_the_model_and_not_its_scales(module):
    model = traced()
    own = sum(parameter.numel() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in module.parameters()) > own
    for shown in (model, module):
        assert f" nodes, {own:,} parameters" in shown._repr_html_()
