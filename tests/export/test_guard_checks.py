"""A file rejects inputs that violate a guard, as the module does."""

import inspect

import onnx
import pytest
import sympy
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._sympy.functions import CeilDiv, Min, ModularIndexing

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    clika_compile,
    export_configuration,
)
from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import SYMPY_TO_PYTHON, Guard, Symbol, SymbolSource, make_symbol
from clika_ref.export.needed_guards import find_needed_guards
from clika_ref.onnx_export.sizes import EXPR_RULES

SIZES = [torch.rand(6, 4), torch.rand(8, 4)]
TARGETS = [DeploymentSettings_ONNXRuntime_ONNX, DeploymentSettings_OpenVINO_ONNX, DeploymentSettings_TensorRT_ONNX]


def branch_on_length(x):
    return x @ x.T * 2 if x.shape[0] > 4 else x @ x.T


def export_and_read_log(function, inputs, tmp_path, *, allow=False, **options):
    """Return the log of an export."""
    logs = tmp_path / "logs"
    module = clika_compile(function, tracing_inputs=inputs, logs_dir=logs)
    with export_configuration(allow_unchecked_guards=allow):
        module.clika_export(tmp_path / "m.onnx", **options)
    return "".join(path.read_text() for path in logs.iterdir())


@pytest.mark.parametrize("settings", TARGETS)
def test_clika_export_branch_on_size_checked_by_file(settings, tmp_path):
    """The file runs where the guard holds, and elsewhere its error names the guard and its line."""
    module = clika_compile(branch_on_length, tracing_inputs=SIZES)
    artifact = module.clika_export(tmp_path / "m.onnx", deployment_settings=settings())
    run = module.clika_state.registry.targets[artifact.target].load(artifact)
    x = torch.rand(5, 4)
    torch.testing.assert_close(run([x])[0], x @ x.T * 2)
    line = inspect.getsourcelines(branch_on_length)[1] + 1
    with pytest.raises(TargetError, match=rf"batch > 4 \(from test_guard_checks.py:{line}\)"):
        run([x[:4]])
    torch.testing.assert_close(run([x])[0], x @ x.T * 2)


def divide_into_windows(x):
    """Pad to a multiple of 4, as transformers' vision models do."""
    return x.sum(0) * (3 if x.shape[0] % 4 else 2)


def pick_by_two_sizes(x, y):
    return x.mean() + y.mean() if x.shape[0] * 2 > y.shape[0] + 3 else x.sum() - y.sum()


def branch_on_number(x, n):
    return x * n if n > 4 else x - n


@pytest.mark.parametrize(
    ("function", "inputs", "rejected"),
    [
        (divide_into_windows, [(torch.rand(8, 3),), (torch.rand(12, 3),)], (torch.rand(9, 3),)),
        (
            pick_by_two_sizes,
            [(torch.rand(8), torch.rand(9)), (torch.rand(7), torch.rand(2))],
            (torch.rand(3), torch.rand(3)),
        ),
        (branch_on_number, [(torch.rand(3), 5), (torch.rand(4), 9)], (torch.rand(3), torch.tensor(4))),
        (lambda x: x.chunk(4)[3], [(torch.rand(8, 3),), (torch.rand(12, 3),)], (torch.rand(9, 3),)),
        (
            lambda x: x[:, : x.shape[0]] if x.shape[0] > 2 else x,
            [(torch.rand(4, 9),), (torch.rand(5, 9),)],
            (torch.rand(2, 9),),
        ),
    ],
    ids=["multiple", "two inputs", "number", "chunk", "slice"],
)
def test_clika_export_relations_checked_by_file(function, inputs, rejected, tmp_path):
    """Relations of all kinds, also between inputs and on numbers, are checked as the module checks them."""
    module = clika_compile(function, tracing_inputs=inputs, logs_dir=tmp_path / "logs")
    artifact = module.clika_export(tmp_path / "m.onnx")
    run = module.clika_state.registry.targets[artifact.target].load(artifact)
    for call in inputs:
        tensors = [torch.as_tensor(x) for x in call]
        torch.testing.assert_close(run(tensors)[0], function(*call))
    with pytest.raises(ModelError):
        module(*rejected)
    with pytest.raises(TargetError, match=r"test_guard_checks\.py"):
        run(list(rejected))
    assert "does not check" not in "".join(path.read_text() for path in (tmp_path / "logs").iterdir())


def count_up(n):
    return torch.arange(n) * 2 if n > 4 else torch.arange(n)


def look_up(ids):
    return functional.one_hot(ids, 5).float() * (2 if ids.shape[0] > 4 else 3)


def branch_next_to_static(weight, x):
    return (x.sum() + weight.reshape(12)) * (2 if x.shape[0] > 4 else 3)


def extend_cache(cache, x):
    return torch.cat([cache, x], 1) * (2 if x.shape[1] > 4 else 3)


def convolve_even(x):
    return functional.conv2d(x, torch.ones(2, 3, 3, 3)) * (2 if x.shape[2] % 2 == 0 else 3)


@pytest.mark.parametrize("settings", TARGETS)
@pytest.mark.parametrize(
    ("function", "inputs", "rejected"),
    [
        (count_up, [(5,), (9,)], (3,)),
        (look_up, [(torch.arange(5),), (torch.ones(8, dtype=torch.int64),)], (torch.arange(3),)),
        (
            branch_next_to_static,
            [(torch.rand(3, 4), torch.rand(n, 4)) for n in (6, 8)],
            (torch.rand(3, 4), torch.rand(3, 4)),
        ),
        (
            extend_cache,
            [(torch.rand(2, n), torch.rand(2, n + 3)) for n in (3, 5)],
            (torch.zeros(2, 0), torch.rand(2, 3)),
        ),
        (convolve_even, [(torch.rand(1, 3, 8, 8),), (torch.rand(2, 3, 10, 12),)], (torch.rand(1, 3, 9, 8),)),
    ],
    ids=["number alone", "vector", "static neighbor", "empty cache", "image"],
)
def test_clika_export_check_kept_by_runtime(function, inputs, rejected, settings, tmp_path):
    """No runtime removes a check: of a vector, of a result, next to a static input, with an empty one, of an image."""
    module = clika_compile(function, tracing_inputs=inputs)
    artifact = module.clika_export(tmp_path / "m.onnx", deployment_settings=settings())
    run = module.clika_state.registry.targets[artifact.target].load(artifact)
    for call in inputs:
        torch.testing.assert_close(run([torch.as_tensor(x) for x in call])[0], function(*call))
    with pytest.raises(TargetError):
        run([torch.as_tensor(x) for x in rejected])


def test_clika_export_check_keeps_static_dims(tmp_path):
    """The file states the static dims of an input after the check."""
    module = clika_compile(convolve_even, tracing_inputs=[torch.rand(1, 3, 8, 8), torch.rand(2, 3, 10, 12)])
    model = onnx.load(module.clika_export(tmp_path / "m.onnx").path)
    del model.graph.value_info[:]
    (convolution,) = [node for node in model.graph.node if node.op_type == "Conv"]
    shapes = {
        value.name: value.type.tensor_type.shape for value in onnx.shape_inference.infer_shapes(model).graph.value_info
    }
    assert shapes[convolution.input[0]].dim[1].dim_value == 3


def test_clika_export_number_without_dynamic_dims_warned(tmp_path):
    """A branch on a number is a warning where no dim is dynamic, which a check needs."""
    text = export_and_read_log(branch_on_number, [(torch.rand(3), 5), (torch.rand(3), 9)], tmp_path)
    assert "the artifact does not check the guard n > 4" in text


def test_clika_export_fixed_size_that_violates_guard_rejected(tmp_path):
    """Sizes fixed by the export must satisfy the guards."""
    module = clika_compile(branch_on_length, tracing_inputs=SIZES)
    with pytest.raises(ModelError, match="batch > 4"):
        module.clika_export(tmp_path / "m.onnx", dynamic_axes={}, example_inputs=torch.rand(4, 4))


def test_clika_export_unchecked_branch_on_request_warned(tmp_path, capsys):
    """On request the file has no checks; its branch on a size is reported once, with its line."""
    text = export_and_read_log(branch_on_length, SIZES, tmp_path, allow=True)
    line = inspect.getsourcelines(branch_on_length)[1] + 1
    warning = (
        f"Warning: the artifact does not check the guard batch > 4 (from test_guard_checks.py:{line}). "
        "Inputs that violate it may fail or give wrong results."
    )
    assert text.count(warning) == 1
    assert "the artifact does not check" in capsys.readouterr().err


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize(
    ("function", "inputs", "options"),
    [
        (branch_on_length, SIZES[:1], {}),
        (branch_on_length, SIZES, {"dynamic_axes": {}, "example_inputs": SIZES[0]}),
        (lambda x: x * 2, SIZES, {}),
        (lambda x: x.amax(1), [torch.rand(2, 3), torch.rand(3, 4)], {}),
    ],
    ids=["static", "fixed", "no branch", "no empty dim"],
)
def test_clika_export_without_needed_guards_adds_no_check(function, inputs, options, allow, tmp_path):
    """Static files, models without branches and empty calls need no check, and give no warning."""
    assert "does not check" not in export_and_read_log(function, inputs, tmp_path, allow=allow, **options)
    assert b"Reshape" not in (tmp_path / "m.onnx").read_bytes()


@pytest.mark.parametrize("function", [*SYMPY_TO_PYTHON])
def test_size_emitter_knows_function(function):
    """A guard may contain each function that capture knows, so that a file can check it."""
    assert any(issubclass(function, rule) for rule in EXPR_RULES)


@pytest.mark.parametrize(
    ("relation", "holding"),
    [
        (CeilDiv(make_symbol("batch"), 4) > 2, [9, 12]),
        (sympy.Eq(ModularIndexing(make_symbol("batch"), 2, 3), 1), [8, 9]),
    ],
)
def test_clika_export_rare_functions_checked_by_file(relation, holding, tmp_path):
    """Rounded quotients of sizes are computed in the file."""
    module = clika_compile(lambda x: x * 2, tracing_inputs=[torch.rand(n, 4) for n in holding])
    module.clika_state.graph.guards.append(Guard(relation, "model.py:1"))
    artifact = module.clika_export(tmp_path / "m.onnx", example_inputs=torch.rand(holding[0], 4))
    run = module.clika_state.registry.targets[artifact.target].load(artifact)
    for size in range(1, 14):
        if bool(relation.subs(make_symbol("batch"), size)):
            assert run([torch.rand(size, 4)])[0].shape == (size, 4)
        else:
            with pytest.raises(TargetError, match=r"model\.py:1"):
                run([torch.rand(size, 4)])


class PackedSequences(torch.nn.Module):
    """A recurrent network on packed sequences; the longest length must be at least 1."""

    def __init__(self):
        super().__init__()
        self.recurrent = torch.nn.GRU(4, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.recurrent(packed)[0], total_length=x.shape[0])[0]


def test_clika_export_guard_on_value_names_its_source(tmp_path):
    """A number that depends on values is explained, as its name occurs nowhere in the model."""
    inputs = [(torch.rand(n, 2, 4), torch.tensor([n, 2])) for n in (5, 7)]
    text = export_and_read_log(PackedSequences(), inputs, tmp_path)
    line = inspect.getsourcelines(PackedSequences.forward)[1] + 1
    assert "the guard max_1_item >= 1. " in text
    assert f"max_1_item is the value of a result of amax at test_guard_checks.py:{line}. " in text


def test_clika_export_many_guards_shortened_on_console(tmp_path, capsys):
    """The console shows the first guards, and the log file shows all."""

    def branch_on_many_lengths(x):
        return sum(x * n for n in range(12) if x.shape[0] > n)

    inputs = [torch.rand(20, 4), torch.rand(24, 4)]
    text = export_and_read_log(branch_on_many_lengths, inputs, tmp_path, allow=True)
    assert "batch > 11" not in capsys.readouterr().err
    lines = text.splitlines()
    (first,) = [i for i, line in enumerate(lines) if "The artifact does not check these guards" in line]
    assert sum("] + batch > " in line for line in lines[first + 1 :]) == 11


N, M = make_symbol("n"), make_symbol("m")
PACKAGE, OWN = "torch/_refs/__init__.py:3194", "model.py:3"


@pytest.mark.parametrize(
    ("guards", "unchecked"),
    [
        ([Guard(3 * N * M > 1, PACKAGE)], []),
        ([Guard(N * M > 1, PACKAGE)], ["m*n > 1 (from torch/_refs/__init__.py:3194)"]),
        ([Guard(N >= 1, OWN), Guard(N + M > 1, OWN), Guard(sympy.Ne(N, 0), "")], []),
        ([Guard(N / 3 >= 1, PACKAGE)], ["n/3 >= 1 (from torch/_refs/__init__.py:3194)"]),
        ([Guard(sympy.Ne(N, 1), OWN)], ["Ne(n, 1) (from model.py:3)"]),
        ([Guard(sympy.Eq(N, M), "")], ["Eq(n, m)"]),
        (
            [
                Guard(sympy.Or(sympy.Eq(N, Min(512, N)), sympy.Eq(Min(512, N), 1)), PACKAGE),
                Guard(sympy.Eq(Min(512, N), N), "torch/_prims/__init__.py:1345"),
            ],
            ["n <= 512 (from torch/_prims/__init__.py:1345)"],
        ),
        ([Guard(N > 4, "vision/swin.py:160")], ["n > 4 (from vision/swin.py:160)"]),
        ([Guard(N > 4, "torch/nn/modules/module.py:1776")], ["n > 4 (from torch/nn/modules/module.py:1776)"]),
    ],
    ids=["always", "not always", "dims", "ratio", "one", "equal dims", "at most", "package", "typed code"],
)
def test_find_needed_guards_keeps_those_not_always_true(guards, unchecked):
    """Guards that hold for all sizes are omitted."""
    graph = Graph("g")
    graph.symbols = {name: Symbol(name, None, None, SymbolSource("x", dim)) for dim, name in enumerate("nm")}
    graph.guards = guards
    assert list(map(str, find_needed_guards(graph))) == unchecked
