"""Write docs/coverage.md from the results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.breadth.catalogue import LIBRARIES
from benchmarks.measuring import ROOT

PAGE = ROOT / "docs/coverage.md"

Results = Mapping[str, Mapping[str, Any]]

STATED_REASONS = ("random", "eager")
"""Results that are no failure: each call draws other numbers, or eager itself fails."""

INTRODUCTION = """# Coverage: which architectures compile

`make breadth` compiles each model of a list with random weights, from the classes of the libraries themselves, and
writes this page. Each is traced with two inputs, and compared with eager PyTorch on a third one, whose sizes were never
traced. The column *dynamic* names the sizes that differ. Models of transformers and diffusers have tiny configurations;
those of torchvision, timm and ultralytics have their own widths.

- **yes**: the ClikaModule and the file in ONNX Runtime agree with eager, as every export is checked: within 1,024
  roundings of the largest element of each result, or with at most 20 times eager's own error, both against float64
  (`clika_ref/export/artifact_check.py`). A rounding is `eps(float32) = 2^-23` of that element. Any other word is the
  step that failed: `compile`, `module` (its result differs), `export`, `file` (its result differs), `time` (120 s of
  one core), `crash`.
- **random**: each call of eager draws other numbers, so that only shapes were compared. **eager**: eager itself fails.
  These two, and results whose size has no bound, are the stated reasons that the bar of 98 % allows for 3 %.
- **nodes** are those of the cleaned graph, **seconds** those of compilation and export, and **roundings** the error of
  module and file; "rows" means the same detections, or almost equal scores, in another order.
- **INT8** is the median SQNR of the samples of the quantized file, at the sizes that were never traced, with random
  weights and random data; "none" if the target quantizes no layer. Batch norms of networks whose results hardly depend
  on the input take the statistics of an input, and scales of residual branches that are almost 0 become 1.
"""


def has_int8_result(found: Mapping[str, Any]) -> bool:
    """Return whether INT8 was tried, or cannot be."""
    return found["status"] != "yes" or not {"decibels", "int8_reason"}.isdisjoint(found)


def describe(found: Mapping[str, Any]) -> str:
    """Return the result of an entry as text."""
    if found["status"] != "yes":
        return f"{found['status']}: {found.get('reason', '')}"
    quantized = found.get("int8_reason") or (f"{found['decibels']} dB" if "decibels" in found else "not tried")
    return f"yes, {found['nodes']} nodes, {found['seconds']} s, {found['file']} roundings, INT8 {quantized}"


def write(results: Results) -> None:
    """Write the page."""
    parts = [INTRODUCTION, _summarize(results)]
    for library, entries in LIBRARIES.items():
        rows = [
            _format_row(name, entry.dynamic, results[f"{library}/{name}"])
            for name, entry in entries().items()
            if f"{library}/{name}" in results
        ]
        head = "| architecture | dynamic | result | nodes | seconds | roundings | INT8 |"
        parts.append("\n".join([f"## {library}\n", head, "|---|---|---|---:|---:|---:|---:|", *rows, ""]))
    failed = {name: found for name, found in results.items() if found["status"] != "yes"}
    quantized = {n: f for n, f in results.items() if "int8_reason" in f}
    for title, chosen, key in (("Failures", failed, "reason"), ("Failures in INT8", quantized, "int8_reason")):
        lines = [f"| {name} | {_escape(found.get(key, ''))} |" for name, found in chosen.items()]
        parts.append("\n".join([f"## {title}\n", "| architecture | reason |\n|---|---|", *lines, ""]))
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def _summarize(results: Results) -> str:
    rows: list[str] = []
    for library in (*LIBRARIES, ""):
        found = [result for name, result in results.items() if name.startswith(f"{library}/" if library else "")]
        if found:
            decibels = [each["decibels"] for each in found if each.get("decibels") is not None]
            agreeing = _format_share(each["status"] == "yes" for each in found)
            in_int8 = _format_share("decibels" in each for each in found)
            median = f"{statistics.median(decibels):.1f} dB" if decibels else ""
            rows.append(f"| {library or 'all'} | {agreeing} | {in_int8} | {median} |")
    passed = _format_share(each["status"] in {"yes", *STATED_REASONS} for each in results.values())
    table = ["| library | float | INT8 | median of INT8 |", "|---|---|---|---:|", *rows, ""]
    return "\n".join([*table, f"With the stated reasons, {passed} pass in float.", ""])


def _format_share(flags: Iterable[bool]) -> str:
    every = [*flags]
    return f"{sum(every)} of {len(every)} ({sum(every) / len(every):.1%})"


def _format_row(name: str, dynamic: str, found: Mapping[str, Any]) -> str:
    status = "yes" if found["status"] == "yes" else f"**{found['status']}**"
    decibels = found.get("decibels", "")
    int8 = "**no**" if "int8_reason" in found else "none" if decibels is None else decibels
    measured = [found[key] for key in ("module", "file") if key in found]
    roundings = "rows" if "rows" in measured else max(measured, default="")
    cells = name, dynamic, status, found.get("nodes", ""), found.get("seconds", ""), roundings, int8
    return f"| {' | '.join(map(str, cells))} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
