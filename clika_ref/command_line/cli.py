"""The command line: which commands there are, those of other distributions included, and how it begins."""

from __future__ import annotations

import importlib.metadata
import io
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from clika_ref.command_line import environment, judging, looking, making, new_plugin, report
from clika_ref.command_line.endings import STATUSES
from clika_ref.reporting.console import in_command

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what escapes is a bug of ours: its whole traceback, in a form to paste
    help="Compress a PyTorch model and deploy it; operators, passes and targets are plugins.",
    epilog=STATUSES,
)

COMMANDS: Mapping[str, Callable[..., None]] = {
    "compile": making.compile_model,
    "quantize": making.quantize,
    "export": making.export,
    "inspect": looking.inspect,
    "explain": looking.explain,
    "check": judging.check,
    "compare": judging.compare,
    "report": report.report,
    "plugins": environment.plugins,
    "targets": environment.targets,
    "new-plugin": new_plugin.new_plugin,
}
"""By its name, each command; a further one is a function of its own module, and a line here."""

for _name, _command in COMMANDS.items():
    app.command(name=_name, epilog=STATUSES)(_command)

GROUP = "clika_ref.commands"
"""The entry-point group of commands that other distributions add."""


def _show_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        typer.echo(f"clika-ref {importlib.metadata.version('clika-ref')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    version: Annotated[  # noqa: ARG001 - its callback has said it
        bool, typer.Option("--version", help="Print the version and end.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    context.with_resource(in_command())


def main() -> None:
    """Run the command line: the entry point ``clika-ref``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a target says may hold what no terminal can show
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a system that ends the command is heard as Ctrl-C is
    join_commands(app)
    app()


def join_commands(into: typer.Typer) -> None:
    """Add the commands of other distributions: entry points of `GROUP`, each a group of commands under its name.

    One that cannot be loaded is named on stderr, and costs no other.
    """
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name):
        try:
            into.add_typer(entry.load(), name=entry.name)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            owner = entry.dist.name if entry.dist else "unknown distribution"
            reason = f"{type(error).__name__}: {error}"
            print(f"clika-ref {entry.name} ({owner}) cannot be used: {reason}", file=sys.stderr)  # noqa: T201
