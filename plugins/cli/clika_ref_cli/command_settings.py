"""Settings of a command: a YAML file, overridden by flags. Each override is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clika_ref.compiled.lowering import target_named
from clika_ref.core.registry import load_registry
from clika_ref.settings.compile_options import BaseDeploymentSettings, deployment_settings_named, full_target_name
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings
from clika_ref.settings.settings import LayerSettings, Settings
from clika_ref.settings.yaml_reader import DEPLOYMENT_SECTION, LAYERS_SECTION, OPTIONS_SECTION, QUANTIZATION_SECTION
from clika_ref.settings.yaml_tree import Entry, Problems, parse_scalar, read_tree
from clika_ref.targets.file_suffixes import suffix_error
from clika_ref_cli.exit_status import MisuseError, print_note, raise_as_misuse

DEFAULT_TARGET = "onnxruntime"


@dataclass(frozen=True)
class Flags:
    """Values of the command-line flags; None or empty for flags that are not given."""

    target: str | None = None
    options: Sequence[str] = ()
    quantization: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of `QuantizationSettings`: for each, the flag as written and its value."""
    keep_float: Sequence[str] = ()


@dataclass(frozen=True)
class CommandSettings:
    """The settings of a command, with the locations of those that come from a file."""

    settings: Settings
    flags: Flags
    file_entries: Mapping[str, Entry]
    """Entries of the file by section, or by section and name: ``clika_compile_options.smooth_quant``."""
    file: Path | None

    @property
    def has_target(self) -> bool:
        """Whether a flag or the file selects a target."""
        return self.flags.target is not None or DEPLOYMENT_SECTION in self.file_entries

    def note_override(self, name: str, flag: str, value: Any, before: Any) -> None:
        """Print a note if a flag overrides a different value of the file."""
        entry = self.file_entries.get(name)
        if entry is not None and before != value:
            field = name.partition(".")[2] or name
            print_note(f"{flag} overrides {field} in line {entry.line} of {self.file}.")


def resolve_settings(file: Path | None, flags: Flags) -> CommandSettings:
    """Return the settings of a file, or the defaults, with the flags applied.

    Raises:
        MisuseError: the file or a flag is invalid, or no plugin provides the target.
    """
    with raise_as_misuse():
        settings = Settings.load_from_path(file) if file is not None else Settings()
        resolved = CommandSettings(settings, flags, _read_file_entries(file) if file is not None else {}, file)
        _choose_target(resolved, flags.target)
        _choose_options(resolved, flags.options)
        _choose_quantization(resolved, flags)
    return resolved


def deployment_settings_for(target: str | None) -> BaseDeploymentSettings:
    """Return the deployment settings of an installed target.

    Raises:
        MisuseError: no plugin provides the target, or its settings have fields without defaults.
    """
    with raise_as_misuse():
        target_named(full_target_name(DEFAULT_TARGET if target is None else target), load_registry())
        return deployment_settings_named(DEFAULT_TARGET if target is None else target)


def deployment_settings_of_saved(module: Any) -> BaseDeploymentSettings:
    """Return the deployment settings of a saved module."""
    return module.clika_state.deployment_settings or deployment_settings_named(DEFAULT_TARGET)


def check_artifact_suffix(path: Path | None, deployment: BaseDeploymentSettings | None) -> None:
    """Reject an artifact path with a suffix that the target does not write, such as that of a Python file.

    Args:
        path: path of the artifact; None if none is written.
        deployment: the settings of the target.

    Raises:
        MisuseError: the target declares the suffixes of its files, and the path has another one.
    """
    if deployment is None or path is None:
        return
    reason = suffix_error(path, deployment.target, load_registry().targets, "--target")
    if reason is not None:
        raise MisuseError(f"-o {path}: {reason}")


def float_compile_arguments(resolved: CommandSettings) -> dict[str, Any]:
    """Return arguments of `clika_compile` for a float model. Print a note if the file asks for quantization."""
    if QUANTIZATION_SECTION in resolved.file_entries and resolved.settings.global_quantization_settings is not None:
        print_note(
            f"`compile` ignores {QUANTIZATION_SECTION} of {resolved.file}. Use `clika-ref quantize` for a quantized "
            "model."
        )
    arguments = resolved.settings.compile_arguments()
    return arguments | {"quantization_settings": None, "layer_quantization_settings": None}


def quantize_arguments(resolved: CommandSettings) -> dict[str, Any]:
    """Return arguments of `clika_compile` that quantize a model.

    Raises:
        MisuseError: the file disables quantization.
    """
    if resolved.settings.global_quantization_settings is None:
        raise MisuseError(
            f"cannot quantize: {resolved.file} sets {QUANTIZATION_SECTION} to null. Remove this line, give "
            "--threshold, or use `clika-ref compile`."
        )
    return {**resolved.settings.compile_arguments()}


def export_deployment_settings(file: Path | None, target: str | None) -> BaseDeploymentSettings | None:
    """Return the deployment settings for an export, or None if no target is selected. Other sections are ignored.

    Raises:
        MisuseError: the file or the flag is invalid, or no plugin provides the target.
    """
    resolved = resolve_settings(file, Flags(target))
    others = [name for name in resolved.file_entries if "." not in name and name != DEPLOYMENT_SECTION]
    if others:
        print_note(f"`export` only uses {DEPLOYMENT_SECTION} of {file}, and ignores {', '.join(others)}.")
    return resolved.settings.deployment_settings if resolved.has_target else None


def _read_file_entries(file: Path) -> dict[str, Entry]:
    """Return the sections of a file and their entries."""
    root = read_tree(file, Problems(file))
    sections: dict[str, Entry] = root.value if isinstance(root.value, dict) else {}
    entries = dict(sections)
    for name, section in sections.items():
        if isinstance(section.value, dict):
            entries |= {f"{name}.{key}": entry for key, entry in section.value.items()}
    return entries


def _choose_target(resolved: CommandSettings, target: str | None) -> None:
    before = resolved.settings.deployment_settings
    if target is None:
        resolved.settings.deployment_settings = before or deployment_settings_for(None)
        return
    given = deployment_settings_for(target)
    if before is not None and before.target == given.target:
        return  # keep the settings of the file for this target
    if before is not None:
        resolved.note_override(
            f"{DEPLOYMENT_SECTION}.target_framework", f"--target {target}", given.target, before.target
        )
    resolved.settings.deployment_settings = given


def _choose_options(resolved: CommandSettings, texts: Sequence[str]) -> None:
    options = resolved.settings.clika_compile_options
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise MisuseError(
                f"cannot parse --option {text!r}: it has no value. Write NAME=VALUE, such as smooth_quant=off."
            )
        parsed = parse_scalar(value)
        if hasattr(options, name):
            resolved.note_override(f"{OPTIONS_SECTION}.{name}", f"--option {text}", parsed, getattr(options, name))
        options = options.with_extra({name: parsed})
    resolved.settings.clika_compile_options = options


def _choose_quantization(resolved: CommandSettings, flags: Flags) -> None:
    settings = resolved.settings
    if flags.quantization and settings.global_quantization_settings is None:
        first = next(iter(flags.quantization.values()))[0]
        resolved.note_override(QUANTIZATION_SECTION, first, QuantizationSettings(), None)
        settings.global_quantization_settings = QuantizationSettings()
    before = settings.global_quantization_settings
    if before is not None and flags.quantization:
        for name, (flag, value) in flags.quantization.items():
            resolved.note_override(f"{QUANTIZATION_SECTION}.{name}", flag, value, getattr(before, name))
        values = {name: value for name, (_, value) in flags.quantization.items()}
        settings.global_quantization_settings = replace(before, **values)
    for layer in flags.keep_float:
        before_of_layer = settings.layer_settings.get(layer, LayerSettings())
        of_layer = replace(before_of_layer, quantization_settings=LayerQuantizationSettings(skip_quantization=True))
        resolved.note_override(f"{LAYERS_SECTION}.{layer}", f"--keep-float {layer}", of_layer, before_of_layer)
        settings.layer_settings = {**settings.layer_settings, layer: of_layer}
