"""Quantization inside control flow: as in a graph, by the inputs that reach each body."""

import pytest
import torch
from onnx_sessions import open_session
from torch import nn
from torch._higher_order_ops import scan

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
)


def make_layers():
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 64, 5)).eval()


class Chosen(nn.Module):
    """One of two networks."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return torch.cond(x.amax() > 0, self.first, self.second, (x,))


def quantize(model, batches, target=None, **settings):
    return clika_compile(
        model,
        tracing_inputs=batches[:1],
        calibration_inputs=batches,
        deployment_settings=target or DeploymentSettings_ONNXRuntime_ONNX(),
        quantization_settings=QuantizationSettings(**settings),
        discard_input_model=False,
        smooth_quant="off",
        equalization="off",
    )


def make_batches(count=4, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, 8, 8, generator=generator) * scale for _ in range(count)]


def test_quantize_taken_branch_like_plain_model():
    """A branch that all inputs take is quantized like the same model alone: decisions, scales and results."""
    torch.manual_seed(0)
    model, batches = make_layers(), make_batches()
    plain = quantize(model, batches, automatic_skip_quantization=False)
    chosen = quantize(Chosen(model, make_layers()), batches, automatic_skip_quantization=False)
    for x in batches:
        assert torch.equal(plain(x), chosen(x))
    decisions = {row.scope.removeprefix("first."): row.decision for row in chosen.clika_summary().layers}
    for row in plain.clika_summary().layers:
        assert decisions[row.scope] == row.decision == "quantized"


def test_quantize_unentered_branch_stays_in_float(tmp_path):
    """Layers of a branch that no calibration input entered stay in float, with that reason; the file is right."""
    torch.manual_seed(0)
    model, batches = Chosen(make_layers(), make_layers()), make_batches()
    module = quantize(model, batches, automatic_skip_quantization=False)
    reasons = {row.scope: row.reason for row in module.clika_summary().layers}
    assert [r for scope, r in reasons.items() if scope.startswith("first")] == ["", "", ""]
    assert {r for scope, r in reasons.items() if scope.startswith("second")} == {
        "no calibration input entered this branch"
    }
    module.clika_export(tmp_path / "model.onnx")
    session, other = open_session(tmp_path / "model.onnx"), -batches[0].abs()
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(other))


class BeforeBranch(nn.Module):
    """Layers before a branch that every input takes, inside `torch.cond` or as plain calls."""

    def __init__(self, *, is_plain):
        super().__init__()
        self.first, self.last, self.is_plain = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 5), is_plain

    def forward(self, x):
        y = self.first(x)
        y = y * 2 if self.is_plain else torch.cond(y.amax() > -9, lambda y: y * 2, lambda y: y * 3, (y,))
        return self.last(y.flatten(1))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_quantize_layers_before_branch_like_plain_model(batch_size):
    """Layers before a branch have the sensitivities of the model without it, at any batch size."""
    torch.manual_seed(0)
    plain = BeforeBranch(is_plain=True).eval()
    chosen = BeforeBranch(is_plain=False).eval()
    chosen.load_state_dict(plain.state_dict())
    batches = [x[:batch_size] for x in make_batches()]
    rows = [
        sorted((row.scope, row.decision, row.sensitivity) for row in quantize(each, batches).clika_summary().layers)
        for each in (plain, chosen)
    ]
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    assert [row[2] for row in rows[1]] == pytest.approx([row[2] for row in rows[0]], rel=1e-3)


class MatmulsInBranch(nn.Module):
    """Matmuls of two operands of a branch, after a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        branches = (lambda x, y: torch.einsum("btd,bsd->bts", x, y)), (lambda x, y: y @ x.transpose(1, 2) + 1)
        return torch.cond(x.sum() > 0, *branches, (x, self.layer(x)))


class WithoutRows(nn.Module):
    """A layer for rows that a batch may not have."""

    def __init__(self):
        super().__init__()
        self.first, self.rare = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        rows = x.sum(-1) > 1e3
        y = x.clone()
        y[rows] = self.rare(x[rows])
        return self.first(y)


class Shortened(nn.Module):
    """A layer after a slice to a length that is read from a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, lengths=None):
        return self.layer(x if lengths is None else x[:, : int(lengths.max())])


@pytest.mark.slow
def test_quantize_with_matmuls_in_branch_and_layers_without_rows():
    """Layers are quantized next to matmuls inside a branch, after a slice by a value, and where one has no rows."""
    torch.manual_seed(0)
    batches = [torch.randn(2, 5, 6) + 1, torch.randn(3, 7, 6) - 1]
    calls = [(x, torch.arange(1, len(x) + 1)) for x in batches]
    for model, given in ((MatmulsInBranch(), batches), (WithoutRows(), batches), (Shortened(), calls)):
        module = clika_compile(
            model.eval(),
            tracing_inputs=given,
            calibration_inputs=given,
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            quantization_settings=QuantizationSettings(automatic_skip_quantization=False),
            discard_input_model=False,
        )
        assert "quantized" in {row.decision for row in module.clika_summary().layers}
        call = given[0] if isinstance(given[0], tuple) else (given[0],)
        with torch.no_grad():
            found, expected = module(*call), model(*call)
        assert (found - expected).norm() < 0.05 * expected.norm()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        def step(h, row):
            h = self.layer(h + row)
            return h, h.clone()

        return scan(step, torch.zeros(4, 8), x, dim=0)[1]


@pytest.mark.slow
def test_quantize_loop_ranges_cover_all_iterations():
    """The range of a value in a loop covers every iteration, not only the last one of a batch."""
    torch.manual_seed(0)
    model = Recurrent().eval()
    x = torch.randn(5, 4, 8)
    x[1] *= 50
    module = quantize(model, [x, x * 0.9], automatic_skip_quantization=False)
    (row,) = module.clika_summary().layers
    assert row.decision == "quantized"
    found, expected = module(x), model(x)
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
def test_quantize_bodies_for_tensorrt_stay_in_float():
    """For TensorRT, layers inside control flow stay in float."""
    torch.manual_seed(0)
    module = quantize(Chosen(make_layers(), make_layers()), make_batches(), DeploymentSettings_TensorRT_ONNX())
    rows = module.clika_summary().layers
    assert len(rows) == 6
    assert {row.reason for row in rows} == {"the target computes layers inside control flow in float"}


@pytest.mark.slow
def test_train_quantized_bodies():
    """Quantization-aware training gives gradients to the weights and scales of the branch that ran."""
    torch.manual_seed(0)
    batches = make_batches()
    module = quantize(Chosen(make_layers(), make_layers()), batches, automatic_skip_quantization=False).train()
    module(batches[0]).square().mean().backward()
    trained = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"first.0.weight", "first.3.weight", "first.5.weight"} <= trained
    assert not any(name.startswith("second") for name in trained)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_weights_of_bodies(bits, tmp_path):
    """Weight-only quantization packs the weights of branches; the file computes what the module computes."""
    torch.manual_seed(0)
    model = Chosen(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    batches.append(-batches[0].abs())
    settings = {"prefer_weights_only_quantization": True, "weights_num_bits": bits}
    module = quantize(model, batches, automatic_skip_quantization=False, **settings)
    module.clika_export(tmp_path / "model.onnx")
    session = open_session(tmp_path / "model.onnx")
    for x in batches:
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x), rtol=0.02, atol=0.02)
    assert all(row.decision.startswith("quantized") for row in module.clika_summary().layers)
