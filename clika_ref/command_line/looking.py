"""The commands that show a model or an operator: ``inspect`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clika_ref.command_line import options
from clika_ref.command_line.endings import Debug, plain_errors
from clika_ref.command_line.places import refuse_no_place
from clika_ref.command_line.printed import alone_on_stdout, late, print_json, seed_all, show, working, written
from clika_ref.reporting.console import result_console

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help=f"{options.FORMS}, an ONNX file; or an operator: its name, or an ATen call such as aten.conv2d.default.",
        show_default=False,
    ),
]


Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw it into this file instead: .svg, .html (folds modules), .png or .dot."),
]

NO_PICTURE = "pictures are of models that Python makes, and of saved modules"


def inspect(
    model: options.ModelOrOnnx,
    *,
    inputs: options.Inputs = None,
    picture: Picture = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the graph of a model: each node with its types, its module and the line of the source that it comes from."""
    with plain_errors(debug=debug), alone_on_stdout():
        refuse_no_place({"--picture": picture} if picture else {}, "", (model, *(inputs or ())))
        with working("Loading"):
            seed_all(seed)
            arguments, data, graphs = late("arguments"), late("data"), late("graphs")
            place = graphs.place_of_picture(picture)
            is_onnx = arguments.heeding(arguments.kind_of(model), model, inputs or ()) is arguments.Kind.ONNX
            if place is not None:
                arguments.require(model, [arguments.Kind.FACTORY, arguments.Kind.SAVED], NO_PICTURE)
            examples = [*data.read_calls(inputs or ())]
        module = None if is_onnx else arguments.compiled(model, examples)
        if place is not None and module is not None:
            module.clika_visualize(place)
        shown = graphs.onnx_graph(Path(model)) if is_onnx else graphs.module_graph(module)
    show(shown if place is None else written(place), {**shown.as_json(), "picture": place}, as_json=as_json)


def explain(
    subject: Subject,
    *,
    inputs: options.Inputs = None,
    target: options.Target = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Say what of a model runs in integers, and why not the rest; or what is known of an operator."""
    with plain_errors(debug=debug), alone_on_stdout():
        with working("Loading"):
            seed_all(seed)
            explaining = late("explaining")
            is_model = explaining.is_model(subject)
        found: Any = explaining.of_model(subject, inputs or (), target) if is_model else None
        facts = [] if is_model else explaining.of_operator(subject)
    if not is_model:
        _show_facts(facts, as_json=as_json)
    else:
        show(found, explaining.as_json(found), as_json=as_json)


def _show_facts(facts: list[tuple[str, str]], *, as_json: bool) -> None:
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
