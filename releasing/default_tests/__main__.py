"""``python -m releasing.default_tests``: coverage and faults, in a checkout that nobody edits meanwhile."""

from __future__ import annotations

import sys

import typer

from releasing.default_tests import faults, measuring

SHARE_FOUND = 0.95
"""Minimum share of the faults found by all tests that the default tests must find."""

app = typer.Typer(add_completion=False, help=__doc__, pretty_exceptions_enable=False)


@app.command()
def coverage(*, again: bool = True) -> None:
    """Measure the default and the slow tests, and print the coverage of both by package."""
    if again:
        measuring.measure("default", "not slow")
        measuring.measure("slow", "slow")
    if broken := measuring.report(list(measuring.compare())):
        sys.exit("\n".join(broken))


@app.command("faults")
def seed_faults(seed: int = 0, count: int = 40) -> None:
    """Seed faults in the measured lines, and print the tests that find each."""
    by_default = by_slow = 0
    for fault in faults.choose(seed, count):
        found = "default" if faults.is_found(fault, "default") else "slow" if faults.is_found(fault, "slow") else "-"
        by_default, by_slow = by_default + (found == "default"), by_slow + (found == "slow")
        print(f"{found:<8}{fault.path}:{fault.line}\n  - {fault.before.strip()}\n  + {fault.after.strip()}", flush=True)
    total = by_default + by_slow
    print(f"{by_default} of {total} faults that all tests find are found by the default tests, of {count} seeded")
    if by_default < SHARE_FOUND * total:
        sys.exit(f"fewer than {SHARE_FOUND:.0%}")


if __name__ == "__main__":
    app()
