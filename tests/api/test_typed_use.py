"""The types of the public interface: `make lint` checks this file with pyright, and pytest runs it.

``assert_type`` does nothing when it runs; pyright compares what it knows of a value with the type that is written.
"""

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import Tensor, nn

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    QuantizationSettings,
    Settings,
    SimpleProgressBar,
    clika_compile,
    clika_install_inputs_catcher,
    clika_move_to_device,
    distillation_loss,
)
from clika_ref.core.artifacts import Artifact
from clika_ref.core.ir import Graph
from clika_ref.export.explanation import Explanation
from clika_ref.quantization.algorithms.accuracy_search import AccuracySearch
from clika_ref.quantization.decision import LayerReport, Quantization, ThresholdPrediction
from clika_ref.reporting.tables import Table


def make_network() -> nn.Module:
    """Return a model of two layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()


def make_data() -> list[Tensor]:
    """Return some batches."""
    return [torch.randn(8, 4) for _ in range(4)]


def test_clika_module_methods_have_known_types(tmp_path: Path) -> None:
    """A type checker knows the type of a module and of the results of its methods."""
    module = clika_compile(
        make_network(),
        calibration_inputs=make_data(),
        quantization_settings=QuantizationSettings(weights_num_bits=[8, 4]),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    assert_type(module, ClikaModule)
    assert_type(module.graph, Graph)
    found = module.clika_summary()
    assert_type(found, Quantization)
    assert_type(found.table, Table[LayerReport])
    assert_type(found.prediction_table, Table[ThresholdPrediction])
    assert_type(found.table.to_dict(), list[dict[str, Any]])
    assert_type(module.clika_export(tmp_path / "model.onnx"), Artifact)
    assert_type(module.clika_explain(), Explanation)
    assert_type(module.clika_quantize_to_goal(lambda _: 1.0, 0.5), AccuracySearch)
    module.clika_save(tmp_path / "model")
    assert_type(ClikaModule.clika_load(tmp_path / "model"), ClikaModule)


def test_clika_compile_type_includes_original_if_disabled() -> None:
    """Only a call with `disable=True` has the type of the original model."""
    model = make_network()
    assert_type(clika_compile(model, tracing_inputs=make_data(), discard_input_model=False), ClikaModule)
    assert clika_compile(model, disable=True) is assert_type(model, nn.Module)


def test_settings_compile_arguments_keep_module_type() -> None:
    """A call with arguments of `Settings` has the type `ClikaModule`."""
    settings = Settings(global_quantization_settings=None)
    module = clika_compile(make_network(), tracing_inputs=make_data(), **settings.compile_arguments())
    assert_type(module, ClikaModule)


def test_public_functions_keep_argument_types() -> None:
    """Functions that pass a value through keep its type."""
    assert_type(clika_move_to_device(make_data(), "cpu"), list[Tensor])
    assert_type(clika_move_to_device({"x": torch.zeros(1)}, "cpu"), dict[str, Tensor])
    for batch in SimpleProgressBar(make_data()):
        assert_type(batch, Tensor)
    assert_type(distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3)), Tensor)
    model = make_network()
    catcher = clika_install_inputs_catcher(model)
    model(make_data()[0])
    assert_type(catcher(), list[Any])
