"""A compiled module draws itself: in float, in integers, explained, pruned, with adapters; notebooks show it."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from adapted_nets import INT4
from calibrated_nets import HERE, batches, compiled, traced
from read_pictures import Page
from torch import nn

from clika_ref import (
    ClikaModule,
    LayerQuantizationSettings,
    LoraSettings,
    ModelError,
    PruningSettings,
    TargetError,
    clika_compile,
)
from clika_ref.core.registry import load_registry


def roles(path):
    return {box.key: box.role for box in Page(path.read_bytes()).boxes}


@pytest.fixture(scope="module")
def module():
    return compiled()


def test_a_float_module_is_drawn_as_it_is(tmp_path):
    module = traced()
    path = module.clika_visualize(tmp_path / "model")
    assert path == tmp_path / "model.svg"
    assert len(Page(path.read_bytes()).boxes) == len(module.graph) + 2
    assert set(roles(path).values()) == {"interface", "float"}


def test_a_quantized_module_shows_its_integers_by_colour(module, tmp_path):
    path = module.clika_visualize(tmp_path / "model.svg")
    found = roles(path)
    assert [found[f"node {name}"] for name in ("linear", "relu", "linear_1")] == ["integers"] * 3
    page = Page(path.read_bytes())
    assert [way.carries for way in page.ways if way.kind == "edge integers"] == ["x integers", "relu integers"]
    assert "as for onnxruntime" in path.read_text()


def test_drawing_changes_nothing(module, tmp_path):
    x = batches(1)[0]
    before, revision = module(x), module.graph.revision
    module.clika_visualize(tmp_path / "model.html")
    assert torch.equal(module(x), before)
    assert module.graph.revision == revision


def test_a_layer_that_is_skipped_says_so(tmp_path):
    module = compiled(layer_quantization_settings={"second": LayerQuantizationSettings(skip_quantization=True)})
    path = module.clika_visualize(tmp_path / "model.svg")
    assert roles(path)["node linear_1"] == "kept"
    assert "in float because: " in Page(path.read_bytes()).tooltip("node linear_1")


def test_weights_in_few_bits_have_a_colour_of_their_own(tmp_path):
    module = compiled(quantization_settings=INT4)
    found = roles(module.clika_visualize(tmp_path / "model.svg"))
    assert [role for role in found.values() if role == "weights"] == ["weights"] * 2


def test_what_a_runtime_runs_is_shown_where_it_is_given(module, tmp_path):
    path = module.clika_visualize(tmp_path / "model.svg", explanation=module.clika_explain())
    assert "in onnxruntime: int8" in Page(path.read_bytes()).tooltip("node linear")


def test_an_explanation_of_another_kind_is_refused(module, tmp_path):
    with pytest.raises(ModelError, match=r"explanation is 'why', a str; give what clika_explain\(\) returns"):
        module.clika_visualize(tmp_path / "model.svg", explanation="why")


def test_a_pruned_module_shows_what_is_left(tmp_path):
    module = traced()
    module.clika_prune(
        PruningSettings(mask_type="structured", pruning_sensitivity_threshold=0.5), calibration_inputs=batches()
    )
    width = module.graph.constants["first.weight"].type.shape[0]
    assert width < 64
    assert f"float32[{width}, 32]" in Page(module.clika_visualize(tmp_path / "model.svg").read_bytes()).texts(
        "node linear"
    )


def test_adapters_have_a_colour_of_their_own(tmp_path):
    module = traced()
    module.clika_attach_lora(LoraSettings(rank=2))
    found = roles(module.clika_visualize(tmp_path / "model.svg"))
    assert [role for role in found.values() if role == "adapter"] == ["adapter"] * 2


def test_adapters_beside_integers_are_told_apart_from_them(tmp_path):
    module = compiled()
    module.clika_attach_lora(LoraSettings(rank=2))
    found = [*roles(module.clika_visualize(tmp_path / "model.svg")).values()]
    assert found.count("adapter") == 2
    assert found.count("integers") >= 2


def test_an_existing_picture_is_overwritten_and_the_log_says_so(tmp_path):
    module = clika_compile(nn.Linear(4, 4), tracing_inputs=[torch.zeros(1, 4)], logs_dir=tmp_path / "logs")
    for _ in range(2):
        module.clika_visualize(tmp_path / "model.dot")
    told = "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    assert told.count("Visualization: file exists: ") == 1
    assert told.count(f"Saved graph visualization to: {tmp_path / 'model.dot'}") == 2


def test_an_empty_module_has_no_picture(tmp_path):
    with pytest.raises(ModelError, match="this ClikaModule is empty"):
        ClikaModule().clika_visualize(tmp_path / "model.svg")
    assert not [*tmp_path.iterdir()]


def test_a_module_for_a_target_that_is_not_there_says_what_to_do(module, tmp_path):
    twin = copy.deepcopy(module)
    twin.clika_state.registry = replace(load_registry(), targets={})
    with pytest.raises(TargetError, match="for the target 'onnxruntime', which no installed plugin provides"):
        twin.clika_visualize(tmp_path / "model.svg")


# Notebooks


def test_a_notebook_shows_a_float_module_with_its_picture():
    shown = traced()._repr_html_()
    assert "<b>Net</b>: 3 nodes, 4,192 parameters" in shown
    assert len(re.findall(r'class="box"', shown)) == 5
    assert "What was decided" not in shown


def test_a_notebook_shows_what_was_decided(module):
    shown = module._repr_html_()
    assert "as for onnxruntime" in shown
    assert "<summary>What was decided</summary>" in shown
    assert "<th" in shown


def test_a_notebook_shows_an_empty_module_as_such():
    assert "ClikaModule" in ClikaModule()._repr_html_()


def test_a_notebook_shows_no_picture_that_nobody_could_read(monkeypatch):
    monkeypatch.setattr("clika_ref.export.inspection.MAX_NOTEBOOK_NODES", 2)
    shown = traced()._repr_html_()
    assert "<svg" not in shown
    assert "clika_visualize(&quot;model.html&quot;) draws it" in shown


def test_a_module_for_here_is_drawn_for_here(module):
    assert HERE.target in module._repr_html_()
