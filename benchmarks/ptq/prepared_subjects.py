"""Models to quantize with their data, as another process built them.

A process that measures an export imports this module only: those that build models and data also import clika_ref and
runtimes, and the time of these imports counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import conftest  # noqa: F401 - first, so that torchvision and transformers import with a torch without CUDA

# isort: split
import torch
import torchvision  # noqa: F401 - it loads parts of torch that exports need, and its time counts for no model

from benchmarks.ptq import audio

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PreparedSubject:
    """A subject with its model and data built."""

    model: torch.nn.Module
    calibration: list[Batch]
    test: list[Batch]
    labels: torch.Tensor | None = None
    is_transformer: bool = False
    decisions: str = "same top-1"


def load_subject(folder: Path) -> PreparedSubject:
    """Load the subject that `benchmarks.ptq.subjects.main` saved in a folder."""
    with audio.import_without(*audio.NOT_NEEDED):
        return torch.load(folder / "subject.pt", weights_only=False)
