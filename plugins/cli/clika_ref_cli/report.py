"""The ``report`` command, which writes a report of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import clika_ref
from clika_ref.serialization.atomic_files import require_suffix
from clika_ref_cli import options
from clika_ref_cli.completion import complete_target
from clika_ref_cli.exit_status import Debug, MisuseError, report_errors
from clika_ref_cli.output import (
    describe_file,
    divert_stdout,
    import_lazily,
    print_result,
    seed_all,
    show_spinner,
)
from clika_ref_cli.output_paths import check_output_paths, prefix_errors_with_flag

ReportOutput = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Path of the .html file.")]

OtherTargets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Another target for the comparison. May be repeated.",
        autocompletion=complete_target,
    ),
]

SAVED_TARGET_MESSAGE = (
    "cannot apply --target to a saved module: its report describes its own target. Compare it with other targets by "
    "--compare-with, or quantize it again with --calibrate DATA."
)

SAVED_SETTINGS_MESSAGE = "cannot apply --settings to a saved module: it is already compiled. Omit --settings."

NO_OUTPUT_MESSAGE = "cannot write the report: there is no output path. Give -o FILE.html."

NO_DATA_HINT = "Give --calibrate DATA for an INT8 report, or --input for a float one."


def report(
    model: options.Model,
    *,
    calibrate: options.Calibrate = None,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    output: ReportOutput = None,
    compare_with: OtherTargets = None,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    logs_dir: options.LogsDir = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Write an HTML report of a model that is quantized on --calibrate, of a saved module, or of a float model."""
    with report_errors(debug=debug), divert_stdout():
        inputs_read = (model, *(inputs or ()), *(calibrate or ()), str(settings))
        check_output_paths({"-o": output}, NO_OUTPUT_MESSAGE, inputs_read)
        with prefix_errors_with_flag("-o"):
            require_suffix(output, "a report", [".html"])
        with show_spinner("Loading"):
            import_lazily("visualizer").check_can_report()
            seed_all(seed)
            choices, arguments = import_lazily("command_settings"), import_lazily("arguments")
            others = [choices.deployment_settings_for(name) for name in compare_with or ()]
            is_saved = arguments.find_model_kind(model, inputs or ()) is arguments.ModelKind.SAVED
            if is_saved and not calibrate and (target is not None or settings is not None):
                raise MisuseError(SAVED_TARGET_MESSAGE if target is not None else SAVED_SETTINGS_MESSAGE)
            resolved = choices.resolve_settings(settings, choices.Flags(target))
        data = (calibrate or [], inputs or [], batch_size)
        module = _quantize_model(model, resolved, data, logs_dir) if calibrate else None
        module = module or (
            arguments.load_compiled(model, []) if is_saved else _compile_float(model, resolved, inputs or [])
        )
        assert output is not None
        path = module.clika_report(output, others)
    result = {"report": {"file": path, "bytes": path.stat().st_size}, "seconds": module.timings}
    print_result(describe_file(path), result, as_json=as_json)


def _quantize_model(
    model: str, resolved: Any, data: tuple[list[str], list[str], int | None], logs_dir: Path | None
) -> clika_ref.ClikaModule:
    """Quantize a model with the given settings."""
    quantizing = import_lazily("quantizing")
    return quantizing.quantize_model(quantizing.load_model_with_data(model, *data), resolved, logs_dir)


def _compile_float(model: str, resolved: Any, inputs: list[str]) -> clika_ref.ClikaModule:
    """Compile a model in float with the given settings."""
    arguments, choices, data = import_lazily("arguments"), import_lazily("command_settings"), import_lazily("data")
    arguments.require_kind(model, [arguments.ModelKind.FACTORY], "Give a Python model or a saved module.")
    if not inputs:
        raise MisuseError(f"cannot report on {model}: there is no data. {NO_DATA_HINT}")
    user_model, calls = arguments.load_model(model), [*data.read_calls(inputs)]
    module: Any = clika_ref.clika_compile(user_model, tracing_inputs=calls, **choices.float_compile_arguments(resolved))
    return module
