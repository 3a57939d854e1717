"""The commands on a small model: files, text and JSON output, and exit statuses."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from command_folder import run_command, run_json
from onnx_sessions import open_session

from clika_ref import ClikaModule
from clika_ref.core.registry import load_registry

pytestmark = pytest.mark.usefixtures("_enter_quantized_folder")


# quantize


def test_quantize_json_describes_artifact_and_module(quantized_folder):
    """`quantize --json` describes layers, the INT8 artifact and the saved module."""
    assert "talks" not in quantized_folder.quantized.stdout, "output of models is not part of the result"
    assert "a model that talks" in quantized_folder.quantized.stderr
    assert "data that talks" in quantized_folder.quantized.stderr
    found = json.loads(quantized_folder.quantized.stdout)
    assert {*found} == {"observer", "bytes", "layers", "what_if", "artifact", "saved", "seconds"}
    bits = load_registry().targets["onnxruntime"].scheme.weights.bits
    assert [(layer["name"], layer["weight_bits"], layer["reason"]) for layer in found["layers"]] == [
        ("linear", bits, ""),
        ("linear_1", bits, ""),
    ]
    assert {*found["layers"][0]} == {
        *("name", "scope", "operator", "weight_bits", "activation_bits", "sensitivity"),
        *("bytes_before", "bytes_after", "reason"),
    }
    assert {*found["what_if"][0]} == {"threshold", "layers", "bytes", "sqnr_db"}
    written = {tensor.data_type for tensor in onnx.load("q.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in written
    size = (quantized_folder.folder / "q.onnx").stat().st_size
    assert found["artifact"] == {
        "file": "q.onnx",
        "target": "onnxruntime",
        "bytes": size,
        "inputs": ["x"],
        "outputs": ["output"],
    }
    assert found["saved"] == {"file": "q.clika", "bytes": (quantized_folder.folder / "q.clika").stat().st_size}
    assert {"Capturing", "Calibrating", "Quantizing", "Writing", "Comparing"} <= {*found["seconds"]}


def test_quantize_saved_module_prints_layers_without_data(quantized_folder, tmp_path):
    """A saved module is requantized without data, and each layer is printed."""
    place = tmp_path / "again.onnx"
    result = run_command("quantize", "q.clika", "--keep-float", "second", "-o", place)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        "layer",
        "operator",
        "weights",
        "activations",
        "QS",
        "bytes",
        "bytes",
        "after",
        "decision",
    ]
    assert any(line.startswith("first") and line.endswith("quantized") for line in lines)
    assert any(line.startswith("second") and "float: " in line for line in lines)
    assert "clika_summary" not in result.stderr + quantized_folder.quantized.stderr, "the command shows it itself"
    assert lines[-1].startswith(f"{place}  ")


def test_quantize_dry_run_writes_no_file(quantized_folder):
    """A dry run of `quantize` decides and writes no file."""
    before = sorted(quantized_folder.folder.iterdir())
    found = run_json(
        "quantize", "talking_model:Net", "--calibrate", "talking_model:batches", "--dry-run", "-o", "none.onnx"
    )
    assert (found["artifact"], found["saved"], len(found["layers"])) == (None, None, 2)
    assert sorted(path for path in quantized_folder.folder.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ]


def test_quantize_weight_only_int4(tmp_path):
    """`--weights-only` and `--weights-bits 4` give INT4 weights and float activations."""
    words = ("--weights-only", "--weights-bits", 4, "--threshold", 1e9, "--save", tmp_path / "few")
    found = run_json("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words)
    assert [(layer["weight_bits"], layer["activation_bits"]) for layer in found["layers"]] == [(4, 32), (4, 32)]
    assert (tmp_path / "few").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["talking_model:Net", "-o", "m.onnx"], "cannot quantize talking_model:Net: --calibrate is missing. Give"),
        (
            ["talking_model:Net", "--calibrate", "1x32"],
            "cannot write the result: there is no output path. Give -o FILE, --save FILE, or --dry-run.",
        ),
        (
            ["talking_model:Net", "--calibrate", "1x32", "-o", "m", "--save", "m"],
            "cannot write two results to one file: -o and --save are equal. Give",
        ),
        (
            ["talking_model:Net", "--calibrate", "1x32", "-o", "m", "--keep-inputs"],
            "cannot keep calibration inputs: no module is saved. Give --save FILE",
        ),
        (
            ["talking_model:Net", "--calibrate", "1x32", "--save", "gone/m"],
            "--save: cannot write gone/m: there is no folder gone. Create",
        ),
        (
            ["q.onnx", "--calibrate", "1x32", "-o", "m"],
            "cannot use q.onnx: it is an ONNX file. Give a Python model or a saved",
        ),
        (["q.clika", "--input", "1x32", "-o", "m"], "cannot trace q.clika: it is already compiled. Omit --input"),
        (
            ["q.clika", "--option", "smooth_quant=off", "-o", "m"],
            "cannot apply --option to a saved module: it is already compiled",
        ),
        (["absent.onnx", "--calibrate", "1x32", "-o", "m"], "cannot load absent.onnx: there is no such file."),
        (
            ["absent.clika", "-o", "m"],
            "cannot load absent.clika: there is no such file. For a Python model, give its module",
        ),
        (["q.clika", "-o", "m.py"], "-o m.py: files of onnxruntime end in .onnx"),
        (["talking_model:Net", "--calibrate", "1x32", "-o", "m.py"], "-o m.py: files of onnxruntime end in .onnx"),
        (["talking_model:Net", "--calibrate", "x.npy", "--save", "x.npy"], "--save: cannot write x.npy: it is also"),
        (["q.clika", "--save", "q.clika"], "--save: cannot write q.clika: it is also an input. Choose another name."),
        (
            ["q.clika", "--seed", 2**64, "-o", "m"],
            f"cannot use --seed {2**64}: it has more than 64 bits. Give a smaller",
        ),
        ([".", "--calibrate", "1x32", "-o", "m"], "cannot load .: it is a folder. Give a model file in it."),
        (["talking_model:Net", "--calibrate", "absent.npz", "-o", "m"], "--calibrate: cannot read absent.npz: No such"),
    ],
)
def test_quantize_misuse_exits_2(words, message):
    """Missing or contradictory arguments exit with 2 and a message."""
    result = run_command("quantize", *words)
    assert result.exit_code == 2, result.output
    assert f"error: {message}" in result.stderr
    assert result.stdout == ""


def test_quantize_random_calibration_warned():
    """Calibration on random numbers prints a note."""
    result = run_command("quantize", "talking_model:Net", "--calibrate", "8x32", "--batch-size", 4, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "note: --calibrate 8x32 draws random numbers. Their ranges differ from those of your data." in result.stderr


def test_quantize_mismatched_data_exits_3():
    """Calibration data of a wrong shape exits with 3."""
    result = run_command("quantize", "talking_model:Net", "--calibrate", "8x31", "--dry-run")
    assert result.exit_code == 3
    assert "Traceback" not in result.stderr


# export


def test_export_writes_for_own_or_other_target(tmp_path):
    """`export` writes for the module's own target or another one."""
    own, other = tmp_path / "own.onnx", tmp_path / "other.onnx"
    result = run_command("export", "q.clika", "-o", own)
    assert (result.exit_code, result.stdout) == (0, f"{own}  {own.stat().st_size / 1e3:.1f} KB\n")
    found = run_json("export", "q.clika", "-o", other, "--target", "trt", "--input", "float32:x.npy")
    assert {*found} == {"artifact", "seconds"}
    assert found["artifact"]["target"] == "tensorrt"
    assert list(tmp_path.glob("other*.trtexec.sh"))
    for path in (own, other):
        session = open_session(path)
        (y,) = session.run(None, {"x": np.zeros((3, 32), np.float32)})
        assert y.shape == (3, 8)


def test_export_fp16_openvino(tmp_path):
    """`export --fp16` writes FP16 weights for another target."""
    place = tmp_path / "half.onnx"
    assert run_command("export", "q.clika", "-o", place, "--target", "ov", "--fp16", "--keep-output", 0).exit_code == 0
    kinds = {tensor.data_type for tensor in onnx.load(place).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["q.clika"], 2, "cannot write the result: there is no output path. Give -o FILE."),
        (
            ["q.clika", "-o", "m.onnx", "--fp16", "--bf16"],
            2,
            "cannot export: --fp16 and --bf16 exclude each other. Give",
        ),
        (
            ["q.onnx", "-o", "m.onnx"],
            2,
            "cannot use q.onnx: it is an ONNX file. Give a file of clika_save. For a Python model, use `clika-ref",
        ),
        (
            ["talking_model:Net", "-o", "m.onnx"],
            2,
            "cannot use talking_model:Net: it is a Python model. Give a file of clika_save. For a Python model, use",
        ),
        (
            ["q.clika", "-o", "m.onnx", "--target", "toaster"],
            2,
            "cannot use the target 'toaster': no installed plugin provides it",
        ),
        (["q.clika", "-o", "m.onnx", "--input", "1x32", "--input", "2x32"], 2, "cannot use 2 calls of --input: the"),
        (
            ["q.clika", "-o", "m.onnx", "--keep-output", 7],
            3,
            "keep_outputs_at_idx contains 7, but the module returns 1",
        ),
        (["talking_model.py", "-o", "m.onnx"], 2, "cannot use talking_model.py: it is a Python model"),
        (["q.clika", "-o", "m.py"], 2, "-o m.py: files of onnxruntime end in .onnx"),
        (
            ["q.clika", "-o", "m.xml"],
            2,
            "-o m.xml: files of onnxruntime end in .onnx. For .xml, use -",
        ),
        (["q.clika", "-o", "m.xml", "--target", "trt"], 2, "-o m.xml: files of tensorrt end in .onnx. For .xml, use"),
        (["q.clika", "-o", "."], 2, "-o: cannot write '"),
        (["q.clika", "-o", "q.clika"], 2, "-o: cannot write q.clika: it is also an input. Choose another name."),
    ],
)
def test_export_misuse_reports_reason(words, status, message):
    """Wrong arguments of `export` exit with a message."""
    result = run_command("export", *words)
    assert result.exit_code == status, result.output
    assert f"error: {message}" in result.stderr


def test_export_without_inputs_rejects_other_target(tmp_path):
    """A module that was saved without inputs cannot be quantized for another target."""
    ClikaModule.clika_load("q.clika").clika_save(tmp_path / "bare")
    result = run_command("export", tmp_path / "bare", "-o", tmp_path / "m.onnx", "--target", "ov")
    assert result.exit_code == 3
    assert "error: cannot quantize for openvino: the module holds no calibration ranges" in result.stderr
    assert not (tmp_path / "m.onnx").exists()


def test_export_truncated_file_exits_3(tmp_path):
    """A truncated file exits with 3."""
    (tmp_path / "cut").write_bytes(Path("q.clika").read_bytes()[:1000])
    result = run_command("export", tmp_path / "cut", "-o", tmp_path / "m.onnx")
    assert result.exit_code == 3
    assert "it is truncated" in result.stderr


# check


def test_check_reads_file_module_and_model():
    """`check` checks files, and the export of modules and models."""
    broken = run_json("check", "q.onnx", "--target", "trt", status=1)
    assert {*broken[0]} == {"rule", "node", "message"}
    assert run_json("check", "q.clika", "--target", "trt") == []
    assert run_json("check", "talking_model:Net", "--input", "2x32", "--target", "trt") == []
    shown = run_command("check", "q.clika", "--target", "trt")
    assert shown.stdout == "q.clika: no violations of rules of trt\n"
    last = run_command("check", "q.onnx", "--target", "trt").stdout.splitlines()[-1]
    assert re.fullmatch(r"q\.onnx: \d+ violations? of rules of trt", last)


def test_check_without_target_exits_2():
    """`check` needs a target."""
    result = run_command("check", "q.onnx")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: cannot check: --target is missing. Give the target whose rules apply.\n",
    )


# compare


def test_compare_rounding_or_sqnr_threshold_agrees(tmp_path):
    """Models agree within rounding, or from an SQNR of `--min-sqnr`."""
    place = tmp_path / "f.onnx"
    assert run_command("compile", "talking_model:Net", "--input", "1x32", "--input", "2x32", "-o", place).exit_code == 0
    same = run_json("compare", "talking_model:Net", place, "--input", "float32:x.npy")
    assert (same["agrees"], same["inputs"]) == (True, 1)
    (output,) = same["outputs"]
    assert (output["name"], output["elements"], output["beyond_rounding"]) == ("output", 48, "")
    assert output["same_decisions"] == 1.0
    other = run_json("compare", place, "q.onnx", "--input", "talking_model:batches", status=1)
    assert (other["agrees"], other["inputs"], other["min_sqnr_db"]) == (False, 5, None)
    assert other["outputs"][0]["beyond_rounding"].startswith("off by ")
    assert other["outputs"][0]["sqnr_db"] > 20
    assert run_json("compare", place, "q.onnx", "--input", "talking_model:batches", "--min-sqnr", 20)["agrees"]
    run_json("compare", place, "q.onnx", "--input", "talking_model:batches", "--min-sqnr", 90, status=1)


def test_compare_prints_table_and_draws_inputs():
    """`compare` prints a table and draws random inputs if none were given."""
    result = run_command("compare", "q.clika", "q.onnx")
    assert result.exit_code == 0, result.output
    heading, row = result.stdout.splitlines()
    assert heading.split("  ")[0] == "output"
    assert row.startswith("output")
    assert row.endswith("yes")
    assert result.stderr == "note: inputs are random numbers. Give --input to compare on your data.\n"
    assert (
        run_command("compare", "q.onnx", "q.onnx", "--target", "ort", "--target", "ov", "--min-sqnr", 20).exit_code == 0
    )


@pytest.mark.parametrize("data", ["dictionaries", "dictionaries_in_tuples"])
def test_compare_model_with_dictionary_input(tmp_path, data):
    """A model with a dictionary input agrees with its artifact on the traced data."""
    place = tmp_path / "keyed.onnx"
    result = run_command("compile", "talking_model:Keyed", "--input", f"talking_model:{data}", "-o", place)
    assert result.exit_code == 0, result.output
    for one in ("dictionaries", "dictionaries_in_tuples"):
        assert run_json("compare", "talking_model:Keyed", place, "--input", f"talking_model:{one}")["agrees"]


def test_compare_batch_size_splits_arrays():
    """`--batch-size` splits arrays into batches."""
    found = run_json("compare", "q.clika", "q.onnx", "--input", "float32:x.npy", "--batch-size", 4)
    assert found["inputs"] == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["talking_model:Net", "talking_model:Net"], 2, "cannot compare: --input is missing. Give a shape"),
        (
            ["talking_model:Net", "talking_model:Wider", "--input", "1x32"],
            3,
            "output 0 has the shape [1, 8] in the first",
        ),
        (
            ["talking_model:Net", "q.onnx", "--input", "1x31"],
            3,
            "cannot run talking_model:Net on float32[1, 31]: it raised RuntimeError",
        ),
        (["q.onnx", "q.onnx", "--input", "y=1x32"], 3, "cannot run q.onnx on {y: float32[1, 32]}: its inputs are x."),
        (
            ["q.onnx", "q.onnx", *["--target", "ort"] * 3],
            2,
            "cannot compare two models on 3 targets. Give --target once",
        ),
        (["q.clika"], 2, "cannot compare: there is no second model. Give one, or give a saved module and"),
        (["q.onnx", "--target", "ort"], 2, "cannot use q.onnx: it is an ONNX file. Give two models, or a saved module"),
        (
            ["q.onnx", "q.onnx", "--target", "toaster"],
            2,
            "cannot use the target 'toaster': no installed plugin provides it",
        ),
    ],
)
def test_compare_misuse_reports_reason(words, status, message):
    """Models and arguments that cannot be compared exit with a message."""
    result = run_command("compare", *words)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_compare_targets_of_saved_module(tmp_path):
    """`compare` lists targets of a saved module, and exits with 1 if one is unsupported."""
    rows = run_json("compare", "q.clika", "--target", "ort", "--target", "trt")
    assert [row["target"] for row in rows] == ["onnxruntime", "tensorrt, emulated by ONNX Runtime"]
    assert {
        "layers",
        "total_layers",
        "bytes",
        "sqnr",
        "share",
        "seconds",
        "ratio",
        "unavailable_reason",
        "unsupported_reason",
    } <= {*rows[0]}
    words = ("--weights-only", "--weights-bits", 8, "--threshold", 1e9, "--save", tmp_path / "eight", "--keep-inputs")
    assert run_command("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words).exit_code == 0
    result = run_command("compare", tmp_path / "eight", "--target", "ort", "--target", "trt")
    assert result.exit_code == 1
    assert "unsupported: see below" in result.stdout


# targets


def test_targets_lists_capabilities():
    """`targets` lists the capabilities of each target."""
    shown = run_command("targets")
    assert shown.exit_code == 0, shown.output
    (row,) = (line for line in shown.stdout.splitlines() if line.strip().startswith("onnxruntime "))
    assert f"onnxruntime {onnxruntime.__version__}" in row
    assert "4 or 8 bits" in row
    found = run_json("targets")
    rows = {row["name"]: row for row in found["targets"]}
    assert {*rows} == {"onnxruntime", "openvino", "tensorrt", "tensorrt-llm"}
    assert (rows["openvino"]["short"], rows["openvino"]["suffixes"]) == ("ov", [".onnx", ".xml"])
    assert (rows["tensorrt"]["emulated_by"], rows["tensorrt"]["has_rules"]) == ("ONNX Runtime", True)
    assert (rows["tensorrt"]["weights_only"], rows["onnxruntime"]["weights_only"]) == ([4], [4, 8])
    assert found["failures"] == []
    assert {*rows["onnxruntime"]} == {
        *("name", "short", "plugin", "runtime", "runtime_version", "emulated_by", "unavailable_reason"),
        *("activations", "weights", "weights_only", "suffixes", "has_rules"),
    }


def test_targets_missing_runtime_suggests_install(monkeypatch):
    """A target without its runtime reports the package to install."""
    monkeypatch.setattr("clika_ref_openvino.target.find_spec", lambda _: None)
    assert "openvino is not installed; pip install openvino" in run_command("targets").stdout


# compile


def test_compile_settings_file_notes_ignored_keys(quantized_folder, tmp_path):
    """`compile` uses a settings file and prints a note about ignored settings."""
    (tmp_path / "clika.yaml").write_text(
        "deployment_settings:\n  target_framework: trt\n  shapes:\n    batch: [1, 2, 4]\n"
        "global_quantization_settings:\n  weights_num_bits: 8\n"
    )
    words = ("--input", "1x32", "--input", "2x32", "-o", tmp_path / "f.onnx", "--settings", tmp_path / "clika.yaml")
    result = run_command("compile", "talking_model:Net", *words)
    assert result.exit_code == 0, result.output
    assert "note: `compile` ignores global_quantization_settings of" in result.stderr
    (script,) = tmp_path.glob("*.trtexec.sh")
    assert "4x32" in script.read_text()


def test_compile_saved_module_rejected():
    """`compile` rejects a saved module and suggests `export`."""
    result = run_command("compile", "q.clika", "--input", "1x32", "-o", "m.onnx")
    hint = "Give a Python model. For a saved module, use `clika-ref export`."
    assert (result.exit_code, result.stderr) == (2, f"error: cannot use q.clika: it is a saved module. {hint}\n")


def test_compile_dry_run_json_matches_table(quantized_folder, monkeypatch):
    """A dry run as JSON has the data of its tables."""
    words = ("talking_model:Net", "--input", "1x32", "--input", "2x32", "--dry-run")
    found = run_json("compile", *words)
    assert (found["target"], found["name"]) == ("onnxruntime", "Net")
    assert found["operators"] == [
        {"operator": "linear", "nodes": 2, "unsupported_reason": None},
        {"operator": "relu", "nodes": 1, "unsupported_reason": None},
    ]
    assert found["symbols"] == ["batch: 0.. from dim 0 of 'x'"]
    target = sys.modules["clika_ref_onnxruntime.target"].OnnxRuntime
    monkeypatch.setattr(
        target, "unsupported_reason", lambda self, node: "no relu here" if node.op_type == "relu" else None
    )
    assert run_json("compile", *words)["operators"][1]["unsupported_reason"] == "no relu here"
    assert "no relu here" in run_command("compile", *words).stdout


def test_export_disagreeing_artifact_exits_1(monkeypatch, tmp_path):
    """An artifact that disagrees exits with 1 and leaves no file."""
    target = sys.modules["clika_ref_onnxruntime.target"]
    right = target.OnnxRuntimeRunner.__call__
    monkeypatch.setattr(target.OnnxRuntimeRunner, "__call__", lambda self, x: [y + 1 for y in right(self, x)])
    result = run_command("export", "q.clika", "-o", tmp_path / "m.onnx")
    assert result.exit_code == 1, result.output
    assert "cannot verify the artifact" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_compile_unsupported_node_exits_3(monkeypatch, tmp_path):
    """A node that the target does not support exits with 3 and leaves no file."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,example")
    words = ("--input", "1x32", "-o", tmp_path / "m", "--target", "interpreter")
    result = run_command("compile", "talking_model:Random", *words)
    assert result.exit_code == 3, result.output
    assert "rand draws random numbers" in result.stderr
    assert list(tmp_path.iterdir()) == []
