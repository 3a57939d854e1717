"""Training settings of the user that do not belong to the training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from clika_ref.settings.validation import CheckedSettings, check_flag, is_integer


def _check_steps(value: Any) -> str:
    return "" if is_integer(value) and value > 0 else "a whole number from 1"


def _check_seed(value: Any) -> str:
    is_seed = is_integer(value) and 0 <= value < 2**64  # what torch.manual_seed takes
    return "" if value is None or is_seed else "a whole number from 0, below 2**64, or None"


@dataclass
class TrainingSettings(CheckedSettings):
    """Training settings of the clika-ace releases of 2024, for training loops of the user.

    Raises:
        ModelError: a value is invalid.
    """

    stats_steps: int = 20
    """Number of batches to calibrate with: ``itertools.islice(data, stats_steps)``.

    The ``torch.compile`` backend ``clika`` reads no more than this from a ``train_dataloader``.
    """

    random_seed: int | None = None
    """Seed for ``torch.manual_seed``; None keeps the current state. Compilation itself draws no random numbers."""

    is_training_from_scratch: bool = False
    """Whether the weights are random: ``is_model_pretrained=False`` of `clika_compile`."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "stats_steps": _check_steps,
        "random_seed": _check_seed,
        "is_training_from_scratch": check_flag,
    }
