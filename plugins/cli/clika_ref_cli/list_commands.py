"""The commands that list the environment: ``plugins`` and ``targets``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from clika_ref.reporting.console import result_console
from clika_ref.reporting.tables import print_table
from clika_ref_cli.exit_status import Debug, Status, report_errors
from clika_ref_cli.options import AsJson
from clika_ref_cli.output import divert_stdout, import_lazily, print_json, show_spinner


def plugins(
    *,
    names: Annotated[bool, typer.Option("--names", help="Also list the names that each plugin adds.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the installed plugins with their contents, and the reasons why some cannot be used."""
    with report_errors(debug=debug), divert_stdout():
        installed = _load_plugins()
    if as_json:
        print_json(installed.as_json())
    else:
        _show_plugins(installed, names=names)
    if installed.failures:
        raise typer.Exit(Status.NEGATIVE)


def targets(
    *,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """List the installed targets: runtime and version, quantized types, file suffixes."""
    with report_errors(debug=debug), divert_stdout():
        installed, table = _load_plugins(), import_lazily("target_table")
        rows = table.list_targets(installed.plugins)
    if as_json:
        print_json({"targets": [asdict(row) for row in rows], "failures": installed.failures})
    else:
        print_table(table.TARGET_COLUMNS, [row.cells() for row in rows])
        _show_failures(installed)
    if installed.failures:
        raise typer.Exit(Status.NEGATIVE)


def _load_plugins() -> Any:
    with show_spinner("Loading plugins"):
        return import_lazily("plugin_facts").load_installed_plugins()


def _show_plugins(installed: Any, *, names: bool) -> None:
    inspection = import_lazily("plugin_facts")
    rows = [(p.name, f"{p.distribution} {p.version}", inspection.count_items(p)) for p in installed.plugins]
    print_table(["plugin", "distribution", "adds"], rows)
    console = result_console()
    for plugin in installed.plugins if names else ():
        for kind in inspection.PLUGIN_ITEM_KINDS:
            if items := inspection.list_names(plugin, kind):
                console.print(f"{plugin.name} {kind}: {', '.join(items)}\n", markup=False)
    for name in installed.excluded:
        console.print(f"{name} is installed, but excluded by ${inspection.PLUGINS_VARIABLE}", markup=False)
    _show_failures(installed)


def _show_failures(installed: Any) -> None:
    for failure in installed.failures:
        result_console().print(f"cannot be used: {failure}", style="red", markup=False)
