"""clika-ref: compress a PyTorch model and deploy it.

All public names can be imported from here. Each is imported on first use, so that ``import clika_ref`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clika_ref.api import AnyCallable as AnyCallable
    from clika_ref.api import ModelArgType as ModelArgType
    from clika_ref.api import clika_compile as clika_compile
    from clika_ref.capture.inputs_catcher import clika_install_inputs_catcher as clika_install_inputs_catcher
    from clika_ref.capture.inputs_catcher import clika_move_to_device as clika_move_to_device
    from clika_ref.core.errors import ClikaError as ClikaError
    from clika_ref.core.errors import ClikaWarning as ClikaWarning
    from clika_ref.core.errors import ModelError as ModelError
    from clika_ref.core.errors import PassError as PassError
    from clika_ref.core.errors import PluginError as PluginError
    from clika_ref.core.errors import TargetError as TargetError
    from clika_ref.export.configuration import export_configuration as export_configuration
    from clika_ref.integrations.distributing import clika_distribute as clika_distribute
    from clika_ref.module.clika_module import ClikaModule as ClikaModule
    from clika_ref.partial_graphs.partial_artifact import PartialArtifact as PartialArtifact
    from clika_ref.partial_graphs.partial_module import PartialClikaModule as PartialClikaModule
    from clika_ref.quantization.qat.distillation import distillation_loss as distillation_loss
    from clika_ref.reporting.progress import SimpleProgressBar as SimpleProgressBar
    from clika_ref.settings.compile_options import BaseDeploymentSettings as BaseDeploymentSettings
    from clika_ref.settings.compile_options import ClikaCompileOptions as ClikaCompileOptions
    from clika_ref.settings.compile_options import (
        DeploymentSettings_ONNXRuntime_ONNX as DeploymentSettings_ONNXRuntime_ONNX,
    )
    from clika_ref.settings.compile_options import DeploymentSettings_OpenVINO_ONNX as DeploymentSettings_OpenVINO_ONNX
    from clika_ref.settings.compile_options import DeploymentSettings_QNN as DeploymentSettings_QNN
    from clika_ref.settings.compile_options import (
        DeploymentSettings_TensorRT_LLM_ONNX as DeploymentSettings_TensorRT_LLM_ONNX,
    )
    from clika_ref.settings.compile_options import DeploymentSettings_TensorRT_ONNX as DeploymentSettings_TensorRT_ONNX
    from clika_ref.settings.compile_options import DeploymentSettings_TFLite as DeploymentSettings_TFLite
    from clika_ref.settings.distributed import DistributedTrainingSettings as DistributedTrainingSettings
    from clika_ref.settings.lora import LoraSettings as LoraSettings
    from clika_ref.settings.pruning import LayerPruningSettings as LayerPruningSettings
    from clika_ref.settings.pruning import PruningSettings as PruningSettings
    from clika_ref.settings.quantization import LayerQuantizationSettings as LayerQuantizationSettings
    from clika_ref.settings.quantization import QuantizationSettings as QuantizationSettings
    from clika_ref.settings.settings import LayerSettings as LayerSettings
    from clika_ref.settings.settings import Settings as Settings
    from clika_ref.settings.training import TrainingSettings as TrainingSettings

MODULE_BY_PUBLIC_NAME = {
    "AnyCallable": "api",
    "BaseDeploymentSettings": "settings.compile_options",
    "ClikaCompileOptions": "settings.compile_options",
    "ClikaError": "core.errors",
    "ClikaModule": "module.clika_module",
    "ClikaWarning": "core.errors",
    "DeploymentSettings_ONNXRuntime_ONNX": "settings.compile_options",
    "DeploymentSettings_OpenVINO_ONNX": "settings.compile_options",
    "DeploymentSettings_QNN": "settings.compile_options",
    "DeploymentSettings_TFLite": "settings.compile_options",
    "DeploymentSettings_TensorRT_LLM_ONNX": "settings.compile_options",
    "DeploymentSettings_TensorRT_ONNX": "settings.compile_options",
    "DistributedTrainingSettings": "settings.distributed",
    "LayerPruningSettings": "settings.pruning",
    "LayerQuantizationSettings": "settings.quantization",
    "LayerSettings": "settings.settings",
    "LoraSettings": "settings.lora",
    "ModelArgType": "api",
    "ModelError": "core.errors",
    "PartialArtifact": "partial_graphs.partial_artifact",
    "PartialClikaModule": "partial_graphs.partial_module",
    "PassError": "core.errors",
    "PluginError": "core.errors",
    "PruningSettings": "settings.pruning",
    "QuantizationSettings": "settings.quantization",
    "Settings": "settings.settings",
    "SimpleProgressBar": "reporting.progress",
    "TargetError": "core.errors",
    "TrainingSettings": "settings.training",
    "clika_compile": "api",
    "clika_distribute": "integrations.distributing",
    "clika_install_inputs_catcher": "capture.inputs_catcher",
    "clika_move_to_device": "capture.inputs_catcher",
    "distillation_loss": "quantization.qat.distillation",
    "export_configuration": "export.configuration",
}
"""The module that defines each public name."""

__all__ = sorted(MODULE_BY_PUBLIC_NAME)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    if name not in MODULE_BY_PUBLIC_NAME:
        raise AttributeError(f"clika_ref has no {name!r}; it offers {', '.join(MODULE_BY_PUBLIC_NAME)}")
    return getattr(import_module(f"clika_ref.{MODULE_BY_PUBLIC_NAME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
