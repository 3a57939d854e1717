"""Sizes for which TensorRT builds an engine, and the script that does."""

import copy
import os
import re
import subprocess
from pathlib import Path

import pytest
import sympy
import torch
from clika_ref_tensorrt.profiles import choose_profile, trtexec_command
from networks import compiled
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


def test_sizes_may_be_chosen_within_what_was_traced(tmp_path):
    artifact = compiled(shapes={"batch": (2, 8, 32)}).clika_export(tmp_path / "net.onnx")
    assert "--minShapes=x:2x3x16x16 --optShapes=x:8x3x16x16 --maxShapes=x:32x3x16x16" in artifact.facts["trtexec"]


def test_an_engine_of_weights_in_few_bits_is_built_for_chosen_sizes_too(tmp_path):
    deployment = DeploymentSettings_TensorRT_LLM_ONNX(shapes={"batch": (2, 8, 32)})
    artifact = compiled().clika_export(tmp_path / "net.onnx", deployment_settings=deployment)
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
        ({"height": (1, 2, 3)}, r"shapes: 'height' is not a dynamic dim of Net, which has 'batch'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_and_nothing_is_written(shapes, message, tmp_path):
    with pytest.raises(TargetError, match=message):
        compiled(shapes=shapes).clika_export(tmp_path / "net.onnx")
    assert not [*tmp_path.iterdir()]


def test_sides_that_are_named_anew_keep_the_sizes_that_were_seen(tmp_path):
    artifact = compiled().clika_export(tmp_path / "net.onnx", dynamic_axes={"x": {0: "N"}})
    assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:6x3x16x16" in artifact.facts["trtexec"]


def test_sizes_by_names_that_an_export_gives_are_no_matter_of_what_explains_or_compares(tmp_path):
    module, deployment = compiled(), DeploymentSettings_TensorRT_ONNX(shapes={"N": (1, 4, 8)})
    artifact = module.clika_export(tmp_path / "net.onnx", dynamic_axes={"x": {0: "N"}}, deployment_settings=deployment)
    assert "--minShapes=x:1x3x16x16 --optShapes=x:4x3x16x16 --maxShapes=x:8x3x16x16" in artifact.facts["trtexec"]
    assert module.clika_explain(deployment).share() == 1.0
    (row,) = module.clika_compare_targets(deployment).rows
    assert (row.share, row.refusal) == (1.0, "")
    with pytest.raises(TargetError, match="shapes: 'N' is not a dynamic dim of Net, which has 'batch'"):
        module.clika_export(tmp_path / "other.onnx", deployment_settings=deployment)


def test_sizes_beyond_what_is_kept_of_the_data_are_counted_and_copies_and_state_dicts_keep_them(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Reservoir, "offer", lambda self, inputs: self.batches.append(inputs) if not self.batches else None
    )
    module = compiled()
    assert len(module.clika_state.calibration.reservoir.batches) == 1
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
    with pytest.raises(TargetError, match=r"shapes: \{.*: 5\} violates .*, for which the model was traced"):
        module.clika_export(tmp_path / "net.onnx", deployment_settings=deployment)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"batch": (3, 2, 4)},
            r"shapes: 'batch' is to be \(3, 2, 4\); it takes the least, the usual and the largest of",
        ),
        ({"batch": (0, 0, 0)}, r"shapes: 'batch' is to be \(0, 0, 0\); .*, and the largest at least 1"),
        ({"batch": (8, 1, 32)}, r"shapes: 'batch' is to be \(8, 1, 32\); .* none below 0 or below the one before it"),
        ({"batch": (-1, 2, 3)}, r"shapes: 'batch' is to be \(-1, 2, 3\); .* none below 0 or below"),
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


def two_sides(*guards, sides=()):
    """A graph of an input with two sides, and another one with sides that follow from these."""
    graph = Graph("two")
    graph.add_output(graph.add_input(TensorType(torch.float32, (make_symbol("n"), make_symbol("m"))), "x"))
    graph.add_output(graph.add_input(TensorType(torch.float32, sides or (make_symbol("n"), make_symbol("m"))), "y"))
    graph.symbols = {
        "n": Symbol("n", 0, None, SymbolSource("x", 0), 4),
        "m": Symbol("m", 0, None, SymbolSource("x", 1), 5),
    }
    graph.guards = [Guard(guard, "model.py:1") for guard in guards]
    return graph


def calls(sizes):
    """Sizes that were seen together, and how often, as a target gets them."""
    return {(("m", m), ("n", n)): count for (n, m), count in sizes.items()}


def line_of(graph, seen=None, **chosen):
    return trtexec_command(graph, Path("net.onnx"), choose_profile(graph, seen or {}, chosen))


def test_the_usual_sizes_are_those_that_were_seen_together_most_often():
    seen = calls({(1, 5): 1, (1, 6): 1, (1, 7): 1, (2, 9): 2})  # most often n is 1, and m is 9, but never both
    profile = choose_profile(two_sides(), seen, {})
    assert (profile.least, profile.usual, profile.largest) == ({"n": 1, "m": 5}, {"n": 2, "m": 9}, {"n": 2, "m": 9})
    assert profile.left_out == ""
    assert "--minShapes=x:1x5,y:1x5 --optShapes=x:2x9,y:2x9 --maxShapes=x:2x9,y:2x9" in line_of(two_sides(), seen)


def test_of_sizes_that_are_as_frequent_together_those_are_usual_that_are_frequent_alone():
    assert choose_profile(two_sides(), calls({(1, 5): 1, (1, 6): 1, (2, 6): 1}), {}).usual == {"n": 1, "m": 6}


def test_sizes_that_a_guard_forbids_together_are_no_end_of_a_profile_which_says_what_it_leaves_out():
    graph = two_sides(sympy.Ne(make_symbol("n"), make_symbol("m")))
    profile = choose_profile(graph, calls({(2, 3): 1, (3, 2): 1, (5, 6): 3}), {})
    assert (profile.least, profile.usual, profile.largest) == ({"n": 3, "m": 2}, {"n": 5, "m": 6}, {"n": 5, "m": 6})
    assert re.search(r"which excludes 1 of 5 seen calls: \{.*\} violates Ne\(", profile.left_out)


def test_sides_that_fall_while_others_rise_leave_a_profile_one_size():
    graph = two_sides(sides=(make_symbol("n"), 10 - make_symbol("m")))
    profile = choose_profile(graph, calls({(1, 2): 1, (1, 6): 3, (1, 8): 1}), {})
    assert profile.least == profile.usual == profile.largest == {"n": 1, "m": 6}
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
def test_sizes_that_no_guard_allows_are_refused(guard, seen, chosen, message):
    with pytest.raises(TargetError, match=f"shapes: {message}.*, for which the model was traced. Choose others"):
        choose_profile(two_sides(guard), calls(seen), chosen)


def test_a_range_beyond_that_of_a_side_is_refused():
    graph = two_sides()
    graph.symbols["n"] = Symbol("n", 2, 8, SymbolSource("x", 0), 4)
    with pytest.raises(TargetError, match=r"shapes: 'n' from 1 to 4 is outside 2\.\.8, for which the model was traced"):
        choose_profile(graph, {}, {"n": (1, 2, 4)})


def test_a_range_that_is_chosen_for_one_side_goes_with_what_was_seen_of_others():
    graph = two_sides(sympy.Le(make_symbol("n"), make_symbol("m")))
    profile = choose_profile(graph, calls({(4, 6): 2, (2, 9): 1}), {"n": (1, 4, 8)})
    assert (profile.least, profile.usual, profile.largest) == ({"m": 6, "n": 1}, {"m": 6, "n": 4}, {"m": 9, "n": 8})


def test_sides_that_follow_from_data_are_in_no_profile():
    graph = two_sides(sympy.Le(make_symbol("found"), make_symbol("n")))
    graph.symbols["found"] = Symbol("found", 0, None, SymbolSource("positions", 0))
    assert choose_profile(graph, calls({(4, 6): 2}), {}).usual == {"n": 4, "m": 6}
    with pytest.raises(TargetError, match="'found' is not a dynamic dim of two, which has 'n', 'm'"):
        choose_profile(graph, {}, {"found": (1, 1, 1)})


def test_an_export_warns_of_calls_that_an_engine_does_not_serve(tmp_path):
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


def test_of_sizes_that_are_as_frequent_the_least_is_usual_none_is_above_the_traced_and_what_is_static_has_none():
    graph = Graph("tied")
    n = make_symbol("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n, 3)), "x"))
    graph.symbols["n"] = Symbol("n", 1, None, SymbolSource("x", 0))
    seen = {(("n", 8),): 2, (("n", 4),): 2, (("n", 2),): 1}
    assert "--minShapes=x:2x3 --optShapes=x:4x3 --maxShapes=x:8x3" in line_of(graph, seen)
    graph.symbols["n"] = Symbol("n", 1, 16, SymbolSource("x", 0))
    with pytest.raises(TargetError, match=r"'n' from 1 to 17 is outside 1\.\.16, for which the model was traced"):
        line_of(graph, n=(1, 4, 17))
    static = Graph("static")
    static.add_output(static.add_input(TensorType(torch.float32, (2, 3)), "x"))
    assert line_of(static) == "trtexec --onnx=net.onnx --saveEngine=net.onnx.engine --stronglyTyped"


def test_integers_that_are_lengths_have_the_range_of_their_values_and_others_have_none(tmp_path):
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
def test_integers_that_say_where_something_begins_or_ends_have_the_range_of_their_values(model, tmp_path):
    module = clika_compile(model, tracing_inputs=[(torch.rand(4, 8), 3), (torch.rand(4, 8), 5), (torch.rand(4, 8), 3)])
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:3 --optShapes=n:3 --maxShapes=n:5")


def test_integers_that_count_from_the_end_have_the_range_of_their_values(tmp_path):
    calls = [(torch.rand(4, 8), -3), (torch.rand(4, 8), -1), (torch.rand(4, 8), -1)]
    module = clika_compile(lambda x, n: x[:, :n], tracing_inputs=calls)
    artifact = module.clika_export(tmp_path / "net.onnx", deployment_settings=DeploymentSettings_TensorRT_ONNX())
    assert artifact.facts["trtexec"].endswith("--minShapes=n:-3 --optShapes=n:-1 --maxShapes=n:-1")


@pytest.mark.parametrize("model", [lambda x, n: x * n, lambda x, n: x[:, n], lambda x, n: x.tril(n)])
def test_integers_that_are_data_have_no_range(model, tmp_path):
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
def test_sizes_at_which_a_guard_has_no_value_are_refused(relation):
    graph = Graph("divided")
    n = make_symbol("n")
    graph.add_output(graph.add_input(TensorType(torch.float32, (n,)), "x"))
    graph.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    graph.guards = [Guard(relation, "model.py:1")]
    with pytest.raises(TargetError, match=r"shapes: \{'n': 0\} violates .*, for which the model was traced"):
        line_of(graph, n=(0, 4, 8))


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
    for name in ("net", "net.onnx", "net.v1.onnx"):
        line = module.clika_export(tmp_path / name).facts["trtexec"]
        assert f"--onnx={name} --saveEngine={name}.engine" in line
        assert (tmp_path / f"{name}.trtexec.sh").exists()


def test_names_that_trtexec_would_divide_are_refused(tmp_path):
    with pytest.raises(TargetError, match="the name of the input 'a:b' contains ',' or ':', which separate"):
        compiled().clika_export(tmp_path / "net.onnx", input_names=["a:b"])
