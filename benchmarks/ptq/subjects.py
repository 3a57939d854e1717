"""The models to quantize, with calibration data and separate test data."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch
from torch.nn.functional import interpolate

from benchmarks import efficientnet
from benchmarks.models import MODELS
from benchmarks.ptq import audio, detection, digits, photographs, sentences
from benchmarks.ptq.prepared_subjects import Batch, PreparedSubject

CALIBRATION_BATCHES, BATCH = 20, 4
TEST_CROPS = 256
BATCH_NORM_CROPS = 64
TEST_TEXTS = 300
TEST_SOUNDS = 160
TEST_CROPS_OF_PHOTOGRAPH = 32
DETECTOR_CROPS = 64

FACE_SIZE, FACE_SHARE = 48, 0.2
"""Size of the images of O-Net in pixels, and of the smallest crop relative to its photograph."""


@dataclass(frozen=True)
class Subject:
    """A model with its data, all built on demand."""

    make: Callable[[], torch.nn.Module]
    calibration: Callable[[], list[Batch]]
    test: Callable[[], list[Batch]]
    labels: Callable[[], torch.Tensor] | None = None
    """Labels of the test data, for trained classifiers."""
    is_transformer: bool = False
    decisions: str = "same top-1"
    """A name in `benchmarks.ptq.decisions.DECISIONS`."""


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
        decisions="same nearest neighbour",
    )


def _make_lite_subject(size: int = efficientnet.SIZE) -> Subject:
    """EfficientNet-Lite0 with ImageNet weights, on crops of photographs."""

    def calibration() -> list[Batch]:
        return [{"inputs": _resize(x, size)} for x in efficientnet.make_calibration_batches()]

    def test() -> list[Batch]:
        images, _ = efficientnet.make_test_crops(TEST_CROPS_OF_PHOTOGRAPH)
        return _make_batches(_resize(images, size), BATCH, "inputs")

    return Subject(efficientnet.load_model, calibration, test)


def _make_face_subject() -> Subject:
    """MTCNN's O-Net with its weights, on crops of photographs with and without a face."""

    def make() -> torch.nn.Module:
        return importlib.import_module("facenet_pytorch.models.mtcnn").ONet().eval()

    def crops(count: int, seed: int) -> torch.Tensor:
        return _resize(efficientnet.crop(efficientnet.load_photograph("astronaut"), count, seed, FACE_SHARE), FACE_SIZE)

    return Subject(
        make,
        lambda: _make_batches(crops(CALIBRATION_BATCHES * BATCH, 1), BATCH),
        lambda: _make_batches(crops(TEST_CROPS, 2), BATCH),
        decisions="same top-1 of the last output",
    )


def _make_detector_subject(width: int = 16, size: int = detection.SIZE) -> Subject:
    """A network like those of the YOLO family with random weights, on crops of photographs."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model = detection.Detector(width)
        return photographs.set_batch_norm_statistics(model, _resize(_make_crops(BATCH_NORM_CROPS, 1), size))

    return Subject(
        make,
        lambda: _make_batches(_resize(_make_crops(CALIBRATION_BATCHES * BATCH, 2), size), BATCH),
        lambda: _make_batches(_resize(_make_crops(DETECTOR_CROPS, 3), size), BATCH),
        decisions="matched boxes",
    )


def _make_audio_subject(
    make: Callable[[], torch.nn.Module], draw: Callable[[int, int], torch.Tensor], name: str, decisions: str
) -> Subject:
    """A trained network on voiced sounds."""
    return Subject(
        make,
        lambda: _make_batches(draw(CALIBRATION_BATCHES * BATCH, 1), BATCH, name),
        lambda: _make_batches(draw(TEST_SOUNDS, 2), BATCH, name),
        decisions=decisions,
    )


def _resize(images: torch.Tensor, size: int) -> torch.Tensor:
    """Return images of another size."""
    return images if images.shape[-1] == size else interpolate(images, (size, size), mode="bilinear", antialias=True)


DIGITS_NETWORKS = {"conv": digits.build_convolutional_network, "depthwise": digits.build_depthwise_network}

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "resnet18": lambda: _make_vision_subject("resnet18"),
    "mobilenet_v3_large": lambda: _make_vision_subject("mobilenet_v3_large"),
    "vit_b_16": lambda: _make_vision_subject("vit_b_16", is_transformer=True),
    "swin_t": lambda: _make_vision_subject("swin_t", is_transformer=True),
    "encoder": _make_encoder_subject,
    "lite0": _make_lite_subject,
    "lite0, 192 x 192": lambda: _make_lite_subject(192),
    "o-net": _make_face_subject,
    "crepe": lambda: _make_audio_subject(audio.make_crepe, audio.make_crepe_frames, "x", "same pitch"),
    "crepe, tiny": lambda: _make_audio_subject(
        functools.partial(audio.make_crepe, "tiny"), audio.make_crepe_frames, "x", "same pitch"
    ),
    "conformer": lambda: _make_audio_subject(audio.make_conformer, audio.make_conformer_mels, "x", "same pitch"),
    "conformer, 50 frames": lambda: _make_audio_subject(
        audio.make_conformer, functools.partial(audio.make_conformer_mels, frames=50), "x", "same pitch"
    ),
    "speakers": lambda: _make_audio_subject(
        audio.make_speaker_encoder, audio.make_speaker_mels, "mels", "same nearest neighbour"
    ),
    "yolo-like": _make_detector_subject,
    "yolo-like, wider": lambda: _make_detector_subject(24),
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
    data = subject.calibration(), subject.test(), labels
    prepared = PreparedSubject(subject.make(), *data, subject.is_transformer, subject.decisions)
    torch.save(prepared, Path(folder) / "subject.pt")
