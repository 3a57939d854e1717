"""``clika_export``: names, dynamic sides, files that appear whole or not at all, and the comparison afterwards."""

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from clika_ref_cleanup import fold_batch_norm
from torch import nn

from clika_ref import DeploymentSettings_OpenVINO_ONNX, DeploymentSettings_TensorRT_ONNX, clika_compile
from clika_ref.core.errors import ModelError, PassError, TargetError
from clika_ref.core.operators import Operator
from clika_ref.export import artifact_check
from clika_ref.onnx_export import writing
from clika_ref.onnx_export.generic_operators import find_operator, torchlib_operator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.body = nn.Sequential(nn.BatchNorm2d(8), nn.Sigmoid())
        self.head = nn.Linear(8, 40)

    def forward(self, image, scale):
        features = self.body(self.conv(image)).mean((2, 3))
        return {"logits": self.head(features) * scale, "features": features}


def element(*shape):
    return (torch.randn(shape), torch.randn(1))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return clika_compile(Net(), tracing_inputs=[element(2, 3, 8, 8), element(3, 3, 9, 8)])


def session(path):
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def shapes(values):
    return {v.name: v.shape for v in values}


def test_names_come_from_the_signature_and_sides_from_the_symbols(module, tmp_path):
    artifact = module.clika_export(tmp_path / "model.onnx")
    run = session(artifact.path)
    assert shapes(run.get_inputs()) == {"image": ["batch", 3, "image_2", 8], "scale": [1]}
    assert [v.shape[1] for v in run.get_outputs()] == [40, 8]
    assert artifact.input_names == ("image", "scale")
    assert list(artifact.output_names) == [v.name for v in run.get_outputs()]


def test_the_file_computes_what_the_module_computes_at_other_sizes(module, tmp_path):
    run = session(module.clika_export(str(tmp_path / "model.onnx")).path)
    image, scale = element(5, 3, 11, 8)
    with torch.no_grad():
        expected = module(image, scale)
    logits, features = run.run(None, {"image": image.numpy(), "scale": scale.numpy()})
    np.testing.assert_allclose(logits, expected["logits"].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features, expected["features"].numpy(), rtol=1e-4, atol=1e-5)


def test_names_can_be_given(module, tmp_path):
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=["x", "head"], output_names=["image", "conv2d"])
    run = session(artifact.path)
    assert [v.name for v in run.get_inputs()] == ["x", "head"]
    assert [v.name for v in run.get_outputs()] == ["image", "conv2d"]


@pytest.mark.parametrize("empty", [None, []])
def test_no_names_mean_those_of_the_signature(module, tmp_path, empty):
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=empty, output_names=empty)
    assert artifact.input_names == ("image", "scale")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_names": ["a"]},
            r"input_names=\['a'\] must be 2 different names; by default they are \['image', 'scale'\]",
        ),
        ({"input_names": ["a", "a"]}, "must be 2 different names"),
        ({"output_names": ["a", "b", "c"]}, r"output_names=\['a', 'b', 'c'\] must be 2 different names"),
        ({"dynamic_axes": {"picture": [0]}}, r"dynamic_axes names 'picture'; the inputs are \['image', 'scale'\]"),
        ({"dynamic_axes": {"image": [7]}}, "dynamic_axes names axis 7 of 'image', which has 4 sides"),
        (
            {"dynamic_axes": {"image": [3]}},
            r"axis 3 of 'image', but the graph was made for .*compile with tracing inputs that",
        ),
        ({"example_inputs": (torch.randn(2, 3, 8, 8),)}, "argument 'scale' is missing|do not match"),
        ({"example_inputs": element(2, 3, 8, 9)}, "dim 3 must be 8"),
        ({"file": 3}, "file is 3, a int; give a path such as 'model.onnx'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_what_fits_and_nothing_is_written(module, tmp_path, arguments, message):
    with pytest.raises(ModelError, match=message):
        module.clika_export(**{"file": tmp_path / "model.onnx", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_dynamic_axes_keep_and_name_sides_and_fix_the_others(module, tmp_path):
    example = element(2, 3, 10, 8)
    artifact = module.clika_export(tmp_path / "m.onnx", example, dynamic_axes={"image": {0: "items"}})
    assert shapes(session(artifact.path).get_inputs())["image"] == ["items", 3, 10, 8]


def test_dynamic_axes_may_be_lists_and_negative(module, tmp_path):
    artifact = module.clika_export(tmp_path / "m.onnx", dynamic_axes={"image": [-2]})
    image = shapes(session(artifact.path).get_inputs())["image"]
    assert isinstance(image[0], int)
    assert image[2] == "image_2"


def test_no_dynamic_axes_at_all_make_a_static_file(module, tmp_path):
    artifact = module.clika_export(tmp_path / "m.onnx", element(4, 3, 9, 8), dynamic_axes={})
    assert shapes(session(artifact.path).get_inputs())["image"] == [4, 3, 9, 8]


def test_the_stored_graph_is_the_same_after_an_export(module, tmp_path):
    before, state = str(module.graph), {k: v.clone() for k, v in module.state_dict().items()}
    module.clika_export(tmp_path / "m.onnx", input_names=["a", "b"], dynamic_axes={"image": [0]})
    assert str(module.graph) == before
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


def test_example_inputs_take_every_form_of_tracing_inputs(module, tmp_path):
    image, scale = element(2, 3, 8, 8)
    for example in ((image, scale), {"image": image, "scale": scale}, (image, {"scale": scale})):
        module.clika_export(tmp_path / "m.onnx", example)


def test_weights_go_beside_the_file_on_request(tmp_path):
    torch.manual_seed(0)
    module = clika_compile(Net(), tracing_inputs=[element(2, 3, 8, 8)], external_data=True)
    path = module.clika_export(tmp_path / "model.onnx").path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    model = onnx.load(str(path), load_external_data=False)
    locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert locations == {"model.onnx.data"}, "a relative place, so that both can be moved together"
    session(path)


def test_behind_a_link_the_artifact_tells_where_it_and_its_weights_really_are(tmp_path):
    real, link = tmp_path / "real" / "m.onnx", tmp_path / "link.onnx"
    real.parent.mkdir()
    link.symlink_to(real)
    module = clika_compile(nn.Linear(64, 64), tracing_inputs=[torch.rand(2, 64)], external_data=True)
    artifact = module.clika_export(link)
    assert artifact.path == real
    assert link.is_symlink()
    assert sorted(p.name for p in real.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    session(artifact.path)


def test_what_a_runtime_says_of_the_artifact_names_its_place(module, target, monkeypatch):
    monkeypatch.setattr(writing, "MODEL_GRAPH", 9)  # a field that the format does not have
    with pytest.raises(TargetError, match=rf"ONNX Runtime .* cannot load {target}: ") as caught:
        module.clika_export(target)
    assert ".clika-" not in str(caught.value)
    assert_old_file_alone(target)


def test_the_module_tree_is_kept_in_the_metadata_of_nodes(module, tmp_path):
    model = onnx.load(str(module.clika_export(tmp_path / "m.onnx").path))
    (sigmoid,) = [n for n in model.graph.node if n.op_type == "Sigmoid"]
    assert {p.key: p.value.partition(":")[0] for p in sigmoid.metadata_props} == {
        "clika.scope": "body.1",
        "clika.source": "test_export.py",
    }
    onnx.checker.check_model(model, full_check=True)


EXPORTING = """
import sys, torch
from clika_ref import clika_compile
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
        self.table = torch.randn(8)
    def forward(self, items):
        x = self.norm(self.conv(items["b"])).mean((2, 3)) + self.table
        return {"z": x, "a": torch.softmax(x + items["a"], -1)}
inputs = [{"items": {"b": torch.randn(n, 3, 8, n), "a": torch.randn(n, 8)}} for n in (4, 5)]
clika_compile(Net(), tracing_inputs=inputs).clika_export(sys.argv[1])
"""


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes_in_any_process_and_folder(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(EXPORTING)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, str(script), "model.onnx"], cwd=there, env=environment, check=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", [str(script), "model.onnx"])
    runpy.run_path(str(script))
    data = (here / "model.onnx").read_bytes()
    assert data == (there / "model.onnx").read_bytes()
    assert str(tmp_path).encode() not in data


OLD = b"the old file"


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(OLD)
    return path


def assert_old_file_alone(path):
    assert path.read_bytes() == OLD
    assert [p.name for p in path.parent.iterdir()] == [path.name], "something was left behind"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_while_writing_keeps_the_old_file(module, target, monkeypatch, error):
    def interrupted(*_):
        raise error

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(error):
        module.clika_export(target)
    assert_old_file_alone(target)


def test_a_full_disk_keeps_the_old_file_and_says_how_much_is_free(module, target, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        ModelError, match=r"cannot write .*model.onnx': no more bytes fit there .*MB are free\); free some"
    ):
        module.clika_export(target)
    assert_old_file_alone(target)


def test_paths_that_cannot_be_written_are_refused(module, tmp_path):
    with pytest.raises(ModelError, match=r"cannot write .*absent' does not exist; create it, or choose another path"):
        module.clika_export(tmp_path / "absent" / "model.onnx")
    with pytest.raises(ModelError, match="it is a folder; add a file name"):
        module.clika_export(tmp_path)


@pytest.mark.parametrize(
    ("name", "deployment", "message"),
    [
        (
            "m.xml",
            None,
            "files of onnxruntime end in .onnx, and those of openvino in .xml: deployment_settings of openv",
        ),
        ("m.engine", DeploymentSettings_TensorRT_ONNX(), "files of tensorrt end in .onnx$"),
        ("m.bin", DeploymentSettings_OpenVINO_ONNX(), "files of openvino end in .onnx or .xml$"),
    ],
)
def test_files_that_end_as_none_of_the_target_are_refused_before_any_work(name, deployment, message, module, tmp_path):
    link = tmp_path / "link.onnx"
    link.symlink_to(tmp_path / name)
    for path in (tmp_path / name, link):
        with pytest.raises(ModelError, match=rf"cannot write '{path}': {message}"):
            module.clika_export(path, input_names="what is looked at later", deployment_settings=deployment)
    assert [*tmp_path.iterdir()] == [link]


def test_a_file_without_a_suffix_is_any_target_s(module, tmp_path):
    assert module.clika_export(tmp_path / "model").path.exists()


def broken(op: Operator) -> Operator:
    """Return the operator with a lowering that computes twice as much."""
    lower = op.lowering

    def doubled(builder, *operands, **attrs):
        result = lower(builder, *operands, **attrs)
        return builder.Add(result, result)

    made = Operator.__new__(type(op))
    made.__dict__.update(vars(op))
    made.lowering = doubled
    return made


def test_a_mismatch_is_an_error_that_names_the_first_node_at_fault(module, tmp_path):
    (node,) = [n for n in module.graph.nodes if n.op.name == "sigmoid"]
    node.op = broken(node.op)
    with pytest.raises(TargetError) as caught:
        module.clika_export(tmp_path / "m.onnx")
    text = str(caught.value)
    assert "onnxruntime computes something else than the module on input 1: output" in text
    assert "The first node that differs is sigmoid (sigmoid) in body.1 at test_export.py:" in text
    assert "No file was put in place; compile with compare_after_export=False to look at one" in text
    assert list(tmp_path.iterdir()) == []


def test_a_mismatch_is_told_though_the_node_at_fault_cannot_be_found(module, tmp_path, monkeypatch):
    def failing(*_):
        msg = "the probe does not load"
        raise TargetError(msg)

    monkeypatch.setattr(artifact_check, "find_first_difference", failing)
    (node,) = [n for n in module.graph.nodes if n.op.name == "sigmoid"]
    node.op = broken(node.op)
    message = (
        r"something else than the module .*\. Which node is at fault could not be found: the probe does not load\. No"
    )
    with pytest.raises(TargetError, match=message):
        module.clika_export(tmp_path / "m.onnx")


def test_a_copy_without_examples_is_compared_on_elements_that_differ(tmp_path):
    """All ones tie in ``topk``, whose choice among them is anybody's."""
    module = clika_compile(lambda x: x.topk(3, -1), tracing_inputs=[torch.rand(4, 5), torch.rand(5, 6)])
    copy.deepcopy(module).clika_export(tmp_path / "topk.onnx")
    assert (tmp_path / "topk.onnx").exists()


def test_a_graph_with_casts_to_half_precision_is_computed_in_float64_too():
    """A mismatch of such a model was an error of the comparison itself: float16 operands met a float64 bias."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.float16):
                return self.second(self.first(x))

    original, x = Half(), torch.randn(2, 8)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    (exact,) = artifact_check.compute_in_float64(module.graph, [x])
    wide = original.second.double()(original.first.double()(x.double()))
    torch.testing.assert_close(exact, wide)


def test_the_comparison_can_be_switched_off(tmp_path):
    module = clika_compile(Net(), tracing_inputs=[element(2, 3, 8, 8)], compare_after_export=False)
    (node,) = [n for n in module.graph.nodes if n.op.name == "sigmoid"]
    node.op = broken(node.op)
    assert module.clika_export(tmp_path / "m.onnx").path.exists()


def test_nodes_without_a_lowering_are_refused_all_at_once(module, tmp_path):
    for node in module.graph.nodes:
        if node.op.name in {"sigmoid", "mean"}:
            node.op = broken(node.op)
            node.op.lowering = None
    with pytest.raises(
        TargetError, match=r"(?s)cannot run 2 nodes of Net:.*sigmoid in body.1 at .*mean in <root> at .*"
    ):
        module.clika_export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_exports_are_logged_beside_the_compilation(tmp_path):
    module = clika_compile(Net(), tracing_inputs=[element(2, 3, 8, 8)], logs_dir=tmp_path / "logs")
    module.clika_export(tmp_path / "m.onnx")
    text = "".join(p.read_text() for p in sorted((tmp_path / "logs").iterdir()))
    assert f"Saved final model: {tmp_path / 'm.onnx'}" in text


def test_integers_that_differ_are_inputs_of_the_file(tmp_path):
    def repeated(x, n):
        return x * n

    module = clika_compile(repeated, tracing_inputs=[(torch.randn(2), 3), (torch.randn(2), 5)])
    run = session(module.clika_export(tmp_path / "m.onnx").path)
    assert {v.name: v.type for v in run.get_inputs()}["n"] == "tensor(int64)"
    x = np.ones(2, dtype=np.float32)
    np.testing.assert_array_equal(run.run(None, {"x": x, "n": np.array(7)})[0], x * 7)


def test_outputs_that_are_inputs_constants_or_repeated_are_in_the_file(tmp_path):
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            y = x + 1
            return y, x, self.weight, y, None, torch.tensor([1.0, 2.0])

    module = clika_compile(Passing(), tracing_inputs=[torch.randn(2), torch.randn(3)])
    run = session(module.clika_export(tmp_path / "m.onnx").path)
    x = np.arange(4, dtype=np.float32)
    found = run.run(None, {"x": x})
    expected = [t.detach().numpy() for t in module(torch.from_numpy(x)) if t is not None]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_operator_can_be_found_again_by_name(module):
    for node in module.graph.nodes:
        assert find_operator(node.op.name, {node.op.name: node.op}, torchlib_operator) is node.op


def test_a_path_may_be_relative_and_a_string(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module.clika_export("here.onnx")
    assert Path("here.onnx").exists()


def relu():
    return clika_compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), tracing_inputs=[torch.rand(2, 3), torch.rand(4, 3)])


def test_dynamic_axes_speak_of_the_names_in_the_file_outputs_included(tmp_path):
    axes = {"img": {0: "n"}, "out": {0: "n"}}
    relu().clika_export(tmp_path / "a.onnx", input_names=["img"], output_names=["out"], dynamic_axes=axes)
    relu().clika_export(tmp_path / "b.onnx", dynamic_axes={"input": [0], "output": [0]})
    (side, _) = onnx.load(tmp_path / "a.onnx").graph.output[0].type.tensor_type.shape.dim
    assert side.dim_param == "n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_names": ["o", "p"]}, r"must be 1 different names; by default they are \['output'\]"),
        ({"output_names": ["input"]}, r"output_names \['input'\] are names of inputs already"),
        ({"dynamic_axes": ["input"]}, r"dynamic_axes is \['input'\]; give \{input: \[axis"),
        ({"dynamic_axes": {"x": [0]}}, r"names 'x'; the inputs are \['input'\], the outputs \['output'\]"),
    ],
)
def test_names_and_axes_that_do_not_fit_are_refused(tmp_path, options, message):
    with pytest.raises(ModelError, match=message):
        relu().clika_export(tmp_path / "m.onnx", **options)


def test_an_artifact_that_is_rejected_leaves_the_old_one(module, tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    (node,) = [n for n in module.graph.nodes if n.op.name == "sigmoid"]
    node.op = broken(node.op)
    with pytest.raises(TargetError):
        module.clika_export(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_weights_that_were_cast_later_are_not_written_under_old_types(tmp_path):
    with pytest.raises(ModelError, match=r"cast after the module was compiled \(.*is torch\.float16 now\)"):
        relu().half().clika_export(tmp_path / "m.onnx")


def test_a_model_without_tensors_has_nothing_to_export(tmp_path):
    with pytest.raises(ModelError, match="returns no tensor, so there is nothing to export"):
        clika_compile(lambda x: 5, tracing_inputs=[torch.rand(2)]).clika_export(tmp_path / "m.onnx")


def test_a_weight_keeps_its_name_whatever_constants_the_lowerings_add(tmp_path):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant_0 = nn.Parameter(torch.randn(3))

        def forward(self, constant_1):
            return constant_1.clamp(-1, 1) * self.constant_0

    clika_compile(Named(), tracing_inputs=[torch.randn(3)]).clika_export(tmp_path / "m.onnx")
    assert "constant_0" in {t.name for t in onnx.load(tmp_path / "m.onnx").graph.initializer}


def test_checked_passes_include_those_that_fold_weights(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    module = clika_compile(model, tracing_inputs=[torch.rand(1, 3, 8, 8)], check_passes=True)
    module.clika_export(tmp_path / "m.onnx")
    honest = fold_batch_norm.fold_weight
    monkeypatch.setattr(fold_batch_norm, "fold_weight", lambda *a, **b: honest(*a, **b) * 1.0001)
    with pytest.raises(PassError, match="pass fold-batch-norm: it declares the error class dot, but changed output 0"):
        module.clika_export(tmp_path / "m.onnx")
