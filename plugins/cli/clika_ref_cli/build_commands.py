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

NOT_A_FACTORY_MESSAGE = "compile takes what Python makes, and `clika-ref export` writes artifacts of saved modules"

NOT_SAVED_MESSAGE = "export takes a file of clika_save; `clika-ref compile` and `quantize` take what Python makes"

NO_INPUT_MESSAGE = "give --input: a shape such as 1x3x224x224, or a file of inputs; two that differ make sides dynamic"


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
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Compile a model in float and write the artifact of a target."""
    with report_errors(debug=debug), divert_stdout(applies=as_json or not dry_run):
        read = (model, *(inputs or ()), str(settings))
        check_output_paths({} if dry_run else {"-o": output}, "give -o FILE to write to, or --dry-run", read)
        if not inputs:
            raise MisuseError(NO_INPUT_MESSAGE)
        with show_spinner("Loading"):
            seed_all(seed)
            choices, arguments, data = (
                import_lazily("command_settings"),
                import_lazily("arguments"),
                import_lazily("data"),
            )
            arguments.require_kind(model, [arguments.ModelKind.FACTORY], NOT_A_FACTORY_MESSAGE)
            given = [*(option or ()), *(["compare_after_export=false"] if no_compare else ())]
            found = choices.resolve_settings(settings, choices.Flags(target, given))
            choices.check_artifact_suffix(output, found.settings.deployment_settings)
            made, examples = arguments.load_model(model), [*data.read_calls(inputs)]
        is_printed = dry_run and not as_json  # by the compilation itself, which returns None then
        how = {"dynamic": not static, "skip_eval_set_mode": train_mode, "is_dry_run": is_printed, "logs_dir": logs_dir}
        module: Any = clika_ref.clika_compile(
            made, tracing_inputs=examples, **how, **choices.float_compile_arguments(found)
        )
        told: dict[str, Any] = {}
        if not dry_run:
            told = {"artifact": _artifact_facts(module.clika_export(output)), "seconds": module.timings}
        elif as_json:
            told = import_lazily("dry_run_json").dry_run_as_json(module, found.settings.deployment_settings)
    if told:
        _print_results(told, as_json=as_json)


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
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Quantize a model on data, say what became of each layer and why, and write an artifact, the module, or both."""
    with report_errors(debug=debug), divert_stdout():
        places: dict[str, Path | None] = {} if dry_run else {"-o": output, "--save": save}
        read = (model, *(inputs or ()), *(calibrate or ()), str(settings))
        check_output_paths(places, "give -o FILE or --save FILE to write to, or --dry-run", read)
        if keep_inputs and save is None:
            raise MisuseError("--keep-inputs is about the file that --save writes; give that as well")
        with show_spinner("Loading"):
            seed_all(seed)
            choices, quantizing = import_lazily("command_settings"), import_lazily("quantizing")
            wanted = quantizing.quantization_flags(threshold, weights_bits, weights_only=weights_only)
            found = choices.resolve_settings(settings, choices.Flags(target, option or (), wanted, keep_float or ()))
            subject = quantizing.load_model_with_data(model, calibrate or (), inputs or (), batch_size)
            choices.check_artifact_suffix(output, quantizing.deployment_of(subject, found))
        module = quantizing.quantize_model(subject, found, logs_dir)
        artifact, saved = _write_results(module, places, keep_inputs=keep_inputs)
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
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the artifact of a saved module, for its own target or for another one, compared on --input if given."""
    with report_errors(debug=debug), divert_stdout():
        check_output_paths({"-o": output}, "give -o FILE to write to", (model, *(inputs or ()), str(settings)))
        if fp16 and bf16:
            raise MisuseError("--fp16 and --bf16 exclude each other; ask for one")
        with show_spinner("Loading"):
            seed_all(seed)
            choices, arguments, data = (
                import_lazily("command_settings"),
                import_lazily("arguments"),
                import_lazily("data"),
            )
            arguments.require_kind(model, [arguments.ModelKind.SAVED], NOT_SAVED_MESSAGE)
            deployment = choices.export_deployment_settings(settings, target)
            example = data.read_single_call(inputs or ())
            module = clika_ref.ClikaModule.clika_load(model)
            choices.check_artifact_suffix(output, deployment or choices.deployment_settings_of_saved(module))
        form = clika_ref.export_configuration(export_fp16=fp16, export_bf16=bf16, keep_outputs_at_idx=keep_output)
        with form:
            artifact = module.clika_export(output, example, deployment_settings=deployment)
    _print_results({"artifact": _artifact_facts(artifact), "seconds": module.timings}, as_json=as_json)


def _write_results(module: clika_ref.ClikaModule, places: dict[str, Path | None], *, keep_inputs: bool) -> list[Any]:
    """Write the artifact, the saved module, or both. Return the facts of each, None for one that was not requested."""
    output, saved = places.get("-o"), places.get("--save")
    artifact = None if output is None else _artifact_facts(module.clika_export(output))
    if saved is not None:
        with show_spinner("Saving"):
            module.clika_save(saved, keep_calibration_inputs=keep_inputs)
    return [artifact, None if saved is None else {"file": saved, "bytes": saved.stat().st_size}]


def _artifact_facts(artifact: Any) -> dict[str, Any]:
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
        f"{found['file']}  {format_size(found['bytes'])}" for key in ("artifact", "saved") if (found := result.get(key))
    ]
    print_result("\n".join([*([before] if before else []), *files]), result, as_json=as_json)
