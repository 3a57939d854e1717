"""Compile every entry of the list in a process of its own, and write the results and the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.breadth import page
from benchmarks.breadth.catalogue import list_names
from benchmarks.breadth.measurement import MAX_SECONDS
from benchmarks.measuring import CALL_MAIN_PROGRAM, MEASURED_ENVIRONMENT, ROOT, Names

RESULTS = Path(__file__).with_name("results.json")
"""The result of each entry, one line for each."""

WAITING_FACTOR = 10
"""An entry may take this many times its processor time on a machine with other load."""

PARTS = 10
"""CI runs one part of the list, another one each day."""

SECONDS_PER_DAY = 86_400

SLOWEST_MACHINE = 3
"""An entry may take this many times its stored time on another machine, which is no fault of ours."""


def run(
    names: Names = None,
    *,
    workers: Annotated[int, typer.Option(help="Entries that run at the same time.")] = 2,
    today: Annotated[bool, typer.Option(help="Run the tenth of the list that is due today, and compare it.")] = False,
    resume: Annotated[bool, typer.Option(help="Run only entries without a result.")] = False,
    in_float: Annotated[bool, typer.Option(help="Leave out INT8. Another run with --resume adds it.")] = False,
) -> None:
    """Compile all architectures of the list; write the results and, once all entries have one, docs/coverage.md."""
    known, every = read_results(), list_names()
    chosen = [name for name in every if not names or any(part in name for part in names)]
    finished = [name for name, found in known.items() if in_float or page.has_int8_result(found)]
    chosen = [name for name in chosen if not resume or name not in finished]
    if today:
        chosen = every[int(time.time() // SECONDS_PER_DAY) % PARTS :: PARTS]
    worse: list[str] = []
    start = time.perf_counter()
    for name, found in _measure(chosen, workers, "float" if in_float else "int8"):
        print(f"{name}: {page.describe(found)}", flush=True)
        if _is_worse(found, known.get(name, found)):
            worse.append(name)
        if not today:
            known[name] = found
            write_results({each: known[each] for each in every if each in known})
    print(f"{len(chosen)} entries in {(time.perf_counter() - start) / 60:.0f} min with {workers} workers")
    if worse:
        print(f"worse than in {RESULTS.name}: {', '.join(worse)}")
        raise typer.Exit(1)
    if not today and all(name in known and page.has_int8_result(known[name]) for name in every):
        page.write(known)


def _is_worse(found: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether an entry that compiled does not any more, except for a time limit that a slow machine exceeds."""
    is_machine = found["status"] == "time" and stored.get("seconds", 0) * SLOWEST_MACHINE > MAX_SECONDS
    return stored["status"] == "yes" != found["status"] and not is_machine


def read_results() -> dict[str, Any]:
    """Return the stored result of each entry."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_results(results: Mapping[str, Any]) -> None:
    """Store the results, one line for each entry."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in results.items())
    RESULTS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _measure(names: Sequence[str], workers: int, precision: str) -> Iterator[tuple[str, Any]]:
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(names, pool.map(partial(_measure_one, precision=precision), names), strict=True)


def _measure_one(name: str, precision: str) -> Any:
    """Return the result of an entry, measured in a fresh process within the limits."""
    environment = {**os.environ, **MEASURED_ENVIRONMENT}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        CALL_MAIN_PROGRAM,
        "benchmarks.breadth.measurement",
        name,
        precision,
    ]
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment,
            timeout=MAX_SECONDS * WAITING_FACTOR,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return _add_failure(error.stdout or b"", "time", f"it took more than {MAX_SECONDS * WAITING_FACTOR} s")
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return _add_failure(done.stdout, "time", f"it took more than {MAX_SECONDS} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return _add_failure(done.stdout, "crash", last[:160])
    return json.loads(done.stdout.splitlines()[-1])


def _add_failure(printed: str | bytes, status: str, reason: str) -> Any:
    """Return the result of a process that ended early: that in float with a failure of INT8, if it printed one."""
    lines = printed.splitlines()
    return {**json.loads(lines[-1]), "int8_reason": reason} if lines else {"status": status, "reason": reason}
