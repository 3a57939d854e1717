"""The commands on a small model: what they write, what they print for people and machines, and how they end."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from command_folder import SOURCE, clika_ref, enter, told

from clika_ref import ClikaModule


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, and what it was quantized to, which the tests of this file read only."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "talking_model.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        words = ("--input", "1x32", "--input", "2x32", "-o", "q.onnx", "--save", "q.clika", "--keep-inputs", "--json")
        result = clika_ref("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words)
        assert result.exit_code == 0, result.output
        np.save("x.npy", np.random.default_rng(0).standard_normal((6, 32)))
    return SimpleNamespace(folder=folder, quantized=result)


@pytest.fixture(autouse=True)
def _in_the_folder(made, monkeypatch):
    enter(made.folder, monkeypatch)


# quantize


def test_quantize_json_describes_artifact_and_module(made):
    """`quantize --json` describes layers, the INT8 artifact and the saved module."""
    assert "talks" not in made.quantized.stdout, "what a model prints is no part of a result"
    assert "a model that talks" in made.quantized.stderr
    assert "data that talks" in made.quantized.stderr
    found = json.loads(made.quantized.stdout)
    assert {*found} == {"observer", "bytes", "layers", "what_if", "artifact", "saved", "seconds"}
    assert [(layer["name"], layer["weight_bits"], layer["reason"]) for layer in found["layers"]] == [
        ("linear", 8, ""),
        ("linear_1", 8, ""),
    ]
    assert {*found["layers"][0]} == {
        *("name", "scope", "operator", "weight_bits", "value_bits", "sensitivity"),
        *("bytes_before", "bytes_after", "reason"),
    }
    assert {*found["what_if"][0]} == {"threshold", "layers", "bytes", "sqnr_db"}
    written = {tensor.data_type for tensor in onnx.load("q.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in written
    size = (made.folder / "q.onnx").stat().st_size
    assert found["artifact"] == {
        "file": "q.onnx",
        "target": "onnxruntime",
        "bytes": size,
        "inputs": ["x"],
        "outputs": ["output"],
    }
    assert found["saved"] == {"file": "q.clika", "bytes": (made.folder / "q.clika").stat().st_size}
    assert {"Capturing", "Calibrating", "Quantizing", "Writing", "Comparing"} <= {*found["seconds"]}


def test_quantize_saved_module_prints_layers_without_data(made, tmp_path):
    """A saved module is requantized without data, and each layer is printed."""
    place = tmp_path / "again.onnx"
    result = clika_ref("quantize", "q.clika", "--keep-float", "second", "-o", place)
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
    assert "clika_summary" not in result.stderr + made.quantized.stderr, "what a command shows itself"
    assert lines[-1].startswith(f"{place}  ")


def test_quantize_dry_run_writes_no_file(made):
    """A dry run of `quantize` decides and writes no file."""
    before = sorted(made.folder.iterdir())
    found = told(
        "quantize", "talking_model:Net", "--calibrate", "talking_model:batches", "--dry-run", "-o", "none.onnx"
    )
    assert (found["artifact"], found["saved"], len(found["layers"])) == (None, None, 2)
    assert sorted(path for path in made.folder.iterdir() if path.name != "__pycache__") == [
        path for path in before if path.name != "__pycache__"
    ]


def test_quantize_weight_only_int4(tmp_path):
    """`--weights-only` and `--weights-bits 4` give INT4 weights and float activations."""
    words = ("--weights-only", "--weights-bits", 4, "--threshold", 1e9, "--save", tmp_path / "few")
    found = told("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words)
    assert [(layer["weight_bits"], layer["value_bits"]) for layer in found["layers"]] == [(4, 32), (4, 32)]
    assert (tmp_path / "few").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["talking_model:Net", "-o", "m.onnx"], "give --calibrate DATA: talking_model:Net is quantized by what its"),
        (["talking_model:Net", "--calibrate", "1x32"], "give -o FILE or --save FILE to write to, or --dry-run"),
        (["talking_model:Net", "--calibrate", "1x32", "-o", "m", "--save", "m"], "-o and --save name one file; give"),
        (["talking_model:Net", "--calibrate", "1x32", "-o", "m", "--keep-inputs"], "--keep-inputs is about the file"),
        (["talking_model:Net", "--calibrate", "1x32", "--save", "gone/m"], "--save: there is no folder gone to write"),
        (["q.onnx", "--calibrate", "1x32", "-o", "m"], "q.onnx is an ONNX file; only models that Python makes, and"),
        (["q.clika", "--input", "1x32", "-o", "m"], "q.clika is compiled already, and --input says what to trace with"),
        (["q.clika", "--option", "smoothing=off", "-o", "m"], "--option says how a model is compiled, and this one is"),
        (["absent.onnx", "--calibrate", "1x32", "-o", "m"], "there is no file absent.onnx"),
        (["absent.clika", "-o", "m"], "there is no file absent.clika; for a model that Python makes write its module"),
        (["q.clika", "-o", "m.py"], "-o m.py: files of onnxruntime end in .onnx"),
        (["talking_model:Net", "--calibrate", "1x32", "-o", "m.py"], "-o m.py: files of onnxruntime end in .onnx"),
        (["talking_model:Net", "--calibrate", "x.npy", "--save", "x.npy"], "--save: x.npy is read here, and would be"),
        (["q.clika", "--save", "q.clika"], "--save: q.clika is read here, and would be written over; choose another"),
        (["q.clika", "--seed", 2**64, "-o", "m"], f"--seed {2**64} has more than 64 bits; give a smaller one"),
        ([".", "--calibrate", "1x32", "-o", "m"], ". is a folder; give the file of a model in it"),
        (["talking_model:Net", "--calibrate", "absent.npz", "-o", "m"], "--calibrate: cannot read absent.npz: No such"),
    ],
)
def test_quantize_misuse_exits_2(words, message):
    """Missing or contradictory arguments exit with 2 and a message."""
    result = clika_ref("quantize", *words)
    assert result.exit_code == 2, result.output
    assert f"error: {message}" in result.stderr
    assert result.stdout == ""


def test_quantize_random_calibration_warned():
    """Calibration on random numbers prints a note."""
    result = clika_ref("quantize", "talking_model:Net", "--calibrate", "8x32", "--batch-size", 4, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "note: --calibrate 8x32 draws random numbers, whose ranges are not those of your data" in result.stderr


def test_quantize_mismatched_data_exits_3():
    """Calibration data of a wrong shape exits with 3."""
    result = clika_ref("quantize", "talking_model:Net", "--calibrate", "8x31", "--dry-run")
    assert result.exit_code == 3
    assert "Traceback" not in result.stderr


# export


def test_export_writes_for_own_or_other_target(tmp_path):
    """`export` writes for the module's own target or another one."""
    own, other = tmp_path / "own.onnx", tmp_path / "other.onnx"
    result = clika_ref("export", "q.clika", "-o", own)
    assert (result.exit_code, result.stdout) == (0, f"{own}  {own.stat().st_size / 1e3:.1f} KB\n")
    found = told("export", "q.clika", "-o", other, "--target", "trt", "--input", "float32:x.npy")
    assert {*found} == {"artifact", "seconds"}
    assert found["artifact"]["target"] == "tensorrt"
    assert list(tmp_path.glob("other*.trtexec.sh"))
    for path in (own, other):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (y,) = session.run(None, {"x": np.zeros((3, 32), np.float32)})
        assert y.shape == (3, 8)


def test_export_fp16_openvino(tmp_path):
    """`export --fp16` writes FP16 weights for another target."""
    place = tmp_path / "half.onnx"
    assert clika_ref("export", "q.clika", "-o", place, "--target", "ov", "--fp16", "--keep-output", 0).exit_code == 0
    kinds = {tensor.data_type for tensor in onnx.load(place).graph.initializer}
    assert onnx.TensorProto.FLOAT16 in kinds


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["q.clika"], 2, "give -o FILE to write to"),
        (["q.clika", "-o", "m.onnx", "--fp16", "--bf16"], 2, "--fp16 and --bf16 exclude each other; ask for one"),
        (
            ["q.onnx", "-o", "m.onnx"],
            2,
            "q.onnx is an ONNX file; export takes a file of clika_save; `clika-ref compile`",
        ),
        (
            ["talking_model:Net", "-o", "m.onnx"],
            2,
            "talking_model:Net is a model that Python makes; export takes a file of clika_save; `clika-ref compile`",
        ),
        (
            ["q.clika", "-o", "m.onnx", "--target", "toaster"],
            2,
            "cannot use the target 'toaster': no installed plugin provides it",
        ),
        (["q.clika", "-o", "m.onnx", "--input", "1x32", "--input", "2x32"], 2, "--input stands for 2 calls where one"),
        (
            ["q.clika", "-o", "m.onnx", "--keep-output", 7],
            3,
            "keep_outputs_at_idx contains 7, but the module returns 1",
        ),
        (["talking_model.py", "-o", "m.onnx"], 2, "talking_model.py is a model that Python makes"),
        (["q.clika", "-o", "m.py"], 2, "-o m.py: files of onnxruntime end in .onnx"),
        (
            ["q.clika", "-o", "m.xml"],
            2,
            "-o m.xml: files of onnxruntime end in .onnx. For .xml, use -",
        ),
        (["q.clika", "-o", "m.xml", "--target", "trt"], 2, "-o m.xml: files of tensorrt end in .onnx, and those of op"),
        (["q.clika", "-o", "."], 2, "-o: cannot write '"),
        (["q.clika", "-o", "q.clika"], 2, "-o: q.clika is read here, and would be written over; choose another name"),
    ],
)
def test_export_misuse_reports_reason(words, status, message):
    """Wrong arguments of `export` exit with a message."""
    result = clika_ref("export", *words)
    assert result.exit_code == status, result.output
    assert f"error: {message}" in result.stderr


def test_export_without_inputs_rejects_other_target(tmp_path):
    """A module that was saved without inputs cannot be quantized for another target."""
    ClikaModule.clika_load("q.clika").clika_save(tmp_path / "bare")
    result = clika_ref("export", tmp_path / "bare", "-o", tmp_path / "m.onnx", "--target", "ov")
    assert result.exit_code == 3
    assert "error: cannot quantize for openvino: the module holds no calibration ranges" in result.stderr
    assert not (tmp_path / "m.onnx").exists()


def test_export_truncated_file_exits_3(tmp_path):
    """A truncated file exits with 3."""
    (tmp_path / "cut").write_bytes(Path("q.clika").read_bytes()[:1000])
    result = clika_ref("export", tmp_path / "cut", "-o", tmp_path / "m.onnx")
    assert result.exit_code == 3
    assert "it is truncated" in result.stderr


# inspect


def test_inspect_model_module_onnx_same_json_keys(tmp_path):
    """`inspect` shows models, saved modules and ONNX files, with the same JSON keys."""
    shown = clika_ref("inspect", "talking_model:Net", "--input", "1x32", "--input", "2x32")
    assert shown.exit_code == 0, shown.output
    assert "graph Net(%x: float32[batch, 32])" in shown.stdout
    assert " = linear(" in shown.stdout
    assert "talking_model.py:" in shown.stdout
    saved, file = clika_ref("inspect", "q.clika"), clika_ref("inspect", "q.onnx")
    assert saved.stdout.splitlines()[-1].endswith("quantized for onnxruntime: `clika-ref explain` shows which")
    assert "QuantizeLinear" in file.stdout
    assert "x: float32[batch, 32]" in file.stdout.splitlines()[0]
    forms = [
        told("inspect", "talking_model:Net", "--input", "1x32", "--input", "2x32"),
        told("inspect", "q.clika"),
        told("inspect", "q.onnx"),
    ]
    assert len({tuple(sorted(form)) for form in forms}) == 1
    assert len({tuple(sorted(form["nodes"][0])) for form in forms}) == 1
    for form in forms:
        assert form["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 32]}]
        assert all({*value} == {"name", "dtype", "shape"} for node in form["nodes"] for value in node["outputs"])
    model, module, artifact = forms
    assert [node["operator"] for node in model["nodes"]] == ["linear", "relu", "linear"]
    assert (model["quantized_for"], module["quantized_for"], artifact["quantized_for"]) == (None, "onnxruntime", None)
    assert artifact["weights_bytes"] < 0.5 * model["weights_bytes"] == 0.5 * 4 * (32 * 64 + 64 + 64 * 8 + 8)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["talking_model:Net"], 2, "talking_model:Net is to be compiled, which takes --input: a shape such as"),
        (["talking_model.py"], 2, "'talking_model.py' names no model: write the module and what makes the model in it"),
        (["talking_model:Nets", "--input", "1x32"], 2, "has no 'Nets'; did you mean Net?"),
        (["junk.onnx"], 3, "junk.onnx cannot be read as an ONNX file: "),
        (["x.npy"], 3, "cannot load 'x.npy': it is not a safetensors file"),
        (["empty.onnx"], 3, "empty.onnx holds no graph; is it an ONNX file, and whole?"),
        (["absent"], 2, "there is no file absent; for a model that Python makes write its module and what makes it: "),
        (["q.clika", "--input", "1x32"], 2, "q.clika is compiled already, and --input says what to trace with; leave"),
        (["q.onnx", "--input", "1x32"], 2, "q.onnx is compiled already, and --input says what to trace with; leave it"),
        (["q.onnx", "--picture", "q.svg"], 2, "q.onnx is an ONNX file; pictures are of models that Python makes, and"),
        (["q.clika", "--picture", "q.jpg"], 2, "--picture: 'q.jpg' ends in '.jpg', and a picture ends in .svg or .ht"),
        (["q.clika", "--picture", "gone/q.svg"], 2, "--picture: there is no folder gone to write to; make it first"),
    ],
)
def test_inspect_misuse_reports_reason(made, words, status, message):
    """Wrong arguments of `inspect` exit with a message."""
    (made.folder / "junk.onnx").write_bytes(b"junk")
    (made.folder / "empty.onnx").touch()
    result = clika_ref("inspect", *words)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def test_inspect_picture_without_visualizer_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    result = clika_ref("inspect", "q.clika", "--picture", tmp_path / "net.svg")
    assert result.exit_code == 3
    assert result.stderr == (
        "error: --picture: no loaded plugin draws pictures and writes reports (loaded: aten, cleanup, onnxruntime). "
        "Run pip install clika-ref-visualize (in a clone: pip install plugins/visualize; from wheels: add --find-links "
        "FOLDER). $CLIKA_REF_PLUGINS limits which plugins are loaded.\n"
    )


def test_inspect_picture_writes_svg(tmp_path):
    """`inspect --picture` writes an SVG file."""
    place = tmp_path / "net.svg"
    result = clika_ref("inspect", "q.clika", "--picture", place)
    assert (result.exit_code, result.stdout) == (0, f"{place}  {place.stat().st_size / 1e3:.1f} KB\n"), result.output
    assert b"</svg>" in place.read_bytes()
    found = told("inspect", "talking_model:Net", "--input", "1x32", "--picture", tmp_path / "other")
    assert (found["picture"], len(found["nodes"])) == (str(tmp_path / "other.svg"), 3)
    assert (tmp_path / "other.svg").exists()
    assert told("inspect", "q.clika")["picture"] is None


# explain


def test_explain_saved_module_reports_int8_per_target():
    """`explain` reports the INT8 nodes of a saved module, for its target and for others."""
    shown = clika_ref("explain", "q.clika")
    assert shown.exit_code == 0, shown.output
    assert "onnxruntime: 2 of 2 nodes planned as quantized run quantized" in shown.stdout
    found = told("explain", "q.clika", "--target", "ov")
    assert {*found} == {"target", "nodes", "share", "planned_share", "missed"}
    assert (found["target"], found["planned_share"]) == ("openvino", 1.0)
    assert {*found["nodes"][0]} == {"name", "scope", "operator", "macs", "planned", "runs", "reason"}


def test_explain_onnx_file_own_and_foreign(tmp_path):
    """`explain` reports the precision of nodes in our ONNX files and in others."""
    ours, foreign = told("explain", "q.onnx"), written_by_another(tmp_path / "foreign.onnx")
    assert {(node["scope"], node["runs"]) for node in ours["nodes"] if node["operator"] == "Gemm"} == {
        ("first", "int8"),
        ("second", "int8"),
    }
    assert {*ours} == {"target", "nodes", "share", "planned_share", "missed"}
    found = told("explain", foreign)
    assert [(node["name"], node["operator"], node["runs"]) for node in found["nodes"]] == [
        ("here/there", "Gemm", "float"),
        ("Relu", "Relu", "fused"),
    ]
    assert "here/there" in clika_ref("explain", foreign, "--target", "ov").stdout


def written_by_another(path):
    """A file of two nodes, one of which has a slash in its name, and the other none."""
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in "xy")
    weight = onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "w")
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w"], ["h"], "here/there"),
        onnx.helper.make_node("Relu", ["h"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "foreign", [x], [y], [weight])
    opset = onnx.helper.make_opsetid("", 18)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
    return path


def test_explain_unreadable_file_rejected(tmp_path):
    """`explain` rejects unreadable and missing files, with the target of their suffix."""
    (tmp_path / "empty.onnx").touch()
    graph = onnx.helper.make_graph([onnx.helper.make_node("Nonsense", ["x"], ["y"])], "odd", [], [])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "odd.onnx")
    for name, status, said in (
        ("empty.onnx", 3, "holds no graph"),
        ("odd.onnx", 3, "ONNX Runtime .* cannot load "),
        ("absent.onnx", 2, "there is no file .*absent.onnx"),
    ):
        result = clika_ref("explain", tmp_path / name)
        assert result.exit_code == status, result.output
        assert re.match(f"error: .*{said}", result.stderr)
    assert "there is no file absent.xml" in clika_ref("explain", "absent.xml").stderr
    assert clika_ref("explain", tmp_path / "odd.onnx", "--target", "ov").exit_code == 3


def test_openvino_file_explained_and_compared(tmp_path):
    """OpenVINO's own files are explained and compared, but not by another target."""
    place = tmp_path / "q.xml"
    assert clika_ref("export", "q.clika", "--target", "ov", "-o", place).exit_code == 0
    found = told("explain", place)
    assert found["target"] == "openvino"
    runs = {node["operator"]: node["runs"] for node in found["nodes"]}
    assert runs["MatMul"] == "int8", found
    same = told("compare", "q.clika", place, "--input", "talking_model:batches", "--at-least", 20)
    assert same["agrees"]
    assert told("compare", place, place)["inputs"] == 1
    for words in (("explain", place), ("compare", place, place)):
        result = clika_ref(*words, "--target", "ort")
        assert (result.exit_code, "is a file for openvino, and none that onnxruntime reads" in result.stderr) == (
            3,
            True,
        )
    result = clika_ref("inspect", place)
    assert result.exit_code == 2
    assert "is a file of a target's own form; `clika-ref explain` and `compare` read it" in result.stderr
    (tmp_path / "cut.xml").write_bytes(place.read_bytes()[:300])
    result = clika_ref("explain", tmp_path / "cut.xml")
    assert (result.exit_code, "OpenVINO" in result.stderr) == (3, True), result.output


def test_explain_operator_json_lists_facts():
    """`explain --json` lists the facts about an operator."""
    result = clika_ref("explain", "softplus", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"schema", "meaning", "ATen calls", "quantization", "ONNX lowering", "plugin"} <= {*found}


def test_explain_float_model_runs_in_float():
    """A float model is explained, without INT8 nodes."""
    found = told("explain", "talking_model:Net", "--input", "2x32")
    assert {node["runs"] for node in found["nodes"]} <= {"float", "fused"}
    assert (found["share"], found["missed"]) == (0.0, [])


# check


def test_check_reads_file_module_and_model():
    """`check` checks files, and the export of modules and models."""
    broken = told("check", "q.onnx", "--target", "trt", status=1)
    assert {*broken[0]} == {"rule", "node", "message"}
    assert told("check", "q.clika", "--target", "trt") == []
    assert told("check", "talking_model:Net", "--input", "2x32", "--target", "trt") == []
    shown = clika_ref("check", "q.clika", "--target", "trt")
    assert shown.stdout == "q.clika keeps all rules of trt\n"
    assert (
        clika_ref("check", "q.onnx", "--target", "trt")
        .stdout.splitlines()[-1]
        .startswith("q.onnx breaks rules of trt in")
    )


def test_check_without_target_exits_2():
    """`check` needs a target."""
    result = clika_ref("check", "q.onnx")
    assert (result.exit_code, result.stderr) == (2, "error: give --target: whose rules are to be kept\n")


# compare


def test_compare_rounding_or_sqnr_threshold_agrees(tmp_path):
    """Models agree within rounding, or from an SQNR of `--at-least`."""
    place = tmp_path / "f.onnx"
    assert clika_ref("compile", "talking_model:Net", "--input", "1x32", "--input", "2x32", "-o", place).exit_code == 0
    same = told("compare", "talking_model:Net", place, "--input", "float32:x.npy")
    assert (same["agrees"], same["inputs"]) == (True, 1)
    (output,) = same["outputs"]
    assert (output["name"], output["elements"], output["beyond_rounding"]) == ("output", 48, "")
    assert output["same_decisions"] == 1.0
    other = told("compare", place, "q.onnx", "--input", "talking_model:batches", status=1)
    assert (other["agrees"], other["inputs"], other["at_least_db"]) == (False, 5, None)
    assert other["outputs"][0]["beyond_rounding"].startswith("off by ")
    assert other["outputs"][0]["sqnr_db"] > 20
    assert told("compare", place, "q.onnx", "--input", "talking_model:batches", "--at-least", 20)["agrees"]
    told("compare", place, "q.onnx", "--input", "talking_model:batches", "--at-least", 90, status=1)


def test_compare_prints_table_and_draws_inputs():
    """`compare` prints a table and draws random inputs if none were given."""
    result = clika_ref("compare", "q.clika", "q.onnx")
    assert result.exit_code == 0, result.output
    heading, row = result.stdout.splitlines()
    assert heading.split("  ")[0] == "output"
    assert row.startswith("output")
    assert row.endswith("yes")
    assert result.stderr == "note: compared on random numbers; --input says on what else\n"
    assert (
        clika_ref("compare", "q.onnx", "q.onnx", "--target", "ort", "--target", "ov", "--at-least", 20).exit_code == 0
    )


@pytest.mark.parametrize("data", ["dictionaries", "dictionaries_in_tuples"])
def test_compare_model_with_dictionary_input(tmp_path, data):
    """A model with a dictionary input agrees with its artifact on the traced data."""
    place = tmp_path / "keyed.onnx"
    result = clika_ref("compile", "talking_model:Keyed", "--input", f"talking_model:{data}", "-o", place)
    assert result.exit_code == 0, result.output
    for one in ("dictionaries", "dictionaries_in_tuples"):
        assert told("compare", "talking_model:Keyed", place, "--input", f"talking_model:{one}")["agrees"]


def test_compare_batch_size_splits_arrays():
    """`--batch-size` splits arrays into batches."""
    found = told("compare", "q.clika", "q.onnx", "--input", "float32:x.npy", "--batch-size", 4)
    assert found["inputs"] == 2


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["talking_model:Net", "talking_model:Net"], 2, "give --input: nothing says what these models take"),
        (
            ["talking_model:Net", "talking_model:Wider", "--input", "1x32"],
            3,
            "output 0 is of shape [1, 8] in the first",
        ),
        (
            ["talking_model:Net", "q.onnx", "--input", "1x31"],
            3,
            "talking_model:Net raised RuntimeError on float32[1, 31]",
        ),
        (["q.onnx", "q.onnx", "--input", "y=1x32"], 3, "q.onnx takes x, and the call is {y: float32[1, 32]}"),
        (["q.onnx", "q.onnx", *["--target", "ort"] * 3], 2, "--target is given 3 times for two models"),
        (["q.clika"], 2, "give a second model, or --target once for each target that a saved module is for"),
        (["q.onnx", "--target", "ort"], 2, "q.onnx is an ONNX file; give two models to compare, or a saved module"),
        (
            ["q.onnx", "q.onnx", "--target", "toaster"],
            2,
            "cannot use the target 'toaster': no installed plugin provides it",
        ),
    ],
)
def test_compare_misuse_reports_reason(words, status, message):
    """Models and arguments that cannot be compared exit with a message."""
    result = clika_ref("compare", *words)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_compare_targets_of_saved_module(tmp_path):
    """`compare` lists targets of a saved module, and exits with 1 if one is unsupported."""
    rows = told("compare", "q.clika", "--target", "ort", "--target", "trt")
    assert [row["target"] for row in rows] == ["onnxruntime", "tensorrt, emulated by ONNX Runtime"]
    assert {"layers", "of_layers", "bytes", "sqnr", "share", "seconds", "ratio", "refusal"} <= {*rows[0]}
    words = ("--weights-only", "--weights-bits", 8, "--threshold", 1e9, "--save", tmp_path / "eight", "--keep-inputs")
    assert clika_ref("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words).exit_code == 0
    result = clika_ref("compare", tmp_path / "eight", "--target", "ort", "--target", "trt")
    assert result.exit_code == 1
    assert "unsupported: see below" in result.stdout


# targets


def test_targets_lists_capabilities():
    """`targets` lists the capabilities of each target."""
    shown = clika_ref("targets")
    assert shown.exit_code == 0, shown.output
    (row,) = (line for line in shown.stdout.splitlines() if line.strip().startswith("onnxruntime "))
    assert f"onnxruntime {onnxruntime.__version__}" in row
    assert "4 or 8 bits" in row
    found = told("targets")
    rows = {row["name"]: row for row in found["targets"]}
    assert {*rows} == {"onnxruntime", "openvino", "tensorrt", "tensorrt-llm"}
    assert (rows["openvino"]["short"], rows["openvino"]["suffixes"]) == ("ov", [".onnx", ".xml"])
    assert (rows["tensorrt"]["emulated_by"], rows["tensorrt"]["has_rules"]) == ("ONNX Runtime", True)
    assert (rows["tensorrt"]["weights_only"], rows["onnxruntime"]["weights_only"]) == ([4], [4, 8])
    assert found["failures"] == []
    assert {*rows["onnxruntime"]} == {
        *("name", "short", "plugin", "runtime", "runtime_version", "emulated_by", "missing"),
        *("values", "weights", "weights_only", "suffixes", "has_rules"),
    }


def test_targets_missing_runtime_suggests_install(monkeypatch):
    """A target without its runtime reports the package to install."""
    monkeypatch.setattr("clika_ref_openvino.target.find_spec", lambda _: None)
    assert "openvino is not installed; pip install openvino" in clika_ref("targets").stdout


# compile


def test_compile_settings_file_notes_ignored_keys(made, tmp_path):
    """`compile` uses a settings file and prints a note about ignored settings."""
    (tmp_path / "clika.yaml").write_text(
        "deployment_settings:\n  target_framework: trt\n  shapes:\n    batch: [1, 2, 4]\n"
        "global_quantization_settings:\n  weights_num_bits: 8\n"
    )
    words = ("--input", "1x32", "--input", "2x32", "-o", tmp_path / "f.onnx", "--settings", tmp_path / "clika.yaml")
    result = clika_ref("compile", "talking_model:Net", *words)
    assert result.exit_code == 0, result.output
    assert "note: compile leaves the model float, and global_quantization_settings of" in result.stderr
    (script,) = tmp_path.glob("*.trtexec.sh")
    assert "4x32" in script.read_text()


def test_compile_saved_module_rejected():
    """`compile` rejects a saved module and suggests `export`."""
    result = clika_ref("compile", "q.clika", "--input", "1x32", "-o", "m.onnx")
    said = "compile takes what Python makes, and `clika-ref export` writes artifacts of saved modules"
    assert (result.exit_code, result.stderr) == (2, f"error: q.clika is a saved module; {said}\n")


def test_compile_dry_run_json_matches_table(made, monkeypatch):
    """A dry run as JSON has the data of its tables."""
    words = ("talking_model:Net", "--input", "1x32", "--input", "2x32", "--dry-run")
    found = told("compile", *words)
    assert (found["target"], found["name"]) == ("onnxruntime", "Net")
    assert found["operators"] == [
        {"operator": "linear", "nodes": 2, "refusal": None},
        {"operator": "relu", "nodes": 1, "refusal": None},
    ]
    assert found["symbols"] == ["batch: 0.. from dim 0 of 'x'"]
    target = sys.modules["clika_ref_onnxruntime.target"].OnnxRuntime
    monkeypatch.setattr(
        target, "unsupported_reason", lambda self, node: "no relu here" if node.op_type == "relu" else None
    )
    assert told("compile", *words)["operators"][1]["refusal"] == "no relu here"
    assert "no relu here" in clika_ref("compile", *words).stdout


def test_export_disagreeing_artifact_exits_1(monkeypatch, tmp_path):
    """An artifact that disagrees exits with 1 and leaves no file."""
    target = sys.modules["clika_ref_onnxruntime.target"]
    right = target.OnnxRuntimeRunner.__call__
    monkeypatch.setattr(target.OnnxRuntimeRunner, "__call__", lambda self, x: [y + 1 for y in right(self, x)])
    result = clika_ref("export", "q.clika", "-o", tmp_path / "m.onnx")
    assert result.exit_code == 1, result.output
    assert "cannot verify the artifact" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_compile_unsupported_node_exits_3(monkeypatch, tmp_path):
    """A node that the target does not support exits with 3 and leaves no file."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,example")
    words = ("--input", "1x32", "-o", tmp_path / "m", "--target", "interpreter")
    result = clika_ref("compile", "talking_model:Random", *words)
    assert result.exit_code == 3, result.output
    assert "rand draws random numbers" in result.stderr
    assert list(tmp_path.iterdir()) == []
