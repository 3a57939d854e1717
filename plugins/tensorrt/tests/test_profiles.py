"""Optimization profiles with the sizes of a TensorRT engine, and the script that builds it."""

import copy
import os
import re
import subprocess
from pathlib import Path

import pytest
import sympy
import torch
from clika_ref_tensorrt.profiles import choose_profile, trtexec_command
from networks import compile_net
from torch import nn
from torch.utils._sympy.functions import OpaqueUnaryFn_sqrt

from clika_ref import (
    ClikaModule,
    DeploymentSettings_TensorRT_LLM_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    clika_compile,
)
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.quantization.calibration.calibrator import Reservoir


def test_shapes_within_traced_sizes_set_profile(tmp_path):
    """Sizes may be chosen within the traced ones."""
    artifact = compile_net(shapes={"batch": (2, 8, 32)}).clika_export(tmp_path / "net.onnx")
    assert "--minShapes=x:2x3x16x16 --optShapes=x:8x3x16x16 --maxShapes=x:32x3x16x16" in artifact.facts["trtexec"]


def test_shapes_set_profile_of_weight_only_engine(tmp_path):
    """An engine with low-bit weights is built for chosen sizes too."""
    deployment = DeploymentSettings_TensorRT_LLM_ONNX(shapes={"batch": (2, 8, 32)})
    artifact = compile_net().clika_export(tmp_path / "net.onnx", deployment_settings=deployment)
    assert "--minShapes=x:2x3x16x16 --optShapes=x:8x3x16x16 --maxShapes=x:32x3x16x16" in artifact.facts["trtexec"]


def test_clika_export_copy_for_other_sizes_without_min_max(tmp_path):
    """A copy is exported for other sizes without observed min/max."""
    module = compile_net()
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
        ({"height": (1, 2, 3)}, r"shapes: 'height' is not a dynamic dim of Net, which has 'batch'"),
    ],
)
def test_shapes_unknown_dim_raises_and_writes_nothing(shapes, message, tmp_path):
    """Sizes of an unknown dim raise, and nothing is written."""
    with pytest.raises(TargetError, match=message):
        compile_net(shapes=shapes).clika_export(tmp_path / "net.onnx")
    assert not [*tmp_path.iterdir()]


def test_dynamic_axes_renamed_dim_keeps_observed_sizes(tmp_path):
    """A dim that is renamed keeps the observed sizes."""
    artifact = compile_net().clika_export(tmp_path / "net.onnx", dynamic_axes={"x": {0: "N"}})
    assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16" in artifact.facts["trtexec"]


def test_shapes_by_exported_names_ignored_by_explain(tmp_path):
    """Sizes by exported names do not matter to explain and compare."""
    module, deployment = compile_net(), DeploymentSettings_TensorRT_ONNX(shapes={"N": (1, 4, 8)})
    artifact = module.clika_export(tmp_path / "net.onnx", dynamic_axes={"x": {0: "N"}}, deployment_settings=deployment)
    assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:8x3x16x16" in artifact.facts["trtexec"]
    assert module.clika_explain(deployment).share() == 1.0
    (row,) = module.clika_compare_targets(deployment).rows
    assert (row.share, row.unsupported_reason) == (1.0, "")
    with pytest.raises(TargetError, match="shapes: 'N' is not a dynamic dim of Net, which has 'batch'"):
        module.clika_export(tmp_path / "other.onnx", deployment_settings=deployment)


def test_calibration_counts_sizes_beyond_reservoir(tmp_path, monkeypatch):
    """Sizes of batches not kept are counted, and copies and state dicts keep them."""
    monkeypatch.setattr(
        Reservoir, "offer", lambda self, inputs: self.batches.append(inputs) if not self.batches else None
    )
    module = compile_net()
    assert len(module.clika_state.calibration.reservoir.batches) == 1
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    for exported in (module, copy.deepcopy(module), loaded):
        artifact = exported.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
        assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16" in artifact.facts["trtexec"]


def test_shapes_contradicting_guard_raise(tmp_path):
    """Sizes that contradict a guard raise."""

    class Even(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] % 2 == 0 else x - 1

    module = clika_compile(Even(), tracing_inputs=[torch.ones(2, 8), torch.ones(6, 8)])
    (side,) = module.graph.symbols
    deployment = DeploymentSettings_TensorRT_ONNX(shapes={side: (3, 5, 7)})
    with pytest.raises(TargetError, match=r"shapes: \{.*: 5\} violates .*, for which the model was traced"):
        module.clika_export(tmp_path / "net.onnx", deployment_settings=deployment)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"batch": (3, 2, 4)},
            r"shapes contains 'batch': \(3, 2, 4\). Give its minimum, optimum and maximum size",
        ),
        ({"batch": (0, 0, 0)}, r"shapes contains 'batch': \(0, 0, 0\)\. .*, the maximum at least 1"),
        ({"batch": (8, 1, 32)}, r"shapes contains 'batch': \(8, 1, 32\)\. .* ascending whole numbers from 0"),
        ({"batch": (-1, 2, 3)}, r"shapes contains 'batch': \(-1, 2, 3\)\. .* ascending whole numbers from 0"),
        ({"batch": (1, 8)}, r"shapes contains 'batch': \(1, 8\)\. .* ascending whole numbers"),
        ({"batch": {1, 2, 8}}, r"shapes contains 'batch': \{.*\}\. .* ascending whole numbers"),
        ({"batch": 8}, r"shapes contains 'batch': 8\. .* ascending whole numbers"),
        ({"batch": "123"}, r"shapes contains 'batch': '123'\. .* ascending whole numbers"),
        ({"batch": (1.5, 2, 3)}, r"shapes contains 'batch': \(1.5, 2, 3\)\. .* ascending whole numbers"),
        ({"batch": (True, True, True)}, r"shapes contains 'batch': \(True, True, True\)\. .* ascending whole numbers"),
        ([("batch", (1, 2, 3))], r"shapes is \[.*\]\. Give \{dim: \(min, opt, max\)\}"),
    ],
)
def test_shapes_invalid_form_raises_at_once(shapes, message):
    """An invalid form of sizes raises in the constructor."""
    with pytest.raises(ModelError, match=message):
        DeploymentSettings_TensorRT_ONNX(shapes=shapes)


def build_two_dim_graph(*guards, shape=()):
    """A graph of two inputs; the dims of the second are computed from the two dims of the first."""
    graph = Graph("two")
    graph.add_output(graph.add_input(TensorType(torch.float32, (make_symbol("n"), make_symbol("m"))), "x"))
    graph.add_output(graph.add_input(TensorType(torch.float32, shape or (make_symbol("n"), make_symbol("m"))), "y"))
    graph.symbols = {
        "n": Symbol("n", 0, None, SymbolSource("x", 0), 4),
        "m": Symbol("m", 0, None, SymbolSource("x", 1), 5),
    }
    graph.guards = [Guard(guard, "model.py:1") for guard in guards]
    return graph


def make_call_counts(sizes):
    """Return the counts of observed size combinations in the form that a target gets."""
    return {(("m", m), ("n", n)): count for (n, m), count in sizes.items()}


def make_trtexec_command(graph, seen=None, **chosen):
    return trtexec_command(graph, Path("net.onnx"), choose_profile(graph, seen or {}, chosen))


def test_choose_profile_usual_sizes_most_frequent_together():
    """The usual sizes are those seen together most often."""
    seen = make_call_counts(
        {(1, 5): 1, (1, 6): 1, (1, 7): 1, (2, 9): 2}
    )  # most often n is 1, and m is 9, but never both
    profile = choose_profile(build_two_dim_graph(), seen, {})
    assert (profile.smallest, profile.usual, profile.largest) == ({"n": 1, "m": 5}, {"n": 2, "m": 9}, {"n": 2, "m": 9})
    assert profile.left_out == ""
    assert "--minShapes=x:1x5,y:1x5 --optShapes=x:2x9,y:2x9 --maxShapes=x:2x9,y:2x9" in make_trtexec_command(
        build_two_dim_graph(), seen
    )


def test_choose_profile_tie_prefers_sizes_frequent_alone():
    """Among equally frequent combinations, sizes that are frequent alone are usual."""
    assert choose_profile(build_two_dim_graph(), make_call_counts({(1, 5): 1, (1, 6): 1, (2, 6): 1}), {}).usual == {
        "n": 1,
        "m": 6,
    }


def test_choose_profile_guard_excludes_limits_and_reports():
    """Sizes that a guard forbids are no limit, and the profile reports the rest."""
    graph = build_two_dim_graph(sympy.Ne(make_symbol("n"), make_symbol("m")))
    profile = choose_profile(graph, make_call_counts({(2, 3): 1, (3, 2): 1, (5, 6): 3}), {})
    assert (profile.smallest, profile.usual, profile.largest) == ({"n": 3, "m": 2}, {"n": 5, "m": 6}, {"n": 5, "m": 6})
    assert re.search(r"which excludes 1 of 5 seen calls: \{.*\} violates Ne\(", profile.left_out)


def test_choose_profile_opposed_dims_leave_one_size():
    """Dims that fall while others rise leave the profile one size."""
    graph = build_two_dim_graph(shape=(make_symbol("n"), 10 - make_symbol("m")))
    profile = choose_profile(graph, make_call_counts({(1, 2): 1, (1, 6): 3, (1, 8): 1}), {})
    assert profile.smallest == profile.usual == profile.largest == {"n": 1, "m": 6}
    assert "2 of 5 seen calls: with {'m': 2, 'n': 1}, a dim 10 - m of 'y' is 8, but is usually 4" in (profile.left_out)


@pytest.mark.parametrize(
    ("guard", "seen", "chosen", "message"),
    [
        (
            sympy.Le(make_symbol("n"), make_symbol("m")),
            {(4, 6): 1},
            {"n": (1, 4, 8)},
            r"\{'m': 6, 'n': 8\} violates n <= m",
        ),
        (sympy.Eq(make_symbol("n"), make_symbol("m")), {}, {}, r"\{'m': 5, 'n': 4\} violates Eq\("),
        (sympy.Ne(make_symbol("m"), 1), {(4, 6): 1}, {"m": (1, 4, 8)}, r"\{'n': 4, 'm': 1\} violates Ne\(m, 1\)"),
    ],
)
def test_choose_profile_sizes_forbidden_by_guard_raise(guard, seen, chosen, message):
    """Sizes that no guard allows raise."""
    with pytest.raises(TargetError, match=f"shapes: {message}.*, for which the model was traced. Choose others"):
        choose_profile(build_two_dim_graph(guard), make_call_counts(seen), chosen)


def test_choose_profile_beyond_traced_bounds_raises():
    """Bounds beyond those of a dim raise."""
    graph = build_two_dim_graph()
    graph.symbols["n"] = Symbol("n", 2, 8, SymbolSource("x", 0), 4)
    with pytest.raises(TargetError, match=r"shapes: 'n' from 1 to 4 is outside 2\.\.8, for which the model was traced"):
        choose_profile(graph, {}, {"n": (1, 2, 4)})


def test_choose_profile_chosen_dim_joins_observed_others():
    """Sizes chosen for one dim combine with observed sizes of others."""
    graph = build_two_dim_graph(sympy.Le(make_symbol("n"), make_symbol("m")))
    profile = choose_profile(graph, make_call_counts({(4, 6): 2, (2, 9): 1}), {"n": (1, 4, 8)})
    assert (profile.smallest, profile.usual, profile.largest) == ({"m": 6, "n": 1}, {"m": 6, "n": 4}, {"m": 9, "n": 8})


def test_choose_profile_data_dependent_dims_left_out():
    """Data-dependent dims are in no profile."""
    graph = build_two_dim_graph(sympy.Le(make_symbol("found"), make_symbol("n")))
    graph.symbols["found"] = Symbol("found", 0, None, SymbolSource("positions", 0))
    assert choose_profile(graph, make_call_counts({(4, 6): 2}), {}).usual == {"n": 4, "m": 6}
    with pytest.raises(TargetError, match="'found' is not a dynamic dim of two, which has 'n', 'm'"):
        choose_profile(graph, {}, {"found": (1, 1, 1)})


def test_clika_export_warns_of_calls_outside_profile(tmp_path):
    """An export warns of calls that the engine does not serve."""

    def model(x, y):
        return x.sum(0) - y.sum(0) if x.shape[0] != y.shape[0] else x + y

    inputs = [(torch.ones(n, 4), torch.ones(m, 4)) for n, m in ((2, 3), (3, 2), (5, 6), (5, 6))]
    module = clika_compile(model, tracing_inputs=inputs, logs_dir=tmp_path / "logs")
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    (told,) = artifact.facts["warnings"]
    assert "which excludes 1 of 4 seen calls" in told
    assert f"Warning: net.onnx: {told}" in "".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    script = (tmp_path / "net.onnx.trtexec.sh").read_text().splitlines()
    assert script[1] == f"# {told}"
    assert script[3] == artifact.facts["trtexec"]


def test_trtexec_command_ties_bounds_and_static_graph():
    """Ties choose the least, limits stay within the traced ones, static needs none."""
    graph = Graph("tied")
    n = make_symbol("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n, 3)), "x"))
    graph.symbols["n"] = Symbol("n", 1, None, SymbolSource("x", 0))
    seen = {(("n", 8),): 2, (("n", 4),): 2, (("n", 2),): 1}
    assert "--minShapes=x:2x3 --optShapes=x:4x3 --maxShapes=x:8x3" in make_trtexec_command(graph, seen)
    graph.symbols["n"] = Symbol("n", 1, 16, SymbolSource("x", 0))
    with pytest.raises(TargetError, match=r"'n' from 1 to 17 is outside 1\.\.16, for which the model was traced"):
        make_trtexec_command(graph, n=(1, 4, 17))
    static = Graph("static")
    static.add_output(static.add_input(TensorType(torch.float32, (2, 3)), "x"))
    assert make_trtexec_command(static) == "trtexec --onnx=net.onnx --saveEngine=net.onnx.engine --stronglyTyped"


def test_profile_integer_input_used_as_length(tmp_path):
    """Integers that are lengths have the bounds of their inputs; others have none."""

    def model(x, n, factor):
        return x[:, None].expand(9, n) * factor

    module = clika_compile(model, tracing_inputs=[(torch.rand(9), 3, 2), (torch.rand(9), 5, 4), (torch.rand(9), 3, 7)])
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:3 --optShapes=n:3 --maxShapes=n:5")


@pytest.mark.parametrize(
    "model",
    [
        lambda x, n: x[:, :n],
        lambda x, n: x[:, -n:] * 2,
        lambda x, n: x.narrow(1, n, 2),
        lambda x, n: x.roll(n, 1),
        lambda x, n: x.slice_scatter(torch.ones(4, 2), 1, n, n + 2),
    ],
)
def test_profile_integer_input_used_as_start_or_end(model, tmp_path):
    """Integers that are starts or ends have the bounds of their inputs."""
    module = clika_compile(model, tracing_inputs=[(torch.rand(4, 8), 3), (torch.rand(4, 8), 5), (torch.rand(4, 8), 3)])
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:3 --optShapes=n:3 --maxShapes=n:5")


def test_profile_negative_integer_input(tmp_path):
    """Integers that count from the end have the bounds of their inputs."""
    calls = [(torch.rand(4, 8), -3), (torch.rand(4, 8), -1), (torch.rand(4, 8), -1)]
    module = clika_compile(lambda x, n: x[:, :n], tracing_inputs=calls)
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:-3 --optShapes=n:-1 --maxShapes=n:-1")


@pytest.mark.parametrize("model", [lambda x, n: x * n, lambda x, n: x[:, n], lambda x, n: x.tril(n)])
def test_profile_integer_input_used_as_data_left_out(model, tmp_path):
    """Integers that are data have no bounds."""
    module = clika_compile(model, tracing_inputs=[(torch.rand(4, 8), 3), (torch.rand(4, 8), 5)])
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--stronglyTyped")


@pytest.mark.parametrize(
    "relation",
    [
        sympy.Eq(sympy.Mod(8, make_symbol("n")), 0),
        OpaqueUnaryFn_sqrt(make_symbol("n") - 1) >= 0,
        sympy.sqrt(make_symbol("n") - 1) >= 0,
    ],
)
def test_choose_profile_undefined_guard_raises(relation):
    """Sizes where a guard is undefined raise."""
    graph = Graph("divided")
    n = make_symbol("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n,)), "x"))
    graph.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    graph.guards = [Guard(relation, "model.py:1")]
    with pytest.raises(TargetError, match=r"shapes: \{'n': 0\} violates .*, for which the model was traced"):
        make_trtexec_command(graph, n=(0, 4, 8))


@pytest.mark.slow
def test_trtexec_script_quotes_file_name(tmp_path):
    """The script runs one command, for any file name."""
    folder = tmp_path / "of models"
    folder.mkdir()
    module = compile_net()
    module.clika_export(folder / "my net; touch broken $(touch broken).onnx")
    (script,) = folder.glob("*.trtexec.sh")
    (tmp_path / "trtexec").write_text('#!/bin/sh\nfor part in "$@"; do echo "$part"; done\n')
    (tmp_path / "trtexec").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = subprocess.run([str(script)], env={"PATH": path}, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[0] == "--onnx=my net; touch broken $(touch broken).onnx"
    assert not [*tmp_path.rglob("broken")]


def test_clika_export_same_stem_has_own_script_and_engine(tmp_path):
    """Files of one stem have scripts and engines of their own."""
    module = compile_net()
    for name in ("net", "net.onnx", "net.v1.onnx"):
        line = module.clika_export(tmp_path / name).facts["trtexec"]
        assert f"--onnx={name} --saveEngine={name}.engine" in line
        assert (tmp_path / f"{name}.trtexec.sh").exists()


def test_clika_export_input_name_with_colon_raises(tmp_path):
    """Names that trtexec would split raise."""
    with pytest.raises(TargetError, match="the name of the input 'a:b' contains ',' or ':', which separate"):
        compile_net().clika_export(tmp_path / "net.onnx", input_names=["a:b"])


@pytest.mark.parametrize("sizes", [(0, 0, 1), (1, 1, 1), (0, 1, 8)])
def test_shapes_smallest_profiles_accepted(sizes):
    """Dims of size 0 are in range, and a maximum of 1 is the smallest."""
    assert DeploymentSettings_TensorRT_ONNX(shapes={"batch": sizes}).shapes == {"batch": sizes}
