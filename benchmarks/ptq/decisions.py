"""The decisions that a network's outputs stand for, and the share of them that two files have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.ptq.detection import SIZE, count_matches, decode_boxes

# isort: split
import torch

Outputs = Sequence[np.ndarray]
"""The outputs of a network for all samples, in order."""


def find_nearest(embeddings: np.ndarray) -> np.ndarray:
    """Return the index of the nearest other sample for each sample."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    return similarities.argmax(1)


def _compare_boxes(actual: Outputs, exact: Outputs) -> float:
    """Return the share of float boxes with a box of the same class at an overlap of at least one half."""
    expected, found = (decode_boxes(torch.from_numpy(outputs[0]), SIZE) for outputs in (exact, actual))
    return sum(map(count_matches, expected, found)) / sum(map(len, expected))


DECISIONS: dict[str, Callable[[Outputs, Outputs], float]] = {
    "same top-1": lambda actual, exact: float((actual[0].argmax(1) == exact[0].argmax(1)).mean()),
    "same top-1 of the last output": lambda actual, exact: float((actual[-1].argmax(1) == exact[-1].argmax(1)).mean()),
    "same pitch": lambda actual, exact: float((actual[0].argmax(-1) == exact[0].argmax(-1)).mean()),
    "same nearest neighbour": lambda actual, exact: float((find_nearest(actual[0]) == find_nearest(exact[0])).mean()),
    "matched boxes": _compare_boxes,
}
"""By name, functions from the outputs of two files to the share of equal decisions."""
