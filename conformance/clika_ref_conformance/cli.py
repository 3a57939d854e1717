"""Commands ``clika-ref conformance ...``. Heavy modules are imported only by the command that needs them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from clika_ref_cli.exit_status import MisuseError, Status, report_errors

from clika_ref_conformance.execution.interruption import handle_end_signals

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # an unexpected error is our bug: print the full traceback, ready to paste
    help="Prove operators, passes and targets right, or show where they are not.",
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

LEVELS = "contract, operators, passes, pairs, graphs, blocks, dynamic, artifacts or quantization"
Levels = Annotated[list[str] | None, typer.Option(metavar="LEVEL", help=f"Only {LEVELS}; may be given again.")]


@app.command()
def run(
    *,
    target: Annotated[str, typer.Option(help="An installed target, 'identity', or package.module:TARGET.")],
    profile: Annotated[str, typer.Option(help="How thorough: quick, ci or nightly.")] = "quick",
    seed: Annotated[int | None, typer.Option(help="Of all that is drawn; nightly draws one.", min=0)] = None,
    word: Annotated[
        list[str] | None, typer.Option("-k", help="Only tasks whose name holds this; may be given again.")
    ] = None,
    level: Levels = None,
    out: Annotated[Path | None, typer.Option(help="Write the report and reproducers into this folder.")] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    memory_limit: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="What a worker may hold; 0 for no limit. The profiles say 4.", min=0),
    ] = None,
    case_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="After so long, and the time to make a failure small (20 s in quick), a check is a hang. "
            "The profiles say 30.",
            min=0.1,
            max=86_400,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Hold a target against eager. Exit status: 0 fine, 1 failures, 2 wrong usage, 3 the run proves too little."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        running, showing, profiles = (
            _load_module(name) for name in ("execution.run", "reporting.run_console", "profiles")
        )
        request = running.RunRequest(
            target,
            profiles.apply_limits(profiles.select_profile(profile, seed), memory_limit, case_seconds),
            tuple(word or ()),
            tuple(level or ()),
            None if out is None else showing.make_report_folder(out),
            workers,
        )
        record = showing.run_and_show(request)
        raise typer.Exit(record.exit_code)


@app.command()
def replay(
    case: Annotated[Path, typer.Argument(help="A CASE.zip from the folder cases/ of a report.")],
    *,
    target: Annotated[str, typer.Option(help="Another target; needed where it is package.module:TARGET.")] = "",
    debug: Debug = False,
) -> None:
    """Run one case once more and judge it. Exit status: 0 it passes now, 1 it fails, 2 the file cannot be used."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        raise typer.Exit(_load_module("reporting.replay_process").replay_in_process(case, target, debug=debug))


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="A report.json.")],
    new: Annotated[Path, typer.Argument(help="A later one of the same target.")],
    *,
    debug: Debug = False,
) -> None:
    """Say what got worse, was fixed, is new and is gone. Exit status: 0 nothing got worse, 1 it did, 2 wrong usage."""
    with report_errors(debug=debug, default=Status.MISUSE):
        raise typer.Exit(_load_module("reporting.report_commands").diff_and_show(old, new))


@app.command()
def report(
    reports: Annotated[list[Path], typer.Argument(help="A report.json of each target.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="The HTML file to write.")] = Path("conformance.html"),
    debug: Debug = False,
) -> None:
    """Write the matrix of several targets side by side."""
    with report_errors(debug=debug, default=Status.MISUSE):
        _load_module("reporting.report_commands").join_and_show(reports, out)


@app.command()
def mutants(
    *,
    target: Annotated[str, typer.Option(help="The target whose lowerings are made faulty.")] = "onnxruntime",
    profile: Annotated[str, typer.Option(help="How thorough: quick, ci or nightly.")] = "quick",
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.", min=1)] = 5,
    word: Annotated[
        list[str] | None, typer.Option("-k", help="Only mutants whose name or change holds this; may be given again.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what became of each into this file.")] = None,
    debug: Debug = False,
) -> None:
    """Count which seeded faults the suite finds. Exit status: 0 enough with each seed, 1 too few, 2 wrong usage."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        show = _load_mutants("mutants").run_mutants_and_show
        settings = {"target": target, "profile": profile, "seeds": seeds, "workers": workers, "json_file": json_file}
        raise typer.Exit(show(tuple(word or ()), **settings))


MUTANTS_PACKAGE = "clika_ref_conformance.mutants"
"""Seeded faults, which wheels do not contain."""

CORRECT_TARGETS = ["identity", "onnxruntime", "clika_ref_onnxruntime.target:UNOPTIMIZED"]
"""Correct targets: a failure on one is a false alarm or a bug that nobody knew of."""


@app.command()
def alarms(
    *,
    target: Annotated[list[str] | None, typer.Option(help="A target that is right; may be given again.")] = None,
    profile: Annotated[str, typer.Option(help="How thorough: quick, ci or nightly.")] = "quick",
    seeds: Annotated[int, typer.Option(help="How many seeds, from 0 on.", min=1)] = 10,
    word: Annotated[list[str] | None, typer.Option("-k", help="Only tasks whose name holds this.")] = None,
    level: Levels = None,
    workers: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    debug: Debug = False,
) -> None:
    """Run targets that are right, and count what fails. Exit status: 0 nothing, 1 something, 2 wrong usage."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        show = _load_mutants("alarms").run_correct_targets_and_show
        settings = {"profile": profile, "seeds": seeds, "subjects": word or (), "levels": level or ()}
        raise typer.Exit(show(target or CORRECT_TARGETS, workers=workers, **settings))


def _load_mutants(command: str) -> Any:
    if importlib.util.find_spec(MUTANTS_PACKAGE) is None:
        msg = (
            f"clika-ref conformance {command}: the installed clika-ref-conformance has no {MUTANTS_PACKAGE}, which "
            "only the repository contains. Install it from a clone: pip install --editable ./conformance"
        )
        raise MisuseError(msg)
    return _load_module("mutants.console_output")


def _load_module(name: str) -> Any:
    """Import a module of the suite on demand: torch takes a second to import, and ``--help`` should not wait for it."""
    return importlib.import_module(f"clika_ref_conformance.{name}")
