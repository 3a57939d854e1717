"""``clika_export``: names, dynamic dims, complete files only, and the comparison afterwards."""

import copy
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from clika_ref_cleanup import fold_batch_norm
from onnx_sessions import open_session
from torch import nn
from torch._higher_order_ops import while_loop

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


def make_element(*shape):
    return (torch.randn(shape), torch.randn(1))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return clika_compile(Net(), tracing_inputs=[make_element(2, 3, 8, 8), make_element(3, 3, 9, 8)])


def shapes_by_name(values):
    return {v.name: v.shape for v in values}


def test_clika_export_names_and_dims_from_signature(module, tmp_path):
    """Input names come from the signature, dims from the symbols."""
    artifact = module.clika_export(tmp_path / "model.onnx")
    run = open_session(artifact.path)
    assert shapes_by_name(run.get_inputs()) == {"image": ["batch", 3, "image_2", 8], "scale": [1]}
    assert [v.shape[1] for v in run.get_outputs()] == [40, 8]
    assert artifact.input_names == ("image", "scale")
    assert list(artifact.output_names) == [v.name for v in run.get_outputs()]


def test_clika_export_file_matches_module_at_other_sizes(module, tmp_path):
    """The file computes the results of the module at other sizes."""
    run = open_session(module.clika_export(str(tmp_path / "model.onnx")).path)
    image, scale = make_element(5, 3, 11, 8)
    with torch.no_grad():
        expected = module(image, scale)
    logits, features = run.run(None, {"image": image.numpy(), "scale": scale.numpy()})
    np.testing.assert_allclose(logits, expected["logits"].numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(features, expected["features"].numpy(), rtol=1e-4, atol=1e-5)


def test_clika_export_given_names_used(module, tmp_path):
    """Given input and output names are used."""
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=["x", "head"], output_names=["image", "conv2d"])
    run = open_session(artifact.path)
    assert [v.name for v in run.get_inputs()] == ["x", "head"]
    assert [v.name for v in run.get_outputs()] == ["image", "conv2d"]


@pytest.mark.parametrize("empty", [None, []])
def test_clika_export_empty_names_use_signature(module, tmp_path, empty):
    """Empty lists of names mean the names of the signature."""
    artifact = module.clika_export(tmp_path / "m.onnx", input_names=empty, output_names=empty)
    assert artifact.input_names == ("image", "scale")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"input_names": ["a"]},
            r"input_names is \['a'\]\. Give 2 distinct names; the defaults are \['image', 'scale'\]",
        ),
        ({"input_names": ["a", "a"]}, "Give 2 distinct names"),
        ({"output_names": ["a", "b", "c"]}, r"output_names is \['a', 'b', 'c'\]. Give 2 distinct names"),
        (
            {"dynamic_axes": {"picture": [0]}},
            r"dynamic_axes contains 'picture', but the inputs are \['image', 'scale'\]",
        ),
        ({"dynamic_axes": {"image": [7]}}, "dynamic_axes contains axis 7 of 'image', which has 4 dims"),
        (
            {"dynamic_axes": {"image": [3]}},
            r"axis 3 of 'image', but the graph was traced for .*Compile with tracing inputs that",
        ),
        ({"example_inputs": (torch.randn(2, 3, 8, 8),)}, "argument 'scale' is missing|do not match"),
        ({"example_inputs": make_element(2, 3, 8, 9)}, "dim 3 must be 8"),
        ({"file": 3}, "file is 3, a int. Give a path such as 'model.onnx'"),
    ],
)
def test_clika_export_invalid_arguments_write_no_file(module, tmp_path, arguments, message):
    """Invalid arguments raise an error with valid values, and no file is written."""
    with pytest.raises(ModelError, match=message):
        module.clika_export(**{"file": tmp_path / "model.onnx", **arguments})
    assert list(tmp_path.iterdir()) == []


def test_clika_export_dynamic_axes_name_and_fix_dims(module, tmp_path):
    """Dynamic axes name dims and fix the others."""
    example = make_element(2, 3, 10, 8)
    artifact = module.clika_export(tmp_path / "m.onnx", example, dynamic_axes={"image": {0: "items"}})
    assert shapes_by_name(open_session(artifact.path).get_inputs())["image"] == ["items", 3, 10, 8]


def test_clika_export_dynamic_axes_lists_and_negative(module, tmp_path):
    """Dynamic axes may be lists and negative."""
    artifact = module.clika_export(tmp_path / "m.onnx", dynamic_axes={"image": [-2]})
    image = shapes_by_name(open_session(artifact.path).get_inputs())["image"]
    assert isinstance(image[0], int)
    assert image[2] == "image_2"


def test_clika_export_no_dynamic_axes_static_file(module, tmp_path):
    """Empty dynamic axes give a static file."""
    artifact = module.clika_export(tmp_path / "m.onnx", make_element(4, 3, 9, 8), dynamic_axes={})
    assert shapes_by_name(open_session(artifact.path).get_inputs())["image"] == [4, 3, 9, 8]


def test_clika_export_keeps_stored_graph(module, tmp_path):
    """An export does not change the stored graph and weights."""
    before, state = str(module.graph), {k: v.clone() for k, v in module.state_dict().items()}
    module.clika_export(tmp_path / "m.onnx", input_names=["a", "b"], dynamic_axes={"image": [0]})
    assert str(module.graph) == before
    assert all(torch.equal(v, state[k]) for k, v in module.state_dict().items())


def test_clika_export_example_inputs_any_form(module, tmp_path):
    """Example inputs have any form of tracing inputs."""
    image, scale = make_element(2, 3, 8, 8)
    written = set[bytes]()
    for example in ((image, scale), {"image": image, "scale": scale}, (image, {"scale": scale})):
        written.add(module.clika_export(tmp_path / "m.onnx", example).path.read_bytes())
    assert len(written) == 1


def test_clika_export_external_data_next_to_file(tmp_path):
    """External data is written next to the file, with a relative location."""
    torch.manual_seed(0)
    module = clika_compile(Net(), tracing_inputs=[make_element(2, 3, 8, 8)], external_data=True)
    path = module.clika_export(tmp_path / "model.onnx").path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    model = onnx.load(str(path), load_external_data=False)
    locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert locations == {"model.onnx.data"}, "a relative place, so that both can be moved together"
    open_session(path)


def test_clika_export_symlink_writes_to_its_target(tmp_path):
    """An export to a symlink writes to its target, and the artifact has that path."""
    real, link = tmp_path / "real" / "m.onnx", tmp_path / "link.onnx"
    real.parent.mkdir()
    link.symlink_to(real)
    module = clika_compile(nn.Linear(64, 64), tracing_inputs=[torch.rand(2, 64)], external_data=True)
    artifact = module.clika_export(link)
    assert artifact.path == real
    assert link.is_symlink()
    assert sorted(p.name for p in real.parent.iterdir()) == ["m.onnx", "m.onnx.data"]
    open_session(artifact.path)


def test_clika_export_runtime_error_names_final_path(module, existing_file, monkeypatch):
    """An error of the runtime names the path of the artifact, and the old file is kept."""
    monkeypatch.setattr(writing, "MODEL_GRAPH", 9)  # a field that the format does not have
    with pytest.raises(TargetError, match=rf"ONNX Runtime .* cannot load {existing_file}: ") as caught:
        module.clika_export(existing_file)
    assert ".clika-" not in str(caught.value)
    assert_old_file_alone(existing_file)


def test_clika_export_node_metadata_has_module_and_line(module, tmp_path):
    """The metadata of nodes has module and source line."""
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
def test_clika_export_same_bytes_in_any_process(tmp_path, monkeypatch):
    """The same model gives the same bytes in any process and folder."""
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
def existing_file(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(OLD)
    return path


def assert_old_file_alone(path):
    assert path.read_bytes() == OLD
    assert [p.name for p in path.parent.iterdir()] == [path.name], "a temporary file was left"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_clika_export_interrupted_write_keeps_old_file(module, existing_file, monkeypatch, error):
    """An interrupted write keeps the old file."""

    def raise_error(*_):
        raise error

    monkeypatch.setattr(os, "fsync", raise_error)
    with pytest.raises(error):
        module.clika_export(existing_file)
    assert_old_file_alone(existing_file)


def test_clika_export_full_disk_keeps_old_file(module, existing_file, monkeypatch):
    """A full disk raises an error with the free space and keeps the old file."""

    def raise_full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", raise_full_disk)
    with pytest.raises(
        ModelError,
        match=r"cannot write .*model.onnx': the disk is full .*MB are free\)\. The old file is unchanged\. Free some",
    ):
        module.clika_export(existing_file)
    assert_old_file_alone(existing_file)


def test_clika_export_unwritable_path_rejected(module, tmp_path):
    """A missing folder or a folder as path raises an error."""
    with pytest.raises(ModelError, match=r"cannot write .*absent' does not exist. Create it, or choose another path"):
        module.clika_export(tmp_path / "absent" / "model.onnx")
    with pytest.raises(ModelError, match=r"it is a folder. Add a file name"):
        module.clika_export(tmp_path)


@pytest.mark.parametrize(
    ("name", "deployment", "message"),
    [
        (
            "m.xml",
            None,
            r"files of onnxruntime end in \.onnx\. For \.xml, use deployment_settings of openvino\.$",
        ),
        ("m.engine", DeploymentSettings_TensorRT_ONNX(), r"files of tensorrt end in \.onnx\. Use \.onnx\.$"),
        (
            "m.bin",
            DeploymentSettings_OpenVINO_ONNX(),
            r"files of openvino end in \.onnx or \.xml\. Use \.onnx or \.xml\.$",
        ),
    ],
)
def test_clika_export_wrong_suffix_rejected_before_work(name, deployment, message, module, tmp_path):
    """A suffix of another target raises an error before any work."""
    link = tmp_path / "link.onnx"
    link.symlink_to(tmp_path / name)
    for path in (tmp_path / name, link):
        with pytest.raises(ModelError, match=rf"cannot write '{path}': {message}"):
            module.clika_export(path, input_names="what is looked at later", deployment_settings=deployment)
    assert [*tmp_path.iterdir()] == [link]


def test_clika_export_no_suffix_accepted(module, tmp_path):
    """A file without a suffix is accepted."""
    assert module.clika_export(tmp_path / "model").path.exists()


def double_lowering(op: Operator) -> Operator:
    """Return the operator with a lowering that computes twice the result."""
    lower = op.lowering

    def emit_doubled(builder, *operands, **attrs):
        result = lower(builder, *operands, **attrs)
        return builder.Add(result, result)

    made = Operator.__new__(type(op))
    made.__dict__.update(vars(op))
    made.lowering = emit_doubled
    return made


def test_clika_export_mismatch_names_first_node(module, tmp_path):
    """A mismatch raises an error that names the first node that differs."""
    (node,) = [n for n in module.clika_state.graph.nodes if n.op.name == "sigmoid"]
    node.op = double_lowering(node.op)
    with pytest.raises(TargetError) as caught:
        module.clika_export(tmp_path / "m.onnx")
    text = str(caught.value)
    assert "onnxruntime returns other results than the module for input 1: output" in text
    assert "The first node that differs is sigmoid (sigmoid) in body.1 at test_export.py:" in text
    assert "The file was not moved into place. Compile with compare_after_export=False to inspect it" in text
    assert list(tmp_path.iterdir()) == []


def test_clika_export_mismatch_reported_without_node(module, tmp_path, monkeypatch):
    """A mismatch is reported even if the node cannot be found."""

    def raise_target_error(*_):
        raise TargetError("the probe does not load")

    monkeypatch.setattr(artifact_check, "find_first_difference", raise_target_error)
    (node,) = [n for n in module.clika_state.graph.nodes if n.op.name == "sigmoid"]
    node.op = double_lowering(node.op)
    message = (
        r"other results than the module .*\. The first node that differs is unknown: the probe does not load\. The"
    )
    with pytest.raises(TargetError, match=message):
        module.clika_export(tmp_path / "m.onnx")


def test_clika_export_copy_compared_on_distinct_elements(tmp_path):
    """A copy without examples is compared on distinct elements, so that topk has no ties."""
    module = clika_compile(lambda x: x.topk(3, -1), tracing_inputs=[torch.rand(4, 5), torch.rand(5, 6)])
    copy.deepcopy(module).clika_export(tmp_path / "topk.onnx")
    assert (tmp_path / "topk.onnx").exists()


def test_compute_in_float64_graph_with_fp16_casts():
    """A graph with casts to float16 is computed in float64 with its bias."""

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


def test_compute_in_float64_graph_with_body_and_integers():
    """Constants of bodies and float results of integers are computed in float64, too."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, steps):
            positions = torch.arange(4) + 0.5
            start = (torch.zeros((), dtype=torch.int64), x)
            return while_loop(lambda i, _: i < steps, lambda i, y: (i + 1, self.layer(y) @ positions.diag()), start)[1]

    original, inputs = Repeated(), [torch.randn(2, 4), torch.tensor(3)]
    module = clika_compile(original, tracing_inputs=[tuple(inputs)], discard_input_model=False)
    (exact,) = artifact_check.compute_in_float64(module.graph, inputs)
    wide, expected = original.layer.double(), inputs[0].double()
    for _ in range(3):
        expected = wide(expected) * torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64)
    torch.testing.assert_close(exact, expected)


def test_clika_export_comparison_disabled(tmp_path):
    """The comparison can be disabled with `compare_after_export=False`."""
    module = clika_compile(Net(), tracing_inputs=[make_element(2, 3, 8, 8)], compare_after_export=False)
    (node,) = [n for n in module.clika_state.graph.nodes if n.op.name == "sigmoid"]
    node.op = double_lowering(node.op)
    assert module.clika_export(tmp_path / "m.onnx").path.exists()


def test_clika_export_missing_lowerings_listed_together(module, tmp_path):
    """All nodes without a lowering are reported in one error."""
    for node in module.clika_state.graph.nodes:
        if node.op.name in {"sigmoid", "mean"}:
            node.op = double_lowering(node.op)
            node.op.lowering = None
    with pytest.raises(
        TargetError, match=r"(?s)cannot run 2 nodes of Net:.*sigmoid in body.1 at .*mean in <root> at .*"
    ):
        module.clika_export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_clika_export_logged_in_logs_dir(tmp_path):
    """An export is logged in `logs_dir`."""
    module = clika_compile(Net(), tracing_inputs=[make_element(2, 3, 8, 8)], logs_dir=tmp_path / "logs")
    module.clika_export(tmp_path / "m.onnx")
    text = "".join(p.read_text() for p in sorted((tmp_path / "logs").iterdir()))
    assert f"Saved final model: {tmp_path / 'm.onnx'}" in text


def test_clika_export_varying_integer_becomes_input(tmp_path):
    """An integer that differs between the tracing inputs is an input of the file."""

    def multiply(x, n):
        return x * n

    module = clika_compile(multiply, tracing_inputs=[(torch.randn(2), 3), (torch.randn(2), 5)])
    run = open_session(module.clika_export(tmp_path / "m.onnx").path)
    assert {v.name: v.type for v in run.get_inputs()}["n"] == "tensor(int64)"
    x = np.ones(2, dtype=np.float32)
    np.testing.assert_array_equal(run.run(None, {"x": x, "n": np.array(7)})[0], x * 7)


def test_clika_export_input_constant_repeated_outputs(tmp_path):
    """Outputs that are inputs, constants or repeated are in the file."""

    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            y = x + 1
            return y, x, self.weight, y, None, torch.tensor([1.0, 2.0])

    module = clika_compile(Passing(), tracing_inputs=[torch.randn(2), torch.randn(3)])
    run = open_session(module.clika_export(tmp_path / "m.onnx").path)
    x = np.arange(4, dtype=np.float32)
    found = run.run(None, {"x": x})
    expected = [t.detach().numpy() for t in module(torch.from_numpy(x)) if t is not None]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_find_operator_finds_each_by_name(module):
    """Each operator of a graph is found by its name."""
    for node in module.clika_state.graph.nodes:
        assert find_operator(node.op.name, {node.op.name: node.op}, torchlib_operator) is node.op


def test_clika_export_relative_string_path_accepted(module, tmp_path, monkeypatch):
    """A relative path as a string is accepted."""
    monkeypatch.chdir(tmp_path)
    module.clika_export("here.onnx")
    assert Path("here.onnx").exists()


def compile_relu():
    return clika_compile(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), tracing_inputs=[torch.rand(2, 3), torch.rand(4, 3)])


def test_clika_export_dynamic_axes_use_given_names(tmp_path):
    """Dynamic axes refer to the given names, outputs included."""
    axes = {"img": {0: "n"}, "out": {0: "n"}}
    compile_relu().clika_export(tmp_path / "a.onnx", input_names=["img"], output_names=["out"], dynamic_axes=axes)
    compile_relu().clika_export(tmp_path / "b.onnx", dynamic_axes={"input": [0], "output": [0]})
    (side, _) = onnx.load(tmp_path / "a.onnx").graph.output[0].type.tensor_type.shape.dim
    assert side.dim_param == "n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_names": ["o", "p"]}, r"Give 1 distinct names; the defaults are \['output'\]"),
        ({"output_names": ["input"]}, r"output_names contains \['input'\], which are names of inputs"),
        ({"dynamic_axes": ["input"]}, r"dynamic_axes is \['input'\]. Give \{input: \[axis"),
        ({"dynamic_axes": {"x": [0]}}, r"contains 'x', but the inputs are \['input'\], the outputs \['output'\]"),
    ],
)
def test_clika_export_mismatched_names_and_axes_rejected(tmp_path, options, message):
    """Names and axes that do not match the graph raise an error."""
    with pytest.raises(ModelError, match=message):
        compile_relu().clika_export(tmp_path / "m.onnx", **options)


def test_clika_export_rejected_artifact_keeps_old_file(module, tmp_path):
    """A rejected artifact leaves the old file."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    (node,) = [n for n in module.clika_state.graph.nodes if n.op.name == "sigmoid"]
    node.op = double_lowering(node.op)
    with pytest.raises(TargetError):
        module.clika_export(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_clika_export_weights_cast_after_compile_rejected(tmp_path):
    """Weights that were cast after the compilation raise an error."""
    with pytest.raises(ModelError, match=r"cast after compilation \(.*is torch\.float16 now\)"):
        compile_relu().half().clika_export(tmp_path / "m.onnx")


def test_clika_export_model_without_tensors_rejected(tmp_path):
    """A model that returns no tensor raises an error."""
    with pytest.raises(ModelError, match=r"returns no tensor. Return at least one"):
        clika_compile(lambda x: 5, tracing_inputs=[torch.rand(2)]).clika_export(tmp_path / "m.onnx")


def test_clika_export_weight_keeps_name(tmp_path):
    """A weight keeps its name if lowerings add constants."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant_0 = nn.Parameter(torch.randn(3))

        def forward(self, constant_1):
            return constant_1.clamp(-1, 1) * self.constant_0

    clika_compile(Named(), tracing_inputs=[torch.randn(3)]).clika_export(tmp_path / "m.onnx")
    assert "constant_0" in {t.name for t in onnx.load(tmp_path / "m.onnx").graph.initializer}


def test_clika_export_check_passes_covers_fuse_passes(tmp_path, monkeypatch):
    """`check_passes` also checks passes that fold weights."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    module = clika_compile(model, tracing_inputs=[torch.rand(1, 3, 8, 8)], check_passes=True)
    module.clika_export(tmp_path / "m.onnx")
    honest = fold_batch_norm.fold_weight
    monkeypatch.setattr(fold_batch_norm, "fold_weight", lambda *a, **b: honest(*a, **b) * 1.0001)
    with pytest.raises(PassError, match="pass fold-batch-norm: it declares the error class dot, but changed output 0"):
        module.clika_export(tmp_path / "m.onnx")
