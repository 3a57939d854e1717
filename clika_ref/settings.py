"""What the user may choose: the deployment target and the options of a compilation."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar, Literal, get_args

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.lora_settings import LoraSettings

Preset = Literal["mixed", "performance"]
"""How OpenVINO's integers cover what values held."""


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
    """OpenVINO, from an ``.onnx`` file or its own ``.xml``; needs a plugin that provides the target ``openvino``."""

    target: ClassVar[str] = "openvino"
    framework: ClassVar[str] = "OpenVINO (Intel)"

    preset: Preset = "mixed"
    """``"mixed"`` lets each range lie where it lies, which suits SiLU, GELU and the like; ``"performance"`` makes
    ranges of values symmetric, so that no layer has to make up for a zero point."""

    def __post_init__(self) -> None:
        """Refuse another preset.

        Raises:
            ModelError: there is none of that name.
        """
        if self.preset not in get_args(Preset):
            msg = f"preset is {self.preset!r}; it takes {', '.join(map(repr, get_args(Preset)))}"
            raise ModelError(msg)


@dataclass(frozen=True)
class _BuiltForSizes:
    """What TensorRT builds an engine for."""

    shapes: Mapping[str, tuple[int, int, int]] = dataclasses.field(default_factory=dict[str, tuple[int, int, int]])
    """The least, the usual and the largest size of a dynamic side, by its name, for which the engine is built; by
    default those of the inputs that the model was traced and calibrated with."""

    def __post_init__(self) -> None:
        """Refuse what says no sizes.

        Raises:
            ModelError: ``shapes`` does not say three whole numbers from 0 by names of sides, the least first.
        """
        _refuse_odd_shapes(self.shapes)
        object.__setattr__(self, "shapes", {name: tuple(sizes) for name, sizes in self.shapes.items()})


def _refuse_odd_shapes(shapes: Any) -> None:
    if not isinstance(shapes, Mapping):
        msg = f"shapes is {shapes!r}; it takes {{side: (least, usual, largest)}}"
        raise ModelError(msg)
    for name, given in shapes.items():
        are_three = isinstance(given, Sequence) and len(given) == 3 and all(type(size) is int for size in given)
        if not are_three or not 0 <= given[0] <= given[1] <= given[2] or given[2] < 1:
            wanted = (
                "the least, the usual and the largest of its sizes, which are whole numbers, none below 0 or below the "
                "one before it, and the largest at least 1"
            )
            msg = f"shapes: {name!r} is to be {given!r}; it takes {wanted}"
            raise ModelError(msg)


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_ONNX(_BuiltForSizes, BaseDeploymentSettings):  # noqa: N801 - the record's name
    """TensorRT, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt``."""

    target: ClassVar[str] = "tensorrt"
    framework: ClassVar[str] = "TensorRT (NVIDIA)"


@dataclass(frozen=True)
class DeploymentSettings_TensorRT_LLM_ONNX(_BuiltForSizes, BaseDeploymentSettings):  # noqa: N801 - the record's name
    """TensorRT-LLM, from an ``.onnx`` file; needs a plugin that provides the target ``tensorrt-llm``."""

    target: ClassVar[str] = "tensorrt-llm"
    framework: ClassVar[str] = "TensorRT-LLM (NVIDIA)"


class _Unwritten(BaseDeploymentSettings):
    """The base of settings that nobody has written a class for: a class of a plugin that is loaded later goes first."""


def deployment_class_named(target: str) -> type[BaseDeploymentSettings]:
    """Return the class of a target's settings by its name or a short one, of a plugin's own too, bases first."""
    name, level = full_name(target), BaseDeploymentSettings.__subclasses__()
    while level:
        for kind in level:
            if name and kind.target == name:  # those of retired targets have no name
                return kind
        level = [derived for kind in level if kind is not _Unwritten for derived in kind.__subclasses__()]
    return type("DeploymentSettings", (_Unwritten,), {"target": name, "framework": name})


def without_default(kind: type) -> list[str]:
    """Return what has to be given to make an instance of a class."""
    taken = inspect.signature(kind).parameters.values()
    return [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def deployment_settings_named(target: str) -> BaseDeploymentSettings:
    """Return the settings of a target, whose fields have their defaults; compiling finds the target or not.

    Raises:
        TargetError: a field has no default.
    """
    kind = deployment_class_named(target)
    lacking = without_default(kind)
    if lacking:
        msg = (
            f"the target {kind.target} needs settings, and its name alone does not tell {', '.join(lacking)} of "
            f"{kind.__module__}.{kind.__qualname__}: give them as deployment_settings in Python or in a settings file, "
            "or let its plugin give them defaults"
        )
        raise TargetError(msg)
    return kind()


DISTRIBUTIONS: Mapping[str, str] = {
    "onnxruntime": "clika-ref-onnxruntime",
    "openvino": "clika-ref-openvino",
    "tensorrt": "clika-ref-tensorrt",
    "tensorrt-llm": "clika-ref-tensorrt",
}
"""What provides our targets."""

RETIRED = frozenset({"tflite", "qnn"})
"""Targets that older releases of the system had, and that nobody has written here."""

SHORT_NAMES: Mapping[str, str] = {
    "ort": "onnxruntime", "ov": "openvino", "trt": "tensorrt", "trt-llm": "tensorrt-llm",
}  # fmt: skip
"""What settings files and the command line may call our targets, as release 24 did (``target_framework: trt``)."""

MAY_BE_ADDED = 'a plugin may add it: CONTRIBUTING.md, "A target", shows one in 80 lines'


def full_name(target: str) -> str:
    """Return the name of a target, given that or its short one."""
    return SHORT_NAMES.get(target, target)


def remedy_for(target: str, installed: Collection[str] = ()) -> str:
    """Return what to do where no installed plugin provides a target, given the names of those that plugins provide."""
    name = full_name(target.strip().lower())
    if not name:
        return "give the name of one"
    if name in RETIRED:
        return f"it retired before release 25, and is not implemented; {MAY_BE_ADDED}"
    if name in DISTRIBUTIONS and name not in installed:
        return f"pip install {DISTRIBUTIONS[name]}"
    near = difflib.get_close_matches(name, [*installed, *DISTRIBUTIONS], n=1)
    return f"did you mean {near[0]!r}?" if near else MAY_BE_ADDED


@dataclass(frozen=True)
class _Retired(BaseDeploymentSettings):
    """A target of `RETIRED`."""

    def __post_init__(self) -> None:
        """Refuse to be made.

        Raises:
            TargetError: always.
        """
        msg = (
            f"the target {self.framework} is not implemented: it retired before release 25; {MAY_BE_ADDED}, to which "
            'settings with its name belong: class Mine(BaseDeploymentSettings): target = "..."'
        )
        raise TargetError(msg)


class DeploymentSettings_TFLite(_Retired):  # noqa: N801 - the record's name
    """TensorFlow Lite, which is not implemented."""

    framework: ClassVar[str] = "TFLite"


class DeploymentSettings_QNN(_Retired):  # noqa: N801 - the record's name
    """Qualcomm's QNN, which is not implemented."""

    framework: ClassVar[str] = "QNN"


Switch = Literal["auto", "on", "off"]
"""Of an algorithm: tried and kept where it helps, always used, or never."""

Goal = Literal["size", "latency"]
"""What quantization is for, beside the numbers."""

Norms = Literal["frozen", "live"]
"""Of batch norms in training: whether they keep their statistics, or are those of the batch."""

TAKEN: Mapping[type, tuple[type, ...]] = {bool: (bool,), float: (float, int), str: (str, PathLike)}
"""By the type of an option's default, what the option takes."""

LIVE_BASE = (
    "adapters train beside layers that stay as they are, and batch_norm='live' learns the statistics of norms; compile "
    "with batch_norm='frozen'"
)
"""Why norms cannot be live beside adapters."""

SWITCHES = ("smoothing", "equalization", "weight_clipping", "sparing", "weight_rounding", "bias_correction")
"""The options that are one."""


@dataclass(frozen=True)
class ClikaCompileOptions:
    """Aspects of compilation that rarely need a choice."""

    check_passes: bool = False
    """Run the graph after each pass and name the pass that changes numbers (slow; for authors of passes)."""

    compare_after_export: bool = True
    """Load each artifact in its runtime and compare it with the ClikaModule."""

    external_data: bool = False
    """Write weights to a file beside the artifact even where one file could hold them (2 GB)."""

    ranges_file: str | PathLike[str] = ""
    """Where to save the ranges that calibration finds, also when it is interrupted; one that exists is begun with, and
    as many batches as it counts are not run again, with a warning where the first is another one. Nowhere where
    empty."""

    optimize_for: Goal = "size"
    """``"latency"`` leaves float what this machine takes longer for in integers: layers are timed one by one, and the
    whole in the end, which needs a target that is not emulated. ``"size"`` times nothing, and quantizes all that is not
    too sensitive."""

    observer: str = "auto"
    """What of a value its integers cover: ``"min-max"``, ``"mean of extremes"``, ``"99.99 %"`` or ``"99.999 %"`` of its
    elements, or what has the ``"least error"``; ``"every"`` gives each value the one of these by which the outputs come
    nearest, and ``"auto"`` the mean or the least error, which is quicker."""

    smoothing: Switch = "auto"
    """Make channels that linear layers read smaller where they are much larger than others, and the weights behind them
    larger; ``"auto"`` where that halves the error of a layer, or the layer before takes it up, ``"on"`` where it
    lessens it."""

    equalization: Switch = "auto"
    """The same between convolutions, where the one before takes it up; ``"on"`` where it lessens the error at all."""

    weight_clipping: Switch = "auto"
    """Let scales of weights miss the largest where that misses less of all."""

    sparing: Switch = "auto"
    """Leave layers float that cost little there and make much of the error, at most 4 % of all products and weights;
    ``"auto"`` where that helps on data."""

    weight_rounding: Switch = "auto"
    """Round weights with feedback, by what a layer reads; ``"auto"`` where that takes little time and helps on data."""

    bias_correction: Switch = "auto"
    """Take back by biases what rounding shifts on average; ``"auto"`` where that helps on data."""

    batch_norm: Norms = "frozen"
    """What batch norms do where a module is trained: ``"frozen"`` ones keep their running statistics, and
    are a part of the weights before them as they will be; ``"live"`` ones normalize by the batch, and learn these."""

    algorithm_seconds: float = 0.0
    """After so long, calibration not counted, what is on ``"auto"`` is no longer tried; 0 for no limit."""

    global_lora_settings: LoraSettings | None = None
    """Which layers get low-rank adapters, which then train in place of all other parameters; None for none."""

    def __post_init__(self) -> None:
        """Refuse values of another kind.

        Raises:
            ModelError: a value has another type, a switch is neither on, off nor auto, or a time is negative.
        """
        for name, of in (*((name, Switch) for name in SWITCHES), ("optimize_for", Goal), ("batch_norm", Norms)):
            if getattr(self, name) not in get_args(of):
                msg = f"option {name!r} is {getattr(self, name)!r}; it takes {', '.join(map(repr, get_args(of)))}"
                raise ModelError(msg)
        for option in dataclasses.fields(self):
            value, wanted = getattr(self, option.name), type(option.default)
            if option.default is None:
                continue
            if not isinstance(value, TAKEN[wanted]) or isinstance(value, bool) is not (wanted is bool):
                msg = f"option {option.name!r} is {value!r}, a {type(value).__name__}; it takes a {wanted.__name__}"
                raise ModelError(msg)
        seconds = self.algorithm_seconds
        if not 0 <= seconds < math.inf:
            msg = f"option 'algorithm_seconds' is {seconds!r}; it takes a number of seconds, 0 for no limit"
            raise ModelError(msg)
        self._refuse_adapters()

    def _refuse_adapters(self) -> None:
        """Refuse settings of adapters that are none, and norms that learn what is to stay as it is."""
        given = self.global_lora_settings
        if given is not None and not isinstance(given, LoraSettings):
            msg = (
                f"option 'global_lora_settings' is {given!r}, a {type(given).__name__}; it takes a LoraSettings, such "
                "as LoraSettings(rank=8), or None"
            )
            raise ModelError(msg)
        if given is not None and self.batch_norm == "live":
            msg = LIVE_BASE
            raise ModelError(msg)

    def with_extra(self, extra: Mapping[str, Any]) -> ClikaCompileOptions:
        """Return these options with some replaced by name.

        Raises:
            ModelError: a name is unknown, or a value is none that the option takes.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name, value in extra.items():
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                msg = f"unknown option {name!r} = {value!r}; the options are {', '.join(known)}{hint}"
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
