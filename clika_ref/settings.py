"""What the user may choose: the deployment target and the options of a compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.core.errors import ModelError


@dataclass(frozen=True)
class BaseDeploymentSettings:
    """Where the model will run. ``target`` is the name under which a plugin provides it.

    A target of your own needs no class here: subclass this with its name.
    """

    target: ClassVar[str] = ""
    framework: ClassVar[str] = ""
    """The name of the runtime, as people write it."""

    def __str__(self) -> str:
        return self.target

    def is_TensorRT_ONNX(self) -> bool:  # noqa: N802 - the record's name
        """Whether the model is for TensorRT."""
        return self.target == "tensorrt"

    def is_TensorRT_LLM_ONNX(self) -> bool:  # noqa: N802 - the record's name
        """Whether the model is for TensorRT-LLM."""
        return self.target == "tensorrt-llm"

    def is_OpenVINO_ONNX(self) -> bool:  # noqa: N802 - the record's name
        """Whether the model is for OpenVINO."""
        return self.target == "openvino"

    def is_ONNXRuntime_ONNX(self) -> bool:  # noqa: N802 - the record's name
        """Whether the model is for ONNX Runtime."""
        return self.target == "onnxruntime"


@dataclass(frozen=True)
class DeploymentSettings_ONNXRuntime_ONNX(BaseDeploymentSettings):  # noqa: N801 - the record's name
    """ONNX Runtime, from an ``.onnx`` file."""

    target: ClassVar[str] = "onnxruntime"
    framework: ClassVar[str] = "ONNX Runtime"


@dataclass(frozen=True)
class DeploymentSettings_OpenVINO_ONNX(BaseDeploymentSettings):  # noqa: N801 - the record's name
    """OpenVINO, from an ``.onnx`` file; needs a plugin that provides the target ``openvino``."""

    target: ClassVar[str] = "openvino"
    framework: ClassVar[str] = "OpenVINO (Intel)"


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_ONNX(BaseDeploymentSettings):  # noqa: N801 - the record's name
    """TensorRT, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt``."""

    target: ClassVar[str] = "tensorrt"
    framework: ClassVar[str] = "TensorRT (NVIDIA)"


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_LLM_ONNX(BaseDeploymentSettings):  # noqa: N801 - the record's name
    """TensorRT-LLM, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt-llm``."""

    target: ClassVar[str] = "tensorrt-llm"
    framework: ClassVar[str] = "TensorRT-LLM (NVIDIA)"


@dataclass(frozen=True)
class ClikaCompileOptions:
    """Aspects of compilation that rarely need a choice."""

    check_passes: bool = False
    """Run the graph after each pass and name the pass that changes numbers (slow; for authors of passes)."""

    compare_after_export: bool = True
    """Load each artifact in its runtime and compare it with the ClikaModule."""

    external_data: bool = False
    """Write weights to a file beside the artifact even where one file could hold them (2 GB)."""

    ranges_file: str = ""
    """Where to save the ranges that calibration finds, also when it is interrupted; one that exists is begun with, and
    the batches that it counts are not run again. Nowhere where empty."""

    def with_extra(self, extra: Mapping[str, Any]) -> ClikaCompileOptions:
        """Return these options with some replaced by name.

        Raises:
            ModelError: a name is unknown, or a value has another type.
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        for name, value in extra.items():
            if name not in known:
                msg = f"unknown option {name!r} = {value!r}; the options are {', '.join(known)}"
                raise ModelError(msg)
            wanted = type(getattr(self, name))
            if not isinstance(value, wanted):
                msg = f"option {name!r} is {value!r}, a {type(value).__name__}; it takes a {wanted.__name__}"
                raise ModelError(msg)
        return dataclasses.replace(self, **extra)


@dataclass(frozen=True)
class Choices:
    """The switches of one compilation, under the names of the arguments of `clika_compile`."""

    discard_input_model: bool
    is_model_pretrained: bool
    skip_eval_set_mode: bool
    dynamic: bool | None
    is_dry_run: bool
    graph_name: str | None
