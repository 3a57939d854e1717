"""The models to quantize, with calibration data and separate test data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch

from benchmarks.models import MODELS
from benchmarks.ptq import digits, photographs, sentences

Batch = dict[str, torch.Tensor]

CALIBRATION_BATCHES, BATCH = 20, 4
TEST_CROPS = 256
BATCH_NORM_CROPS = 64
TEST_TEXTS = 300


@dataclass(frozen=True)
class Subject:
    """A model with its data, all built on demand."""

    make: Callable[[], torch.nn.Module]
    calibration: Callable[[], list[Batch]]
    test: Callable[[], list[Batch]]
    labels: Callable[[], torch.Tensor] | None = None
    """Labels of the test data, for trained classifiers."""
    is_transformer: bool = False


@dataclass(frozen=True)
class PreparedSubject:
    """A subject with its model and data built."""

    model: torch.nn.Module
    calibration: list[Batch]
    test: list[Batch]
    labels: torch.Tensor | None
    is_transformer: bool


@functools.cache
def _make_crops(count: int, seed: int) -> torch.Tensor:
    return photographs.make_crops(count, seed)


def _make_batches(images: torch.Tensor, size: int, name: str = "x") -> list[Batch]:
    return [{name: part} for part in images.split(size)]


def _make_vision_subject(name: str, *, is_transformer: bool = False) -> Subject:
    def make() -> torch.nn.Module:
        return photographs.set_batch_norm_statistics(MODELS[name]().make(), _make_crops(BATCH_NORM_CROPS, 1))

    return Subject(
        make,
        lambda: _make_batches(_make_crops(CALIBRATION_BATCHES * BATCH, 2), BATCH),
        lambda: _make_batches(_make_crops(TEST_CROPS, 3), BATCH),
        is_transformer=is_transformer,
    )


def _make_digits_subject(build: Callable[[], torch.nn.Module], seed: int) -> Subject:
    def make() -> torch.nn.Module:
        torch.manual_seed(seed)
        return digits.train_network(build(), seed)

    def calibration() -> list[Batch]:
        images, *_ = digits.load_data()
        return _make_batches(images[: CALIBRATION_BATCHES * BATCH], BATCH, "input")

    def test() -> list[Batch]:
        return _make_batches(digits.load_data()[2], BATCH, "input")

    return Subject(make, calibration, test, lambda: digits.load_data()[3])


def _make_encoder_subject() -> Subject:
    calibration_texts = CALIBRATION_BATCHES * BATCH

    @functools.cache
    def read_texts() -> Sequence[str]:
        return sentences.read_texts(TEST_TEXTS + calibration_texts)

    return Subject(
        lambda: sentences.SentenceEncoder(sentences.find_weights_folder()).eval(),
        lambda: sentences.tokenize(list(read_texts()[:calibration_texts]), BATCH),
        lambda: sentences.tokenize(list(read_texts()[calibration_texts:]), BATCH),
        is_transformer=True,
    )


DIGITS_NETWORKS = {"conv": digits.build_convolutional_network, "depthwise": digits.build_depthwise_network}

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet18": lambda: _make_vision_subject("resnet18"),
    "mobilenet_v3_large": lambda: _make_vision_subject("mobilenet_v3_large"),
    "vit_b_16": lambda: _make_vision_subject("vit_b_16", is_transformer=True),
    "swin_t": lambda: _make_vision_subject("swin_t", is_transformer=True),
    "encoder": _make_encoder_subject,
    **{
        f"digits-{name}-{seed}": functools.partial(_make_digits_subject, build, seed)
        for name, build in DIGITS_NETWORKS.items()
        for seed in range(3)
    },
}
"""Subjects by name, built on demand."""


def main(name: str, folder: str) -> None:
    """Build a subject, and save it in a folder."""
    subject = SUBJECTS[name]()
    labels = subject.labels() if subject.labels is not None else None
    prepared = PreparedSubject(subject.make(), subject.calibration(), subject.test(), labels, subject.is_transformer)
    torch.save(prepared, Path(folder) / "subject.pt")


def load_subject(folder: Path) -> PreparedSubject:
    """Load the subject that `main` saved in a folder."""
    return torch.load(folder / "subject.pt", weights_only=False)
