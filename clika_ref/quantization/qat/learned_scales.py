"""Learned scales: trainable logarithms, relative to the scales of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.quantization.qat.fake_quantization import apply_log_scales
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.qparams import MIN_SCALE

LOG_SCALE_SCOPES = ("clika.log_scales", "clika.log_weight_scales")
"""Prefixes of the logarithms among the parameters of a module: of values, and of layer weights."""

VALUE_LOG_SCALE_PREFIX, WEIGHT_LOG_SCALE_PREFIX = (f"{scope}." for scope in LOG_SCALE_SCOPES)


def log_scale_name(plan: Plan, value: str) -> str:
    """Return the name of the log scale of a value; values that must have the same scale share it."""
    return VALUE_LOG_SCALE_PREFIX + plan.scale_sources.get(value, value)


def initial_log_scales(plan: Plan) -> dict[str, Tensor]:
    """Return the initial log scales of a plan: zeros, by parameter name.

    A single one is ``float32[1]``: FSDP cannot shard 0-d tensors.
    """
    return {name: torch.zeros_like(torch.atleast_1d(scales)) for name, scales in scales_by_log_name(plan).items()}


def scales_by_log_name(plan: Plan) -> dict[str, Tensor]:
    """Return the scales of a plan, by the names of their log scale parameters."""
    values = {  # float32, whatever the default dtype of the process
        log_scale_name(plan, name): torch.tensor(scale.scale, dtype=torch.float32)
        for name, scale in plan.activations.items()
    }
    tensors = {**plan.weights, **{name: tensors.scales for name, tensors in plan.packed_weights.items()}}
    return values | {WEIGHT_LOG_SCALE_PREFIX + name: scales for name, scales in tensors.items()}


@torch.no_grad()
def has_valid_scales(planned: Tensor, logs: Sequence[Tensor]) -> bool:
    """Return whether all scales are valid; they are checked together, since each answer of a device is slow.

    Args:
        planned: the scales that the logarithms are relative to, ``float32[scales of all]``.
        logs: the logarithms, in the same order.
    """
    scales = planned * torch.cat([log.reshape(-1) for log in logs]).exp()
    return bool(((scales >= MIN_SCALE) & (scales < math.inf)).all())


@torch.no_grad()
def apply_learned_scales(plan: Plan, logs: Mapping[str, Tensor]) -> Plan:
    """Return a plan with the learned scales; the plan itself if nothing was learned.

    Args:
        plan: the plan with the calibrated scales.
        logs: the learned log scales by name, in the shapes of `initial_log_scales`.

    Raises:
        ModelError: a scale is NaN, infinite, or so small that runtimes flush it to 0; the message names all of them.
    """
    if not any(bool(log.any()) for log in logs.values()):
        return plan
    learned = scales_by_log_name(plan)
    learned |= {n: apply_log_scales(logs[n], scales.to(logs[n].device)) for n, scales in learned.items() if n in logs}
    values = {name: float(learned[log_scale_name(plan, name)]) for name in plan.activations}
    weights = {name: learned[WEIGHT_LOG_SCALE_PREFIX + name] for name in (*plan.weights, *plan.packed_weights)}
    invalid = [f"of the activation {name!r} is {x}" for name, x in values.items() if not MIN_SCALE <= x < math.inf]
    for name, scales in weights.items():
        odd = scales[~((scales >= MIN_SCALE) & scales.isfinite())]
        invalid += [f"of the weight of {name!r} is {float(odd[0])}"] if len(odd) else []
    if invalid:
        raise ModelError(
            f"the scale {', that '.join(invalid)}: training has diverged. Load an earlier state dict, and train with "
            "a smaller learning rate."
        )
    return replace(
        plan,
        activations={name: replace(scale, scale=values[name]) for name, scale in plan.activations.items()},
        weights={name: weights[name] for name in plan.weights},
        packed_weights={name: replace(packed, scales=weights[name]) for name, packed in plan.packed_weights.items()},
    )
