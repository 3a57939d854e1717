"""Settings of a compilation: the deployment target and the options."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal, get_args

from clika_ref.core.errors import ModelError, TargetError, format_install_command
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.validation import format_hint

Preset = Literal["mixed", "performance"]
"""OpenVINO's quantization presets, which choose symmetric or asymmetric activation ranges."""


@dataclass(frozen=True)
class BaseDeploymentSettings:
    """The deployment target; ``target`` is the name under which a plugin provides it.

    A target of your own needs no class here: subclass this with its name.
    """

    target: ClassVar[str] = ""
    framework: ClassVar[str] = ""
    """The display name of the runtime."""

    def __str__(self) -> str:
        return self.target

    def is_TensorRT_ONNX(self) -> bool:  # noqa: N802 - clika-ace's name
        """Whether the model is for TensorRT."""
        return self.target == "tensorrt"

    def is_TensorRT_LLM_ONNX(self) -> bool:  # noqa: N802 - clika-ace's name
        """Whether the model is for TensorRT-LLM."""
        return self.target == "tensorrt-llm"

    def is_OpenVINO_ONNX(self) -> bool:  # noqa: N802 - clika-ace's name
        """Whether the model is for OpenVINO."""
        return self.target == "openvino"

    def is_ONNXRuntime_ONNX(self) -> bool:  # noqa: N802 - clika-ace's name
        """Whether the model is for ONNX Runtime."""
        return self.target == "onnxruntime"


@dataclass(frozen=True)
class DeploymentSettings_ONNXRuntime_ONNX(BaseDeploymentSettings):  # noqa: N801 - clika-ace's name
    """ONNX Runtime, from an ``.onnx`` file."""

    target: ClassVar[str] = "onnxruntime"
    framework: ClassVar[str] = "ONNX Runtime"


@dataclass(frozen=True)
class DeploymentSettings_OpenVINO_ONNX(BaseDeploymentSettings):  # noqa: N801 - clika-ace's name
    """OpenVINO, from an ``.onnx`` file or its own ``.xml``; needs a plugin for the target ``openvino``."""

    target: ClassVar[str] = "openvino"
    framework: ClassVar[str] = "OpenVINO (Intel)"

    preset: Preset = "mixed"
    """``"mixed"`` allows asymmetric activation ranges, which suits SiLU, GELU and similar activations;
    ``"performance"`` makes activation ranges symmetric, so that no layer needs zero-point corrections.
    """

    def __post_init__(self) -> None:
        """Reject an unknown preset.

        Raises:
            ModelError: there is no preset of that name.
        """
        if self.preset not in get_args(Preset):
            raise ModelError(f"preset is {self.preset!r}. Choose one of {', '.join(map(repr, get_args(Preset)))}.")


@dataclass(frozen=True)
class _ShapeProfiles:
    """Shape profiles of a TensorRT engine."""

    shapes: Mapping[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int, int]])
    """Minimum, optimum and maximum size of a dynamic dim, by its name, for the optimization profile; by default from
    the inputs that the model was traced and calibrated with.
    """

    def __post_init__(self) -> None:
        """Reject invalid shapes.

        Raises:
            ModelError: ``shapes`` does not map names of dims to three ascending whole numbers from 0.
        """
        _check_shapes(self.shapes)
        object.__setattr__(self, "shapes", {name: tuple(sizes) for name, sizes in self.shapes.items()})


def _check_shapes(shapes: Any) -> None:
    if not isinstance(shapes, Mapping):
        raise ModelError(f"shapes is {shapes!r}. Give {{dim: (min, opt, max)}}.")
    for name, given in shapes.items():
        is_triple = isinstance(given, Sequence) and len(given) == 3 and all(type(size) is int for size in given)
        if not is_triple or not 0 <= given[0] <= given[1] <= given[2] or given[2] < 1:
            accepted = "its minimum, optimum and maximum size: ascending whole numbers from 0, the maximum at least 1"
            raise ModelError(f"shapes contains {name!r}: {given!r}. Give {accepted}.")


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_ONNX(_ShapeProfiles, BaseDeploymentSettings):  # noqa: N801 - clika-ace's name
    """TensorRT, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt``."""

    target: ClassVar[str] = "tensorrt"
    framework: ClassVar[str] = "TensorRT (NVIDIA)"


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_LLM_ONNX(_ShapeProfiles, BaseDeploymentSettings):  # noqa: N801 - clika-ace's name
    """TensorRT-LLM, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt-llm``."""

    target: ClassVar[str] = "tensorrt-llm"
    framework: ClassVar[str] = "TensorRT-LLM (NVIDIA)"


class _GeneratedSettings(BaseDeploymentSettings):
    """Base of generated settings classes; the class of a plugin that is loaded later takes precedence."""


def deployment_class_named(target: str) -> type[BaseDeploymentSettings]:
    """Return the settings class of a target by its full or short name, including plugins' classes, bases first."""
    name, level = full_target_name(target), BaseDeploymentSettings.__subclasses__()
    while level:
        for kind in level:
            if name and kind.target == name:  # retired targets have no name
                return kind
        level = [derived for kind in level if kind is not _GeneratedSettings for derived in kind.__subclasses__()]
    return type("DeploymentSettings", (_GeneratedSettings,), {"target": name, "framework": name})


def find_required_arguments(kind: type) -> list[str]:
    """Return the names of the required arguments of a class."""
    taken = inspect.signature(kind).parameters.values()
    return [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def deployment_settings_named(target: str) -> BaseDeploymentSettings:
    """Return the default settings of a target; whether the target exists is checked by compiling.

    Raises:
        TargetError: a field has no default.
    """
    kind = deployment_class_named(target)
    lacking = find_required_arguments(kind)
    if lacking:
        raise TargetError(
            f"cannot use the target {kind.target} by name: {kind.__module__}.{kind.__qualname__} needs "
            f"{', '.join(lacking)}. Give deployment_settings in Python or in a settings file, or let its plugin "
            "define defaults."
        )
    return kind()


TARGET_DISTRIBUTIONS: Mapping[str, str] = {
    "onnxruntime": "clika-ref-onnxruntime",
    "openvino": "clika-ref-openvino",
    "tensorrt": "clika-ref-tensorrt",
    "tensorrt-llm": "clika-ref-tensorrt",
}
"""The distribution that provides each of our targets."""

RETIRED_TARGETS = frozenset({"tflite", "qnn"})
"""Targets of older clika-ace releases that are not implemented here."""

TARGET_SHORT_NAMES: Mapping[str, str] = {
    "ort": "onnxruntime", "ov": "openvino", "trt": "tensorrt", "trt-llm": "tensorrt-llm",
}  # fmt: skip
"""Short names of our targets in settings files and on the command line, as in release 24 (``target_framework: trt``).
"""

PLUGIN_HINT = "A plugin can add it: docs/example-plugin.md shows one in 80 lines."


def full_target_name(target: str) -> str:
    """Return the full name of a target, given its full or short name."""
    return TARGET_SHORT_NAMES.get(target, target)


def target_hint(target: str, installed: Collection[str] = ()) -> str:
    """Return advice for a target that no installed plugin provides, given the names of the installed targets."""
    name = full_target_name(target.strip().lower())
    if not name:
        return "Give the name of one."
    if name in RETIRED_TARGETS:
        return f"It retired before release 25, and is not implemented. {PLUGIN_HINT}"
    if name in TARGET_DISTRIBUTIONS and name not in installed:
        return f"Run {format_install_command(TARGET_DISTRIBUTIONS[name])}."
    near = difflib.get_close_matches(name, [*installed, *TARGET_DISTRIBUTIONS], n=1)
    return f"Did you mean {near[0]!r}?" if near else PLUGIN_HINT


@dataclass(frozen=True)
class _RetiredSettings(BaseDeploymentSettings):
    """A target of `RETIRED_TARGETS`."""

    def __post_init__(self) -> None:
        """Reject the target.

        Raises:
            TargetError: always.
        """
        raise TargetError(
            f"cannot use the target {self.framework}: it retired before release 25, and is not implemented. "
            f'{PLUGIN_HINT} Define its settings there: class Mine(BaseDeploymentSettings): target = "...".'
        )


class DeploymentSettings_TFLite(_RetiredSettings):  # noqa: N801 - clika-ace's name
    """TensorFlow Lite, which is not implemented."""

    framework: ClassVar[str] = "TFLite"


class DeploymentSettings_QNN(_RetiredSettings):  # noqa: N801 - clika-ace's name
    """Qualcomm's QNN, which is not implemented."""

    framework: ClassVar[str] = "QNN"


Switch = Literal["auto", "on", "off"]
"""When to apply an algorithm: if a candidate evaluation shows a gain, always, or never."""

OptimizationGoal = Literal["size", "latency"]
"""The optimization goal of quantization, in addition to accuracy."""

BatchNormMode = Literal["frozen", "live"]

StateMode = Literal["internal", "io"]
"""Batch norms in training: keep running statistics, or normalize by the batch."""

ACCEPTED_OPTION_TYPES: Mapping[type, tuple[type, ...]] = {bool: (bool,), float: (float, int), str: (str, PathLike)}
"""Accepted types of an option, by the type of its default."""

LIVE_NORMS_WITH_ADAPTERS = (
    "batch_norm='live' learns the statistics of norms, but adapters train with all other parameters frozen. "
    "Compile with batch_norm='frozen'."
)
"""Explains why batch norms cannot be live in a model with adapters."""

SWITCH_OPTIONS = (
    "smooth_quant",
    "equalization",
    "weight_clipping",
    "mixed_precision",
    "gptq",
    "bias_correction",
)
"""The options of type `Switch`."""


@dataclass(frozen=True)
class ClikaCompileOptions:
    """Options of compilation that rarely need a change."""

    check_passes: bool = False
    """Run the graph after each pass and report the pass that changes results (slow; for authors of passes)."""

    compare_after_export: bool = True
    """Load each artifact in its runtime, compare it with the ClikaModule, and a quantized one with the speed of float.
    """

    external_data: bool = False
    """Write weights to a file next to the artifact even if one file could hold them (2 GB)."""

    ranges_file: str | PathLike[str] = ""
    """File for the calibration ranges, also written on an interrupt. If it exists, calibration resumes from it and
    skips as many batches as it counts, with a warning if the first batch differs. Empty for no file.
    """

    optimize_for: OptimizationGoal = "size"
    """``"latency"`` uses the plan that is fastest on this machine: the default one, the one without layers that are
    slower in INT8 alone, the one with all layers in INT8, or float. The target must not be emulated. ``"size"`` times
    nothing, and quantizes every layer that is not too sensitive.
    """

    observer: str = "auto"
    """The quantized range of an activation: ``"min-max"``, ``"mean-min-max"`` (averaged over batches),
    ``"percentile-99.99"``, ``"percentile-99.999"``, or ``"mse"`` (least mean squared error). ``"every"`` chooses the
    best of these for each tensor by the error of the outputs. ``"auto"`` chooses between ``"min-max"`` and ``"mse"``,
    which is faster.
    """

    smooth_quant: Switch = "auto"
    """SmoothQuant: scale down outlier channels of the inputs of linear layers, and scale up the weights that read them;
    ``"auto"`` if that halves the error of a layer, or can be folded into the layer before, ``"on"`` if it reduces the
    error.
    """

    equalization: Switch = "auto"
    """Cross-layer equalization: the same between convolutions, folded into the one before; ``"on"`` if it reduces the
    error at all.
    """

    weight_clipping: Switch = "auto"
    """Clip the largest weights if a smaller scale reduces the total error."""

    mixed_precision: Switch = "auto"
    """Mixed precision: keep cheap layers with a large share of the error in float, up to 4 % of all MACs and weights;
    ``"auto"`` if that helps on data.
    """

    gptq: Switch = "auto"
    """GPTQ: round weights with error feedback from a layer's inputs; ``"auto"`` if that is fast and helps on data."""

    bias_correction: Switch = "auto"
    """Bias correction: compensate the mean shift of rounding in the biases; ``"auto"`` if that helps on data."""

    batch_norm: BatchNormMode = "frozen"
    """Batch norms in training: ``"frozen"`` ones keep their running statistics, and are folded into the weights before
    them; ``"live"`` ones normalize by the batch, and update their statistics.
    """

    algorithm_seconds: float = 0.0
    """Time limit in seconds, not counting calibration, after which algorithms on ``"auto"`` are skipped; 0 for no
    limit.
    """

    global_lora_settings: LoraSettings | None = None
    """The layers that get low-rank adapters, which are then trained in place of all other parameters; None for none."""

    convert_branches: bool = False
    """Convert branches and loops on the values of tensors in the model's Python code into conditions and loops of the
    graph, which both the module and the file contain.
    """

    state: StateMode = "internal"
    """Buffers that ``forward`` writes, such as caches: ``"io"`` makes them inputs and outputs of a file, which keeps
    nothing between calls. With ``"internal"`` they are constants there. The module keeps them either way.
    """

    def __post_init__(self) -> None:
        """Reject invalid values.

        Raises:
            ModelError: a value has the wrong type, a switch is neither on, off nor auto, or a time is negative.
        """
        for name, of in (
            *((name, Switch) for name in SWITCH_OPTIONS),
            ("optimize_for", OptimizationGoal),
            ("batch_norm", BatchNormMode),
            ("state", StateMode),
        ):
            if getattr(self, name) not in get_args(of):
                raise ModelError(
                    f"option {name!r} is {getattr(self, name)!r}. Choose one of {', '.join(map(repr, get_args(of)))}."
                )
        for option in dataclasses.fields(self):
            value, kind = getattr(self, option.name), type(option.default)
            if option.default is None:
                continue
            if not isinstance(value, ACCEPTED_OPTION_TYPES[kind]) or isinstance(value, bool) is not (kind is bool):
                raise ModelError(
                    f"option {option.name!r} is {value!r}, a {type(value).__name__}. Give a {kind.__name__}."
                )
        seconds = self.algorithm_seconds
        if not 0 <= seconds < math.inf:
            raise ModelError(f"option 'algorithm_seconds' is {seconds!r}. Give a number of seconds, or 0 for no limit.")
        self._check_adapters()

    def _check_adapters(self) -> None:
        """Reject invalid adapter settings, and adapters combined with live batch norms."""
        given = self.global_lora_settings
        if given is not None and not isinstance(given, LoraSettings):
            raise ModelError(
                f"option 'global_lora_settings' is {given!r}, a {type(given).__name__}. Give a LoraSettings, such "
                "as LoraSettings(rank=8), or None."
            )
        if given is not None and self.batch_norm == "live":
            raise ModelError(LIVE_NORMS_WITH_ADAPTERS)

    def with_extra(self, extra: Mapping[str, Any]) -> ClikaCompileOptions:
        """Return these options with some replaced by name.

        Raises:
            ModelError: a name is unknown, or the option does not accept a value.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in extra.items():
            if name not in known:
                hint = format_hint(name, known)
                raise ModelError(f"unknown option {name!r} = {value!r}.{hint} The options are {', '.join(known)}.")
        return dataclasses.replace(self, **extra)
