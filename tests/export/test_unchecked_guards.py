"""An export names the guards that the module checks and the artifact does not."""

import inspect

import pytest
import sympy
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._sympy.functions import Min

from clika_ref import clika_compile, export_configuration
from clika_ref.core.errors import ModelError
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.export.unchecked_guards import find_unchecked_guards

SIZES = [torch.rand(6, 4), torch.rand(8, 4)]


def branch_on_length(x):
    return x * 2 if x.shape[0] > 4 else x * 3


def export_and_read_log(function, inputs, tmp_path, *, allow=False, **options):
    """Return the log of an export."""
    logs = tmp_path / "logs"
    module = clika_compile(function, tracing_inputs=inputs, logs_dir=logs)
    with export_configuration(allow_unchecked_guards=allow):
        module.clika_export(tmp_path / "m.onnx", **options)
    return "".join(path.read_text() for path in logs.iterdir())


def test_clika_export_unchecked_branch_rejected(tmp_path):
    """A file that would follow one branch for all sizes is not written, and an earlier one stays."""
    (tmp_path / "m.onnx").write_bytes(b"earlier")
    line = inspect.getsourcelines(branch_on_length)[1] + 1
    message = (
        rf"does not check the guard batch > 4 \(from test_unchecked_guards.py:{line}\). It returns a result for x: "
        r"float32\[4, 4\], which violates batch > 4.* Fix such dims with dynamic_axes"
    )
    with pytest.raises(ModelError, match=message):
        export_and_read_log(branch_on_length, SIZES, tmp_path)
    assert (tmp_path / "m.onnx").read_bytes() == b"earlier"
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "logs"}


def test_clika_export_allowed_unchecked_branch_warned_once(tmp_path, capsys):
    """On request the file is written; its branch on a size is reported once, with its line."""
    text = export_and_read_log(branch_on_length, SIZES, tmp_path, allow=True)
    line = inspect.getsourcelines(branch_on_length)[1] + 1
    warning = (
        f"Warning: the artifact does not check the guard batch > 4 (from test_unchecked_guards.py:{line}). "
        "Inputs that violate them may fail or give wrong results."
    )
    assert text.count(warning) == 1
    assert "the artifact does not check" in capsys.readouterr().err


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
def test_clika_export_checked_guards_give_no_warning(function, inputs, options, tmp_path):
    """Static files, models without branches and empty calls give no warning."""
    assert "does not check" not in export_and_read_log(function, inputs, tmp_path, **options)


@pytest.mark.parametrize(
    ("function", "inputs", "limit"),
    [
        (lambda x: x.topk(3, 0)[0], [torch.rand(5, 4), torch.rand(6, 4)], "batch >= 3"),
        (lambda x: x + torch.arange(10)[: x.shape[0], None], SIZES, "batch <= 10"),
        (lambda x: sum(part.sum() for part in x.chunk(4)), SIZES, "batch - 3*(((batch + 3)//4)) >= 0"),
    ],
    ids=["topk", "slice of a table", "chunk"],
)
def test_clika_export_operator_guard_warned_with_line(function, inputs, limit, tmp_path):
    """A size limit of an operator, at which the graph fails, is reported with its line."""
    text = export_and_read_log(function, inputs, tmp_path)
    assert f"the artifact does not check the guard {limit} (from test_unchecked_guards.py:" in text


def test_clika_export_limit_of_model_warned(tmp_path):
    """A file that returns a result where the model itself fails is written with a warning."""

    def reject_long(x):
        if x.shape[0] > 10:
            raise ValueError("too long")
        return x * 2

    assert "the artifact does not check the guard batch <= 10" in export_and_read_log(reject_long, SIZES, tmp_path)


def test_clika_export_branch_without_effect_warned(tmp_path):
    """A file that returns the result of the model in the other branch, too, is written with a warning."""

    def add_in_either_order(x):
        return x + 1 if x.shape[0] > 7 else torch.add(1, x)

    text = export_and_read_log(add_in_either_order, [torch.rand(8, 4), torch.rand(9, 4)], tmp_path)
    assert "the artifact does not check the guard batch > 7" in text


def test_large_sizes_are_not_run(tmp_path):
    """A limit that only large inputs violate is a warning: neither the model nor the graph runs on them."""
    sizes = []

    def record(x):
        sizes.append(tuple(x.shape))
        return x * 2 if x.shape[0] < 3000 else x * 3

    inputs = [torch.rand(2, 3, 64, 64), torch.rand(3, 3, 64, 64)]
    assert "does not check the guard batch < 3000" in export_and_read_log(record, inputs, tmp_path)
    assert max(shape[0] for shape in sizes if isinstance(shape[0], int)) < 200


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
    assert f"max_1_item is the value of a result of amax at test_unchecked_guards.py:{line}. " in text


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
def test_find_unchecked_guards_keeps_those_not_always_true(guards, unchecked):
    """Guards that hold for all sizes are omitted."""
    graph = Graph("g")
    graph.symbols = {name: Symbol(name, None, None, SymbolSource("x", dim)) for dim, name in enumerate("nm")}
    graph.guards = guards
    assert list(map(str, find_unchecked_guards(graph))) == unchecked
