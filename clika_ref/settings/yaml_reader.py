"""Read a settings file by section: the schema of clika-ace's releases of 2024, and the additions of this project."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clika_ref.core.errors import ClikaError, ClikaWarning
from clika_ref.core.registry import load_registry
from clika_ref.settings.compile_options import (
    TARGET_SHORT_NAMES,
    BaseDeploymentSettings,
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_QNN,
    DeploymentSettings_TFLite,
    deployment_class_named,
    full_target_name,
)
from clika_ref.settings.distributed import DistributedTrainingSettings
from clika_ref.settings.lora import LoraSettings
from clika_ref.settings.pruning import LayerPruningSettings, PruningSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings
from clika_ref.settings.training import TrainingSettings
from clika_ref.settings.yaml_sections import (
    describe_entry,
    is_mapping,
    parse_flag,
    read_section,
    unknown_name_message,
)
from clika_ref.settings.yaml_tree import Entry, Problems, read_tree

SETTINGS_BY_FRAMEWORK: Mapping[str, type[BaseDeploymentSettings]] = {
    **{short: deployment_class_named(name) for short, name in TARGET_SHORT_NAMES.items()},
    "tflite": DeploymentSettings_TFLite,
    "qnn": DeploymentSettings_QNN,
}
"""Names of targets in clika-ace. Other targets use their plugin's name."""

DEPLOYMENT_SECTION, QUANTIZATION_SECTION, LAYERS_SECTION = (
    "deployment_settings",
    "global_quantization_settings",
    "layer_settings",
)
LORA_SECTION, OPTIONS_SECTION = "global_lora_settings", "clika_compile_options"
FRAMEWORK_FIELD, METHOD_FIELD, FULL_RANGE_FIELD = "target_framework", "method", "weights_utilize_full_int_range"
THRESHOLD_FIELD = "quantization_sensitivity_threshold"

REQUIRED_SECTIONS: Mapping[str, type] = {
    "distributed_training_settings": DistributedTrainingSettings,
    "training_settings": TrainingSettings,
    OPTIONS_SECTION: ClikaCompileOptions,
}
"""Sections that always exist."""

OPTIONAL_SECTIONS: Mapping[str, type] = {
    QUANTIZATION_SECTION: QuantizationSettings,
    "global_pruning_settings": PruningSettings,
    LORA_SECTION: LoraSettings,
}
"""Sections for changes to a model; ``null`` disables them."""

LAYER_SUBSECTIONS: Mapping[str, type] = {
    "quantization_settings": LayerQuantizationSettings,
    "pruning_settings": LayerPruningSettings,
}
"""Sections of one layer."""

QAT_METHOD = "qat"
"""The only method of clika-ace: calibration first, then training in the user's own loop."""

FULL_RANGE_TARGETS = ("openvino", "onnxruntime")
"""The only targets with ``weights_utilize_full_int_range`` in clika-ace, where it is a deployment setting."""

MIN_LEGACY_THRESHOLD = 1000.0
"""clika-ace's thresholds of 2024 were 5,000 or 10,000, for an error that was not normalized."""

SECTION_NAMES = (DEPLOYMENT_SECTION, LAYERS_SECTION, *OPTIONAL_SECTIONS, *REQUIRED_SECTIONS)

FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    DEPLOYMENT_SECTION: (FRAMEWORK_FIELD,),
    **{
        name: tuple(f.name for f in dataclasses.fields(kind) if f.name != LORA_SECTION)  # LORA is a section of its own
        for name, kind in {**OPTIONAL_SECTIONS, **REQUIRED_SECTIONS}.items()
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
            if name in SECTION_NAMES:
                found[name] = _SectionReader(problems).read(name, entry)
            else:
                problems.add(entry.line, unknown_name_message(name, "the file", SECTION_NAMES, FIELD_NAMES))
        _apply_full_range(found, root.value.get(DEPLOYMENT_SECTION))
    problems.raise_if_any()
    return found


@dataclasses.dataclass(frozen=True)
class _SectionReader:
    problems: Problems

    def read(self, name: str, entry: Entry) -> Any:
        is_off = entry.value is None and bool(entry.text)  # an empty section means defaults
        if name == LAYERS_SECTION:
            return self._layers(entry)
        if is_off and name not in REQUIRED_SECTIONS:
            return None
        if name == DEPLOYMENT_SECTION:
            return self._deployment(entry)
        if name == OPTIONS_SECTION:
            entry = self._drop_adapter_settings(entry)
        if name == QUANTIZATION_SECTION:
            entry = self._drop_ace_fields(entry)
        if is_off:
            is_mapping(entry, name, self.problems)
            return None
        return read_section({**OPTIONAL_SECTIONS, **REQUIRED_SECTIONS}[name], entry, name, self.problems, FIELD_NAMES)

    def _deployment(self, entry: Entry) -> Any:
        if entry.value is None:
            return DeploymentSettings_ONNXRuntime_ONNX()
        if not is_mapping(entry, DEPLOYMENT_SECTION, self.problems):
            return None
        fields = dict(entry.value)
        named, full = fields.pop(FRAMEWORK_FIELD, Entry("ort", entry.line, "ort")), fields.pop(FULL_RANGE_FIELD, None)
        if full is not None and not isinstance(parse_flag(full), bool):
            self.problems.add(
                full.line, f"{DEPLOYMENT_SECTION}.{FULL_RANGE_FIELD} is {describe_entry(full)}. Give true or false."
            )
        kind = self._framework(named)
        return kind and read_section(kind, Entry(fields, entry.line), DEPLOYMENT_SECTION, self.problems, FIELD_NAMES)

    def _framework(self, entry: Entry) -> type[BaseDeploymentSettings] | None:
        name = entry.text
        try:
            if name in SETTINGS_BY_FRAMEWORK:
                SETTINGS_BY_FRAMEWORK[name]()  # raises for retired frameworks
                return SETTINGS_BY_FRAMEWORK[name]
            targets = load_registry().targets
            if name in targets:
                return deployment_class_named(name)
        except ClikaError as error:
            self.problems.add(entry.line, f"{DEPLOYMENT_SECTION}.{FRAMEWORK_FIELD}: {error}")
            return None
        known = [*SETTINGS_BY_FRAMEWORK, *targets]
        self.problems.add(entry.line, unknown_name_message(name, f"{DEPLOYMENT_SECTION}.{FRAMEWORK_FIELD}", known, {}))
        return None

    def _drop_ace_fields(self, entry: Entry) -> Entry:
        """Return the entry of quantization settings without the fields that only clika-ace has."""
        if not isinstance(entry.value, dict):
            return entry
        fields = dict(entry.value)
        method, threshold = fields.pop(METHOD_FIELD, None), fields.get(THRESHOLD_FIELD)
        if method is not None and method.value != QAT_METHOD:
            problem = (
                f"{QUANTIZATION_SECTION}.{METHOD_FIELD} is {describe_entry(method)}. Give {QAT_METHOD!r}, which "
                "calibrates first."
            )
            self.problems.add(method.line, problem)
        if threshold is not None and threshold.value is None:
            del fields[THRESHOLD_FIELD]
        elif (
            threshold is not None
            and isinstance(threshold.value, int | float)
            and threshold.value >= MIN_LEGACY_THRESHOLD
        ):
            msg = (
                f"{self.problems.path}, line {threshold.line}: {THRESHOLD_FIELD} is {threshold.text}, as in "
                "releases of 2024, which used another scale. Here it is a share of the outputs, and with this "
                "value no layer is too sensitive. Give a value such as 0.005."
            )
            warnings.warn(msg, ClikaWarning, stacklevel=5)
        return dataclasses.replace(entry, value=fields)

    def _drop_adapter_settings(self, entry: Entry) -> Entry:
        """Return the entry of options without adapter settings, which have a section of their own."""
        if not isinstance(entry.value, dict) or LORA_SECTION not in entry.value:
            return entry
        fields = dict(entry.value)
        self.problems.add(
            fields.pop(LORA_SECTION).line,
            f"{OPTIONS_SECTION} has no {LORA_SECTION!r}. Make it a section of its own.",
        )
        return dataclasses.replace(entry, value=fields)

    def _layers(self, entry: Entry) -> dict[str, dict[str, Any]]:
        if entry.value is None or not is_mapping(entry, LAYERS_SECTION, self.problems):
            return {}
        return {name: self._layer(name, layer_entry) for name, layer_entry in entry.value.items()}

    def _layer(self, layer: str, entry: Entry) -> dict[str, Any]:
        where, found = f"{LAYERS_SECTION}.{layer}", dict[str, Any]()
        is_empty = entry.value is None and not entry.text  # an empty layer has only defaults
        if is_empty or not is_mapping(entry, where, self.problems) or entry.value is None:
            return found
        names = {
            section: tuple(f.name for f in dataclasses.fields(kind)) for section, kind in LAYER_SUBSECTIONS.items()
        }
        for name, layer_entry in entry.value.items():
            if name in LAYER_SUBSECTIONS:
                is_off = layer_entry.value is None and bool(layer_entry.text)
                own = LAYER_SUBSECTIONS[name], layer_entry, f"{where}.{name}"
                found[name] = None if is_off else read_section(*own, self.problems, names)
            else:
                self.problems.add(layer_entry.line, unknown_name_message(name, where, LAYER_SUBSECTIONS, names))
        return found


def _apply_full_range(found: dict[str, Any], deployment: Entry | None) -> None:
    """Copy clika-ace's deployment setting ``weights_utilize_full_int_range`` to quantization settings without it."""
    fields = deployment.value if deployment is not None and isinstance(deployment.value, dict) else {}
    given, framework = fields.get(FULL_RANGE_FIELD), fields.get(FRAMEWORK_FIELD)
    if given is None or (framework is not None and full_target_name(framework.text) not in FULL_RANGE_TARGETS):
        return
    settings = found.setdefault(QUANTIZATION_SECTION, QuantizationSettings())
    flag = parse_flag(given)
    if settings is not None and settings.weights_utilize_full_int_range is None and isinstance(flag, bool):
        settings.weights_utilize_full_int_range = flag
