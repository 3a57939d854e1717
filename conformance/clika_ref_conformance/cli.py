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
    help="Compare operators, passes and targets with eager PyTorch, and report each difference.",
)

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

LEVELS = "contract, operators, passes, pairs, graphs, blocks, dynamic, artifacts, quantization or neighborhoods"
Profile = Annotated[str, typer.Option(help="Profile: quick, ci or nightly. Each tests more than the one before.")]
TaskWords = Annotated[
    list[str] | None, typer.Option("-k", help="Run only tasks with this word in their name; repeat for several.")
]
Workers = Annotated[int, typer.Option(help="Number of worker processes.", min=1)]
Seeds = Annotated[int, typer.Option(help="Number of seeds, counted from 0.", min=1)]
Levels = Annotated[list[str] | None, typer.Option(metavar="LEVEL", help=f"Only {LEVELS}. Repeat for several.")]


@app.command()
def run(
    *,
    target: Annotated[
        str, typer.Option(help="Target to test: an installed one, 'identity', or package.module:TARGET.")
    ],
    profile: Profile = "quick",
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random draws. Default: 0, or random for nightly.", min=0)
    ] = None,
    word: TaskWords = None,
    level: Levels = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the report and the reproducers.")] = None,
    workers: Workers = 2,
    memory_limit: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory limit of a worker; 0 for none. Default: 4.", min=0),
    ] = None,
    case_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Time limit of a check, without the time to shrink a failure (20 s in quick). Default: 30.",
            min=0.1,
            max=86_400,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare a target with eager. Exit status: 0 no failures, 1 failures, 2 wrong usage, 3 too little was proven."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        execution, console, profiles = (
            _load_module(name) for name in ("execution.run", "reporting.run_console", "profiles")
        )
        request = execution.RunRequest(
            target,
            profiles.apply_limits(profiles.select_profile(profile, seed), memory_limit, case_seconds),
            tuple(word or ()),
            tuple(level or ()),
            None if out is None else console.make_report_folder(out),
            workers,
        )
        record = console.run_and_show(request)
        raise typer.Exit(record.exit_code)


@app.command()
def replay(
    case: Annotated[Path, typer.Argument(help="CASE.zip from the folder cases/ of a report.")],
    *,
    target: Annotated[str, typer.Option(help="Target to use instead. Required if it is package.module:TARGET.")] = "",
    debug: Debug = False,
) -> None:
    """Run a failed case again and judge it. Exit status: 0 it passes, 1 it fails, 2 the file cannot be used."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        raise typer.Exit(_load_module("reporting.replay_process").replay_in_process(case, target, debug=debug))


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="report.json of the earlier run.")],
    new: Annotated[Path, typer.Argument(help="report.json of a later run of the same target.")],
    *,
    debug: Debug = False,
) -> None:
    """Compare two reports of a target. Exit status: 0 no regressions, 1 regressions, 2 wrong usage."""
    with report_errors(debug=debug, default=Status.MISUSE):
        raise typer.Exit(_load_module("reporting.report_commands").diff_and_show(old, new))


@app.command()
def report(
    reports: Annotated[list[Path], typer.Argument(help="report.json of each target.")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="HTML file to write.")] = Path("conformance.html"),
    debug: Debug = False,
) -> None:
    """Write one HTML matrix of several targets."""
    with report_errors(debug=debug, default=Status.MISUSE):
        _load_module("reporting.report_commands").join_and_show(reports, out)


@app.command()
def mutants(
    *,
    target: Annotated[str, typer.Option(help="Target with the lowerings to make faulty.")] = "onnxruntime",
    profile: Profile = "quick",
    seeds: Seeds = 5,
    word: Annotated[
        list[str] | None,
        typer.Option("-k", help="Run only mutants with this word in their name or change; repeat for several."),
    ] = None,
    workers: Workers = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the result of each mutant.")] = None,
    debug: Debug = False,
) -> None:
    """Count the seeded faults that the suite finds. Exit status: 0 enough for each seed, 1 too few, 2 wrong usage."""
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
    target: Annotated[list[str] | None, typer.Option(help="Correct target; repeat for several.")] = None,
    profile: Profile = "quick",
    seeds: Seeds = 10,
    word: TaskWords = None,
    level: Levels = None,
    workers: Workers = 2,
    debug: Debug = False,
) -> None:
    """Run correct targets and count the failures. Exit status: 0 none, 1 failures, 2 wrong usage."""
    with report_errors(debug=debug, default=Status.MISUSE), handle_end_signals():
        show = _load_mutants("alarms").run_correct_targets_and_show
        settings = {"profile": profile, "seeds": seeds, "subjects": word or (), "levels": level or ()}
        raise typer.Exit(show(target or CORRECT_TARGETS, workers=workers, **settings))


def _load_mutants(command: str) -> Any:
    if importlib.util.find_spec(MUTANTS_PACKAGE) is None:
        raise MisuseError(
            f"cannot run clika-ref conformance {command}: the installed suite does not contain {MUTANTS_PACKAGE}. "
            "Install it from a clone: pip install --editable ./conformance"
        )
    return _load_module("mutants.console_output")


def _load_module(name: str) -> Any:
    """Import a module of the suite on demand: torch takes a second to import, and ``--help`` should not wait for it."""
    return importlib.import_module(f"clika_ref_conformance.{name}")
