"""Compare files of Python loops over positions, for any length, with unrolled files: latency at one length.

``python -m benchmarks loops`` prints the table. An unrolled file comes from tracing inputs of one length.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from benchmarks.breadth.architecture import make_text
from benchmarks.breadth.tiny_configurations import build_tiny
from benchmarks.breadth.transformers_text import DECODERS
from benchmarks.measuring import Names, format_verdict, median_ratio, run_in_turn
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, clika_compile
from clika_ref.reporting.tables import print_table

LENGTHS = (16, 64)
"""The lengths to measure at; each has an unrolled file."""

TRACED_SIZES = ((1, 8), (2, 11))
"""Batches and lengths of the tracing inputs of the file for any length."""

MAX_RATIO = 1.1
"""Goal for the latency relative to the unrolled file."""

ROUNDS, CALLS_PER_ROUND = 11, 30

WIDTH, HIDDEN = 32, 64
"""Sizes of the inputs and states of the cells."""


class CellOverPositions(nn.Module):
    """A loop over the positions with one of PyTorch's cells."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = cell(WIDTH, HIDDEN)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Return all hidden states."""
        h = c = x.new_zeros(x.shape[0], HIDDEN)
        found: list[Tensor] = []
        for t in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)


class CustomCellOverPositions(nn.Module):
    """A loop with a cell that no recurrent layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the readouts of all states."""
        h, found = x.new_zeros(x.shape[0], HIDDEN), list[Tensor]()
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(x[:, t]) + self.b(h) * torch.sigmoid(h))
            found.append(self.c(h))
        return torch.stack(found, 1)


class GatedSum(nn.Module):
    """``h = a[t] * h + x[t]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return all states."""
        a, h, found = torch.sigmoid(self.gate(x)), x.new_zeros(x.shape[0], x.shape[2]), list[Tensor]()
        for t in range(x.shape[1]):
            h = a[:, t] * h + x[:, t]
            found.append(h)
        return torch.stack(found, 1)


def _draw(width: int, batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, width)


def _build_decoder(name: str) -> nn.Module:
    return build_tiny(f"{name}ForCausalLM", **DECODERS[name])


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "LSTMCell": (lambda: CellOverPositions(nn.LSTMCell), functools.partial(_draw, WIDTH)),
    "GRUCell": (lambda: CellOverPositions(nn.GRUCell), functools.partial(_draw, WIDTH)),
    "RNNCell": (lambda: CellOverPositions(nn.RNNCell), functools.partial(_draw, WIDTH)),
    "custom cell": (CustomCellOverPositions, functools.partial(_draw, WIDTH)),
    "h = a * h + x, width 64": (lambda: GatedSum(64), functools.partial(_draw, 64)),
    "h = a * h + x, width 1024": (lambda: GatedSum(1024), functools.partial(_draw, 1024)),
    **{name: (functools.partial(_build_decoder, name), make_text) for name in ("Mamba", "Rwkv")},
}
"""Models, and functions that make an input of a batch size and a length."""


def run(names: Names = None) -> None:
    """Print the latency of both files at each length, and their ratio."""
    rows: list[tuple[str, ...]] = []
    for name in names or MODELS:
        build, make_input = MODELS[name]
        torch.manual_seed(0)
        model = build().eval()
        with tempfile.TemporaryDirectory() as folder:
            any_length = _export(model, [make_input(b, n) for b, n in TRACED_SIZES], Path(folder, "loop.onnx"))
            for length in LENGTHS:
                inputs = [make_input(batch, length) for batch in (1, 2)]
                unrolled = _export(model, inputs, Path(folder, "unrolled.onnx"))
                rows.append((name, str(length), *_compare(unrolled, any_length, inputs[0])))
    print_table(("model", "length", "unrolled, ms", "any length, ms", "ratio"), rows)


def _export(model: nn.Module, inputs: list[Any], path: Path) -> onnxruntime.InferenceSession:
    settings = DeploymentSettings_ONNXRuntime_ONNX()
    module = clika_compile(model, tracing_inputs=inputs, deployment_settings=settings, discard_input_model=False)
    module.clika_export(path)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _compare(
    unrolled: onnxruntime.InferenceSession, any_length: onnxruntime.InferenceSession, given: Any
) -> tuple[str, ...]:
    def time_session(session: onnxruntime.InferenceSession) -> float:
        names = [i.name for i in session.get_inputs()]
        feeds = {name: (given[name] if isinstance(given, dict) else given).numpy() for name in names}
        start = time.perf_counter()
        for _ in range(CALLS_PER_ROUND):
            session.run(None, feeds)
        return (time.perf_counter() - start) / CALLS_PER_ROUND

    candidates = {"any": functools.partial(time_session, any_length), "one": functools.partial(time_session, unrolled)}
    times = run_in_turn(candidates, ROUNDS)
    ratio = median_ratio(times["any"], times["one"])
    medians = (f"{1e3 * sorted(times[key])[ROUNDS // 2]:.3f}" for key in ("one", "any"))
    return (*medians, format_verdict(ratio, MAX_RATIO))
