"""Python loops over positions: the module, its gradients and its file equal eager at lengths that were not traced."""

import copy

import pytest
import torch
from onnx_sessions import open_session
from torch import nn
from torch.utils import _pytree as pytree

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.capture.loops.repeated_iterations import find_repeated_iterations
from clika_ref.core.errors import ModelError

WIDTH, HIDDEN = 4, 5


def randn(batch, length, seed=0):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


INPUTS = [randn(2, 5), randn(3, 7)]
UNSEEN = [randn(2, 1), randn(1, 2), randn(4, 3), randn(2, 23)]


class StackedList(nn.Module):
    """An LSTM cell on selected positions, with a stacked list."""

    def __init__(self):
        super().__init__()
        self.cell, self.readout = nn.LSTMCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], HIDDEN)
        found = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            found.append(h)
        return self.readout(torch.stack(found, 1)), self.readout(h), c


class LastState(nn.Module):
    """A GRU cell on unbound rows, with its default state; only the last state is read."""

    def __init__(self):
        super().__init__()
        self.cell, self.readout = nn.GRUCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        h = None
        for row in x.unbind(1):
            h = self.cell(row, h)
        return self.readout(h)


class TimeMajor(nn.Module):
    """An RNN cell on rows of the first dim, joined by cat."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(WIDTH, HIDDEN, nonlinearity="relu")

    def forward(self, x):
        x, h, found = x.transpose(0, 1), None, []
        for t in range(len(x)):
            h = self.cell(x[t], h)
            found.append(h[None])
        return torch.cat(found)


class Preallocated(nn.Module):
    """Results that are written to a tensor, and a state that a mask keeps."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, HIDDEN)

    def forward(self, x):
        mask, h = x.sum(-1) > 0, torch.zeros(len(x), HIDDEN)
        out = torch.empty(len(x), x.shape[1], HIDDEN)
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t : t + 1], self.cell(x[:, t], h), h)
            out[:, t, :] = h
        return out


class TwoCells(nn.Module):
    """Two cells in one loop, with a layer between them and a residual connection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTMCell(WIDTH, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        states = [(x.new_zeros(len(x), HIDDEN), x.new_zeros(len(x), HIDDEN)) for _ in range(2)]
        found = []
        for row in x.unbind(1):
            states[0] = self.first(row, states[0])
            states[1] = self.second(self.norm(states[0][0]), states[1])
            found.append(states[0][0] + states[1][0])
        return torch.stack(found, dim=1)


class Bidirectional(nn.Module):
    """Two loops, one from the last position to the first."""

    def __init__(self):
        super().__init__()
        self.ahead, self.back = nn.GRUCell(WIDTH, HIDDEN), nn.GRUCell(WIDTH, HIDDEN)

    def forward(self, x):
        h, g, left, right = x.new_zeros(len(x), HIDDEN), x.new_zeros(len(x), HIDDEN), [], []
        for t in range(x.shape[1]):
            h = self.ahead(x[:, t], h)
            left.append(h)
        for t in reversed(range(x.shape[1])):
            g = self.back(x[:, t], g)
            right.insert(0, g)
        return torch.cat([torch.stack(left, 1), torch.stack(right, 1)], -1)


class CustomCell(nn.Module):
    """A cell that no layer computes, in reversed time."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, x):
        h, found = torch.zeros(len(x), HIDDEN), []
        for t in range(x.shape[1] - 1, -1, -1):
            h = torch.tanh(self.a(x[:, t]) + self.b(h) * torch.sigmoid(h))
            found.append(self.c(h).unsqueeze(1))
        return torch.cat(found[::-1], 1)


class Smoothing(nn.Module):
    """A linear recurrence that starts from the first row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.8, WIDTH))

    def forward(self, x):
        h = x[:, 0]
        found = [h]
        for t in range(1, x.shape[1]):
            h = torch.lerp(h, x[:, t], self.weight)
            found.append(h)
        return torch.stack(found, 1)


class MatrixState(nn.Module):
    """Linear attention: a decayed sum of outer products, read by a product."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 3) for _ in range(3))
        self.decay = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        q, k, v, state, found = self.q(x), self.k(x), self.v(x), x.new_zeros(len(x), 3, 3), []
        for t in range(x.shape[1]):
            state = state * self.decay.sigmoid()[:, None] + k[:, t, :, None] * v[:, t, None, :]
            found.append((q[:, t, None] @ state).squeeze(1))
        return torch.stack(found, 1)


class PositionNumber(nn.Module):
    """A cell that reads the number of the position, and a sum of all results."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h, total = torch.zeros(len(x), WIDTH), 0
        for t in range(x.shape[1]):
            h = torch.tanh(self.layer(h) + x[:, t] * (t + 1) / x.shape[1])
            total = total + h
        return total


CASES = {
    StackedList: ["lstm"],
    LastState: ["gru"],
    TimeMajor: ["rnn_relu"],
    Preallocated: ["scan"],
    TwoCells: ["lstm", "lstm"],
    Bidirectional: ["gru", "gru"],
    CustomCell: ["scan"],
    Smoothing: ["linear_recurrence"],
    MatrixState: ["linear_recurrence"],
    PositionNumber: ["linear_recurrence", "scan"],
}
"""The models, and the recurrent calls of their graphs."""

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "scan", "linear_recurrence", "while_loop")


@pytest.mark.slow_cases("TwoCells", "MatrixState", "Preallocated")
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_loop_module_gradients_and_file_equal_eager(build, tmp_path):
    """A loop becomes recurrent layers, and equals eager at any length, also in ONNX Runtime and in training."""
    torch.manual_seed(0)
    model = build().eval()
    target = DeploymentSettings_ONNXRuntime_ONNX()
    module = clika_compile(copy.deepcopy(model), tracing_inputs=INPUTS, deployment_settings=target)
    assert sorted(n.op_type for n in module.graph.nodes if n.op_type in RECURRENT) == CASES[build]
    assert not module.graph.guards
    module.clika_export(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    for x in UNSEEN:
        expected = pytree.tree_leaves(model(x))
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        for results in (pytree.tree_leaves(module(x)), [torch.from_numpy(a) for a in found]):
            torch.testing.assert_close(results, expected)
        assert_same_gradients(model, module, x)


def assert_same_gradients(model, module, x):
    for each in (model, module):
        each.zero_grad()
        total = sum(y.square().sum() for y in pytree.tree_leaves(each(x)))
        if total.requires_grad:  # a loop without iterations uses no parameter
            total.backward()
    actual = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-4, atol=1e-5)  # sums in another order


def test_loop_quantized_module_runs_at_other_length(tmp_path):
    """Layers outside the loop are quantized, and the recurrent layer stays in float."""
    torch.manual_seed(0)
    module = clika_compile(
        StackedList().eval(),
        tracing_inputs=INPUTS,
        calibration_inputs=[randn(2, 6, seed) for seed in range(4)],
        quantization_settings=QuantizationSettings(quantization_sensitivity_threshold=10.0),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    module.eval()
    module.clika_export(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    x = randn(2, 11)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert found[0].shape == (2, 11, 3)
    torch.testing.assert_close(torch.from_numpy(found[0]), module(x)[0], rtol=0, atol=0.05)


@pytest.mark.slow
def test_loop_of_long_inputs_traced_at_short_lengths(monkeypatch):
    """Loops are compared at a few positions, and the longer inputs of the user are compared with eager."""
    counts = []

    def record(graph, allowed):
        counts.append(max(allowed))
        return find_repeated_iterations(graph, allowed)

    monkeypatch.setattr("clika_ref.capture.loops.loop_rolling.find_repeated_iterations", record)
    model = LastState().eval()
    module = clika_compile(copy.deepcopy(model), tracing_inputs=[randn(2, 33), randn(3, 40)])
    assert max(counts) <= 16
    torch.testing.assert_close(module(randn(1, 50)), model(randn(1, 50)))


def test_loop_branch_on_long_length_becomes_guard():
    """A branch that only longer inputs take is no silent error: the runs at longer lengths keep a bound."""

    class Truncated(LastState):
        def forward(self, x):
            return super().forward(x) * (2 if x.shape[1] > 16 else 1)

    model = Truncated().eval()
    module = clika_compile(copy.deepcopy(model), tracing_inputs=INPUTS)
    torch.testing.assert_close(module(randn(1, 6)), model(randn(1, 6)))
    with pytest.raises(ModelError, match="violates"):
        module(randn(1, 20))


@pytest.mark.slow
def test_loop_with_other_graph_for_each_length_rejected():
    """A number that is no linear function of the length raises an error."""

    class Squared(LastState):
        def forward(self, x):
            return super().forward(x) * len(range(x.shape[1])) ** 2

    with pytest.raises(ModelError, match="agrees with eager only at the two lengths"):
        clika_compile(Squared().eval(), tracing_inputs=[randn(2, 5), randn(3, 8)])


def sum_chunks(x):
    """Sum the rows of chunks of four; a branch on the length removes the padding, if there is some."""
    missing = (4 - x.shape[1] % 4) % 4
    padded = nn.functional.pad(x, (0, 0, 0, missing))
    total = padded.reshape(x.shape[0], -1, 4, WIDTH).cumsum(2).reshape(x.shape[0], -1, WIDTH)
    return total[:, : x.shape[1]] if missing > 0 else total


def test_branch_that_computes_the_same_is_merged():
    """A slice to the length, taken only if the tensor is longer, does not exclude inputs without padding."""
    for inputs in ([randn(2, 8), randn(3, 11)], [randn(2, 11), randn(3, 16)]):
        module = clika_compile(sum_chunks, tracing_inputs=inputs)
        for length in (6, 7, 8, 12, 21):
            torch.testing.assert_close(module(randn(2, length)), sum_chunks(randn(2, length)))


@pytest.mark.parametrize("lengths", [(8, 16), (11, 15), (400, 800)], ids=str)
def test_branch_that_no_input_takes_is_merged(lengths):
    """The other branch is found and traced as well, if all tracing inputs take the same one."""
    first, second = lengths
    module = clika_compile(sum_chunks, tracing_inputs=[randn(2, first), randn(3, second)])
    for length in (6, 7, 8, 12, 21, 401):
        torch.testing.assert_close(module(randn(2, length)), sum_chunks(randn(2, length)))


def keep_window(x):
    """Keep the last 16 rows of a long tensor: without effect up to there."""
    hidden = x.tanh()
    return 2 * (hidden[:, -16:] if x.shape[1] > 10 else hidden)


def keep_first(x):
    """Keep the first 12 rows of a long tensor."""
    hidden = x.tanh()
    return 2 * (hidden[:, :12] if x.shape[1] > 4 else hidden)


def pad_long(x):
    """Pad a long tensor by an eighth of its length, less one row: without effect up to 15 rows."""
    hidden, more = x.tanh(), max(0, x.shape[1] // 8 - 1)
    return 2 * (nn.functional.pad(hidden, (0, 0, 0, more)) if x.shape[1] > 4 else hidden)


@pytest.mark.parametrize(
    ("function", "lengths"),
    [(keep_window, (12, 13)), (keep_window, (8, 12)), (keep_first, (3, 6)), (keep_first, (6, 9)), (pad_long, (3, 6))],
)
def test_branch_with_effect_on_long_tensors_only_is_kept(function, lengths):
    """A branch that has no effect near its border is no branch without effect: no result beyond is wrong."""
    first, second = lengths
    module = clika_compile(function, tracing_inputs=[randn(2, first), randn(3, second)])
    found = 0
    for length in (3, 8, 12, 17, 31, 70):
        x = randn(2, length)
        try:
            result = module(x)
        except ModelError:
            continue  # a guard excludes the length
        assert torch.equal(result, function(x))
        found += 1
    assert found >= 1


def test_branch_that_eager_cannot_take_keeps_guard():
    """Sizes of another branch, which the model rejects, stay excluded by the guard."""

    def sum_even(x):
        if x.shape[1] % 2:
            raise ValueError
        return x.cumsum(1)

    module = clika_compile(sum_even, tracing_inputs=[randn(2, 8), randn(3, 16)])
    with pytest.raises(ModelError, match="violates"):
        module(randn(2, 9))


def test_branch_that_computes_another_result_rejected():
    """Branches with different results are not merged."""

    def scale(x):
        return x.cumsum(1) * (2 if x.shape[1] % 4 else 1)

    with pytest.raises(ModelError, match="takes a different branch"):
        clika_compile(scale, tracing_inputs=[randn(2, 8), randn(3, 11)])


class RunningMean(nn.Module):
    """Each iteration has other numbers."""

    def forward(self, x):
        mean, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            mean = mean * (t / (t + 1)) + x[:, t] / (t + 1)
            found.append(mean)
        return torch.stack(found, 1)


class ChunkedPositions(nn.Module):
    """Pads rows to a multiple of 4, unless they are one, and adds constants in chunks of 4."""

    def forward(self, x):
        remainder = x.shape[1] % 4
        if remainder:
            x = torch.nn.functional.pad(x, (0, 4 - remainder))
        chunks = torch.arange(x.shape[1]).reshape(x.shape[1] // 4, 4)
        return x.reshape(x.shape[0], -1, 4) + chunks


def test_branch_without_meaning_at_other_sizes_is_not_merged():
    """Constants of a branch may be impossible at sizes that the branch excludes: the branches differ."""
    with pytest.raises(ModelError, match="takes a different branch"):
        clika_compile(ChunkedPositions(), tracing_inputs=[torch.ones(2, 8), torch.ones(3, 17)])


@pytest.mark.slow
def test_loop_with_other_numbers_in_iterations_names_line():
    """The error names the line of the loop, why it was not rolled, and what to do."""
    message = r"test_loops.py:\d+ runs once for each position, and its iterations differ .*visit every position"
    with pytest.raises(ModelError, match=message):
        clika_compile(RunningMean(), tracing_inputs=[torch.randn(n, 2 * n + 3, 4) for n in (1, 2, 3)])


class MaskedCell(nn.Module):
    """A recurrent layer that keeps its state where a mask, a second input of the same length, is false."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, mask):
        h, rows = x.new_zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            h = torch.where(mask[:, t, None], self.cell(x[:, t], h), h)
            rows.append(h)
        return torch.stack(rows, 1)


class Normalizer(nn.Module):
    """The forward recursion of a conditional random field with a mask; the first position has no transition."""

    def forward(self, x, mask):
        scores = x[:, 0]
        for t in range(1, x.shape[1]):
            following = torch.logsumexp(scores[:, :, None] + x[:, t, None], 1)
            scores = torch.where(mask[:, t, None], following, scores)
        return scores


class FastWeights(nn.Module):
    """A recurrence that selects the column of a product."""

    def forward(self, x, _mask):
        weight, h, rows = x.mT @ x / 9, x[:, 0], []
        for t in range(x.shape[1]):
            h = torch.tanh((weight @ h[:, :, None])[..., 0] + x[:, t])
            rows.append(h)
        return torch.stack(rows, 1)


@pytest.mark.parametrize("kind", [MaskedCell, Normalizer, FastWeights])
def test_loop_over_two_inputs_serves_any_length(kind):
    """Loops that read two inputs per position, or select columns inside, agree with eager at lengths never traced."""
    torch.manual_seed(0)
    model = kind().eval()

    def make_call(batch, length):
        return randn(batch, length), torch.rand(batch, length) > 0.3

    calls = [make_call(2, 5), make_call(3, 7)]
    module = clika_compile(model, tracing_inputs=calls, discard_input_model=False)
    for length in (1, 2, 12, 40):
        call = make_call(2, length)
        torch.testing.assert_close(module(*call), model(*call))
