"""Inputs that distinguish two functions by themselves, and random inputs for all others."""

from __future__ import annotations

import pytest
import torch

from clika_ref import clika_compile
from clika_ref.capture.random_inputs import is_informative

TELLING = {
    "different floats": torch.arange(6.0).reshape(2, 3),
    "positions": torch.arange(5),
    "complex numbers": torch.complex(torch.arange(4.0), torch.arange(4.0) + 4),
    "half of the elements equal": torch.tensor([0.0, 0.0, 1.0, 2.0]),
    "both truth values": torch.tensor([True, False]),
    "eight bits": torch.arange(4.0).to(torch.float8_e4m3fn),
    "no element": torch.zeros(0, 3),
}

SILENT = {
    "zeros": torch.zeros(2, 3),
    "a mask of ones": torch.ones(2, 3, dtype=torch.int64),
    "one element": torch.tensor([0.3]),
    "mostly zeros": torch.eye(3),
    "NaN": torch.full((4,), torch.nan),
    "minus infinity": torch.full((4,), -torch.inf),
    "one truth value": torch.ones(3, dtype=torch.bool),
}


@pytest.mark.parametrize("values", TELLING.values(), ids=TELLING)
def test_is_informative_varied_elements(values: torch.Tensor) -> None:
    """A tensor is informative if no element fills more than 50 % of it."""
    assert is_informative([None, 3, values])


@pytest.mark.parametrize("values", SILENT.values(), ids=SILENT)
def test_is_informative_uniform_elements(values: torch.Tensor) -> None:
    """A call with one uniform tensor is not informative."""
    assert not is_informative([torch.arange(6.0), values])


def test_clika_compile_uninformative_inputs_run_eager_again() -> None:
    """Eager runs again at a traced length only if the inputs were uninformative."""
    lengths: list[int] = []

    class Attention(torch.nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and not torch.compiler.is_compiling():
                lengths.append(x.shape[0])
            return super().forward(x, x, x, need_weights=False)[0]

    runs = []
    for make in (torch.randn, torch.zeros):
        lengths.clear()
        clika_compile(Attention(4, 2, batch_first=True), tracing_inputs=[make(1, 3, 4), make(5, 3, 4)])
        runs.append(lengths.count(1))
    assert runs[1] == runs[0] + 1
