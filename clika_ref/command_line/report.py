"""The ``report`` command, which writes a report of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import clika_ref
from clika_ref.command_line import options
from clika_ref.command_line.completion import complete_target
from clika_ref.command_line.endings import Debug, MisuseError, plain_errors
from clika_ref.command_line.places import flagged, refuse_no_place
from clika_ref.command_line.printed import alone_on_stdout, late, seed_all, show, working, written
from clika_ref.storage import path_of_kind

Page = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="The .html file to write.")]

Beside = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A further target to set beside that of the model; may be given again.",
        autocompletion=complete_target,
    ),
]

OF_ITS_OWN = (
    "--target says where a model is to run that is compiled or quantized, and a report of a saved module is about its "
    "own target; name others with --beside, or give --calibrate DATA"
)

UNHEEDED = "--settings say how a model is compiled or quantized, and this one is a saved module; leave them out"


def report(
    model: options.Model,
    *,
    calibrate: options.Calibrate = None,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    output: Page = None,
    beside: Beside = None,
    target: options.Target = None,
    settings: options.SettingsFile = None,
    logs_dir: options.LogsDir = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one HTML file of all that is known of a model: quantized on --calibrate, saved, or in float on --input."""
    with plain_errors(debug=debug), alone_on_stdout():
        read = (model, *(inputs or ()), *(calibrate or ()), str(settings))
        refuse_no_place({"-o": output}, "give -o FILE.html to write to", read)
        with flagged("-o"):
            path_of_kind(output, "a report", [".html"])
        with working("Loading"):
            seed_all(seed)
            choices, arguments = late("choices"), late("arguments")
            others = [choices.deployment(name) for name in beside or ()]
            is_saved = arguments.heeding(arguments.kind_of(model), model, inputs or ()) is arguments.Kind.SAVED
            if is_saved and not calibrate and (target is not None or settings is not None):
                raise MisuseError(OF_ITS_OWN if target is not None else UNHEEDED)
            chosen = choices.chosen(settings, choices.Flags(target))
        module = _quantized(model, chosen, (calibrate or [], inputs or [], batch_size), logs_dir) if calibrate else None
        module = module or (arguments.compiled(model, []) if is_saved else _in_float(model, chosen, inputs or []))
        assert output is not None
        place = module.clika_report(output, others)
    told = {"report": {"file": place, "bytes": place.stat().st_size}, "seconds": module.timings}
    show(written(place), told, as_json=as_json)


def _quantized(
    model: str, chosen: Any, data: tuple[list[str], list[str], int | None], logs_dir: Path | None
) -> clika_ref.ClikaModule:
    """Quantize a model with the given settings."""
    quantizing = late("quantizing")
    return quantizing.quantized(quantizing.subject_of(model, *data), chosen, logs_dir)


def _in_float(model: str, chosen: Any, inputs: list[str]) -> clika_ref.ClikaModule:
    """Compile a model in float with the given settings."""
    arguments, choices, data = late("arguments"), late("choices"), late("data")
    arguments.require(model, [arguments.Kind.FACTORY], "reports are of models that Python makes, and of saved modules")
    if not inputs:
        raise MisuseError("give --calibrate DATA for a report in integers, or --input for one in float")
    made, calls = arguments.load_model(model), [*data.read_calls(inputs)]
    module: Any = clika_ref.clika_compile(made, tracing_inputs=calls, **choices.for_compile(chosen))
    return module
