"""A target of another package: run, report page, replay and comparison, without an edit in our packages."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/reference_evaluator"
TARGET = f"{EXAMPLE.name}.target:TARGET"
TASKS = ("operators/relu/float32", "dynamic/relu/float32", "operators/log_softmax/float32")


def run_clika_ref(*words, folder):
    """Run the command line in its own process, without modules of its folder on the path, as the script does."""
    main = "from clika_ref_cli.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", main, "conformance", *map(str, words)],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """A folder with the files of an external target only."""
    folder = tmp_path_factory.mktemp("external")
    shutil.copytree(EXAMPLE, folder / EXAMPLE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def report(target_folder):
    """The report of a run of two operators; one of them deviates as declared."""
    options = (*(word for task in TASKS for word in ("-k", task)), "--workers", "1")
    done = run_clika_ref("run", "--target", TARGET, *options, "--out", "report", folder=target_folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return target_folder / "report"


def test_external_target_unknown_to_packages():
    """None of our packages mentions the external target."""
    ours = [ROOT / "clika_ref", ROOT / "plugins", ROOT / "conformance/clika_ref_conformance"]
    files = [p for folder in ours for kind in ("py", "toml", "txt") for p in folder.rglob(f"*.{kind}")]
    assert len(files) > 300
    assert [p for p in files if EXAMPLE.name in p.read_text(encoding="utf-8")] == []


def test_external_target_at_most_85_lines():
    """A target is written in 85 lines."""
    assert len((EXAMPLE / "target.py").read_text(encoding="utf-8").splitlines()) <= 85


@pytest.mark.slow
def test_external_target_run_writes_report(report):
    """A run of the external target writes the report files."""
    document = json.loads((report / "report.json").read_text())
    verdicts = {(t["level"], t["subject"]): t["verdict"] for t in document["tasks"]}
    assert verdicts == {
        ("operators", "relu"): "pass",
        ("dynamic", "relu"): "pass",
        ("operators", "log_softmax"): "deviation:declared",
    }
    assert sum(document["verdicts"].values()) == document["planned"] > 30
    assert (report / "junit.xml").stat().st_size > 0


@pytest.mark.slow
def test_external_target_matrix_has_static_and_dynamic_cells(report):
    """The matrix has a cell for each task, static and dynamic."""
    page = (report / "index.html").read_text(encoding="utf-8")
    assert f"Conformance of {TARGET}" in page
    rows = dict(re.findall(r'<th scope="row">(relu|log_softmax)</th>(<td>.*)', page))
    halves = {name: re.findall(r'<button class="(\w+)[^>]* title="([^:]*):', cells) for name, cells in rows.items()}
    assert halves == {
        "relu": [("pass", "operators/relu/float32"), ("pass", "dynamic/relu/float32/dynamic")],
        "log_softmax": [("declared", "operators/log_softmax/float32")],
    }


@pytest.mark.slow
def test_external_target_declared_deviation_seen(report):
    """The declared deviation is seen."""
    entries = {d["id"]: d for d in json.loads((report / "report.json").read_text())["deviations"]}
    assert entries["log-of-softmax"]["occurred"] > 0
    assert entries["peepholes-of-zero"]["applicable"] == 0, "nothing else was run"


@pytest.mark.slow
def test_external_target_undeclared_failures_replay(report, tmp_path):
    """Without the declaration it fails, and each type of failure replays."""
    shutil.copy(EXAMPLE / "target.py", tmp_path / "undeclared.py")
    words = ("--target", "undeclared:TARGET")
    options = ("-k", "operators/log_softmax/float32", "--level", "operators", "--workers", "1", "--out", tmp_path)
    done = run_clika_ref("run", *words, *options, folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    again = {case: run_clika_ref("replay", case, *words, folder=tmp_path) for case in (tmp_path / "cases").iterdir()}
    assert {replayed.returncode for replayed in again.values()} == {1}
    kinds = {replayed.stdout.partition(": ")[0]: case for case, replayed in again.items()}
    verdicts = json.loads((tmp_path / "report.json").read_text())["verdicts"]
    assert set(kinds) == {verdict for verdict in verdicts if verdict.startswith("fail:")}
    case = kinds["fail:special"]
    assert run_clika_ref("replay", case, "--target", "onnxruntime", folder=tmp_path).returncode == 0
    rejected = run_clika_ref("replay", case, folder=tmp_path)
    assert rejected.returncode == 2
    assert "Give its target yourself: --target undeclared:TARGET" in rejected.stderr

    rejected = run_clika_ref("diff", report / "report.json", tmp_path / "report.json", folder=tmp_path)
    assert rejected.returncode == 2
    assert f"they are of two targets, {TARGET} and undeclared:TARGET" in " ".join(rejected.stderr.split())
    earlier = json.loads((report / "report.json").read_text()) | {"target": "undeclared:TARGET"}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    regressed = run_clika_ref("diff", "earlier.json", "report.json", folder=tmp_path)
    assert regressed.returncode == 1
    assert regressed.stdout.startswith("The old run covers `")
    assert "regression: operators/log_softmax/float32: " in regressed.stdout
    assert run_clika_ref("diff", "report.json", "earlier.json", folder=tmp_path).returncode == 0
    joined = run_clika_ref(
        "report", report / "report.json", tmp_path / "report.json", "-o", "both.html", folder=tmp_path
    )
    assert joined.returncode == 0
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count('class="target"') == 2
    assert case.name in page


@pytest.mark.slow
def test_diff_other_json_named(tmp_path):
    """A file that is no report is named."""
    (tmp_path / "a.json").write_text("{}")
    done = run_clika_ref("diff", "a.json", "a.json", folder=tmp_path)
    assert done.returncode == 2
    assert "a.json': it is damaged, or no report of a run" in done.stderr.replace("\n", " ")
