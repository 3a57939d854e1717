"""The commands that show what is there: ``inspect`` and ``explain``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clika_ref.command_line import options
from clika_ref.command_line.endings import Debug, plain_errors
from clika_ref.command_line.printed import alone_on_stdout, late, print_json, seed_all, working
from clika_ref.reporting.console import result_console

Subject = Annotated[
    str,
    typer.Argument(
        metavar="SUBJECT",
        help=f"{options.FORMS}, an ONNX file; or an operator: its name, or an ATen call such as aten.conv2d.default.",
        show_default=False,
    ),
]


def inspect(
    model: options.ModelOrOnnx,
    *,
    inputs: options.Inputs = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the graph of a model: each node with its types, its module and the line of the source that it comes from."""
    with plain_errors(debug=debug), alone_on_stdout():
        with working("Loading"):
            seed_all(seed)
            arguments, data, graphs = late("arguments"), late("data"), late("graphs")
            is_onnx = arguments.kind_of(model) is arguments.Kind.ONNX
            examples = [] if is_onnx else [*data.read_calls(inputs or ())]
        onnx = graphs.onnx_graph(Path(model)) if is_onnx else None
        shown = onnx or graphs.module_graph(arguments.compiled(model, examples))
    if as_json:
        print_json(shown.as_json())
    else:
        typer.echo(str(shown))


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
    elif as_json:
        print_json(explaining.as_json(found))
    else:
        typer.echo(str(found))


def _show_facts(facts: list[tuple[str, str]], *, as_json: bool) -> None:
    """Print what is known of an operator, one fact below the other."""
    if as_json:
        print_json(dict(facts))
        return
    console = result_console()
    for title, text in facts:
        first, *rest = text.splitlines()
        console.print(f"{title:<16}{first}", markup=False, soft_wrap=True)
        for line in rest:
            console.print(f"{'':<16}{line}" if line else "", markup=False, soft_wrap=True)
