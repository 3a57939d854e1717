"""A stranger's target, from its module to the page, the replay and the comparison, without an edit in our packages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGET = "reference_evaluator.target:TARGET"


def clika_ref(*words, folder=ROOT / "examples"):
    """Run the command line in a process of its own, as a stranger would."""
    return subprocess.run(
        [sys.executable, "-c", "from clika_ref.command_line.cli import main; main()", "conformance", *map(str, words)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a run of two operators, one of which deviates as declared."""
    folder = tmp_path_factory.mktemp("stranger") / "report"
    options = ("-k", "operators/relu/float32", "-k", "operators/log_softmax/float32", "--workers", "1")
    done = clika_ref("run", "--target", TARGET, "--level", "operators", *options, "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_a_strangers_target_goes_from_its_module_to_the_page(report):
    document = json.loads((report / "report.json").read_text())
    assert {task["subject"]: task["verdict"] for task in document["tasks"]} == {
        "relu": "pass",
        "log_softmax": "deviation:declared",
    }
    assert sum(document["verdicts"].values()) == document["planned"] > 50
    page = (report / "index.html").read_text(encoding="utf-8")
    assert f"Conformance of {TARGET}" in page
    assert '<th scope="row">log_softmax</th>' in page
    assert (report / "junit.xml").stat().st_size > 0


def test_its_declared_deviation_is_seen(report):
    entries = {d["id"]: d for d in json.loads((report / "report.json").read_text())["deviations"]}
    assert entries["log-of-softmax"]["seen"] > 0
    assert entries["peepholes-of-zero"]["watched"] == 0, "nothing else was run"


def test_without_the_declaration_it_fails_and_every_kind_of_failure_replays(report, tmp_path):
    source = (ROOT / "examples/reference_evaluator/target.py").read_text(encoding="utf-8")
    (tmp_path / "undeclared.py").write_text(source, encoding="utf-8")
    words = ("--target", "undeclared:TARGET")
    options = ("-k", "operators/log_softmax/float32", "--level", "operators", "--workers", "1", "--out", tmp_path)
    done = clika_ref("run", *words, *options, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (case,) = (tmp_path / "cases").iterdir()
    again = clika_ref("replay", case, *words, folder=tmp_path)
    assert again.returncode == 1, again.stdout + again.stderr
    assert again.stdout.startswith("fail:special: ")
    assert clika_ref("replay", case, "--target", "onnxruntime", folder=tmp_path).returncode == 0
    refused = clika_ref("replay", case, folder=tmp_path)
    assert refused.returncode == 2
    assert "replay it with --target undeclared:TARGET" in refused.stderr

    worse = clika_ref("diff", report / "report.json", tmp_path / "report.json")
    assert worse.returncode == 1
    assert "worse: operators/log_softmax/float32: " in worse.stdout
    assert "The target was reference_evaluator.target:TARGET and is undeclared:TARGET." in worse.stdout.replace(
        "\n", " "
    )
    assert clika_ref("diff", tmp_path / "report.json", report / "report.json").returncode == 0
    joined = clika_ref("report", report / "report.json", tmp_path / "report.json", "-o", tmp_path / "both.html")
    assert joined.returncode == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count('class="target"') == 2
    assert case.name in page


def test_a_report_that_is_none_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    done = clika_ref("diff", tmp_path / "a.json", tmp_path / "a.json")
    assert done.returncode == 2
    assert "a.json is no report of a conformance run" in done.stderr.replace("\n", " ")
