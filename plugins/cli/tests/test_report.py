"""``clika-ref report``: of an INT8 model, a saved module and a float model, and messages for invalid arguments."""

import json

import pytest
from clika_ref_cli import cli
from reported_nets import compile_int8, read_contents
from typer.testing import CliRunner

SOURCE = """
import torch

Net = lambda: torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))

def batches():
    for seed in range(4):
        yield torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
"""


def run_report(*words):
    """Run the command line in this process."""
    if "report" not in cli.COMMANDS:
        pytest.fail("cli.py does not register the command")
    return CliRunner().invoke(cli.app, ["report", *map(str, words)])


@pytest.fixture
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets_to_report.py").write_text(SOURCE)
    return tmp_path


def test_report_model_quantized_with_other_target(working_folder):
    """A model is quantized and reported for its target and another one."""
    words = ("nets_to_report:Net", "--calibrate", "nets_to_report:batches", "-o", "report.html", "--compare-with", "ov")
    done = run_report(*words, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["report"]["file"] == "report.html"
    found = read_contents(working_folder / "report.html")
    assert [row["target"] for row in found["targets"]] == ["onnxruntime", "openvino"]
    assert result["report"]["bytes"] == (working_folder / "report.html").stat().st_size


def test_report_saved_module_or_float_model(working_folder):
    """A saved module and a float model are reported."""
    compile_int8().clika_save(working_folder / "saved")
    for words in (("saved",), ("nets_to_report:Net", "--input", "4x32")):
        done = run_report(*words, "-o", "report.html")
        assert done.exit_code == 0, done.output
        assert done.stdout == f"report.html  {(working_folder / 'report.html').stat().st_size / 1e3:.1f} KB\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nets_to_report:Net",), "there is no output path. Give -o FILE.html."),
        (
            ("nets_to_report:Net", "-o", "r.html"),
            "there is no data. Give --calibrate DATA for an INT8 report, or --input",
        ),
        (("saved", "-o", "r.html", "--target", "ov"), "Compare it with other targets by --compare-with"),
        (("saved", "-o", "r.html", "--settings", "settings.yaml"), "it is already compiled. Omit --settings."),
        (
            ("saved", "-o", "r.html", "--compare-with", "nowhere"),
            "cannot use the target 'nowhere': no installed plugin provides it",
        ),
    ],
)
def test_report_misuse_exits_2(working_folder, words, message):
    """Missing or contradictory arguments exit with 2 and leave no file."""
    compile_int8().clika_save(working_folder / "saved")
    (working_folder / "settings.yaml").write_text("{}\n")
    done = run_report(*words)
    assert done.exit_code == 2
    assert message in done.stderr
    assert not (working_folder / "r.html").exists()


def test_report_other_suffix_rejected_before_compiling(working_folder, monkeypatch):
    """Another suffix is rejected before the model is compiled."""
    monkeypatch.setattr("clika_ref.clika_compile", None)
    done = run_report("nets_to_report:Net", "--calibrate", "nets_to_report:batches", "-o", "report.pdf")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: -o: cannot write a report to 'report.pdf': the name ends in '.pdf'. Use .html.\n",
    )


def test_report_without_visualizer_fails_before_any_work(working_folder, monkeypatch):
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    done = run_report("nets_to_report:Net", "--calibrate", "nets_to_report:absent", "-o", "report.html")
    assert done.exit_code == 3
    assert done.stderr.startswith(
        "error: clika-ref report: no loaded plugin draws pictures and writes reports (loaded: "
    )
    assert done.stderr.endswith("$CLIKA_REF_PLUGINS limits which plugins are loaded.\n")
