"""Compile every entry of the list in a process of its own, and write the results and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.breadth import page
from benchmarks.breadth.catalogue import list_names
from benchmarks.measuring import CALL_MAIN_PROGRAM, MEASURED_ENVIRONMENT, ROOT, Names

RESULTS = Path(__file__).with_name("results.json")
"""The result of each entry, one line for each."""

MAX_SECONDS = 120
"""Time limit of an entry."""

PARTS = 10
"""CI runs one part of the list, another one each day."""

SECONDS_PER_DAY = 86_400


def run(
    names: Names = None,
    *,
    workers: Annotated[int, typer.Option(help="Entries that run at the same time.")] = 2,
    today: Annotated[bool, typer.Option(help="Run the tenth of the list that is due today, and compare it.")] = False,
    resume: Annotated[bool, typer.Option(help="Run only entries without a result.")] = False,
) -> None:
    """Compile all architectures of the list; write the results and, once all entries have one, docs/coverage.md."""
    known, every = read_results(), list_names()
    chosen = [name for name in every if not names or any(part in name for part in names)]
    chosen = [name for name in chosen if not resume or name not in known]
    if today:
        chosen = every[int(time.time() // SECONDS_PER_DAY) % PARTS :: PARTS]
    worse: list[str] = []
    for name, found in _measure(chosen, workers):
        print(f"{name}: {page.describe(found)}", flush=True)
        if known.get(name, found)["status"] == "yes" != found["status"]:
            worse.append(name)
        if not today:
            known[name] = found
            write_results({each: known[each] for each in every if each in known})
    if worse:
        print(f"worse than in {RESULTS.name}: {', '.join(worse)}")
        raise typer.Exit(1)
    if not today and known.keys() >= {*every}:
        page.write(known)


def read_results() -> dict[str, Any]:
    """Return the stored result of each entry."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_results(results: Mapping[str, Any]) -> None:
    """Store the results, one line for each entry."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in results.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _measure(names: Sequence[str], workers: int) -> Iterator[tuple[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(names, pool.map(_measure_one, names), strict=True)


def _measure_one(name: str) -> Any:
    """Return the result of an entry, measured in a fresh process within the limits."""
    environment = {**os.environ, **MEASURED_ENVIRONMENT}
    command = [sys.executable, "-W", "ignore", "-c", CALL_MAIN_PROGRAM, "benchmarks.breadth.measurement", name]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=MAX_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"status": "time", "reason": f"it took more than {MAX_SECONDS} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"status": "crash", "reason": last[:160]}
    return json.loads(done.stdout.splitlines()[-1])
