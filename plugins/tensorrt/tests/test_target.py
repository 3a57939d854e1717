"""TensorRT as a target: files that keep its rules, the command beside them, and what it refuses."""

import copy
import os
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path

import onnx
import pytest
import sympy
import torch
from clika_ref_tensorrt.profiles import command
from clika_ref_tensorrt.rules import violations
from clika_ref_tensorrt.scheme import OF_WEIGHTS
from clika_ref_tensorrt.target import TensorRt
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn import functional as F
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt

from clika_ref import (
    ClikaCompileOptions,
    ClikaModule,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.symbols import Guard, Side, Symbol, named
from clika_ref.core.types import TensorType
from clika_ref.quantization.calibration import Reservoir
from clika_ref.target_comparison import TargetComparison
from clika_ref.wanted import Wanted


class Net(nn.Module):
    """What rules speak of: residuals, one of them projected, what is joined, a transposed convolution, a linear one."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.two, self.side = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.joined, self.up, self.head = nn.Conv2d(16, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(4, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 2)
        y = F.relu(self.one(x) + x)
        y = F.relu(self.two(y) + self.side(x))
        y = F.relu(self.joined(torch.cat([x, y], 1)))
        return self.head(self.up(y).mean((2, 3)))


def images(*counts):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(count, 3, 16, 16, generator=generator) for count in counts]


def compiled(**settings):
    torch.manual_seed(0)
    return clika_compile(
        Net().eval(),
        tracing_inputs=images(1, 6),
        calibration_inputs=images(2, 4, 4, 4),
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(**settings),
    ).eval()


def test_a_file_keeps_the_rules_and_the_command_that_builds_an_engine_has_the_sizes_that_were_seen(tmp_path):
    module = compiled()
    artifact = module.clika_export(tmp_path / "net.onnx")  # which compares it with the module
    assert violations(onnx.load(artifact.path)) == []
    assert (tmp_path / "net.onnx.trtexec.sh").read_text() == (
        '#!/bin/sh\ncd "$(dirname "$0")" || exit\n'
        "trtexec --onnx=net.onnx --saveEngine=net.onnx.engine --minShapes=x:1x3x16x16 "
        "--optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16\n"
    )
    found = module.clika_explain()
    assert found.target == "tensorrt, emulated by ONNX Runtime"
    assert found.share() == found.share(planned=True) == 1.0


def test_onnx_itself_computes_what_the_module_does_as_what_stands_in_for_tensorrt_does(tmp_path):
    module, (x,) = compiled(), images(2)
    artifact = module.clika_export(tmp_path / "net.onnx")
    model = onnx.version_converter.convert_version(onnx.load(artifact.path), 21)  # its evaluator knows no older pairs
    found = {
        "onnx": torch.from_numpy(ReferenceEvaluator(model).run(None, {"x": x.numpy()})[0]),
        "stand-in": TensorRt().load(artifact)([x])[0],
    }
    with torch.no_grad():
        integers, exact = module(x), copy.deepcopy(module).train()(x)
    rounded = (integers - exact).square().sum()
    for name, result in found.items():
        assert (result - integers).square().sum() < 0.01 * rounded, name  # of which sums rounded otherwise are little


class JoinedWithConstants(nn.Module):
    """Joins values with a constant, twice, that is the weight of another layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Conv2d(8, 8, 1), nn.Conv2d(16, 4, 8)
        self.edge = nn.Parameter(3 * torch.randn(4, 4, 8, 8))

    def forward(self, x):
        return self.outer(torch.cat([self.edge, self.inner(x), self.edge], 1)) + F.conv2d(x[:, :4], self.edge)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_constants_that_are_joined_with_integers_are_integers_of_their_scale(tmp_path, is_loaded):
    data = [torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    module = clika_compile(
        JoinedWithConstants().eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    ).eval()
    if is_loaded:
        loaded = ClikaModule()
        loaded.load_state_dict(module.state_dict())
        assert torch.equal(loaded.eval()(data[0]), module(data[0]))
        module = loaded
    deployment = DeploymentSettings_TensorRT_ONNX()
    artifact = module.clika_export(tmp_path / "net.onnx", data[0], deployment_settings=deployment)
    assert violations(onnx.load(artifact.path)) == []


class SharedByJoins(nn.Module):
    """Joins one value with a far larger one, and with one as small as itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small, self.shared = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.one, self.other = nn.Conv2d(16, 8, 3), nn.Conv2d(16, 8, 3)

    def forward(self, x):
        large, small, shared = self.large(x) * 100, self.small(x), self.shared(x)
        return self.one(torch.cat([large, shared], 1)), self.other(torch.cat([shared, small], 1))


def test_what_several_joins_share_a_scale_of_covers_the_largest_of_them(tmp_path):
    data = [torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    module = clika_compile(
        SharedByJoins().eval(),
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    ).eval()
    with torch.no_grad():
        found, wanted = module(data[0])[0], SharedByJoins().eval()(data[0])[0]
    assert (found - wanted).square().sum() < 0.001 * wanted.square().sum()
    assert violations(onnx.load(module.clika_export(tmp_path / "net.onnx").path)) == []


def test_sizes_may_be_chosen_within_what_was_traced(tmp_path):
    artifact = compiled(shapes={"batch": (2, 8, 32)}).clika_export(tmp_path / "net.onnx")
    assert "--minShapes=x:2x3x16x16 --optShapes=x:8x3x16x16 --maxShapes=x:32x3x16x16" in artifact.facts["trtexec"]


def test_a_copy_is_exported_for_other_sizes_without_ranges(tmp_path):
    module = compiled()
    deployment = DeploymentSettings_TensorRT_ONNX(shapes={"batch": (2, 8, 32)})
    files = [
        twin.clika_export(tmp_path / name, deployment_settings=deployment)
        for twin, name in ((module, "own.onnx"), (copy.deepcopy(module), "copy.onnx"))
    ]
    assert files[0].path.read_bytes() == files[1].path.read_bytes()
    assert "--optShapes=x:8x3x16x16" in files[1].facts["trtexec"]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"height": (1, 2, 3)}, r"shapes: 'height' is no dynamic side of Net, which has 'batch'"),
        ({"batch": (-1, 2, 4)}, r"shapes: 'batch' is to be from -1 to 4, but the model was traced for"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_nothing_is_written(shapes, message, tmp_path):
    with pytest.raises(TargetError, match=message):
        compiled(shapes=shapes).clika_export(tmp_path / "net.onnx")
    assert not [*tmp_path.iterdir()]


def test_sides_that_are_named_anew_keep_the_sizes_that_were_seen(tmp_path):
    artifact = compiled().clika_export(tmp_path / "net.onnx", dynamic_axes={"x": {0: "N"}})
    assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16" in artifact.facts["trtexec"]


def test_sizes_beyond_what_is_kept_of_the_data_are_counted_and_copies_and_state_dicts_keep_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Reservoir, "offer", lambda self, inputs: self.batches.append(inputs) if not self.batches else None
    )
    module = compiled()
    assert len(module._clika_calibration.reservoir.batches) == 1
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    for exported in (module, copy.deepcopy(module), loaded):
        artifact = exported.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
        assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16" in artifact.facts["trtexec"]


def test_sizes_that_contradict_a_guard_are_refused(tmp_path):
    class Even(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] % 2 == 0 else x - 1

    module = clika_compile(Even(), tracing_inputs=[torch.ones(2, 8), torch.ones(6, 8)])
    (side,) = module.graph.symbols
    deployment = DeploymentSettings_TensorRT_ONNX(shapes={side: (3, 5, 7)})
    with pytest.raises(TargetError, match=r"shapes: \{.*: 3\} contradict .*, for which the model was traced"):
        module.clika_export(tmp_path / "net.onnx", deployment_settings=deployment)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"batch": (3, 2, 4)},
            r"shapes: 'batch' is to be \(3, 2, 4\); it takes the least, the usual and the largest of",
        ),
        ({"batch": (0, 0, 0)}, r"shapes: 'batch' is to be \(0, 0, 0\); it takes the least, the usual"),
        ({"batch": (1, 8)}, r"shapes: 'batch' is to be \(1, 8\); .*, which are whole numbers"),
        ({"batch": {1, 2, 8}}, r"shapes: 'batch' is to be \{.*\}; .*, which are whole numbers"),
        ({"batch": 8}, r"shapes: 'batch' is to be 8; .*, which are whole numbers"),
        ({"batch": "123"}, r"shapes: 'batch' is to be '123'; .*, which are whole numbers"),
        ({"batch": (1.5, 2, 3)}, r"shapes: 'batch' is to be \(1.5, 2, 3\); .*, which are whole numbers"),
        ({"batch": (True, True, True)}, r"shapes: 'batch' is to be \(True, True, True\); .*, which are whole numbers"),
        ([("batch", (1, 2, 3))], r"shapes is \[.*\]; it takes \{side: \(least, usual, largest\)\}"),
    ],
)
def test_what_says_no_sizes_is_refused_as_soon_as_it_is_given(shapes, message):
    with pytest.raises(ModelError, match=message):
        DeploymentSettings_TensorRT_ONNX(shapes=shapes)


def test_guards_over_sides_that_nobody_chose_are_not_asked():
    graph = Graph("two")
    n, m = named("n"), named("m")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n, m)), "x"))
    graph.symbols = {"n": Symbol("n", 1, None, Side("x", 0), 4), "m": Symbol("m", 1, None, Side("x", 1), 5)}
    graph.guards = [Guard(sympy.Eq(sympy.Mod(m, 2), 0), "model.py:1")]
    assert "--maxShapes=x:8x5" in command(graph, Path("net.onnx"), {}, {"n": (1, 4, 8)})
    with pytest.raises(TargetError, match=r"shapes: .* contradict "):
        command(graph, Path("net.onnx"), {}, {"m": (1, 4, 8)})


def test_of_sizes_that_are_as_frequent_the_least_is_usual_none_is_above_the_traced_and_what_is_static_has_none():
    graph = Graph("tied")
    n = named("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n, 3)), "x"))
    graph.symbols["n"] = Symbol("n", 1, None, Side("x", 0))
    seen = {"n": Counter({8: 2, 4: 2, 2: 1})}
    assert "--minShapes=x:2x3 --optShapes=x:4x3 --maxShapes=x:8x3" in command(graph, Path("net.onnx"), seen, {})
    graph.symbols["n"] = Symbol("n", 1, 16, Side("x", 0))
    with pytest.raises(TargetError, match=r"'n' is to be from 1 to 17, but the model was traced for 1\.\.16"):
        command(graph, Path("net.onnx"), {}, {"n": (1, 4, 17)})
    static = Graph("static")
    static.add_output(static.add_input(TensorType(torch.float32, (2, 3)), "x"))
    assert command(static, Path("net.onnx"), {}, {}) == "trtexec --onnx=net.onnx --saveEngine=net.onnx.engine"


def test_integers_that_are_lengths_have_the_range_of_their_values_and_others_have_none(tmp_path):
    def model(x, n, factor):
        return x[:, None].expand(9, n) * factor

    module = clika_compile(model, tracing_inputs=[(torch.rand(9), 3, 2), (torch.rand(9), 5, 4), (torch.rand(9), 3, 7)])
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:3 --optShapes=n:3 --maxShapes=n:5")


@pytest.mark.parametrize(
    "relation",
    [
        sympy.Eq(sympy.Mod(8, named("n")), 0),
        OpaqueUnaryFn_sqrt(named("n") - 1) >= 0,
        sympy.sqrt(named("n") - 1) >= 0,
    ],
)
def test_sizes_at_which_a_guard_has_no_value_are_refused(relation):
    graph = Graph("divided")
    n = named("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n,)), "x"))
    graph.symbols["n"] = Symbol("n", 0, None, Side("x", 0))
    graph.guards = [Guard(relation, "model.py:1")]
    with pytest.raises(TargetError, match=r"shapes: \{'n': 0\} contradict .*, for which the model was traced"):
        command(graph, Path("net.onnx"), {}, {"n": (0, 4, 8)})


def test_the_script_runs_one_command_whatever_the_file_is_called(tmp_path):
    folder = tmp_path / "of models"
    folder.mkdir()
    module = compiled()
    module.clika_export(folder / "my net; touch broken $(touch broken).onnx")
    (script,) = folder.glob("*.trtexec.sh")
    (tmp_path / "trtexec").write_text('#!/bin/sh\nfor part in "$@"; do echo "$part"; done\n')
    (tmp_path / "trtexec").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = subprocess.run([str(script)], env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[0] == "--onnx=my net; touch broken $(touch broken).onnx"
    assert not [*tmp_path.rglob("broken")]


def test_files_of_one_stem_have_scripts_and_engines_of_their_own(tmp_path):
    module = compiled()
    for name in ("net", "net.onnx", "net.v1"):
        line = module.clika_export(tmp_path / name).facts["trtexec"]
        assert f"--onnx={name} --saveEngine={name}.engine" in line
        assert (tmp_path / f"{name}.trtexec.sh").exists()


def test_names_that_trtexec_would_divide_are_refused(tmp_path):
    with pytest.raises(TargetError, match="separates by ',' and ':', which the input 'a:b' has in its name"):
        compiled().clika_export(tmp_path / "net.onnx", input_names=["a:b"])


def test_more_of_the_largest_than_can_be_found_are_refused_and_other_broken_rules_are_told(tmp_path):
    def exported(function):
        module = clika_compile(function, tracing_inputs=[torch.randn(4000)], logs_dir=tmp_path / "logs")
        return module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())

    message = r"topk in .*: it finds the largest 3,841, of which TensorRT takes 3,840 at most"
    with pytest.raises(TargetError, match=message):
        exported(lambda x: x.topk(3841)[0])
    exported(lambda x: x.topk(3840)[0])
    exported(lambda x: x.sort()[0])
    told = "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    assert "Warning: net.onnx breaks rules of tensorrt in 1 places:" in told
    assert told.count("breaks rules of") == 1, "of three exports"
    assert "[top-k] output/TopK: K is 4000; at most 3840 are taken" in told


def test_numbers_of_64_bits_are_refused(tmp_path):
    module = clika_compile(
        nn.Linear(3, 2).double(),
        tracing_inputs=[torch.ones(1, 3, dtype=torch.float64)],
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    )
    with pytest.raises(TargetError, match="float64, which TensorRT does not take; compile the model in float32"):
        module.clika_export(tmp_path / "net.onnx")


@pytest.mark.parametrize(
    ("deployment", "bits", "block"),
    [
        (DeploymentSettings_TensorRT_ONNX(), 4, 64),
        (DeploymentSettings_TensorRT_LLM_ONNX(), 4, 128),
        (DeploymentSettings_TensorRT_LLM_ONNX(), 8, 0),
    ],
)
def test_weights_alone_are_held_in_few_bits(deployment, bits, block, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 128)
    settings = QuantizationSettings(
        prefer_weights_only_quantization=True,
        weights_num_bits=bits,
        weights_only_quantization_block_size=block,
        automatic_skip_quantization=False,
    )
    module = clika_compile(
        nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)).eval(),
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=settings,
        deployment_settings=deployment,
    ).eval()
    artifact = module.clika_export(tmp_path / "net.onnx")
    model = onnx.load(artifact.path)
    held = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(held) == 2
    assert load_registry().targets[deployment.target].check(artifact.path) == []
    assert [n.runs for n in module.clika_explain().nodes if n.products] == [f"int{bits} weights"] * 2
    assert [v.rule for v in violations(model)] == ([] if bits == 4 else ["all-inputs"] * 2)


@pytest.mark.parametrize(
    ("deployment", "wish", "planned"),
    [
        (DeploymentSettings_TensorRT_LLM_ONNX(), None, "int8 weights"),
        (DeploymentSettings_TensorRT_LLM_ONNX(), False, "int8"),
        (DeploymentSettings_TensorRT_ONNX(), None, "int8"),
    ],
)
def test_tensorrt_llm_quantizes_weights_alone_unless_its_user_wants_more(deployment, wish, planned):
    torch.manual_seed(0)
    x = torch.randn(4, 32)
    settings = QuantizationSettings(prefer_weights_only_quantization=wish, automatic_skip_quantization=False)
    module = clika_compile(
        nn.Linear(32, 32).eval(),
        tracing_inputs=[x],
        calibration_inputs=[x],
        quantization_settings=settings,
        deployment_settings=DeploymentSettings_TensorRT_ONNX(),
    )
    assert [n.planned for n in module.clika_explain(deployment).nodes if n.products] == [planned]


def test_bits_of_values_that_stay_float_are_refused():
    message = r"prefer_weights_only_quantization leaves values between layers float, and activations_num_bits=4"
    with pytest.raises(ModelError, match=message):
        Wanted(TensorRt("tensorrt-llm", OF_WEIGHTS), QuantizationSettings(activations_num_bits=4))


def test_a_branch_of_operators_that_nobody_knows_is_told_and_ends_nothing():
    make = onnx.helper.make_node
    value = partial(onnx.helper.make_tensor_value_info, elem_type=onnx.TensorProto.FLOAT, shape=[2])
    kinds = {"then_branch": ("Abs", ""), "else_branch": ("Odd", "com.microsoft")}
    graphs = {
        name: onnx.helper.make_graph([make(kind, ["x"], ["end"], kind, domain=domain)], name, [], [value("end")])
        for name, (kind, domain) in kinds.items()
    }
    flag = onnx.helper.make_tensor_value_info("flag", onnx.TensorProto.BOOL, [])
    graph = onnx.helper.make_graph(
        [make("If", ["flag"], ["y"], "choice", **graphs)], "if", [flag, value("x")], [value("y")]
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[*map(onnx.helper.make_opsetid, ["", "com.microsoft"], [18, 1])]
    )
    assert [(v.rule, v.node) for v in violations(model)] == [("known-operators", "Odd")]


def test_what_is_emulated_is_not_timed_neither_for_a_table_nor_to_decide():
    (row,) = compiled().clika_compare_targets(DeploymentSettings_TensorRT_ONNX()).rows
    assert (row.seconds, row.ratio, row.share) == (None, None, 1.0)
    assert "not measured: emulated" in str(TargetComparison([row]))
    message = "optimize_for='latency' times layers, but tensorrt is emulated by ONNX Runtime here.* optimize_for='size'"
    with pytest.raises(TargetError, match=message):
        Wanted(TensorRt(), QuantizationSettings(), options=ClikaCompileOptions(optimize_for="latency"))
