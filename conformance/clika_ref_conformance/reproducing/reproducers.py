"""Pack a finding as a zip that anyone can run: graph, inputs, artifact, expected results and their bounds."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.serialization.atomic_files import write_atomically
from clika_ref.serialization.graph_format import encode, graph_to_json
from clika_ref_conformance.cases import Compiled, GraphCase, Outcome, Task
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.reproducing.archives import ARTIFACT_FOLDER, is_artifact_file, pack
from clika_ref_conformance.reproducing.expectations import make_expectation
from clika_ref_conformance.reproducing.json_values import to_json
from clika_ref_conformance.reproducing.tensors import elements_of, layout_of, to_npz
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Verdict

REPRODUCER_FORMAT = 2
"""Increased when the content changes. Only reproducers of this format are read."""

CASES_FOLDER = "cases"
"""Folder of reproducers, next to the report."""

CHECKSUM_DIGITS = 8
"""Number of digits of the checksum in the name of a reproducer."""

MAX_LISTING_CHARACTERS = 8000
"""Limit on the printed text of a graph: small graphs are shown in full, and large ones are in graph.json."""


def write_reproducer(outcome: Outcome, task: Task, suite: Suite, target: str, report: Path) -> str:
    """Write the reproducer of a failed outcome into the folder of the report, and return its path relative to that.

    Args:
        outcome: failed outcome; without a case, the reproducer repeats the check itself.
        task: the task that it belongs to.
        suite: tested suite.
        target: name of the target, as given by the user, or ``package.module:OBJECT``.
        report: the folder of the report.

    Returns:
        ``cases/NAME.zip``.
    """
    content = make_reproducer(outcome, task, suite, target)
    path = f"{CASES_FOLDER}/{make_case_name(task, content)}"
    (report / CASES_FOLDER).mkdir(parents=True, exist_ok=True)
    with write_atomically(report / path) as file:
        file.write(content)
    return path


def remove_stale_cases(report: Path, named: Collection[str]) -> None:
    """Remove the reproducers in a report's folder that it does not name: those of an earlier run."""
    for path in (report / CASES_FOLDER).glob(f"*-{'[0-9a-f]' * CHECKSUM_DIGITS}.zip"):
        if f"{CASES_FOLDER}/{path.name}" not in named:
            path.unlink()


def make_case_name(task: Task, content: bytes) -> str:
    """Return a descriptive file name that depends on the content."""
    label = re.sub(r"[^A-Za-z0-9]+", "-", f"{task.level}-{task.subject}-{task.dtype}").strip("-").lower()[:60]
    return f"{label}-{hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS]}.zip"


def make_reproducer(outcome: Outcome, task: Task, suite: Suite, target: str) -> bytes:
    """Return the reproducer of an outcome; equal outcomes give equal bytes."""
    case = outcome.case or GraphCase(outcome.name, Graph("nothing"), ())
    files = {"repro.py": Path(__file__).with_name("repro_script.py").read_bytes()}
    inputs = {f"run{r}_input{i}": elements_of(t) for r, run in enumerate(case.runs) for i, t in enumerate(run.inputs)}
    files["inputs.npz"] = to_npz(inputs)
    expected: dict[str, np.ndarray] = {}
    coarse = outcome.verdict is Verdict.PRECISION
    references = [
        functools.partial(CaseReference, case.graph, run.inputs, arithmetic=suite.arithmetic) for run in case.runs
    ]
    outputs = [_add_expectation(make, f"run{r}_", expected, coarse=coarse) for r, make in enumerate(references)]
    random = any(node.is_random for node in case.graph.nodes)
    files["expected.npz"] = to_npz(expected)
    weights = {n: v.data.detach().cpu().contiguous() for n, v in case.graph.constants.items() if v.data is not None}
    files["weights.safetensors"] = safetensors.torch.save({name: data.clone() for name, data in weights.items()})
    files["graph.json"] = _encode_json(graph_to_json(case.graph))
    meta = _collect_facts(outcome, case, task, target) | {
        "artifact": _add_artifact(outcome.compiled, files),
        "profile": suite.profile.name,
        "seed": suite.profile.seed,
        "repeats_check": outcome.case is None,
        "limit_seconds": suite.profile.case_seconds,
        "limit_bytes": suite.profile.memory_bytes,
        "runs": [
            {"name": run.name, "inputs": list(map(layout_of, run.inputs)), "outputs": made, "random": random}
            for run, made in zip(case.runs, outputs, strict=True)
        ],
    }
    files["meta.json"] = _encode_json(meta)
    return pack(files)


def _collect_facts(outcome: Outcome, case: GraphCase, task: Task, target: str) -> dict[str, Any]:
    return {
        "format": REPRODUCER_FORMAT,
        "suite": version("clika-ref-conformance"),
        "torch": torch.__version__,
        "target": target,
        "task": asdict(task),
        "check": outcome.name,
        "case": case.name,
        "passes": case.passes,
        "facts": {key: _encode_fact(value) for key, value in case.facts.items()},
        "run": outcome.run,
        "verdict": str(outcome.verdict),
        "message": outcome.comparison.message,
        "listing": _format_listing(case),
    }


def _encode_fact(value: Any) -> Any:
    try:
        return encode(value)
    except ModelError:
        return str(value)


def _format_listing(case: GraphCase) -> str:
    text = str(case.graph)
    return (
        text
        if len(text) <= MAX_LISTING_CHARACTERS
        else f"{text[:MAX_LISTING_CHARACTERS]}\n... (the rest is in graph.json)"
    )


def _encode_json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(to_json(document), indent=1, allow_nan=False).encode()


def _add_expectation(
    make: Callable[[], CaseReference], prefix: str, arrays: dict[str, np.ndarray], *, coarse: bool
) -> list[dict[str, Any]]:
    """Add the expected results of a run; return the layouts of the outputs, or nothing if eager rejects the run."""
    try:
        expected = make().expected
    except Exception:  # noqa: BLE001 - no expected results if eager rejects the run; that may be the finding
        return []
    for index, one in enumerate(expected):
        found = {"output": elements_of(one.eager), **make_expectation(one, coarse=coarse)}
        arrays.update({f"{prefix}output{index}_{name}": array for name, array in found.items()})
    return [layout_of(one.eager.contiguous()) for one in expected]


def _add_artifact(compiled: Compiled | None, files: dict[str, bytes]) -> dict[str, Any] | None:
    """Add the files of an artifact; return its metadata.

    None if nothing was compiled, or a zip cannot hold the artifact: the reproducer then compiles the graph itself.
    """
    if compiled is None or not all(is_artifact_file(ARTIFACT_FOLDER + name) for name in compiled.files):
        return None
    made = compiled.artifact
    try:
        facts = {key: encode(value) for key, value in made.facts.items()}
    except ModelError:
        return None
    files.update({ARTIFACT_FOLDER + name: content for name, content in compiled.files.items()})
    return {
        "file": made.path.name,
        "input_names": list(made.input_names),
        "output_names": list(made.output_names),
        "facts": facts,
    }
