"""Buffers that a call writes: inputs and outputs of a file on request, otherwise a warning."""

import onnx
import pytest
import torch
from onnx_sessions import open_session
from torch import nn

from clika_ref import ClikaCompileOptions, ModelError, clika_compile, export_configuration


class Averaging(nn.Module):
    """Adds a running mean of its inputs, and counts the calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count.add_(1)
        self.mean.lerp_(x.mean(0), 0.5)
        return x + self.mean, self.mean.sum()


def compile_stateful(model, state="io"):
    inputs = [torch.randn(2, 3), torch.randn(4, 3)]
    return clika_compile(model, tracing_inputs=inputs, clika_compile_options=ClikaCompileOptions(state=state))


def test_state_carried_by_caller(tmp_path):
    """A file computes the results of the module call after call if the caller passes its state on."""
    module = compile_stateful(Averaging())
    module.clika_export(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    names = [i.name for i in session.get_inputs()]
    assert names == ["x", "mean", "count"]
    assert [o.name for o in session.get_outputs()][2:] == ["mean.next", "count.next"]
    state = {name: module.get_buffer(name).numpy() for name in names[1:]}
    for size in (2, 3, 1):
        x = torch.randn(size, 3)
        *found, mean, count = session.run(None, {"x": x.numpy(), **state})
        state = {"count": count, "mean": mean}
        for expected, actual in zip(module(x), found, strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected)
    assert state["count"] == module.count


def test_state_kept_with_selected_outputs(tmp_path):
    """The state stays an output if only some outputs of the model are exported."""
    module = compile_stateful(Averaging())
    with export_configuration(keep_outputs_at_idx=[1]):
        module.clika_export(tmp_path / "model.onnx")
    assert len(onnx.load(tmp_path / "model.onnx").graph.output) == 3


class Writing(nn.Module):
    def forward(self, x):
        x.mul_(2)
        return x.sum()


def test_written_input_returned(tmp_path):
    """An input that a call writes gets an output."""
    module = compile_stateful(Writing())
    module.clika_export(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    assert [i.name for i in session.get_inputs()] == ["x"]
    _, written = session.run(None, {"x": torch.ones(2, 3).numpy()})
    assert (written == 2).all()


def test_lost_state_named(tmp_path, capfd):
    """By default, the export names the buffers that a file does not keep."""
    compile_stateful(Averaging(), "internal").clika_export(tmp_path / "model.onnx")
    assert "forward writes 'mean', 'count', but the artifact keeps nothing between calls" in capfd.readouterr().err
    assert [i.name for i in onnx.load(tmp_path / "model.onnx").graph.input] == ["x"]


class Branching(nn.Module):
    """Reads its state in a branch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda x: x + self.total, lambda x: x - self.total, (x,))
        self.total.add_(1)
        return y


def test_state_read_in_branch_rejected(tmp_path):
    """A branch that reads state is named, with what to do."""
    module = compile_stateful(Branching())
    with pytest.raises(
        ModelError, match=r"reads 'total', which forward writes, in a branch or a loop\. Read it before"
    ):
        module.clika_export(tmp_path / "model.onnx")


def test_unknown_state_mode_rejected():
    """The option names its values."""
    with pytest.raises(ModelError, match=r"option 'state' is 'files'\. Choose one of 'internal', 'io'"):
        ClikaCompileOptions(state="files")
