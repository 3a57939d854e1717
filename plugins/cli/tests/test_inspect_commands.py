"""The commands ``inspect`` and ``explain`` on a small model: text and JSON output, and exit statuses."""

import json
import re

import numpy as np
import onnx
import pytest
from command_folder import run_command, run_json

pytestmark = pytest.mark.usefixtures("_enter_quantized_folder")


# inspect


def test_inspect_model_module_onnx_same_json_keys(tmp_path):
    """`inspect` shows models, saved modules and ONNX files, with the same JSON keys."""
    shown = run_command("inspect", "talking_model:Net", "--input", "1x32", "--input", "2x32")
    assert shown.exit_code == 0, shown.output
    assert "graph Net(%x: float32[batch, 32])" in shown.stdout
    assert " = linear(" in shown.stdout
    assert "talking_model.py:" in shown.stdout
    saved, file = run_command("inspect", "q.clika"), run_command("inspect", "q.onnx")
    assert saved.stdout.splitlines()[-1].endswith("quantized for onnxruntime: see `clika-ref explain`")
    assert "QuantizeLinear" in file.stdout
    assert "x: float32[batch, 32]" in file.stdout.splitlines()[0]
    forms = [
        run_json("inspect", "talking_model:Net", "--input", "1x32", "--input", "2x32"),
        run_json("inspect", "q.clika"),
        run_json("inspect", "q.onnx"),
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
        (["talking_model:Net"], 2, "cannot compile talking_model:Net: --input is missing. Give a shape such as"),
        (["talking_model.py"], 2, "cannot load 'talking_model.py': it is not of the form module:factory. Write for"),
        (["talking_model:Nets", "--input", "1x32"], 2, "has no 'Nets'. Did you mean Net?"),
        (["junk.onnx"], 3, "cannot read junk.onnx as ONNX: "),
        (["x.npy"], 3, "cannot load 'x.npy': it is not a safetensors file"),
        (["empty.onnx"], 3, "cannot read empty.onnx as ONNX: it contains no graph. Give a complete ONNX file."),
        (["absent"], 2, "cannot load absent: there is no such file. For a Python model, give its module and factory"),
        (["q.clika", "--input", "1x32"], 2, "cannot trace q.clika: it is already compiled. Omit --input"),
        (["q.onnx", "--input", "1x32"], 2, "cannot trace q.onnx: it is already compiled. Omit --input"),
        (["q.onnx", "--picture", "q.svg"], 2, "cannot use q.onnx: it is an ONNX file. Give a Python model or a saved"),
        (["q.clika", "--picture", "q.jpg"], 2, "--picture: cannot write a picture to 'q.jpg': the name ends in '.jpg'"),
        (
            ["q.clika", "--picture", "gone/q.svg"],
            2,
            "--picture: cannot write gone/q.svg: there is no folder gone. Create it first.",
        ),
    ],
)
def test_inspect_misuse_reports_reason(quantized_folder, words, status, message):
    """Wrong arguments of `inspect` exit with a message."""
    (quantized_folder.folder / "junk.onnx").write_bytes(b"junk")
    (quantized_folder.folder / "empty.onnx").touch()
    result = run_command("inspect", *words)
    assert result.exit_code == status, result.output
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def test_inspect_picture_without_visualizer_names_package(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    result = run_command("inspect", "q.clika", "--picture", tmp_path / "net.svg")
    assert result.exit_code == 3
    assert result.stderr == (
        "error: --picture: no loaded plugin draws pictures and writes reports (loaded: aten, cleanup, onnxruntime). "
        "Run pip install clika-ref-visualize (in a clone: pip install plugins/visualize; from wheels: add --find-links "
        "FOLDER). $CLIKA_REF_PLUGINS limits which plugins are loaded.\n"
    )


def test_inspect_picture_writes_svg(tmp_path):
    """`inspect --picture` writes an SVG file."""
    place = tmp_path / "net.svg"
    result = run_command("inspect", "q.clika", "--picture", place)
    assert (result.exit_code, result.stdout) == (0, f"{place}  {place.stat().st_size / 1e3:.1f} KB\n"), result.output
    assert b"</svg>" in place.read_bytes()
    found = run_json("inspect", "talking_model:Net", "--input", "1x32", "--picture", tmp_path / "other")
    assert (found["picture"], len(found["nodes"])) == (str(tmp_path / "other.svg"), 3)
    assert (tmp_path / "other.svg").exists()
    assert run_json("inspect", "q.clika")["picture"] is None


# explain


def test_explain_saved_module_reports_int8_per_target():
    """`explain` reports the INT8 nodes of a saved module, for its target and for others."""
    shown = run_command("explain", "q.clika")
    assert shown.exit_code == 0, shown.output
    assert "onnxruntime: 2 of 2 nodes planned as quantized run quantized" in shown.stdout
    found = run_json("explain", "q.clika", "--target", "ov")
    assert {*found} == {"target", "nodes", "share", "planned_share", "not_quantized", "speed"}
    assert (found["target"], found["planned_share"]) == ("openvino", 1.0)
    facts = {"name", "scope", "operator", "macs", "planned", "runs", "reason", "is_between_int8", "time_share"}
    assert {*found["nodes"][0]} == facts
    assert {*found["speed"][0]} == {"threads", "ratio", "is_faster"}


def test_explain_onnx_file_own_and_foreign(tmp_path):
    """`explain` reports the precision of nodes in our ONNX files and in others."""
    ours, foreign = run_json("explain", "q.onnx"), write_foreign_file(tmp_path / "foreign.onnx")
    assert {(node["scope"], node["runs"]) for node in ours["nodes"] if node["operator"] == "Gemm"} == {
        ("first", "int8"),
        ("second", "int8"),
    }
    assert {*ours} == {"target", "nodes", "share", "planned_share", "not_quantized", "speed"}
    found = run_json("explain", foreign)
    assert [(node["name"], node["operator"], node["runs"]) for node in found["nodes"]] == [
        ("here/there", "Gemm", "float"),
        ("Relu", "Relu", "fused"),
    ]
    assert "here/there" in run_command("explain", foreign, "--target", "ov").stdout


def write_foreign_file(path):
    """Write a file of two nodes: the name of one has a slash, the name of the other has none."""
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
        ("empty.onnx", 3, "contains no graph"),
        ("odd.onnx", 3, "ONNX Runtime .* cannot load "),
        ("absent.onnx", 2, "cannot load .*absent.onnx: there is no such file"),
    ):
        result = run_command("explain", tmp_path / name)
        assert result.exit_code == status, result.output
        assert re.match(f"error: .*{said}", result.stderr)
    assert "cannot load absent.xml: there is no such file" in run_command("explain", "absent.xml").stderr
    assert run_command("explain", tmp_path / "odd.onnx", "--target", "ov").exit_code == 3


def test_openvino_file_explained_and_compared(tmp_path):
    """OpenVINO's own files are explained and compared, but not by another target."""
    place = tmp_path / "q.xml"
    assert run_command("export", "q.clika", "--target", "ov", "-o", place).exit_code == 0
    found = run_json("explain", place)
    assert found["target"] == "openvino"
    runs = {node["operator"]: node["runs"] for node in found["nodes"]}
    assert runs["MatMul"] == "int8", found
    same = run_json("compare", "q.clika", place, "--input", "talking_model:batches", "--min-sqnr", 20)
    assert same["agrees"]
    assert run_json("compare", place, place)["inputs"] == 1
    for words in (("explain", place), ("compare", place, place)):
        result = run_command(*words, "--target", "ort")
        assert (
            result.exit_code,
            "with onnxruntime: its format is that of openvino. Give --target openvino." in result.stderr,
        ) == (
            3,
            True,
        )
    result = run_command("inspect", place)
    assert result.exit_code == 2
    assert "it is a file in a target's own format. Use `clika-ref explain` or `clika-ref compare`." in result.stderr
    (tmp_path / "cut.xml").write_bytes(place.read_bytes()[:300])
    result = run_command("explain", tmp_path / "cut.xml")
    assert (result.exit_code, "OpenVINO" in result.stderr) == (3, True), result.output


def test_explain_operator_json_lists_facts():
    """`explain --json` lists the facts about an operator."""
    result = run_command("explain", "softplus", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"schema", "meaning", "ATen calls", "quantization", "ONNX lowering", "plugin"} <= {*found}


def test_explain_float_model_runs_in_float():
    """A float model is explained, without INT8 nodes."""
    found = run_json("explain", "talking_model:Net", "--input", "2x32")
    assert {node["runs"] for node in found["nodes"]} <= {"float", "fused"}
    assert (found["share"], found["not_quantized"]) == (0.0, [])
