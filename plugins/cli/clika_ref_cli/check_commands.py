"""The ``check`` command, which checks a file against a target's rules, and ``compare``, which compares two models."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from clika_ref_cli import options
from clika_ref_cli.exit_status import Debug, MisuseError, Status, report_errors
from clika_ref_cli.output import (
    divert_stdout,
    import_lazily,
    print_result,
    seed_all,
    show_progress,
    show_spinner,
)

OtherModel = Annotated[
    str | None,
    typer.Argument(metavar="OTHER", help="What is held against it, of the same kinds.", show_default=False),
]

MinSqnr = Annotated[
    float | None, typer.Option(metavar="DB", help="Agree from this SQNR on; without, only within float rounding.")
]


def check(
    model: options.ModelOrOnnx,
    *,
    target: options.Target = None,
    inputs: options.Inputs = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Say which rules of a target a file breaks, and where; of another model, the file that would be exported."""
    with report_errors(debug=debug), divert_stdout():
        if target is None:
            raise MisuseError("give --target: whose rules are to be kept")
        with show_spinner("Loading"):
            seed_all(seed)
            checking = import_lazily("checking")
        found = checking.find_violations(model, target, inputs or ())
    places = "one place" if len(found) == 1 else f"{len(found)} places"
    verdict = f"breaks rules of {target} in {places}" if found else f"keeps all rules of {target}"
    told = [{"rule": v.rule, "node": v.node, "message": v.message} for v in found]
    print_result("\n".join([*map(str, found), f"{model} {verdict}"]), told, as_json=as_json)
    if found:
        raise typer.Exit(Status.NEGATIVE)


def compare(
    model: options.ModelOrOnnx,
    other: OtherModel = None,
    *,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    target: options.Targets = None,
    at_least: MinSqnr = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Run two models on the same inputs and say how far apart they are; or set targets side by side for a saved one."""
    with report_errors(debug=debug), divert_stdout():
        with show_spinner("Loading"):
            seed_all(seed)
            comparing = import_lazily("comparing")
        if other is None:
            if not target or inputs or at_least is not None:
                raise MisuseError("give a second model, or --target once for each target that a saved module is for")
            with show_spinner("Comparing targets"):
                found = comparing.compare_targets(model, target)
            told, is_good = comparing.targets_as_json(found), not any(row.unsupported_reason for row in found.rows)
        else:
            found = _compare_two(comparing, (model, other), target or [], (inputs or [], batch_size))
            told, is_good = comparing.agreement_as_json(found, at_least), comparing.agrees(found, at_least)
    print_result(found, told, as_json=as_json)
    if not is_good:
        raise typer.Exit(Status.NEGATIVE)


def _compare_two(
    comparing: Any, names: tuple[str, str], targets: list[str], given: tuple[list[str], int | None]
) -> Any:
    """Compare two models. ONNX files run in the target at their own index, or in the only one given."""
    if len(targets) > len(names):
        raise MisuseError(f"--target is given {len(targets)} times for two models; give it once, or once for each")
    with show_spinner("Loading models"):
        places = [targets[min(i, len(targets) - 1)] if targets else None for i in range(len(names))]
        first, second = (comparing.load_compared_model(*pair) for pair in zip(names, places, strict=True))
        calls = comparing.select_calls((first, second), *given)
    return comparing.compare_models(first, second, show_progress("Comparing", calls))
