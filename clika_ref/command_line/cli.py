"""The command line: ``clika-ref compile``, ``clika-ref plugins``, ``clika-ref explain``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import clika_ref
from clika_ref import settings
from clika_ref.core.errors import ClikaError
from clika_ref.reporting.console import result_console
from clika_ref.reporting.tables import print_table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # what escapes is a bug of ours: its whole traceback, in a form to paste
    help="Compress a PyTorch model and deploy it; operators, passes and targets are plugins.",
)

COMMANDS = "clika_ref.commands"
"""The entry-point group of commands that other distributions add."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        typer.echo(f"clika-ref {importlib.metadata.version('clika-ref')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line: the entry point ``clika-ref``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a target says may hold what no terminal can show
            stream.reconfigure(errors="backslashreplace")
    join_commands(app)
    app()


def join_commands(into: typer.Typer) -> None:
    """Add the commands of other distributions: entry points of `COMMANDS`, each a group of commands under its name.

    One that cannot be loaded is named on stderr, and costs no other.
    """
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS), key=lambda e: e.name):
        try:
            into.add_typer(entry.load(), name=entry.name)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            owner = entry.dist.name if entry.dist else "unknown distribution"
            reason = f"{type(error).__name__}: {error}"
            print(f"clika-ref {entry.name} ({owner}) cannot be used: {reason}", file=sys.stderr)  # noqa: T201


@app.command(name="compile")
def compile_command(
    model: Annotated[str, typer.Argument(help="package.module:factory - a module, its class, or a callable.")],
    *,
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="One call: 1x3x224x224, int64:1x128, ids=int64:1x128,mask=1x128. A side that differs becomes dynamic.",
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")] = None,
    target: Annotated[str, typer.Option(help="Where the model is to run: its name, or ort, ov, trt.")] = "onnxruntime",
    logs_dir: Annotated[Path | None, typer.Option(help="Keep a full log in this folder.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and inputs.")] = 0,
    static: Annotated[bool, typer.Option("--static", help="Refuse inputs of different sizes.")] = False,
    train_mode: Annotated[bool, typer.Option("--train-mode", help="Leave the model's mode: no eval().")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done; write nothing.")] = False,
    no_compare: Annotated[bool, typer.Option("--no-compare", help="Skip running the file against the model.")] = False,
    debug: Debug = False,
) -> None:
    """Compile a model and write the artifact of a target."""
    with plain_errors(debug=debug):
        if not dry_run:
            _refuse_no_place(output)
        torch, arguments = _late("torch"), _late("clika_ref.command_line.arguments")
        torch.manual_seed(seed)
        made = arguments.load_model(model)
        tracing_inputs = [arguments.example_input(text) for text in inputs]
        module: Any = clika_ref.clika_compile(
            made,
            tracing_inputs=tracing_inputs,
            deployment_settings=arguments.deployment_settings(target),
            logs_dir=logs_dir,
            dynamic=not static,
            skip_eval_set_mode=train_mode,
            is_dry_run=dry_run,
            clika_compile_options=settings.ClikaCompileOptions(compare_after_export=not no_compare),
        )
        if output is not None and not dry_run:
            module.clika_export(output)
            typer.echo(f"{output}  {output.stat().st_size / 1e6:,.1f} MB")


def _refuse_no_place(output: Path | None) -> None:
    """Notice before the work begins that its result would have no place."""
    if output is None:
        raise typer.BadParameter("give -o FILE to write to, or --dry-run", param_hint="-o")
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent} to write to; make it first", param_hint="-o")


@app.command()
def plugins(
    *,
    names: Annotated[bool, typer.Option("--names", help="Also list what each plugin adds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON, names included.")] = False,
    debug: Debug = False,
) -> None:
    """List the installed plugins, what each adds, and why some cannot be used."""
    with plain_errors(debug=debug):
        inspection = _late("clika_ref.command_line.inspection")
        installed = inspection.installed_plugins()
        if as_json:
            typer.echo(json.dumps(installed.as_json(), indent=2))
        else:
            _show_plugins(inspection, installed, names=names)
        if installed.failures:
            raise typer.Exit(2)


def _show_plugins(inspection: Any, installed: Any, *, names: bool) -> None:
    rows = [(p.name, f"{p.distribution} {p.version}", inspection.counts_of(p)) for p in installed.plugins]
    print_table(["plugin", "distribution", "adds"], rows)
    console = result_console()
    for plugin in installed.plugins if names else ():
        for kind in inspection.KINDS:
            if found := inspection.names_of(plugin, kind):
                console.print(f"{plugin.name} {kind}: {', '.join(found)}\n", markup=False)
    for name in installed.left_out:
        console.print(f"{name} is installed but left out by ${inspection.LIMIT_VARIABLE}", markup=False)
    for failure in installed.failures:
        console.print(f"cannot be used: {failure}", style="red", markup=False)


@app.command()
def explain(
    operator: Annotated[str, typer.Argument(help="Its name, or an ATen call: aten.conv2d.default.")],
    *,
    debug: Debug = False,
) -> None:
    """Show what is known of an operator: schema, meaning, ATen calls, quantization, rounding, lowering, samples."""
    with plain_errors(debug=debug):
        inspection = _late("clika_ref.command_line.inspection")
        # Of the plugins that work: one that fails to load must not hide what another declares.
        registry = inspection.build_registry(inspection.installed_plugins().plugins)
        found = inspection.find_operator(registry, operator)
        console = result_console()
        for title, text in inspection.facts_of(registry, found):
            first, *rest = text.splitlines()
            console.print(f"{title:<16}{first}", markup=False, soft_wrap=True)
            for line in rest:
                console.print(f"{'':<16}{line}" if line else "", markup=False, soft_wrap=True)


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The file of a model, such as model.onnx.")],
    *,
    target: Annotated[str, typer.Option(help="Whose rules it must keep.")],
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Say which rules of a target a file breaks, and where. Exit status: 0 none, 1 some, 2 wrong usage."""
    with plain_errors(debug=debug):
        found = _late("clika_ref.command_line.inspection").rules_broken(file, target)
        if as_json:
            typer.echo(json.dumps([{"rule": v.rule, "node": v.node, "message": v.message} for v in found], indent=2))
        else:
            for violation in found:
                typer.echo(str(violation))
            typer.echo(f"{file} breaks rules of {target} in {len(found)} places" if found else f"{file} keeps them all")
    if found:
        raise typer.Exit(1)


def _late(name: str) -> Any:
    """Import a module when a command needs it: torch takes a second, for which ``--help`` should not wait."""
    return importlib.import_module(name)


@contextlib.contextmanager
def plain_errors(*, debug: bool) -> Iterator[None]:
    """Turn an error meant for the reader into its message and the exit status 2."""
    try:
        yield
    except ClikaError as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error
