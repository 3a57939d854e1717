"""The subjects of quantization: models with calibration data, and other data for measurements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conftest  # noqa: F401 - lets torchvision and transformers import with a torch without CUDA, so it comes first

# isort: split
import torch

from benchmarks.models import MODELS
from benchmarks.ptq import digits, photographs, sentences

Batch = dict[str, torch.Tensor]

CALIBRATION_BATCHES, BATCH = 20, 4
TEST_CROPS = 256
SETTLING_CROPS = 64
TEXTS = 300


@dataclass(frozen=True)
class Subject:
    """One model, and its facts."""

    make: Callable[[], torch.nn.Module]
    calibration: Callable[[], list[Batch]]
    test: Callable[[], list[Batch]]
    labels: Callable[[], torch.Tensor] | None = None
    """Of the test data, where the model is trained to tell them."""
    is_transformer: bool = False


@dataclass(frozen=True)
class Prepared:
    """A subject that was read from its folder."""

    model: torch.nn.Module
    calibration: list[Batch]
    test: list[Batch]
    labels: torch.Tensor | None
    is_transformer: bool


@functools.cache
def _crops(count: int, seed: int) -> torch.Tensor:
    return photographs.crops(count, seed)


def _make_batches(images: torch.Tensor, size: int, name: str = "x") -> list[Batch]:
    return [{name: part} for part in images.split(size)]


def _vision(name: str, *, is_transformer: bool = False) -> Subject:
    def make() -> torch.nn.Module:
        return photographs.set_batch_norm_statistics(MODELS[name]().make(), _crops(SETTLING_CROPS, 1))

    calibrating = CALIBRATION_BATCHES * BATCH
    return Subject(
        make,
        lambda: _make_batches(_crops(calibrating, 2), BATCH),
        lambda: _make_batches(_crops(TEST_CROPS, 3), BATCH),
        is_transformer=is_transformer,
    )


def _digits(build: Callable[[], torch.nn.Module], seed: int) -> Subject:
    def make() -> torch.nn.Module:
        torch.manual_seed(seed)
        return digits.train_network(build(), seed)

    def calibration() -> list[Batch]:
        images, *_ = digits.load_data()
        return _make_batches(images[: CALIBRATION_BATCHES * BATCH], BATCH, "input")

    return Subject(
        make, calibration, lambda: _make_batches(digits.load_data()[2], BATCH, "input"), lambda: digits.load_data()[3]
    )


def _encoder() -> Subject:
    calibrating = CALIBRATION_BATCHES * BATCH

    @functools.cache
    def make_written() -> Sequence[str]:
        return sentences.read_texts(TEXTS + calibrating)

    return Subject(
        lambda: sentences.Encoder(sentences.find_folder()).eval(),
        lambda: sentences.make_batches(list(make_written()[:calibrating]), BATCH),
        lambda: sentences.make_batches(list(make_written()[calibrating:]), BATCH),
        is_transformer=True,
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet18": lambda: _vision("resnet18"),
    "mobilenet_v3_large": lambda: _vision("mobilenet_v3_large"),
    "vit_b_16": lambda: _vision("vit_b_16", is_transformer=True),
    "swin_t": lambda: _vision("swin_t", is_transformer=True),
    "encoder": _encoder,
    **{f"digits-conv-{seed}": functools.partial(_digits, digits.make_convolutional, seed) for seed in range(3)},
    **{f"digits-depthwise-{seed}": functools.partial(_digits, digits.make_depthwise, seed) for seed in range(3)},
}
"""By name; each is made on demand."""


def write(name: str, folder: Path) -> None:
    """Make a subject, and keep it in a folder."""
    subject = SUBJECTS[name]()
    labels = subject.labels() if subject.labels is not None else None
    whole = Prepared(subject.make(), subject.calibration(), subject.test(), labels, subject.is_transformer)
    torch.save(whole, folder / "subject.pt")


def read(folder: Path) -> Prepared:
    """Read a subject that `write` wrote."""
    return torch.load(folder / "subject.pt", weights_only=False)
