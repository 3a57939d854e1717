"""Updates of running statistics by normalization in training mode, as PyTorch's trace omits them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Value

MEAN_POSITION, VARIANCE_POSITION = 3, 4
"""Positions of the running statistics among the operands of batch_norm and instance_norm."""


def running_statistics(
    name: str, operands: Sequence[Any], attrs: Mapping[str, Any], build: Builder
) -> Iterator[tuple[int, Value]]:
    """Yield the position and the new value of each running statistic that the call overwrites."""
    per_instance = name == "instance_norm"
    active = attrs["use_input_stats"] if per_instance else attrs["training"]
    x, mean, variance = operands[0], operands[MEAN_POSITION], operands[VARIANCE_POSITION]
    if not active or not isinstance(mean, Value) or not isinstance(variance, Value):
        return
    options = {"momentum": attrs["momentum"], "per_instance": per_instance}
    yield MEAN_POSITION, build("running_mean_update", x, mean, types=(mean.type,), **options)
    yield VARIANCE_POSITION, build("running_var_update", x, variance, types=(variance.type,), **options)
