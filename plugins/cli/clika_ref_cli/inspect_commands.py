"""The commands that show a model or an operator: ``inspect`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clika_ref.reporting.console import result_console
from clika_ref_cli import options
from clika_ref_cli.exit_status import Debug, report_errors
from clika_ref_cli.output import (
    describe_file,
    divert_stdout,
    import_lazily,
    print_json,
    print_result,
    seed_all,
    show_spinner,
)
from clika_ref_cli.output_paths import check_output_paths

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help=f"{options.MODEL_SYNTAX}, or an ONNX file. Or an operator: its name, or an ATen call such as "
        "aten.conv2d.default.",
        show_default=False,
    ),
]


Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a picture to this file instead: .svg, .html (foldable), .png or .dot."),
]

PICTURE_HINT = "Give a Python model or a saved module for --picture."


def inspect(
    model: options.ModelOrOnnx,
    *,
    inputs: options.Inputs = None,
    picture: Picture = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the graph of a model: each node with its types, module and source line."""
    with report_errors(debug=debug), divert_stdout():
        check_output_paths({"--picture": picture} if picture else {}, "", (model, *(inputs or ())))
        with show_spinner("Loading"):
            seed_all(seed)
            arguments, graphs = import_lazily("arguments"), import_lazily("graphs")
            path = import_lazily("visualizer").resolve_picture_path(picture)
            is_onnx = arguments.find_model_kind(model, inputs or ()) is arguments.ModelKind.ONNX
            if path is not None:
                arguments.require_kind(model, [arguments.ModelKind.FACTORY, arguments.ModelKind.SAVED], PICTURE_HINT)
            examples = [*import_lazily("data").read_calls(inputs or ())]
        module = None if is_onnx else arguments.load_compiled(model, examples)
        if path is not None and module is not None:
            module.clika_visualize(path)
        text, data = graphs.describe_onnx(Path(model)) if is_onnx else graphs.describe_module(module)
    print_result(text if path is None else describe_file(path), {**data, "picture": path}, as_json=as_json)


def explain(
    subject: Subject,
    *,
    inputs: options.Inputs = None,
    target: options.Target = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the precision of each node in the runtime, with the reasons for float; or describe an operator."""
    with report_errors(debug=debug), divert_stdout():
        with show_spinner("Loading"):
            seed_all(seed)
            explaining = import_lazily("explaining")
            is_model = explaining.is_model(subject)
        explanation: Any = explaining.explain_model(subject, inputs or (), target) if is_model else None
        facts = [] if is_model else explaining.explain_operator(subject)
    if not is_model:
        _print_facts(facts, as_json=as_json)
    else:
        print_result(explanation, explaining.explanation_as_json(explanation), as_json=as_json)


def _print_facts(facts: list[tuple[str, str]], *, as_json: bool) -> None:
    """Print the facts of an operator, one below the other."""
    if as_json:
        print_json(dict(facts))
        return
    console = result_console()
    for title, text in facts:
        first, *rest = text.splitlines()
        console.print(f"{title:<16}{first}", markup=False, soft_wrap=True)
        for line in rest:
            console.print(f"{'':<16}{line}" if line else "", markup=False, soft_wrap=True)
