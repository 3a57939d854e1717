"""Buffers have the same contents after a call of the graph as after a call in eager."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture import capture


class Stateful(nn.Module):
    """Calls a function with itself; its buffers contain different numbers."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("old", torch.arange(12.0).reshape(3, 4))
        self.register_buffer("other", torch.ones(3, 4))

    def forward(self, x):
        return self.body(self, x)


class Around(nn.Module):
    """Contains such a module, whose assignments torch.export does not report."""

    def __init__(self, body):
        super().__init__()
        self.inner = Stateful(body)

    def forward(self, x):
        return self.inner(x * 1)


def return_read_state(self, x):
    stored = self.old
    self.old = stored * 0.5
    return x, stored


def return_part_of_read_state(self, x):
    stored = self.old
    self.old = stored * 0.5
    return x, stored[:2]


def write_read_state(self, x):
    stored = self.old
    stored.mul_(0.5)
    return x, stored, self.old[:2]


def write_and_assign(self, x):
    stored = self.old
    stored.add_(x.sum())
    self.old = stored + 1
    stored.mul_(2)
    return stored, self.old


def write_assigned_state(self, x):
    self.old = self.old * 0.5
    self.old.add_(x.sum())
    return x + self.old.sum()


def swap_states(self, x):
    self.old, self.other = self.other[:], self.old
    return x, self.old


def keep_input(self, x):
    before = self.old
    self.old = x
    return x - before


def update_average(self, x):
    result = x - self.old
    self.old = self.old * 0.9 + 0.1 * x.detach().mean(0)
    return result


@pytest.mark.parametrize("kind", [Stateful, Around])
@pytest.mark.parametrize(
    "body",
    [
        return_read_state,
        return_part_of_read_state,
        write_read_state,
        write_and_assign,
        write_assigned_state,
        swap_states,
        keep_input,
        update_average,
    ],
)
def test_state_writes_and_reads_follow_eager(compile_and_compare, kind, body):
    """State and tensors read from it follow eager over several calls."""
    compile_and_compare(kind(body), [torch.randn(3, 4)], [torch.randn(3, 4) for _ in range(3)])


class Recurrent(nn.Module):
    """Keeps the state of an LSTM from call to call."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(4, 5, batch_first=True)
        self.register_buffer("h", torch.zeros(1, 2, 5))
        self.register_buffer("c", torch.zeros(1, 2, 5))

    def forward(self, x):
        y, (self.h, self.c) = self.cell(x, (self.h, self.c))
        return y


@pytest.mark.filterwarnings("ignore:.*_flat_weights.* were assigned during export:UserWarning")
def test_state_of_recurrent_network_follows_eager(compile_and_compare):
    """A recurrent network keeps its state."""
    compile_and_compare(Recurrent(), [torch.randn(2, 3, 4), torch.randn(2, 5, 4)], [torch.randn(2, 4, 4)])


class Rolling(nn.Module):
    """Keeps the last keys: the oldest fall out as new ones come."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("keys", torch.zeros(6, 4))

    def forward(self, x):
        before, self.keys = self.keys, torch.cat([self.keys, self.norm(x)])[-6:]
        return (x @ self.keys.mT).softmax(-1) @ before, before[1:]


@pytest.mark.parametrize("train", [True, False])
def test_state_of_cache_and_running_stats_follows_eager(compile_and_compare, train):
    """A cache and running statistics follow eager."""
    inputs, unseen = [torch.randn(3, 4), torch.randn(5, 4)], [torch.randn(2, 4), torch.randn(4, 4)]
    compile_and_compare(Rolling().train(train), inputs, unseen, skip_eval_set_mode=True)


def assign_for_long_inputs(self, x):
    if x.shape[0] > 3:
        self.old = self.old + 1
    return x


def test_state_assigned_in_branch_guarded(compile_and_compare):
    """State that a branch assigns is served on that branch only."""
    module = compile_and_compare(
        Around(assign_for_long_inputs), [torch.randn(4, 4), torch.randn(5, 4)], [torch.randn(6, 4)]
    )
    with pytest.raises(ModelError, match=r"violates .*> 3"):
        module(torch.randn(2, 4))
    with pytest.raises(ModelError, match="the model takes a different branch for input 2"):
        clika_compile(Around(assign_for_long_inputs), tracing_inputs=[torch.randn(4, 4), torch.randn(2, 4)])


def test_state_write_dropped_by_trace_rejected(monkeypatch):
    """A trace that drops a write to a buffer raises an error."""
    monkeypatch.setattr(capture, "trace_assignments_as_writes", lambda *_: contextlib.nullcontext())
    with pytest.raises(ModelError, match=r"forward writes to inner.old in a way that this trace does not record"):
        clika_compile(Around(return_read_state), tracing_inputs=[torch.randn(3, 4)])


def test_state_disagreeing_with_eager_rejected():
    """A graph that leaves other data in a buffer raises an error."""
    calls = itertools.count(1)

    def count_in_python(self, x):
        self.old.fill_(next(calls))
        return x

    with pytest.raises(ModelError, match="disagrees with eager on input 1: old after the call is off by"):
        clika_compile(Stateful(count_in_python), tracing_inputs=[torch.randn(3, 4)])


class Growing(nn.Module):
    """Rebinds a buffer to a tensor of another shape."""

    def __init__(self, grow, buffer):
        super().__init__()
        self.grow = grow
        self.register_buffer("stored", buffer)

    def forward(self, x):
        self.stored = self.grow(self.stored, x)
        return x + self.stored.sum()


def append_rows(stored, x):
    return torch.cat([stored, x])


def start_or_add(stored, x):
    return x if stored is None else stored + x


def extend_table(stored, x):
    return torch.arange(float(x.shape[1])) if stored is None or stored.numel() < x.shape[1] else stored


@pytest.mark.parametrize(
    ("grow", "buffer", "message"),
    [
        (
            append_rows,
            torch.zeros(0, 4),
            r"assigns 'stored' to float32\[3, 4\] from float32\[0, 4\], and the next call reads",
        ),
        (start_or_add, None, r"assigns 'stored' to float32\[3, 4\] from nothing, and the next call reads it"),
    ],
)
def test_state_of_other_shape_read_by_next_call_rejected(grow, buffer, message):
    """State of another shape raises an error if the next call reads it."""
    with pytest.raises(ModelError, match=message):
        clika_compile(Growing(grow, buffer), tracing_inputs=[torch.ones(3, 4)])


@pytest.mark.parametrize("buffer", [None, torch.zeros(2)])
def test_state_cached_table_accepted_with_warning(buffer, tmp_path):
    """A cached table is no state and gives a warning."""
    x = torch.ones(3, 4)
    module = clika_compile(Growing(extend_table, buffer), tracing_inputs=[x], logs_dir=tmp_path)
    for _ in range(2):
        torch.testing.assert_close(module(x), torch.full((3, 4), 7.0))
    (log,) = tmp_path.iterdir()
    assert "Warning: forward assigns 'stored' to float32[4] from" in log.read_text()


def test_state_rebound_parameter_rejected():
    """A rebound parameter raises an error that names it."""

    def rebind_parameter(self, x):
        self.weight = nn.Parameter(self.weight.detach() * 2)
        return x * self.weight

    model = Stateful(rebind_parameter)
    model.weight = weight = nn.Parameter(torch.ones(4))
    with pytest.raises(ModelError, match=r"forward writes to weight in a way that this trace does not record, .*copy_"):
        clika_compile(model, tracing_inputs=[torch.randn(3, 4)])
    assert model.weight is weight


def test_state_expanded_buffer_assignment_rejected():
    """Assigning to a buffer that was registered as expanded raises an error."""

    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1).expand(4))

        def forward(self, x):
            self.total = self.total + x.sum(0)
            return x + self.total

    with pytest.raises(ModelError, match=r"assigns to 'total', which was registered as an expanded tensor.*clone"):
        clika_compile(Expanded(), tracing_inputs=[torch.ones(2, 4)])
