"""JUnit XML for continuous integration: a suite for each level, a test case for each task."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from clika_ref.serialization.atomic_files import write_atomically
from clika_ref_conformance.reporting.report import Detail, Report, TaskReport
from clika_ref_conformance.verdicts import PROVING_VERDICTS

JUNIT_FILE = "junit.xml"

_ILLEGAL_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot represent. Source: Extensible Markup Language 1.0, section 2.2, Char."""


def write_junit(report: Report, path: Path) -> None:
    """Write the report as JUnit XML.

    Raises:
        ModelError: the path cannot be written.
    """
    with write_atomically(path) as file:
        file.write(render_junit(report))


def render_junit(report: Report) -> bytes:
    """Return the report as JUnit XML; tasks without any check that proves something count as skipped."""
    root = ET.Element("testsuites", name=_clean_text(f"clika-ref conformance: {report.target}"))
    for level in report.levels:
        entries = [entry for entry in report.tasks if entry.task.level == level]
        suite = ET.SubElement(root, "testsuite", name=_clean_text(level))
        for entry in entries:
            _add_task(suite, report, entry)
        _set_counts(suite, sum(entry.seconds for entry in entries))
    if report.problems:
        suite = ET.SubElement(root, "testsuite", name="run")
        for problem in report.problems:
            case = ET.SubElement(suite, "testcase", classname="run", name=_clean_text(problem), time="0")
            ET.SubElement(case, "failure", message=_clean_text(problem))
        _set_counts(suite, 0.0)
    _set_counts(root, report.seconds)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True)


def _add_task(suite: ET.Element, report: Report, entry: TaskReport) -> None:
    classname = _clean_text(f"{report.target}.{entry.task.level}")
    case = ET.SubElement(
        suite, "testcase", classname=classname, name=_clean_text(str(entry.task)), time=f"{entry.seconds:.3f}"
    )
    failed = [detail for detail in entry.details if detail.verdict.is_failure]
    if failed:
        message = ", ".join(f"{count} {verdict}" for verdict, count in entry.verdicts.items() if verdict.is_failure)
        failure = ET.SubElement(case, "failure", type=_clean_text(failed[0].verdict), message=_clean_text(message))
        failure.text = _clean_text("\n\n".join(_format_detail(detail, report) for detail in failed))
    elif PROVING_VERDICTS.isdisjoint(entry.verdicts):
        counts = ", ".join(f"{count} {verdict}" for verdict, count in entry.verdicts.items())
        reason = f"{counts}: {entry.details[0].comparison.message}" if entry.details else "no checks are planned"
        ET.SubElement(case, "skipped", message=_clean_text(reason))


def _format_detail(detail: Detail, report: Report) -> str:
    lines = [f"{detail.verdict} in {detail.check}" + f" on the inputs {detail.run}" * bool(detail.run)]
    lines += [detail.comparison.message, *(f"{key}: {value}" for key, value in detail.facts.items())]
    if detail.reproducer:
        lines += ["# in the folder of the report:", report.format_commands(detail.reproducer)]
    return "\n".join(filter(None, lines))


def _set_counts(element: ET.Element, seconds: float) -> None:
    element.set("tests", str(len(list(element.iter("testcase")))))
    element.set("failures", str(len(list(element.iter("failure")))))
    element.set("skipped", str(len(list(element.iter("skipped")))))
    element.set("errors", "0")
    element.set("time", f"{seconds:.3f}")


def _clean_text(text: str) -> str:
    return _ILLEGAL_XML.sub("\ufffd", text)
