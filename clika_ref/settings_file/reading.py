"""Read a settings file by section: the schema of clika-ace's releases of 2024, and the additions of this project."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clika_ref.core.errors import ClikaError, ClikaWarning
from clika_ref.core.registry import load_registry
from clika_ref.distributed_settings import DistributedTrainingSettings
from clika_ref.lora_settings import LoraSettings
from clika_ref.pruning_settings import LayerPruningSettings, PruningSettings
from clika_ref.quantization_settings import LayerQuantizationSettings, QuantizationSettings
from clika_ref.settings import (
    SHORT_NAMES,
    BaseDeploymentSettings,
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_QNN,
    DeploymentSettings_TFLite,
    deployment_class_named,
    full_name,
)
from clika_ref.settings_file.sections import WORDS, is_mapping, read_section, shown, unknown
from clika_ref.settings_file.tree import Entry, Problems, read_tree
from clika_ref.training_settings import TrainingSettings

FRAMEWORKS: Mapping[str, type[BaseDeploymentSettings]] = {
    **{short: deployment_class_named(name) for short, name in SHORT_NAMES.items()},
    "tflite": DeploymentSettings_TFLite,
    "qnn": DeploymentSettings_QNN,
}
"""Names of targets in clika-ace. Other targets use their plugin's name."""

DEPLOYMENT, QUANTIZATION, LAYERS = "deployment_settings", "global_quantization_settings", "layer_settings"
LORA, OPTIONS = "global_lora_settings", "clika_compile_options"
FRAMEWORK, METHOD, FULL_RANGE = "target_framework", "method", "weights_utilize_full_int_range"
THRESHOLD = "quantization_sensitivity_threshold"

WHOLE: Mapping[str, type] = {
    "distributed_training_settings": DistributedTrainingSettings,
    "training_settings": TrainingSettings,
    OPTIONS: ClikaCompileOptions,
}
"""Sections that always exist."""

OPTIONAL: Mapping[str, type] = {
    QUANTIZATION: QuantizationSettings,
    "global_pruning_settings": PruningSettings,
    LORA: LoraSettings,
}
"""Sections for changes to a model; ``null`` disables them."""

OF_LAYER: Mapping[str, type] = {
    "quantization_settings": LayerQuantizationSettings,
    "pruning_settings": LayerPruningSettings,
}
"""Sections of one layer."""

TRAINED = "qat"
"""The only method of clika-ace: calibration first, then training in the user's own loop."""

SATURATES = ("openvino", "onnxruntime")
"""The only targets with ``weights_utilize_full_int_range`` in clika-ace, where it is a deployment setting."""

OLD_SCALE = 1000.0
"""clika-ace's thresholds of 2024 were 5,000 or 10,000, for an error that was not normalized."""

SECTIONS = (DEPLOYMENT, LAYERS, *OPTIONAL, *WHOLE)

NAMES: Mapping[str, tuple[str, ...]] = {
    DEPLOYMENT: (FRAMEWORK,),
    **{
        name: tuple(f.name for f in dataclasses.fields(kind) if f.name != LORA)  # LORA is a section of its own
        for name, kind in {**OPTIONAL, **WHOLE}.items()
    },
}
"""Field names of each section."""


def read_settings(file: Path) -> dict[str, Any]:
    """Return the sections of a file as settings, by name; absent sections are omitted.

    Raises:
        ModelError: the file cannot be read, or has invalid settings; the message lists all of them with their lines.
    """
    problems = Problems(file)
    root = read_tree(file, problems)
    found: dict[str, Any] = {}
    if is_mapping(root, "the file", problems):
        for name, entry in root.value.items():
            if name in SECTIONS:
                found[name] = _Reader(problems).read(name, entry)
            else:
                problems.add(entry.line, unknown(name, "the file", SECTIONS, NAMES))
        _take_full_range(found, root.value.get(DEPLOYMENT))
    problems.refuse()
    return found


@dataclasses.dataclass(frozen=True)
class _Reader:
    problems: Problems

    def read(self, name: str, entry: Entry) -> Any:
        is_off = entry.value is None and bool(entry.text)  # an empty section means defaults
        if name == LAYERS:
            return self._layers(entry)
        if is_off and name not in WHOLE:
            return None
        if name == DEPLOYMENT:
            return self._deployment(entry)
        if name == OPTIONS:
            entry = self._without_adapters(entry)
        if name == QUANTIZATION:
            entry = self._without_record(entry)
        if is_off:
            is_mapping(entry, name, self.problems)
            return None
        return read_section({**OPTIONAL, **WHOLE}[name], entry, name, self.problems, NAMES)

    def _deployment(self, entry: Entry) -> Any:
        if entry.value is None:
            return DeploymentSettings_ONNXRuntime_ONNX()
        if not is_mapping(entry, DEPLOYMENT, self.problems):
            return None
        fields = dict(entry.value)
        named, full = fields.pop(FRAMEWORK, Entry("ort", entry.line, "ort")), fields.pop(FULL_RANGE, None)
        if full is not None and not isinstance(_flag(full), bool):
            self.problems.add(full.line, f"{DEPLOYMENT}.{FULL_RANGE} is {shown(full)}; it takes true or false")
        kind = self._framework(named)
        return kind and read_section(kind, Entry(fields, entry.line), DEPLOYMENT, self.problems, NAMES)

    def _framework(self, entry: Entry) -> type[BaseDeploymentSettings] | None:
        name = entry.text
        try:
            if name in FRAMEWORKS:
                FRAMEWORKS[name]()  # raises for retired frameworks
                return FRAMEWORKS[name]
            targets = load_registry().targets
            if name in targets:
                return deployment_class_named(name)
        except ClikaError as error:
            self.problems.add(entry.line, f"{DEPLOYMENT}.{FRAMEWORK}: {error}")
            return None
        known = [*FRAMEWORKS, *targets]
        self.problems.add(entry.line, unknown(name, f"{DEPLOYMENT}.{FRAMEWORK}", known, {}))
        return None

    def _without_record(self, entry: Entry) -> Entry:
        """Return the entry of quantization settings without the fields that only clika-ace has."""
        if not isinstance(entry.value, dict):
            return entry
        fields = dict(entry.value)
        method, threshold = fields.pop(METHOD, None), fields.get(THRESHOLD)
        if method is not None and method.value != TRAINED:
            said = f"{QUANTIZATION}.{METHOD} is {shown(method)}; it takes {TRAINED!r}, which calibrates first"
            self.problems.add(method.line, said)
        if threshold is not None and threshold.value is None:
            del fields[THRESHOLD]
        elif threshold is not None and isinstance(threshold.value, int | float) and threshold.value >= OLD_SCALE:
            msg = (
                f"{self.problems.path}, line {threshold.line}: {THRESHOLD} is {threshold.text}, as in releases of "
                "2024, whose scale was another one. Here it is a share of the outputs, such as 0.005: with this one no "
                "layer is too sensitive"
            )
            warnings.warn(msg, ClikaWarning, stacklevel=5)
        return Entry(fields, entry.line, entry.text, entry.is_quoted)

    def _without_adapters(self, entry: Entry) -> Entry:
        """Return the entry of options without adapter settings, which have a section of their own."""
        if not isinstance(entry.value, dict) or LORA not in entry.value:
            return entry
        fields = dict(entry.value)
        self.problems.add(fields.pop(LORA).line, f"{OPTIONS} has no {LORA!r}; it is a section of its own, beside this")
        return Entry(fields, entry.line, entry.text, entry.is_quoted)

    def _layers(self, entry: Entry) -> dict[str, dict[str, Any]]:
        if entry.value is None or not is_mapping(entry, LAYERS, self.problems):
            return {}
        return {name: self._layer(name, held) for name, held in entry.value.items()}

    def _layer(self, layer: str, entry: Entry) -> dict[str, Any]:
        where, found = f"{LAYERS}.{layer}", dict[str, Any]()
        is_empty = entry.value is None and not entry.text  # an empty layer has only defaults
        if is_empty or not is_mapping(entry, where, self.problems) or entry.value is None:
            return found
        names = {section: tuple(f.name for f in dataclasses.fields(kind)) for section, kind in OF_LAYER.items()}
        for name, held in entry.value.items():
            if name in OF_LAYER:
                is_off = held.value is None and bool(held.text)
                own = None if is_off else read_section(OF_LAYER[name], held, f"{where}.{name}", self.problems, names)
                found[name] = own
            else:
                self.problems.add(held.line, unknown(name, where, OF_LAYER, names))
        return found


def _flag(entry: Entry) -> Any:
    """Return the value of a switch, including the booleans of YAML 1.1."""
    word = None if entry.is_quoted else WORDS.get(entry.text.lower())
    return entry.value if word is None else word


def _take_full_range(found: dict[str, Any], deployment: Entry | None) -> None:
    """Copy clika-ace's deployment setting ``weights_utilize_full_int_range`` to quantization settings without it."""
    fields = deployment.value if deployment is not None and isinstance(deployment.value, dict) else {}
    given, framework = fields.get(FULL_RANGE), fields.get(FRAMEWORK)
    if given is None or (framework is not None and full_name(framework.text) not in SATURATES):
        return
    settings = found.setdefault(QUANTIZATION, QuantizationSettings())
    if settings is not None and settings.weights_utilize_full_int_range is None and isinstance(_flag(given), bool):
        settings.weights_utilize_full_int_range = _flag(given)
