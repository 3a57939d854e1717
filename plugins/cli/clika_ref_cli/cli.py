"""The ``clika-ref`` entry point: registers the built-in commands and those of other distributions."""

from __future__ import annotations

import importlib.metadata
import io
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from clika_ref.core.errors import PluginError, format_install_command
from clika_ref.reporting.console import command_context
from clika_ref_cli import build_commands, check_commands, inspect_commands, list_commands, new_plugin, report
from clika_ref_cli.exit_status import STATUS_HELP, report_errors

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # an escaping exception is a bug of ours: show a plain, full traceback
    help="Compress and deploy PyTorch models. Operators, passes and targets are plugins.",
    epilog=STATUS_HELP,
)

COMMANDS: Mapping[str, Callable[..., None]] = {
    "compile": build_commands.compile_model,
    "quantize": build_commands.quantize,
    "export": build_commands.export,
    "inspect": inspect_commands.inspect,
    "explain": inspect_commands.explain,
    "check": check_commands.check,
    "compare": check_commands.compare,
    "report": report.report,
    "plugins": list_commands.plugins,
    "targets": list_commands.targets,
    "new-plugin": new_plugin.new_plugin,
}
"""The commands by name. To add one, write a function in its own module and add a line here."""

for _name, _command in COMMANDS.items():
    app.command(name=_name, epilog=STATUS_HELP)(_command)

COMMAND_ENTRY_POINT_GROUP = "clika_ref.commands"
"""The entry-point group for commands of other distributions."""

SUITE_COMMAND = "conformance"
"""The command that the distribution clika-ref-conformance adds."""

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Context settings of a command that accepts any arguments."""


def _show_version(is_requested: bool) -> None:  # noqa: FBT001 - typer passes it by position
    if is_requested:
        typer.echo(f"clika-ref {importlib.metadata.version('clika-ref')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Parse the options before a command."""
    context.with_resource(command_context())


def main() -> None:
    """Run the command line (the entry point ``clika-ref``)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a target may print characters the terminal cannot encode
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # handle termination by the system like Ctrl-C
    add_plugin_commands(app)
    app()


def add_plugin_commands(into: typer.Typer) -> None:
    """Add the commands of other distributions: entry points of `COMMAND_ENTRY_POINT_GROUP`, each a group of its own.

    An entry point that fails to load is reported on stderr. The others are still added. Without the conformance suite,
    its command reports how to install it.
    """
    entries = sorted(importlib.metadata.entry_points(group=COMMAND_ENTRY_POINT_GROUP), key=lambda e: e.name)
    if SUITE_COMMAND not in {entry.name for entry in entries}:
        into.command(SUITE_COMMAND, hidden=True, context_settings=ANY_ARGUMENTS)(_report_missing_suite)
    for entry in entries:
        try:
            into.add_typer(entry.load(), name=entry.name)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            owner = entry.dist.name if entry.dist else "unknown distribution"
            reason = f"{type(error).__name__}: {error}"
            print(f"clika-ref {entry.name}: cannot load {owner}: {reason}. Update or uninstall it.", file=sys.stderr)  # noqa: T201


def _report_missing_suite() -> None:
    """Report that the conformance suite is not installed, and what to install."""
    with report_errors(debug=False):
        command = format_install_command("clika-ref-conformance")
        raise PluginError(f"clika-ref {SUITE_COMMAND}: the conformance suite is not installed. Run {command}.")
