"""The baseline: equal records have no differences, and each kind of change is found and named."""

import copy
import json

import onnx
import pytest
from typer.testing import CliRunner

from releasing.baseline.artifacts import digest_graph
from releasing.baseline.commands import STARTING_COMMIT, app
from releasing.baseline.comparing import compare_records, environment_warnings, rename, show_differences
from releasing.baseline.json_outputs import normalize_json
from releasing.baseline.networks import NETWORKS, QUICK_NETWORKS
from releasing.baseline.recording import part_names, read_record, write_record
from releasing.baseline.variants import record_network

PART = "networks/shared-layer"


def record_one():
    part = record_network(NETWORKS["shared-layer"], variants=["float"], targets=["onnxruntime"])
    signatures = {"top level": {"f": "(x)", "g": "(y)"}}
    return {"header": {"commit": "0" * 40, "torch": "2.13"}, "parts": {PART: part, "signatures": signatures}}


@pytest.fixture(scope="module")
def recorded_network():
    return record_one()


@pytest.fixture
def changed_record(recorded_network):
    return copy.deepcopy(recorded_network)


def show_report(before, after):
    return "\n".join(show_differences(compare_records(before, after)))


def test_record_network_twice_gives_equal_records(recorded_network):
    """Two records of the same network are equal."""
    again = record_one()
    assert "model.onnx" in recorded_network["parts"][PART]["variants"]["float"]["onnxruntime"]["files"]
    assert compare_records(recorded_network, again) == []


def test_compare_records_other_file_or_graph_reported(recorded_network, changed_record):
    """A changed file is reported, with a changed or an equal graph."""
    files = changed_record["parts"][PART]["variants"]["float"]["onnxruntime"]["files"]
    digest, graph = files["model.onnx"].split()
    files["model.onnx"] = f"{digest[::-1]} {graph}"
    assert "model.onnx: bytes differ, graph is equal\n      in shared-layer/float/onnxruntime" in show_report(
        recorded_network, changed_record
    )
    files["model.onnx"] = f"{digest[::-1]} {graph[::-1]}"
    assert "model.onnx: graph differs" in show_report(recorded_network, changed_record)
    del files["model.onnx"]
    assert "networks, removed: 1\n  files / model.onnx" in show_report(recorded_network, changed_record)


def test_compare_records_other_state_dict_reported(recorded_network, changed_record):
    """A changed, added or removed state dict entry is reported."""
    tensors = changed_record["parts"][PART]["tensors"]
    index = tensors.index("head.weight: float32[4, 16]")
    tensors[index] = "head.weight: float32[4, 8]"
    assert "state_dict / head.weight: float32[4, 16] -> float32[4, 8]" in show_report(recorded_network, changed_record)
    tensors[index] = "last.weight: float32[4, 16]"
    found = show_report(recorded_network, changed_record)
    assert "networks, added: 1\n  state_dict / last.weight" in found
    assert "networks, removed: 1\n  state_dict / head.weight" in found


def test_compare_records_failing_variant_reported(recorded_network, changed_record):
    """A variant that fails is reported with its error."""
    changed_record["parts"][PART]["variants"]["float"]["onnxruntime"] = {"error": "ModelError: no"}
    assert "error: ModelError: no" in show_report(recorded_network, changed_record)


def test_compare_records_missing_part_reported(recorded_network, changed_record):
    """A missing part is reported."""
    del changed_record["parts"][PART]
    assert f"networks, removed: 1\n  not in the other record\n      in {PART}" in show_report(
        recorded_network, changed_record
    )


def test_compare_records_renamed_signature_equal_with_map(recorded_network, changed_record):
    """A renamed signature is equal if the map of renames has it."""
    changed_record["parts"]["signatures"]["top level"] = {"first": "(x)", "g": "(y)"}
    found = show_report(recorded_network, changed_record)
    assert "signatures, added: 1\n  first: (x)" in found
    assert "signatures, removed: 1\n  f: (x)" in found
    assert compare_records(rename(recorded_network, {"f": "first"}), changed_record) == []


def test_environment_warnings_other_version(recorded_network, changed_record):
    """Another version in the environment gives a warning."""
    assert environment_warnings(recorded_network, changed_record) == []
    changed_record["header"] |= {"torch": "2.14", "commit": "1" * 40}
    assert environment_warnings(recorded_network, changed_record) == ["torch: recorded with 2.13, now 2.14"]


def test_compare_command_differences_exit_1(recorded_network, changed_record, tmp_path):
    """The command exits with 1 if the records differ."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write_record(recorded_network, before)
    write_record(changed_record, after)
    assert read_record(before) == json.loads(json.dumps(recorded_network))
    done = CliRunner().invoke(app, ["compare", str(before), str(after)])
    assert (done.exit_code, done.output) == (0, "0 differences in 2 parts from 000000000000\n")
    changed_record["parts"]["signatures"]["top level"]["g"] = "(y, z)"
    write_record(changed_record, after)
    done = CliRunner().invoke(app, ["compare", str(before), str(after)])
    assert done.exit_code == 1
    assert "signatures, changed: 1\n  g: (y) -> (y, z)" in done.output
    done = CliRunner().invoke(app, ["compare", str(before), str(after), "--only", "networks/*"])
    assert done.exit_code == 0
    done = CliRunner().invoke(app, ["compare", str(before), str(after), "--only", "nothing"])
    assert done.exit_code == 2


def test_digest_graph_ignores_metadata_only():
    node = onnx.helper.make_node("Relu", ["x"], ["y"], name="relu")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "net", values[:1], values[1:]), producer_name="one")
    digest = digest_graph(model.SerializeToString())
    model.producer_name = "other"
    model.graph.node[0].metadata_props.add(key="clika.scope", value="block")
    model.graph.input[0].doc_string = "the input"
    assert digest_graph(model.SerializeToString()) == digest
    model.graph.node[0].op_type = "Abs"
    assert digest_graph(model.SerializeToString()) != digest


def test_normalize_json_removes_times_only():
    """Times are removed and floats are rounded; all else is kept."""
    given = {"seconds": {"Writing": 0.1, "Fusing": 0.2}, "ratio": None, "sqnr": 12.3456789, "rows": [{"seconds": 2.0}]}
    wanted = {"seconds": ["Fusing", "Writing"], "ratio": None, "sqnr": 12.3457, "rows": [{"seconds": "<time>"}]}
    assert normalize_json(given) == wanted


def test_part_names_thirty_networks_by_pattern():
    """There are 30 networks, and patterns select their parts."""
    assert len(NETWORKS) == 30
    assert set(QUICK_NETWORKS) < set(NETWORKS)
    assert part_names("lstm") == ["networks/lstm"]
    assert part_names("commands/*") == ["commands/convolutional", "commands/linear", "commands/installation"]
    assert len(part_names(is_quick=True)) == len(QUICK_NETWORKS) + 2


def test_read_record_starting_commit_has_every_part():
    """The starting commit has a record of every part."""
    assert set(read_record(STARTING_COMMIT)["parts"]) == set(part_names())
