"""``Settings``: all user settings in one object, which can be stored as one YAML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any, ClassVar, Self, TypedDict

from clika_ref.serialization.atomic_files import require_path, write_atomically
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
)
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings
from clika_ref.settings.training import TrainingSettings
from clika_ref.settings.validation import CheckedSettings

EXAMPLE_SETTINGS_PATH = "clika.yaml"


def _check_instance(kind: type) -> Callable[[Any], str]:
    return lambda value: "" if isinstance(value, kind) else f"a {kind.__name__}"


def _check_optional_instance(kind: type) -> Callable[[Any], str]:
    return lambda value: "" if value is None or isinstance(value, kind) else f"a {kind.__name__}, or None"


def _check_layer_settings(value: Any) -> str:
    is_right = isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(layer, LayerSettings) for name, layer in value.items()
    )
    return "" if is_right else "a dict from layer names to LayerSettings"


@dataclass
class LayerSettings(CheckedSettings):
    """Overrides for one layer; None keeps the setting of the model.

    Raises:
        ModelError: a value has the wrong type.
    """

    quantization_settings: LayerQuantizationSettings | None = None
    """Quantization settings of the layer."""
    pruning_settings: LayerPruningSettings | None = None
    """Pruning settings of the layer."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "quantization_settings": _check_optional_instance(LayerQuantizationSettings),
        "pruning_settings": _check_optional_instance(LayerPruningSettings),
    }


class CompileArguments(TypedDict):
    """Arguments of `clika_compile`, typed so that a type checker can infer the result of a call."""

    deployment_settings: BaseDeploymentSettings | None
    quantization_settings: QuantizationSettings | None
    layer_quantization_settings: dict[str, LayerQuantizationSettings] | None
    pruning_settings: PruningSettings | None
    layer_pruning_settings: dict[str, LayerPruningSettings] | None
    distributed_training_settings: DistributedTrainingSettings
    clika_compile_options: ClikaCompileOptions
    is_model_pretrained: bool


@dataclass
class Settings(CheckedSettings):
    """All settings of one model; the defaults quantize it for ONNX Runtime.

    Fields may be assigned later; each value is checked on assignment.

    Raises:
        ModelError: a value has the wrong type.
    """

    deployment_settings: BaseDeploymentSettings | None = field(default_factory=DeploymentSettings_ONNXRuntime_ONNX)
    """The deployment target; None to choose it at export."""

    distributed_training_settings: DistributedTrainingSettings = field(default_factory=DistributedTrainingSettings)
    """Whether several processes work on the model."""

    global_quantization_settings: QuantizationSettings | None = field(default_factory=QuantizationSettings)
    """How to quantize; None keeps the model float."""

    global_pruning_settings: PruningSettings | None = None
    """How to prune; None keeps all weights."""

    global_lora_settings: LoraSettings | None = None
    """The layers that get an adapter, with all other parameters frozen; None for no adapters."""

    training_settings: TrainingSettings = field(default_factory=TrainingSettings)
    """Settings for the user's training loop."""

    layer_settings: dict[str, LayerSettings] = field(default_factory=dict[str, LayerSettings])
    """Overrides for single layers. A key is a module path, a node name, or either with wildcards."""

    clika_compile_options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Options that rarely need a change."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "deployment_settings": _check_optional_instance(BaseDeploymentSettings),
        "distributed_training_settings": _check_instance(DistributedTrainingSettings),
        "global_quantization_settings": _check_optional_instance(QuantizationSettings),
        "global_pruning_settings": _check_optional_instance(PruningSettings),
        "global_lora_settings": _check_optional_instance(LoraSettings),
        "training_settings": _check_instance(TrainingSettings),
        "layer_settings": _check_layer_settings,
        "clika_compile_options": _check_instance(ClikaCompileOptions),
    }

    def _find_contradiction(self) -> str:
        if self.clika_compile_options.global_lora_settings is not None:
            return "global_lora_settings is also given in clika_compile_options. Give it in Settings only."
        return ""

    @classmethod
    def load_from_path(cls, path: str | PathLike[str]) -> Self:
        """Read settings from a YAML file; missing entries take their defaults.

        Raises:
            ModelError: ``path`` is no path, the file cannot be read, or an entry is no valid setting; all such entries
                are listed, with their lines.
        """
        from clika_ref.settings.yaml_reader import read_settings  # noqa: PLC0415 - loads a parser, for files only

        found = read_settings(require_path(path, EXAMPLE_SETTINGS_PATH))
        layers = found.get("layer_settings", {})
        return cls(**{**found, "layer_settings": {name: LayerSettings(**of) for name, of in layers.items()}})

    def save_to_path(self, path: str | PathLike[str]) -> None:
        """Write the settings to a YAML file that reads back as the same settings.

        Raises:
            ModelError: ``path`` is no path, or no file can be written there.
        """
        with write_atomically(require_path(path, EXAMPLE_SETTINGS_PATH)) as file:
            file.write(self.to_yaml().encode())

    def to_yaml(self) -> str:
        """Return the settings as YAML text, as `save_to_path` writes it."""
        from clika_ref.settings.yaml_writer import to_yaml_text  # noqa: PLC0415 - loads a parser, for files only

        return to_yaml_text({of.name: getattr(self, of.name) for of in fields(self)})

    def compile_arguments(self) -> CompileArguments:
        """Return these settings as arguments: ``clika_compile(model, ..., **settings.compile_arguments())``."""
        layers = self.layer_settings.items()
        quantized = {name: of.quantization_settings for name, of in layers if of.quantization_settings is not None}
        options = replace(self.clika_compile_options, global_lora_settings=self.global_lora_settings)
        pruned = {name: of.pruning_settings for name, of in layers if of.pruning_settings is not None}
        return {
            "deployment_settings": self.deployment_settings,
            "quantization_settings": self.global_quantization_settings,
            "layer_quantization_settings": quantized or None,
            "pruning_settings": self.global_pruning_settings,
            "layer_pruning_settings": pruned or None,
            "distributed_training_settings": self.distributed_training_settings,
            "clika_compile_options": options,
            "is_model_pretrained": not self.training_settings.is_training_from_scratch,
        }
