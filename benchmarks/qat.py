"""Time steps of training on each road, and print how many times as long as in float they take."""

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

LIMIT = 2.0
"""Of a float step (issue 6)."""

WARM_UP = 2

SMALL_STEP = 1e-4
"""A learning rate with which random weights stay what they are about."""

EVERY_LAYER = QuantizationSettings(quantization_sensitivity_threshold=1e9)


SUBJECTS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "resnet18": lambda: (MODELS["resnet18"]().make(), torch.randn(16, 3, 64, 64)),
    "encoder": lambda: (Encoder(256, 4).eval(), torch.randn(16, 64, 256)),
}


def compile_quantized(model: nn.Module, x: torch.Tensor, **options: Any) -> nn.Module:
    """Compile with every layer in INT8."""
    return clika_compile(
        model,
        calibration_inputs=[x],
        quantization_settings=EVERY_LAYER,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        **options,
    )


def nncf(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train with NNCF's fake quantization."""
    peer: Any = importlib.import_module("nncf")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return peer.quantize(model, peer.Dataset([x]), subset_size=1)


def torchao(model: nn.Module, x: torch.Tensor) -> nn.Module:
    """Train with torchao's quantization of exported programs."""
    peer: Any = importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    quantizers: Any = importlib.import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config(is_qat=True))
    return peer.prepare_qat_pt2e(torch.export.export(model.train(), (x,)).module(), quantizer)


TRAINING_METHODS = {
    "float": lambda model, _: model,
    "ours": compile_quantized,
    "ours, live norms": partial(compile_quantized, batch_norm="live"),
    "NNCF": nncf,
    "torchao": torchao,
}


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """Return what trains a model by one step and returns the seconds that it takes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL_STEP, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return lambda: measure_processor_seconds(step)


def main(name: str, rounds: str) -> dict[str, Any]:
    """Return the seconds of each step by roads, and why there are none of others."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = SUBJECTS[name]()
    steps: dict[str, Callable[[], float]] = {}
    lacking: dict[str, str] = {}
    for method, make in TRAINING_METHODS.items():
        if method == "ours, live norms" and not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
            continue
        try:
            made = make(copy.deepcopy(model), x)
            steps[method] = step_of(made.train() if method != "torchao" else made, x)
            steps[method]()
        except (ImportError, ValueError) as error:  # the latter by torchao, of modules that are called twice
            lacking[method] = str(error)
            steps.pop(method, None)
    run_in_turn(steps, WARM_UP)
    return {"seconds": run_in_turn(steps, int(rounds)), "lacking": lacking}


def run(names: Names = None, rounds: int = 9) -> None:
    """One step of training in integers, against float, NNCF's and torchao's; not part of all."""
    rows: list[tuple[str, ...]] = []
    worst, compared = 0.0, 0.0
    for name in names or SUBJECTS:
        found = run_in_fresh_process("benchmarks.qat", name, str(rounds))
        seconds = found["seconds"]
        for method, times in seconds.items():
            figure = median_ratio(times, seconds["float"])
            rows.append((name, method, f"{statistics.median(times) * 1e3:.1f} ms", f"{figure:.2f}"))
            worst = max(worst, figure) if method.startswith("ours") else worst
        rows += [(name, method, "makes none", reason) for method, reason in found["lacking"].items()]
        peers = [median_ratio(seconds["ours"], seconds[method]) for method in ("NNCF", "torchao") if method in seconds]
        compared = max(compared, *peers) if peers else compared
    title = "One step: forward, backward, SGD; in turn, one thread, processor time"
    print_table(("model", "road", "step", "times a float step"), rows, title=title)
    print(f"Worst ratio to float: {format_verdict(worst, LIMIT)}")
    print(f"Worst ratio to a peer: {format_verdict(compared, 1.0)}" if compared else "No peer is installed")
