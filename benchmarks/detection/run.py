"""The command: train the detectors if they are not cached, compress them, and compare mAP and latency with float."""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from benchmarks.detection.average_precision import IOU_THRESHOLDS, Detections, compute_mean_average_precision
from benchmarks.detection.detectors import (
    CALIBRATION_SEED,
    DETECTORS,
    MAX_TRAINING_SECONDS,
    TEST_SEED,
    DetectorSpec,
    load_detector,
    render_scenes,
)
from benchmarks.detection.shapes import CLASSES, Scene
from benchmarks.measuring import Names, format_verdict, run_in_fresh_process, run_in_turn
from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.core.registry import load_registry
from clika_ref.reporting.tables import print_table

CALIBRATION_IMAGES, TEST_IMAGES = 64, 300

MAX_LOST_POINTS = 1.0
"""Limit of the mAP in INT8 below that of the same runtime in float, at each IoU."""

ROUNDS, CALLS_PER_ROUND = 20, 10

TARGETS = {"ONNX Runtime": DeploymentSettings_ONNXRuntime_ONNX, "OpenVINO": DeploymentSettings_OpenVINO_ONNX}

Caller = Callable[[Sequence[Tensor]], Any]
"""Takes images ``float32[3, size, size]``, and returns outputs in the structure of the model."""


def split_into_calls(detector: DetectorSpec, scenes: Sequence[Scene]) -> list[list[Tensor]]:
    """Return the images of scenes, as many in each part as a call takes."""
    images = [scene.image for scene in scenes]
    return [images[i : i + detector.max_images] for i in range(0, len(images), detector.max_images)]


def compile_detector(model: torch.nn.Module, detector: DetectorSpec, quantization: QuantizationSettings | None) -> Any:
    """Return a detector, compiled in float or quantized with the default arguments."""
    calls = [detector.make_inputs(images) for images in make_calibration_calls(detector)]
    batches: dict[str, Any] = {} if quantization is None else {"calibration_inputs": [(call,) for call in calls]}
    sizes = (1, 2) if detector.max_images > 1 else (1, 1)  # a dim 0 that differs is dynamic
    images = [scene.image for scene in render_scenes(CALIBRATION_SEED, 2)]
    return clika_compile(
        model,
        tracing_inputs=[(detector.make_inputs(images[:size]),) for size in sizes],
        quantization_settings=quantization,
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
        **batches,
    )


def make_calibration_calls(detector: DetectorSpec) -> list[list[Tensor]]:
    """Return images for calibration, at most four in each call."""
    images = [scene.image for scene in render_scenes(CALIBRATION_SEED, CALIBRATION_IMAGES)]
    size = min(4, detector.max_images)
    return [images[i : i + size] for i in range(0, len(images), size)]


def load_file(module: ClikaModule, path: Path, target: str, detector: DetectorSpec, spec: Any) -> Caller:
    """Export a module for a target, and return a function that runs the file on one thread."""
    settings = TARGETS[target]()
    artifact = module.clika_export(path, deployment_settings=settings)
    runner = load_registry().targets[settings.target].load(artifact)

    def call(images: Sequence[Tensor]) -> Any:
        leaves, _ = tree_flatten(detector.make_inputs(images))
        return tree_unflatten(runner(leaves), spec)

    return call


def measure_precision(call: Caller, detector: DetectorSpec, scenes: Sequence[Scene]) -> dict[str, float]:
    """Return the mAP at an IoU of 0.5, and over all IoUs, in percent."""
    found: list[Detections] = []
    with torch.no_grad():
        for images in split_into_calls(detector, scenes):
            found += detector.read_detections(call(images))
    boxes, labels = [scene.boxes for scene in scenes], [scene.labels for scene in scenes]
    thresholds: Mapping[str, Sequence[float]] = {"0.5": (0.5,), "0.5:0.95": IOU_THRESHOLDS}
    return {name: compute_mean_average_precision(found, boxes, labels, each) for name, each in thresholds.items()}


def _time_calls(call: Caller, images: Sequence[Tensor]) -> float:
    """Return the median seconds of a call."""
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(CALLS_PER_ROUND):
            start = time.perf_counter()
            call(images)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main(name: str, images: str, rounds: str) -> dict[str, Any]:
    """Return the figures of each file of a detector, and the layers that stay in float."""
    warnings.simplefilter("ignore")
    model, training = load_detector(name)
    detector, scenes = DETECTORS[name], render_scenes(TEST_SEED, int(images))
    one = [scenes[0].image]
    with torch.no_grad():
        spec = tree_flatten(model(detector.make_inputs(one)))[1]
    callers: dict[str, Caller] = {"PyTorch, float": lambda images: model(detector.make_inputs(images))}
    float_module = compile_detector(model, detector, None)
    module = compile_detector(model, detector, QuantizationSettings())
    floats: dict[str, dict[str, str]] = {}
    with TemporaryDirectory() as folder:
        for target in TARGETS if importlib.util.find_spec("openvino") else [*TARGETS][:1]:
            if floats:  # the first target is that of the compilation
                module.clika_initialize_algorithms(QuantizationSettings(), deployment_settings=TARGETS[target]())
            layers = module.clika_summary().layers
            floats[target] = {layer.scope or layer.name: layer.reason for layer in layers if layer.reason}
            for precision, compiled in {"float": float_module, "INT8": module}.items():
                path = Path(folder) / f"{target} {precision}.onnx"
                callers[f"{target}, {precision}"] = load_file(compiled, path, target, detector, spec)
        rows = {row: measure_precision(call, detector, scenes) for row, call in callers.items()}
        calls = {row: lambda call=call: _time_calls(call, one) for row, call in callers.items()}
        seconds = run_in_turn(calls, int(rounds))
    for row, found in rows.items():
        in_float = f"{row.partition(',')[0]}, float"
        found["seconds"] = statistics.median(seconds[row])
        found["ratio"] = statistics.median(a / b for a, b in zip(seconds[row], seconds[in_float], strict=True))
    return {"training": training, "rows": rows, "layers": len(module.clika_summary().layers), "floats": floats}


def run(names: Names = None, images: int = TEST_IMAGES, rounds: int = ROUNDS) -> None:
    """Compare INT8 with float for two detectors that are trained on rendered shapes."""
    for name in names or DETECTORS:
        found = run_in_fresh_process("benchmarks.detection.run", name, str(images), str(rounds))
        training, rows = found["training"], found["rows"]
        table = [
            (
                row,
                *(f"{each[key]:.2f}" for key in ("0.5", "0.5:0.95")),
                f"{each['seconds'] * 1e3:.2f} ({each['ratio']:.2f}x)",
            )
            for row, each in rows.items()
        ]
        title = f"{name}: {images} images of {len(CLASSES)} shapes, batch 1 on one thread"
        print_table(("", "mAP at 0.5", "mAP at 0.5:0.95", "latency, ms (float = 1)"), table, title=title)
        seconds = format_verdict(training["seconds"], MAX_TRAINING_SECONDS)
        print(f"{name}: processor seconds of {training['steps']} training steps: {seconds}")
        for target, floats in found["floats"].items():
            in_float, in_int8 = rows[f"{target}, float"], rows[f"{target}, INT8"]
            lost = max(in_float[key] - in_int8[key] for key in ("0.5", "0.5:0.95"))
            print(f"{name} in {target}: lost points of mAP: {format_verdict(lost, MAX_LOST_POINTS)}")
            print(f"{name} in {target}: {len(floats)} of {found['layers']} layers in float")
            for layer, reason in floats.items():
                print(f"  {layer}: {reason}")
