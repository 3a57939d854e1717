"""Time training steps in turn, in float and with each method: ``python -m benchmarks.qat.steps resnet18 9``."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import measure_processor_seconds, run_in_turn
from benchmarks.models import MODELS
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

WARM_UP = 2

SMALL_STEP = 1e-4
"""A learning rate with which random weights stay what they are about."""

EVERY_LAYER = QuantizationSettings(quantization_sensitivity_threshold=1e9)


class _Encoder(nn.Module):
    """Four layers of a transformer, without dropout, which clika-ref removes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


SUBJECTS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet18": lambda: (MODELS["resnet18"]().make(), torch.randn(16, 3, 64, 64)),
    "encoder": lambda: (_Encoder().eval(), torch.randn(16, 64, 256)),
}


def prepare_floating(model: nn.Module, _: torch.Tensor) -> nn.Module:
    """Train in float, norms being those of the batch."""
    return model


def train_quantized(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train the INT8 module with frozen batch norm."""
    return _compile_module(model, x)


def train_quantized_live(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train the INT8 module with live batch norm."""
    return _compile_module(model, x, batch_norm="live")


def _compile_module(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    return clika_compile(
        model,
        calibration_inputs=[x],
        quantization_settings=EVERY_LAYER,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        **options,
    )


def prepare_nncf(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train with NNCF's fake quantization."""
    peer: Any = importlib.import_module("nncf")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return peer.quantize(model, peer.Dataset([x]), subset_size=1)


def prepare_torchao(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train with torchao's quantization of exported programs."""
    peer: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizers: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config(is_qat=True))
    return peer.prepare_qat_pt2e(torch.export.export(model.train(), (x,)).module(), quantizer)


TRAINING_METHODS = {
    "float": prepare_floating,
    "clika-ref": train_quantized,
    "clika-ref, live norms": train_quantized_live,
    "NNCF": prepare_nncf,
    "torchao": prepare_torchao,
}


def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Return a function that trains a model for one step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL_STEP, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return lambda: measure_processor_seconds(step)


def main(name: str, rounds: str) -> dict[str, Any]:
    """Return the seconds of each step by method, and the reason for each method without any."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    steps: dict[str, Callable[[], float]] = {}
    lacking: dict[str, str] = {}
    for method, make in TRAINING_METHODS.items():
        if method == "clika-ref, live norms" and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
            continue
        try:
            made = make(copy.deepcopy(model), x)
            steps[method] = make_step(made.train() if method != "torchao" else made, x)
            steps[method]()
        except (ImportError, ValueError) as error:  # the latter by torchao, of modules that are called twice
            lacking[method] = str(error)
            steps.pop(method, None)
    run_in_turn(steps, WARM_UP)
    return {"seconds": run_in_turn(steps, int(rounds)), "lacking": lacking}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
