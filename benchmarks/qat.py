"""Compare a step of quantization-aware training with a float step, and with NNCF and torchao."""

from __future__ import annotations

import copy
import importlib
import logging
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import (
    Names,
    format_verdict,
    measure_processor_seconds,
    median_ratio,
    run_in_fresh_process,
    run_in_turn,
)
from benchmarks.models import MODELS, Encoder
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile
from clika_ref.reporting.tables import print_table

MAX_RATIO = 2.0
"""Of a step to a step in float (issue 6)."""

WARM_UP_ROUNDS = 2

LEARNING_RATE = 1e-4
"""Small, so that random weights hardly change."""

INT8_SETTINGS = QuantizationSettings(quantization_sensitivity_threshold=1e9)
"""Quantize every layer."""

SUBJECTS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet18": lambda: (MODELS["resnet18"]().make(), torch.randn(16, 3, 64, 64)),
    "encoder": lambda: (Encoder(256, 4).eval(), torch.randn(16, 64, 256)),
}


def compile_quantized(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    """Compile with every layer in INT8."""
    return clika_compile(
        model,
        calibration_inputs=[x],
        quantization_settings=INT8_SETTINGS,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        **options,
    )


def prepare_with_nncf(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Insert the fake quantization of NNCF."""
    nncf: Any = importlib.import_module("nncf")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf.quantize(model, nncf.Dataset([x]), subset_size=1)


def prepare_with_torchao(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Insert the fake quantization of torchao into the exported program."""
    pt2e: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizers: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config(is_qat=True))
    return pt2e.prepare_qat_pt2e(torch.export.export(model.train(), (x,)).module(), quantizer)


TRAINING_METHODS = {
    "float": lambda model, _: model,
    "clika-ref": compile_quantized,
    "clika-ref, live norms": partial(compile_quantized, batch_norm="live"),
    "NNCF": prepare_with_nncf,
    "torchao": prepare_with_torchao,
}


def make_step(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Return a function that runs one training step and returns its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def run_step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return lambda: measure_processor_seconds(run_step)


def main(name: str, rounds: str) -> dict[str, Any]:
    """Return the seconds of each step by method, and the error of each method that failed."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    steps: dict[str, Callable[[], float]] = {}
    errors: dict[str, str] = {}
    for method, prepare in TRAINING_METHODS.items():
        if method == "clika-ref, live norms" and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
            continue
        try:
            prepared = prepare(copy.deepcopy(model), x)
            steps[method] = make_step(prepared.train() if method != "torchao" else prepared, x)
            steps[method]()
        except (ImportError, ValueError) as error:  # torchao raises ValueError for modules that are called twice
            errors[method] = str(error)
            steps.pop(method, None)
    run_in_turn(steps, WARM_UP_ROUNDS)
    return {"seconds": run_in_turn(steps, int(rounds)), "errors": errors}


def run(names: Names = None, rounds: int = 9) -> None:
    """Compare a step of quantization-aware training with float, NNCF and torchao."""
    rows: list[tuple[str, ...]] = []
    max_float_ratio, max_peer_ratio = 0.0, 0.0
    for name in names or SUBJECTS:
        found = run_in_fresh_process("benchmarks.qat", name, str(rounds))
        seconds = found["seconds"]
        for method, times in seconds.items():
            ratio = median_ratio(times, seconds["float"])
            rows.append((name, method, f"{statistics.median(times) * 1e3:.1f} ms", f"{ratio:.2f}"))
            if method.startswith("clika-ref"):
                max_float_ratio = max(max_float_ratio, ratio)
        rows += [(name, method, "failed", error) for method, error in found["errors"].items()]
        peers = [seconds[method] for method in ("NNCF", "torchao") if method in seconds]
        max_peer_ratio = max(max_peer_ratio, *(median_ratio(seconds["clika-ref"], peer) for peer in peers), 0.0)
    title = "One step: forward, backward, SGD; in turn, one thread, processor time"
    print_table(("model", "method", "step", "multiple of a float step"), rows, title=title)
    print(f"Largest ratio to float: {format_verdict(max_float_ratio, MAX_RATIO)}")
    print(
        f"Largest ratio to a peer: {format_verdict(max_peer_ratio, 1.0)}" if max_peer_ratio else "No peer is installed"
    )
