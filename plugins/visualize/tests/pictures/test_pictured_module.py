"""Pictures of compiled modules: float, INT8, explained, pruned, with adapters; and their display in notebooks."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from adapted_nets import INT4
from calibrated_nets import HERE, compile_net, make_batches, trace_net
from log_files import read_logs
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


def read_roles(path):
    return {box.key: box.role for box in Page(path.read_bytes()).boxes}


@pytest.fixture(scope="module")
def module():
    return compile_net()


def test_clika_visualize_float_module_draws_all_nodes(tmp_path):
    """A float module is drawn with all nodes, in float colors."""
    module = trace_net()
    path = module.clika_visualize(tmp_path / "model")
    assert path == tmp_path / "model.svg"
    assert len(Page(path.read_bytes()).boxes) == len(module.graph) + 2
    assert set(read_roles(path).values()) == {"interface", "float"}


def test_clika_visualize_quantized_module_marks_int8(module, tmp_path):
    """A quantized module marks INT8 nodes and edges."""
    path = module.clika_visualize(tmp_path / "model.svg")
    found = read_roles(path)
    assert [found[f"node {name}"] for name in ("linear", "relu", "linear_1")] == ["quantized"] * 3
    page = Page(path.read_bytes())
    assert [route.tensor for route in page.routes if route.kind == "edge quantized"] == [
        "x quantized",
        "relu quantized",
    ]
    assert "as for onnxruntime" in path.read_text()


def test_clika_visualize_keeps_module_unchanged(module, tmp_path):
    """Drawing changes neither outputs nor the graph."""
    x = make_batches(1)[0]
    before, revision = module(x), module.graph.revision
    module.clika_visualize(tmp_path / "model.html")
    assert torch.equal(module(x), before)
    assert module.graph.revision == revision


def test_clika_visualize_skipped_layer_shows_reason(tmp_path):
    """A skipped layer is marked as kept in float, with the reason."""
    module = compile_net(layer_quantization_settings={"second": LayerQuantizationSettings(skip_quantization=True)})
    path = module.clika_visualize(tmp_path / "model.svg")
    assert read_roles(path)["node linear_1"] == "kept_in_float"
    assert "reason for float: " in Page(path.read_bytes()).tooltip("node linear_1")


def test_clika_visualize_int4_weights_have_own_color(tmp_path):
    """INT4 weights have their own color."""
    module = compile_net(quantization_settings=INT4)
    found = read_roles(module.clika_visualize(tmp_path / "model.svg"))
    assert [role for role in found.values() if role == "weight_only"] == ["weight_only"] * 2


def test_clika_visualize_explanation_shows_runtime_precision(module, tmp_path):
    """With an explanation, the tooltip shows the precision in the runtime."""
    path = module.clika_visualize(tmp_path / "model.svg", explanation=module.clika_explain())
    assert "precision in onnxruntime: int8" in Page(path.read_bytes()).tooltip("node linear")


def test_clika_visualize_wrong_explanation_raises(module, tmp_path):
    """An explanation of a wrong type raises an error."""
    with pytest.raises(ModelError, match=r"explanation is 'why', a str. Pass the result of clika_explain"):
        module.clika_visualize(tmp_path / "model.svg", explanation="why")


def test_clika_visualize_pruned_module_shows_new_shape(tmp_path):
    """A pruned module is drawn with its remaining channels."""
    module = trace_net()
    module.clika_prune(
        PruningSettings(mask_type="structured", pruning_sensitivity_threshold=0.5), calibration_inputs=make_batches()
    )
    width = module.graph.constants["first.weight"].type.shape[0]
    assert width < 64
    assert f"float32[{width}, 32]" in Page(module.clika_visualize(tmp_path / "model.svg").read_bytes()).texts(
        "node linear"
    )


def test_clika_visualize_adapters_have_own_color(tmp_path):
    """Adapters have their own color."""
    module = trace_net()
    module.clika_attach_lora(LoraSettings(rank=2))
    found = read_roles(module.clika_visualize(tmp_path / "model.svg"))
    assert [role for role in found.values() if role == "adapter"] == ["adapter"] * 2


def test_clika_visualize_adapters_next_to_int8_distinguished(tmp_path):
    """Adapters next to INT8 layers have a color different from them."""
    module = compile_net()
    module.clika_attach_lora(LoraSettings(rank=2))
    found = [*read_roles(module.clika_visualize(tmp_path / "model.svg")).values()]
    assert found.count("adapter") == 2
    assert found.count("quantized") >= 2


def test_clika_visualize_overwrites_file_with_log_line(tmp_path):
    """An existing picture is overwritten, and the log reports it."""
    module = clika_compile(nn.Linear(4, 4), tracing_inputs=[torch.zeros(1, 4)], logs_dir=tmp_path / "logs")
    for _ in range(2):
        module.clika_visualize(tmp_path / "model.dot")
    log = read_logs(tmp_path / "logs")
    assert log.count("Visualization: file exists: ") == 1
    assert log.count(f"Saved graph visualization to: {tmp_path / 'model.dot'}") == 2


def test_clika_visualize_empty_module_raises(tmp_path):
    """An empty module raises an error, and no file is written."""
    with pytest.raises(ModelError, match="this ClikaModule is empty"):
        ClikaModule().clika_visualize(tmp_path / "model.svg")
    assert not [*tmp_path.iterdir()]


def test_clika_visualize_missing_target_raises(module, tmp_path):
    """A module for a target that is not installed raises an error."""
    twin = copy.deepcopy(module)
    twin.clika_state.registry = replace(load_registry(), targets={})
    with pytest.raises(TargetError, match="for the target 'onnxruntime', which no installed plugin provides"):
        twin.clika_visualize(tmp_path / "model.svg")


# Notebooks


def test_repr_html_float_module_contains_picture():
    """A notebook shows a float module with its picture."""
    shown = trace_net()._repr_html_()
    assert "<b>Net</b>: 3 nodes, 4,192 parameters" in shown
    assert len(re.findall(r'class="box"', shown)) == 5
    assert "Decisions" not in shown


def test_repr_html_quantized_module_contains_decisions(module):
    """A notebook shows the decisions about a quantized module."""
    shown = module._repr_html_()
    assert "as for onnxruntime" in shown
    assert "<summary>Decisions</summary>" in shown
    assert "<th" in shown


def test_repr_html_empty_module_shows_name():
    """A notebook shows an empty module by its name."""
    assert "ClikaModule" in ClikaModule()._repr_html_()


def test_repr_html_large_module_omits_picture(monkeypatch):
    """A notebook shows no picture of a large module, only how to draw it."""
    monkeypatch.setattr("clika_ref.export.inspection.MAX_NOTEBOOK_NODES", 2)
    shown = trace_net()._repr_html_()
    assert "<svg" not in shown
    assert "clika_visualize(&quot;model.html&quot;) draws it" in shown


def test_repr_html_names_target(module):
    """A notebook shows the target of the module."""
    assert HERE.target in module._repr_html_()
