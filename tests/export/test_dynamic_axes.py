"""``dynamic_axes``: the dims that stay dynamic, their names, and dims that share a name."""

import numpy as np
import pytest
import torch
from onnx_sessions import open_session
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError


def read_dims(path):
    """Return the dims of the inputs and outputs of a file by name."""
    run = open_session(path)
    return {v.name: v.shape for v in (*run.get_inputs(), *run.get_outputs())}


class Sums(nn.Module):
    """Takes rows that need not be equally many."""

    def forward(self, a, b):
        return a * 2, b.sum(0) + a.shape[0] - b.shape[0]


def compile_sums(*rows, **options):
    inputs = [(torch.rand(n, 2), torch.rand(m, 2)) for n, m in rows]
    return clika_compile(Sums(), tracing_inputs=inputs, **options)


def test_dynamic_axes_same_name_one_dim(tmp_path):
    """Dims with one name become one dim."""
    module = compile_sums((2, 2), (3, 3), (3, 4))
    assert list(module.graph.symbols) == ["batch", "batch_1"]
    path = tmp_path / "m.onnx"
    module.clika_export(path, dynamic_axes={"a": {0: "rows"}, "b": {0: "rows"}})
    assert read_dims(path) == {"a": ["rows", 2], "b": ["rows", 2], "output_0": ["rows", 2], "output_1": [2]}
    a, b = torch.rand(7, 2), torch.rand(7, 2)
    found = open_session(path).run(None, {"a": a.numpy(), "b": b.numpy()})
    for f, e in zip(found, module(a, b), strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=0, atol=8 * np.finfo(np.float32).eps * 8)  # 7 sums of up to 8


def test_dynamic_axes_transformer_form_accepted(tmp_path):
    """The usual dynamic axes of a transformer are accepted, outputs included."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    torch.manual_seed(0)
    inputs = [
        {"input_ids": torch.randint(0, 50, (n, m)), "attention_mask": torch.ones(n, m, dtype=torch.int64)}
        for n, m in ((2, 7), (3, 9))
    ]
    module = clika_compile(transformers.DistilBertModel(config), tracing_inputs=inputs)
    axes = {0: "batch", 1: "seq"}
    path = tmp_path / "m.onnx"
    module.clika_export(path, dynamic_axes={"input_ids": axes, "attention_mask": axes, "last_hidden_state": axes})
    assert read_dims(path) == {
        "input_ids": ["batch", "seq"],
        "attention_mask": ["batch", "seq"],
        "last_hidden_state": ["batch", "seq", 16],
    }


def test_dynamic_axes_comparison_uses_equal_dims(tmp_path, capfd):
    """The artifact is compared on an example with equal dims for one name."""
    compile_sums((2, 3), (4, 4), (3, 5)).clika_export(tmp_path / "m.onnx", dynamic_axes={"a": {0: "n"}, "b": {0: "n"}})
    assert "equal to the module within float rounding on 1 input in" in capfd.readouterr().err


def test_clika_export_empty_outputs_not_compared(tmp_path, capfd):
    """Outputs without elements are not compared, with a line in the log."""
    clika_compile(torch.nn.Linear(2, 3).eval(), tracing_inputs=[torch.rand(0, 2)]).clika_export(tmp_path / "m.onnx")
    assert "not compared: the outputs for these inputs are empty" in capfd.readouterr().err


def test_dynamic_axes_other_dims_fixed_by_example(tmp_path):
    """Other dims are fixed as in an example with equal dims for one name."""

    def model(a, b, c):
        return a.sum() + b.sum() + c.sum()

    inputs = [tuple(torch.rand(n) for n in lengths) for lengths in ((2, 3, 4), (5, 5, 6))]
    module = clika_compile(model, tracing_inputs=inputs)
    path = tmp_path / "m.onnx"
    module.clika_export(path, dynamic_axes={"a": {0: "n"}, "b": {0: "n"}})
    assert read_dims(path) == {"a": ["n"], "b": ["n"], "c": [6], "output": []}


def test_dynamic_axes_name_for_unequal_dims_rejected(tmp_path):
    """One name for dims that differ in every example raises an error."""
    module = clika_compile(nn.Conv2d(3, 4, 3), tracing_inputs=[torch.rand(1, 3, 8, 8), torch.rand(2, 3, 9, 9)])
    message = (
        r"gives several dims the name 'n', but they differ in every example "
        r"\(dim 0 of 'input' is 1, dim 2 of 'input' is 8\)\. Give each its own name, or example_inputs in which"
    )
    with pytest.raises(ModelError, match=message):
        module.clika_export(tmp_path / "m.onnx", dynamic_axes={"input": {0: "n", 2: "n"}})


@pytest.mark.parametrize(
    ("axes", "a", "b"),
    [
        ({"a": {0: "batch_1"}}, "batch_1", 3),
        ({"a": {0: "batch_1"}, "b": [0]}, "batch_1", "batch_1_1"),
        ({"a": {0: "batch_1"}, "b": {0: "batch"}}, "batch_1", "batch"),
        ({"a": [0], "b": {0: "batch"}}, "batch_2", "batch"),
    ],
)
def test_dynamic_axes_name_of_other_symbol_accepted(tmp_path, axes, a, b):
    """A dim may get the name that another dim had."""
    path = tmp_path / "m.onnx"
    compile_sums((2, 3), (4, 5)).clika_export(path, dynamic_axes=axes)
    assert read_dims(path) == {"a": [a, 2], "b": [b, 2], "output_0": [a, 2], "output_1": [2]}


def test_dynamic_axes_several_names_first_used(tmp_path):
    """The first of several names for one dim is used."""

    def model(a, b, c):
        return a + b, c

    inputs = [(torch.rand(n), torch.rand(n), torch.rand(2 * n)) for n in (2, 3)]
    path = tmp_path / "m.onnx"
    clika_compile(model, tracing_inputs=inputs).clika_export(
        path, dynamic_axes={"a": [0], "b": {0: "n"}, "c": {0: "m"}}
    )
    assert read_dims(path)["a"] == read_dims(path)["b"] == ["n"]


def test_dynamic_axes_unlisted_input_fixed(tmp_path):
    """An input without dynamic axes has fixed dims."""
    path = tmp_path / "m.onnx"
    compile_sums((2, 3), (4, 5)).clika_export(path, dynamic_axes={"a": {}, "b": (0,), "output_1": []})
    assert read_dims(path) == {"a": [2, 2], "b": ["batch_1", 2], "output_0": [2, 2], "output_1": [2]}


def test_dynamic_axes_integer_inputs_stay_inputs(tmp_path):
    """Integer inputs stay inputs without being listed."""
    module = clika_compile(lambda x, n: x * n, tracing_inputs=[(torch.rand(2), 3), (torch.rand(4), 5)])
    path = tmp_path / "m.onnx"
    module.clika_export(path, dynamic_axes={"x": {0: "rows"}})
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(open_session(path).run(None, {"x": x, "n": np.array(7)})[0], x * 7)


@pytest.mark.parametrize(
    "axes", [0, "batch", "", None, [0.5], ["0"], [True], {"0": "n"}, {0: 5}, {0: None}, {0: ""}, [[0]], ((0, "n"),)]
)
@pytest.mark.parametrize("name", ["a", "output_0"])
def test_dynamic_axes_wrong_form_rejected(tmp_path, name, axes):
    """Dynamic axes of a wrong form raise an error with the accepted forms."""
    message = rf"dynamic_axes\['{name}'\] is .*\. Give \[axis, ...\] or \{{axis: name, ...\}}, such as \[0\] or \{{0: "
    with pytest.raises(ModelError, match=message):
        compile_sums((2, 3), (4, 5)).clika_export(tmp_path / "m.onnx", dynamic_axes={name: axes})
