"""Implementation of ``clika-ref quantize`` for Python models and saved modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import clika_ref
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref_cli.arguments import ModelKind, find_model_kind, load_model, require_kind
from clika_ref_cli.command_settings import (
    DEPLOYMENT_SECTION,
    LAYERS_SECTION,
    QUANTIZATION_SECTION,
    CommandSettings,
    deployment_settings_of_saved,
    quantize_arguments,
)
from clika_ref_cli.data import note_random_calibration, read_calls
from clika_ref_cli.exit_status import MisuseError, print_note

APPLICABLE_SECTIONS = (DEPLOYMENT_SECTION, QUANTIZATION_SECTION, LAYERS_SECTION)
"""Sections of a settings file that apply to a module that is already compiled."""


@dataclass(frozen=True)
class ModelWithData:
    """A model to quantize, with its calibration data and tracing inputs."""

    model: Any
    """A module of the user, or a ClikaModule."""
    is_compiled: bool
    calibration: Iterable[Any] | None
    tracing: list[Any] | None


def quantization_flags(
    threshold: float | None, weights_bits: Sequence[int] | None, *, weights_only: bool | None
) -> dict[str, tuple[str, Any]]:
    """Return the fields of `QuantizationSettings` set by flags: for each, the flag as written and its value."""
    fields: dict[str, tuple[str, Any]] = {}
    if threshold is not None:
        fields["quantization_sensitivity_threshold"] = (f"--threshold {threshold:g}", threshold)
    if weights_bits:
        shown = " ".join(f"--weights-bits {bits}" for bits in weights_bits)
        fields["weights_num_bits"] = (shown, weights_bits[0] if len(weights_bits) == 1 else [*weights_bits])
    if weights_only is not None:
        shown = "--weights-only" if weights_only else "--weights-and-activations"
        fields["prefer_weights_only_quantization"] = (shown, weights_only)
    return fields


def load_model_with_data(
    text: str, calibrate: Sequence[str], inputs: Sequence[str], batch_size: int | None
) -> ModelWithData:
    """Load a model and its data from arguments.

    Raises:
        MisuseError: the argument names no model, its data is missing, or inputs are given for a compiled one.
    """
    require_kind(text, [ModelKind.FACTORY, ModelKind.SAVED], "Give a Python model or a saved module.")
    kind = find_model_kind(text, inputs)
    if kind is ModelKind.FACTORY and not calibrate:
        raise MisuseError(f"cannot quantize {text}: --calibrate is missing. Give calibration data, which is read once.")
    note_random_calibration(calibrate, "--calibrate")
    calibration = read_calls(calibrate, "--calibrate", batch_size=batch_size) if calibrate else None
    if kind is ModelKind.SAVED:
        return ModelWithData(clika_ref.ClikaModule.clika_load(text), True, calibration, None)
    return ModelWithData(load_model(text), False, calibration, [*read_calls(inputs)] if inputs else None)


def find_deployment(subject: ModelWithData, resolved: CommandSettings) -> BaseDeploymentSettings | None:
    """Return the deployment settings of the model: a saved one keeps its target unless another is selected."""
    if subject.is_compiled and not resolved.has_target:
        return deployment_settings_of_saved(subject.model)
    return resolved.settings.deployment_settings


def quantize_model(subject: ModelWithData, resolved: CommandSettings, logs_dir: Path | None) -> clika_ref.ClikaModule:
    """Quantize the model with the given settings.

    Raises:
        MisuseError: the file disables quantization, or options are given for a module that is already compiled.
        ModelError: the model cannot be compiled, or the data does not fit it.
    """
    arguments = quantize_arguments(resolved)
    if not subject.is_compiled:
        data = {"tracing_inputs": subject.tracing, "calibration_inputs": subject.calibration}
        module: Any = clika_ref.clika_compile(subject.model, **data, logs_dir=logs_dir, **arguments)
        return module
    _reject_options(resolved)
    subject.model.clika_state.logs_dir = logs_dir
    subject.model.clika_initialize_algorithms(
        arguments["quantization_settings"],
        calibration_inputs=subject.calibration,
        deployment_settings=arguments["deployment_settings"] if resolved.has_target else None,
        layer_quantization_settings=arguments["layer_quantization_settings"],
    )
    return subject.model


def _reject_options(resolved: CommandSettings) -> None:
    """Reject options for a compiled module, which has its own. Print a note on sections that no longer apply."""
    if resolved.flags.options:
        raise MisuseError(
            "cannot apply --option to a saved module: it is already compiled with its own options. Omit --option."
        )
    ignored = [name for name in resolved.file_entries if "." not in name and name not in APPLICABLE_SECTIONS]
    if ignored:
        print_note(f"{', '.join(ignored)} of {resolved.file} are ignored, because the module is already compiled.")


def decisions_as_json(module: clika_ref.ClikaModule) -> dict[str, Any]:
    """Return the decision and reason for each layer, and the outcome of other thresholds, as plain data."""
    quantization = module.clika_quantization
    assert quantization is not None
    return {
        "observer": quantization.observer,
        "bytes": quantization.bytes,
        "layers": [
            {
                "name": layer.name,
                "scope": layer.scope,
                "operator": layer.operator,
                "weight_bits": layer.bits[0],
                "activation_bits": layer.bits[1],
                "sensitivity": layer.sensitivity,
                "bytes_before": layer.bytes_before,
                "bytes_after": layer.bytes_after,
                "reason": layer.reason,
            }
            for layer in quantization.layers
        ],
        "what_if": [
            {"threshold": row.threshold, "layers": row.layers, "bytes": row.bytes, "sqnr_db": row.sqnr}
            for row in quantization.what_if
        ],
    }
