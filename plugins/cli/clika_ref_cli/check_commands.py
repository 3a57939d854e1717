"""The ``check`` command, which checks a file against a target's rules, and ``compare``, which compares two models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from clika_ref.core.errors import format_count
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

NO_OTHER_MESSAGE = (
    "cannot compare: there is no second model. Give one, or give a saved module and --target once for each target."
)

OtherModel = Annotated[
    str | None,
    typer.Argument(metavar="OTHER", help="The model to compare with, in the same forms.", show_default=False),
]

MinSqnr = Annotated[
    float | None,
    typer.Option(metavar="DB", help="Minimum SQNR for agreement. By default, only rounding may differ."),
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
    """List violations of a target's rules in a file. For other models, check the file that an export would write."""
    with report_errors(debug=debug), divert_stdout():
        if target is None:
            raise MisuseError("cannot check: --target is missing. Give the target whose rules apply.")
        with show_spinner("Loading"):
            seed_all(seed)
            checking = import_lazily("checking")
        violations = checking.find_violations(model, target, inputs or ())
    count = format_count(len(violations), "violation")
    summary = f"{model}: {count if violations else 'no violations'} of rules of {target}"
    data = [{"rule": v.rule, "node": v.node, "message": v.message} for v in violations]
    print_result("\n".join([*map(str, violations), summary]), data, as_json=as_json)
    if violations:
        raise typer.Exit(Status.NEGATIVE)


def compare(
    model: options.ModelOrOnnx,
    other: OtherModel = None,
    *,
    inputs: options.Inputs = None,
    batch_size: options.BatchSize = None,
    target: options.Targets = None,
    min_sqnr: MinSqnr = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare the outputs of two models on the same inputs, or compare targets for a saved module."""
    with report_errors(debug=debug), divert_stdout():
        with show_spinner("Loading"):
            seed_all(seed)
            comparing = import_lazily("comparing")
        if other is None:
            if not target or inputs or min_sqnr is not None:
                raise MisuseError(NO_OTHER_MESSAGE)
            with show_spinner("Comparing targets"):
                result = comparing.compare_targets(model, target)
            data = [asdict(row) for row in result.rows]
            is_positive = not any(row.unsupported_reason for row in result.rows)
        else:
            result = _compare_two(comparing, (model, other), target or [], (inputs or [], batch_size))
            data = comparing.agreement_as_json(result, min_sqnr)
            is_positive = comparing.is_in_agreement(result, min_sqnr)
    print_result(result, data, as_json=as_json)
    if not is_positive:
        raise typer.Exit(Status.NEGATIVE)


def _compare_two(comparing: Any, names: tuple[str, str], targets: list[str], data: tuple[list[str], int | None]) -> Any:
    """Compare two models. ONNX files run in the target at their own index, or in the only one given."""
    if len(targets) > len(names):
        raise MisuseError(
            f"cannot compare two models on {len(targets)} targets. Give --target once, or once for each model."
        )
    with show_spinner("Loading models"):
        names_of_targets = [targets[min(i, len(targets) - 1)] if targets else None for i in range(len(names))]
        first, second = (comparing.load_compared_model(*pair) for pair in zip(names, names_of_targets, strict=True))
        calls = comparing.select_calls((first, second), *data)
    return comparing.compare_models(first, second, show_progress("Comparing", calls))
