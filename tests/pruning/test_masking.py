"""Masks: the kept weights, masks during training and quantization, and unsupported requests."""

import onnx
import pytest
import torch
from loaded_copies import load_copy
from onnx import numpy_helper
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerPruningSettings,
    ModelError,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.pruning.masks import make_magnitude_mask, make_pattern_mask

ANY = 1e9
"""A threshold that nothing exceeds."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.conv(self.stem(x).relu())).mean((2, 3)))


def compile_net(settings, layers=None):
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8), torch.randn(6, 3, 8, 8)]
    module = clika_compile(
        Net().eval(), calibration_inputs=data, pruning_settings=settings, layer_pruning_settings=layers
    )
    return module, data


def is_n_of_m_sparse(weight, kept=2, of=4):
    """Whether at most ``kept`` of every ``of`` elements along dim 1 are nonzero."""
    return bool(((weight.movedim(1, -1).unflatten(-1, (-1, of)) != 0).sum(-1) <= kept).all())


def read_written_weight(path):
    """Return the weight of the second convolution in a file, in which no node reads a mask."""
    graph = onnx.load(str(path)).graph
    assert not [node for node in graph.node if any("masks" in name for name in node.input)]
    (weight,) = [numpy_helper.to_array(t) for t in graph.initializer if tuple(t.dims) == (8, 8, 3, 3)]
    return torch.from_numpy(weight.copy())


def test_magnitude_mask_drops_smallest_first_of_equal():
    """The smallest weights are masked, and the first of equal ones."""
    assert make_magnitude_mask(torch.tensor([1.0, -1.0, 1.0, 3.0]), 0.5).tolist() == [False, False, True, True]


def test_pattern_mask_follows_input_dim():
    """The pattern is applied along the input dim."""
    mask = make_pattern_mask(torch.randn(6, 8, 3, 3), 1, 1, 4)
    assert (mask.movedim(1, -1).unflatten(-1, (-1, 4)).sum(-1) == 1).all()


def test_clika_compile_masked_weights_stay_zero_in_training():
    """Masked weights stay zero in training, and the state dict keeps the original keys."""
    module, data = compile_net(PruningSettings("2:4", ANY))
    assert is_n_of_m_sparse(module.conv.weight)
    assert is_n_of_m_sparse(module.head.weight)
    assert set(Net().state_dict()) <= set(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    module.train()
    for _ in range(3):
        optimizer.zero_grad()
        module(data[0]).square().sum().backward()
        optimizer.step()
    assert is_n_of_m_sparse(module.conv.weight)
    again = load_copy(module)
    torch.testing.assert_close(again.eval()(data[1]), module.eval()(data[1]))


def test_masked_weight_written_values_ignored():
    """Values written to masked elements count as zero."""
    module, data = compile_net(PruningSettings("2:4", ANY))
    before = module(data[0])
    with torch.no_grad():
        module.conv.weight.add_((module.conv.weight == 0) * 5.0)
    torch.testing.assert_close(module(data[0]), before)


def test_clika_export_masked_model_keeps_zeros(tmp_path):
    """A masked model is exported with zeros, in float and INT8."""
    module, data = compile_net(PruningSettings("2:4", ANY))
    for name, is_quantized in (("float", False), ("integers", True)):
        if is_quantized:
            module.clika_initialize_algorithms(
                QuantizationSettings(automatic_skip_quantization=False),
                calibration_inputs=data,
                deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
            )
        path = tmp_path / f"{name}.onnx"
        module.clika_export(path)
        assert is_n_of_m_sparse(read_written_weight(path)), name


def test_masked_model_qat_keeps_zeros(tmp_path):
    """QAT of a masked model keeps its zeros."""
    module, data = compile_net(PruningSettings("2:4", ANY))
    module.clika_initialize_algorithms(
        QuantizationSettings(automatic_skip_quantization=False),
        calibration_inputs=data,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    before = module.conv.weight.detach().clone()
    optimizer = torch.optim.AdamW(module.parameters(), 0.01)
    module.train()
    for _ in range(3):
        optimizer.zero_grad()
        module(data[0]).square().sum().backward()
        optimizer.step()
    module.eval().clika_export(tmp_path / "trained.onnx")
    weight = read_written_weight(tmp_path / "trained.onnx")
    assert weight.dtype == torch.int8
    assert is_n_of_m_sparse(weight)
    kept = module.get_buffer("clika.masks.conv.weight")
    assert ((module.conv.weight != before) & kept.bool()).any()


def test_pruning_threshold_controls_number_of_zeros():
    """A higher threshold masks more weights."""
    little, _ = compile_net(PruningSettings(pruning_sensitivity_threshold=1e-6))
    much, _ = compile_net(PruningSettings(pruning_sensitivity_threshold=0.05))
    zeros = [sum(int((p == 0).sum()) for p in module.parameters() if p.ndim > 1) for module in (little, much)]
    assert zeros[0] < zeros[1]


def test_mask_pattern_indivisible_layer_skipped_or_raises():
    """A layer whose size the pattern does not divide is skipped; naming it raises an error."""
    module, _ = compile_net(PruningSettings("2:4", ANY))
    assert not (module.stem.weight == 0).any()
    with pytest.raises(
        ModelError, match=r"'stem': mask_type='2:4' needs a multiple of 4 inputs for each output, but the layer has 3"
    ):
        compile_net(PruningSettings("2:4", ANY), {"stem": LayerPruningSettings(mask_type="2:4")})


def test_clika_prune_skipped_layer_and_new_mask():
    """A layer can be skipped, and a mask can be replaced by another pattern."""
    module, data = compile_net(PruningSettings("2:4", ANY), {"head": LayerPruningSettings(skip_pruning=True)})
    assert not (module.head.weight == 0).any()
    module.clika_prune(PruningSettings("1:4", ANY), calibration_inputs=data)
    assert is_n_of_m_sparse(module.conv.weight, kept=1)
    assert len([name for name in module.state_dict() if name.startswith("clika.masks.")]) == 2


def test_clika_prune_structured_on_masked_weights_raises():
    """Removing channels from masked weights raises an error."""
    module, data = compile_net(PruningSettings("2:4", ANY))
    with pytest.raises(ModelError, match=r"cannot remove channels: the weights are masked.*First remove"):
        module.clika_prune(PruningSettings("structured", None, 0.5), calibration_inputs=data)
