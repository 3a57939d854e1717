"""Adjacent calls that ONNX Runtime fuses or moves compute the same as the single calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clika_ref import clika_compile

COMPUTATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros around negative numbers, then their maximum": lambda x: F.max_pool2d(F.pad(x - 9, (1, 1, 1, 1)), 3, 1),
    "zeros around, then a maximum that pads": lambda x: F.max_pool2d(F.pad(x - 9, (1, 1, 1, 1)), 3, 1, padding=1),
    "more zeros around than a window is long": lambda x: F.avg_pool2d(F.pad(x, (3, 3, 3, 3)), 2),
    "a transpose, then a product with a vector": lambda x: x[0, 0].t() @ x[0, 0, :, 0],
    "a transposed batch, then a product with a vector": lambda x: x[0].transpose(1, 2) @ x[0, 0, :, 0],
    "a transpose, then windows as columns": lambda x: F.unfold(x.permute(0, 3, 1, 2), (2, 1), padding=(1, 0)),
}


class _Computation(torch.nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_clika_export_fused_calls_agree_with_eager(name, tmp_path):
    """The artifact agrees although ONNX Runtime fuses or moves nodes."""
    x = torch.randn(2, 6, 8, 4, generator=torch.Generator().manual_seed(0))
    module = clika_compile(_Computation(COMPUTATIONS[name]), tracing_inputs=[x])
    assert module.clika_export(tmp_path / "model.onnx").facts["nodes"] > 1  # the export compares both
