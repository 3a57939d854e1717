"""clika-ref: compress a PyTorch model and deploy it.

All public names are importable from here. Each is imported on first use, so that ``import clika_ref`` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clika_ref.all_settings import LayerSettings as LayerSettings
    from clika_ref.all_settings import Settings as Settings
    from clika_ref.compiling import AnyCallable as AnyCallable
    from clika_ref.compiling import ModelArgType as ModelArgType
    from clika_ref.compiling import clika_compile as clika_compile
    from clika_ref.core.errors import ClikaError as ClikaError
    from clika_ref.core.errors import ClikaWarning as ClikaWarning
    from clika_ref.core.errors import ModelError as ModelError
    from clika_ref.core.errors import PassError as PassError
    from clika_ref.core.errors import PluginError as PluginError
    from clika_ref.core.errors import TargetError as TargetError
    from clika_ref.distillation import distillation_loss as distillation_loss
    from clika_ref.distributed_settings import DistributedTrainingSettings as DistributedTrainingSettings
    from clika_ref.distributing import clika_distribute as clika_distribute
    from clika_ref.exporting.configuration import export_configuration as export_configuration
    from clika_ref.inputs import clika_install_inputs_catcher as clika_install_inputs_catcher
    from clika_ref.inputs import clika_move_to_device as clika_move_to_device
    from clika_ref.lora_settings import LoraSettings as LoraSettings
    from clika_ref.module import ClikaModule as ClikaModule
    from clika_ref.pruning_settings import LayerPruningSettings as LayerPruningSettings
    from clika_ref.pruning_settings import PruningSettings as PruningSettings
    from clika_ref.quantization_settings import LayerQuantizationSettings as LayerQuantizationSettings
    from clika_ref.quantization_settings import QuantizationSettings as QuantizationSettings
    from clika_ref.reporting.progress import SimpleProgressBar as SimpleProgressBar
    from clika_ref.settings import BaseDeploymentSettings as BaseDeploymentSettings
    from clika_ref.settings import ClikaCompileOptions as ClikaCompileOptions
    from clika_ref.settings import DeploymentSettings_ONNXRuntime_ONNX as DeploymentSettings_ONNXRuntime_ONNX
    from clika_ref.settings import DeploymentSettings_OpenVINO_ONNX as DeploymentSettings_OpenVINO_ONNX
    from clika_ref.settings import DeploymentSettings_QNN as DeploymentSettings_QNN
    from clika_ref.settings import DeploymentSettings_TensorRT_LLM_ONNX as DeploymentSettings_TensorRT_LLM_ONNX
    from clika_ref.settings import DeploymentSettings_TensorRT_ONNX as DeploymentSettings_TensorRT_ONNX
    from clika_ref.settings import DeploymentSettings_TFLite as DeploymentSettings_TFLite
    from clika_ref.training_settings import TrainingSettings as TrainingSettings

HOMES = {
    "AnyCallable": "compiling",
    "BaseDeploymentSettings": "settings",
    "ClikaCompileOptions": "settings",
    "ClikaError": "core.errors",
    "ClikaModule": "module",
    "ClikaWarning": "core.errors",
    "DeploymentSettings_ONNXRuntime_ONNX": "settings",
    "DeploymentSettings_OpenVINO_ONNX": "settings",
    "DeploymentSettings_QNN": "settings",
    "DeploymentSettings_TFLite": "settings",
    "DeploymentSettings_TensorRT_LLM_ONNX": "settings",
    "DeploymentSettings_TensorRT_ONNX": "settings",
    "DistributedTrainingSettings": "distributed_settings",
    "LayerPruningSettings": "pruning_settings",
    "LayerQuantizationSettings": "quantization_settings",
    "LayerSettings": "all_settings",
    "LoraSettings": "lora_settings",
    "ModelArgType": "compiling",
    "ModelError": "core.errors",
    "PassError": "core.errors",
    "PluginError": "core.errors",
    "PruningSettings": "pruning_settings",
    "QuantizationSettings": "quantization_settings",
    "Settings": "all_settings",
    "SimpleProgressBar": "reporting.progress",
    "TargetError": "core.errors",
    "TrainingSettings": "training_settings",
    "clika_compile": "compiling",
    "clika_distribute": "distributing",
    "clika_install_inputs_catcher": "inputs",
    "clika_move_to_device": "inputs",
    "distillation_loss": "distillation",
    "export_configuration": "exporting.configuration",
}
"""The module that defines each public name."""

__all__ = sorted(HOMES)  # noqa: PLE0605 - the table above is the list


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        msg = f"clika_ref has no {name!r}; it offers {', '.join(HOMES)}"
        raise AttributeError(msg)
    return getattr(import_module(f"clika_ref.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(HOMES)
