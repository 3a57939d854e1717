"""Learned scales: trainable logarithms, relative to the scales of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.quantization.fake_quantization import learned_scale, learned_scales
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.scales import LEAST_SCALE, Scale

LEARNED = ("clika.log_scales", "clika.log_weight_scales")
"""Prefixes of the logarithms among the parameters of a module: of values, and of layer weights."""

VALUES, WEIGHTS = (f"{scope}." for scope in LEARNED)


def log_scale_name(plan: Plan, value: str) -> str:
    """Return the name of the log scale of a value; values that must have the same scale share it."""
    return VALUES + plan.scaled_as.get(value, value)


def unlearned(plan: Plan) -> dict[str, Tensor]:
    """Return the initial log scales of a plan: zeros, by parameter name.

    A single one is ``float32[1]``: FSDP cannot shard 0-d tensors.
    """
    return {name: torch.zeros_like(torch.atleast_1d(scales)) for name, scales in planned_scales(plan).items()}


def planned_scales(plan: Plan) -> dict[str, Tensor]:
    """Return the scales of a plan, by the names of their log scale parameters."""
    values = {  # float32, whatever the default dtype of the process
        log_scale_name(plan, name): torch.tensor(scale.scale, dtype=torch.float32)
        for name, scale in plan.activations.items()
    }
    held = {**plan.weights, **{name: held.scales for name, held in plan.compressed.items()}}
    return values | {WEIGHTS + name: scales for name, scales in held.items()}


@torch.no_grad()
def are_sound(planned: Tensor, logs: Sequence[Tensor]) -> bool:
    """Return whether all scales are valid; they are checked together, since each answer of a device is slow.

    Args:
        planned: the scales that the logarithms are relative to, ``float32[scales of all]``.
        logs: the logarithms, in the same order.
    """
    scales = planned * torch.cat([log.reshape(-1) for log in logs]).exp()
    return bool(((scales >= LEAST_SCALE) & (scales < math.inf)).all())


@torch.no_grad()
def learned_plan(plan: Plan, logs: Mapping[str, Tensor]) -> Plan:
    """Return a plan with the learned scales; the plan itself if nothing was learned.

    Raises:
        ModelError: a scale is NaN, infinite, or so small that runtimes flush it to 0; the message names all of them.
    """
    if not any(bool(log.any()) for log in logs.values()):
        return plan
    values = {name: _number(scale, logs.get(log_scale_name(plan, name))) for name, scale in plan.activations.items()}
    weights = {name: _scales(scales, logs.get(WEIGHTS + name)) for name, scales in plan.weights.items()}
    held = {name: _scales(held.scales, logs.get(WEIGHTS + name)) for name, held in plan.compressed.items()}
    spoiled = [f"of the value {name!r} is {scale}" for name, scale in values.items() if not _is_sound(scale)]
    for name, scales in {**weights, **held}.items():
        odd = scales[~((scales >= LEAST_SCALE) & scales.isfinite())]
        spoiled += [f"of the weight of {name!r} is {float(odd[0])}"] if len(odd) else []
    if spoiled:
        msg = (
            f"the scale {', that '.join(spoiled)}: training has diverged there, and no integers have such a scale; "
            "load a state dict from before, and train with a smaller learning rate"
        )
        raise ModelError(msg)
    activations = {name: Scale(values[name], scale.zero_point) for name, scale in plan.activations.items()}
    compressed = {name: replace(plan.compressed[name], scales=scales) for name, scales in held.items()}
    return replace(plan, activations=activations, weights=weights, compressed=compressed)


def _number(scale: Scale, log: Tensor | None) -> float:
    return scale.scale if log is None else float(learned_scale(log, planned=scale.scale))


def _scales(planned: Tensor, logs: Tensor | None) -> Tensor:
    return planned if logs is None else learned_scales(logs, planned.to(logs.device))


def _is_sound(scale: float) -> bool:
    return LEAST_SCALE <= scale < math.inf
