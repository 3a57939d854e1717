"""The commands that build a model or an artifact: ``compile``, ``quantize``, ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import clika_ref
from clika_ref.reporting.console import format_size
from clika_ref_cli import options
from clika_ref_cli.exit_status import Debug, MisuseError, report_errors
from clika_ref_cli.output import divert_stdout, import_lazily, print_result, seed_all, show_spinner
from clika_ref_cli.output_paths import check_output_paths

FACTORY_HINT = "Give a Python model. For a saved module, use `clika-ref export`."

SAVED_HINT = "Give a file of clika_save. For a Python model, use `clika-ref compile` or `quantize`."

NO_INPUT_MESSAGE = (
    "cannot compile: --input is missing. Give a shape such as 1x3x224x224, or a file of inputs. A dim that differs "
    "between two calls becomes dynamic."
)

NO_OUTPUT_MESSAGE = "cannot write the result: there is no output path. Give -o FILE"

NO_SAVE_MESSAGE = "cannot keep calibration inputs: no module is saved. Give --save FILE, or omit --keep-inputs."


def compile_model(
    model: options.Model,
    *,
    inputs: options.Inputs = None,
    output: options.Output = None,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    option: options.Option = None,
    logs_dir: options.LogsDir = None,
    seed: options.Seed = 0,
    static: options.Static = False,
    train_mode: options.TrainMode = False,
    dry_run: options.DryRun = False,
    no_compare: options.NoCompare = False,
    allow_unchecked_guards: options.AllowUncheckedGuards = False,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Compile a model in float and write the artifact of a target."""
    with report_errors(debug=debug), divert_stdout(applies=as_json or not dry_run):
        inputs_read = (model, *(inputs or ()), str(settings))
        check_output_paths({} if dry_run else {"-o": output}, f"{NO_OUTPUT_MESSAGE}, or --dry-run.", inputs_read)
        if not inputs:
            raise MisuseError(NO_INPUT_MESSAGE)
        with show_spinner("Loading"):
            seed_all(seed)
            choices, arguments, data = map(import_lazily, ("command_settings", "arguments", "data"))
            arguments.require_kind(model, [arguments.ModelKind.FACTORY], FACTORY_HINT)
            options_given = [*(option or ()), *(["compare_after_export=false"] if no_compare else ())]
            resolved = choices.resolve_settings(settings, choices.Flags(target, options_given))
            choices.check_artifact_suffix(output, resolved.settings.deployment_settings)
            user_model, examples = arguments.load_model(model), [*data.read_calls(inputs)]
        is_printed = dry_run and not as_json  # by the compilation itself, which returns None then
        modes = {"dynamic": not static, "skip_eval_set_mode": train_mode, "is_dry_run": is_printed}
        module: Any = clika_ref.clika_compile(
            user_model, tracing_inputs=examples, logs_dir=logs_dir, **modes, **choices.float_compile_arguments(resolved)
        )
        result: dict[str, Any] = {}
        if not dry_run:
            with clika_ref.export_configuration(allow_unchecked_guards=allow_unchecked_guards):
                result = {"artifact": _describe_artifact(module.clika_export(output)), "seconds": module.timings}
        elif as_json:
            result = import_lazily("graphs").dry_run_as_json(module, resolved.settings.deployment_settings)
    if result:
        _print_results(result, as_json=as_json)


def quantize(
    model: options.Model,
    *,
    calibrate: options.Calibrate = None,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    output: options.Output = None,
    save: options.Save = None,
    keep_inputs: options.KeepInputs = False,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    threshold: options.Threshold = None,
    weights_bits: options.WeightsBits = None,
    weights_only: options.WeightsOnly = None,
    keep_float: options.KeepFloat = None,
    option: options.Option = None,
    logs_dir: options.LogsDir = None,
    seed: options.Seed = 0,
    dry_run: options.DryRun = False,
    allow_unchecked_guards: options.AllowUncheckedGuards = False,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Quantize a model on data, show the decision for each layer, and write an artifact, the module, or both."""
    with report_errors(debug=debug), divert_stdout():
        paths: dict[str, Path | None] = {} if dry_run else {"-o": output, "--save": save}
        inputs_read = (model, *(inputs or ()), *(calibrate or ()), str(settings))
        check_output_paths(paths, f"{NO_OUTPUT_MESSAGE}, --save FILE, or --dry-run.", inputs_read)
        if keep_inputs and save is None:
            raise MisuseError(NO_SAVE_MESSAGE)
        with show_spinner("Loading"):
            seed_all(seed)
            choices, quantizing = import_lazily("command_settings"), import_lazily("quantizing")
            fields = quantizing.quantization_flags(threshold, weights_bits, weights_only=weights_only)
            resolved = choices.resolve_settings(settings, choices.Flags(target, option or (), fields, keep_float or ()))
            subject = quantizing.load_model_with_data(model, calibrate or (), inputs or (), batch_size)
            choices.check_artifact_suffix(output, quantizing.find_deployment(subject, resolved))
        module = quantizing.quantize_model(subject, resolved, logs_dir)
        with clika_ref.export_configuration(allow_unchecked_guards=allow_unchecked_guards):
            artifact, saved = _write_results(module, paths, keep_inputs=keep_inputs)
    written = {"artifact": artifact, "saved": saved, "seconds": module.timings}
    _print_results(
        {**quantizing.decisions_as_json(module), **written}, as_json=as_json, before=f"{module.clika_summary()}\n"
    )


def export(
    model: options.Saved,
    *,
    output: options.Output = None,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    inputs: options.Inputs = None,
    fp16: options.Fp16 = False,
    bf16: options.Bf16 = False,
    keep_output: options.KeepOutput = None,
    allow_unchecked_guards: options.AllowUncheckedGuards = False,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Export a saved module for its own target or another one. --input selects the data for the comparison."""
    with report_errors(debug=debug), divert_stdout():
        check_output_paths({"-o": output}, f"{NO_OUTPUT_MESSAGE}.", (model, *(inputs or ()), str(settings)))
        if fp16 and bf16:
            raise MisuseError("cannot export: --fp16 and --bf16 exclude each other. Give only one.")
        with show_spinner("Loading"):
            seed_all(seed)
            choices, arguments, data = map(import_lazily, ("command_settings", "arguments", "data"))
            arguments.require_kind(model, [arguments.ModelKind.SAVED], SAVED_HINT)
            deployment = choices.export_deployment_settings(settings, target)
            example = data.read_single_call(inputs or ())
            module = clika_ref.ClikaModule.clika_load(model)
            choices.check_artifact_suffix(output, deployment or choices.deployment_settings_of_saved(module))
        flags = {"export_fp16": fp16, "export_bf16": bf16, "keep_outputs_at_idx": keep_output}
        with clika_ref.export_configuration(**flags, allow_unchecked_guards=allow_unchecked_guards):
            artifact = module.clika_export(output, example, deployment_settings=deployment)
    _print_results({"artifact": _describe_artifact(artifact), "seconds": module.timings}, as_json=as_json)


def _write_results(module: clika_ref.ClikaModule, paths: dict[str, Path | None], *, keep_inputs: bool) -> list[Any]:
    """Write the artifact, the saved module, or both. Return the facts of each, None for one that was not requested."""
    output, saved = paths.get("-o"), paths.get("--save")
    if saved is not None:  # first, as an export may be rejected
        with show_spinner("Saving"):
            module.clika_save(saved, keep_calibration_inputs=keep_inputs)
    artifact = None if output is None else _describe_artifact(module.clika_export(output))
    return [artifact, None if saved is None else {"file": saved, "bytes": saved.stat().st_size}]


def _describe_artifact(artifact: Any) -> dict[str, Any]:
    """Return the facts of an artifact as plain data."""
    return {
        "file": artifact.path,
        "target": artifact.target,
        "bytes": artifact.facts.get("bytes"),
        "inputs": artifact.input_names,
        "outputs": artifact.output_names,
    }


def _print_results(result: dict[str, Any], *, as_json: bool, before: str = "") -> None:
    """Print ``before`` and the written files, or the whole result as JSON."""
    files = [
        f"{written['file']}  {format_size(written['bytes'])}"
        for key in ("artifact", "saved")
        if (written := result.get(key))
    ]
    print_result("\n".join([*([before] if before else []), *files]), result, as_json=as_json)
