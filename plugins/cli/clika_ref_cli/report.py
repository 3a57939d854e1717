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

ReportOutput = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="The .html file to write.")]

OtherTargets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A further target to set beside that of the model; may be given again.",
        autocompletion=complete_target,
    ),
]

SAVED_TARGET_MESSAGE = (
    "--target says where a model is to run that is compiled or quantized, and a report of a saved module is about its "
    "own target; name others with --beside, or give --calibrate DATA"
)

SAVED_SETTINGS_MESSAGE = (
    "--settings say how a model is compiled or quantized, and this one is a saved module; leave them out"
)


def report(
    model: options.Model,
    *,
    calibrate: options.Calibrate = None,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    output: ReportOutput = None,
    beside: OtherTargets = None,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    logs_dir: options.LogsDir = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one HTML file of all that is known of a model: quantized on --calibrate, saved, or in float on --input."""
    with report_errors(debug=debug), divert_stdout():
        read = (model, *(inputs or ()), *(calibrate or ()), str(settings))
        check_output_paths({"-o": output}, "give -o FILE.html to write to", read)
        with prefix_errors_with_flag("-o"):
            require_suffix(output, "a report", [".html"])
        with show_spinner("Loading"):
            import_lazily("visualizer").check_can_report()
            seed_all(seed)
            choices, arguments = import_lazily("command_settings"), import_lazily("arguments")
            others = [choices.deployment_settings_for(name) for name in beside or ()]
            is_saved = (
                arguments.reject_unused_inputs(arguments.kind_of(model), model, inputs or ())
                is arguments.ModelKind.SAVED
            )
            if is_saved and not calibrate and (target is not None or settings is not None):
                raise MisuseError(SAVED_TARGET_MESSAGE if target is not None else SAVED_SETTINGS_MESSAGE)
            chosen = choices.resolve_settings(settings, choices.Flags(target))
        module = (
            _quantize_model(model, chosen, (calibrate or [], inputs or [], batch_size), logs_dir) if calibrate else None
        )
        module = module or (
            arguments.load_compiled(model, []) if is_saved else _compile_float(model, chosen, inputs or [])
        )
        assert output is not None
        place = module.clika_report(output, others)
    told = {"report": {"file": place, "bytes": place.stat().st_size}, "seconds": module.timings}
    print_result(describe_file(place), told, as_json=as_json)


def _quantize_model(
    model: str, chosen: Any, data: tuple[list[str], list[str], int | None], logs_dir: Path | None
) -> clika_ref.ClikaModule:
    """Quantize a model with the given settings."""
    quantizing = import_lazily("quantizing")
    return quantizing.quantize_model(quantizing.load_model_with_data(model, *data), chosen, logs_dir)


def _compile_float(model: str, chosen: Any, inputs: list[str]) -> clika_ref.ClikaModule:
    """Compile a model in float with the given settings."""
    arguments, choices, data = import_lazily("arguments"), import_lazily("command_settings"), import_lazily("data")
    arguments.require_kind(
        model, [arguments.ModelKind.FACTORY], "reports are of models that Python makes, and of saved modules"
    )
    if not inputs:
        raise MisuseError("give --calibrate DATA for a report in integers, or --input for one in float")
    made, calls = arguments.load_model(model), [*data.read_calls(inputs)]
    module: Any = clika_ref.clika_compile(made, tracing_inputs=calls, **choices.float_compile_arguments(chosen))
    return module
