"""Serialization of a plan as JSON and tensors: the quantization of a module without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.quantization.compressing import Compressed
from clika_ref.quantization.quantizing import Plan
from clika_ref.quantization.scales import Scale
from clika_ref.quantization_scheme import Integers, QuantizationScheme

VERSION = 2
"""Version of this format; raised when older data can no longer be read."""

WEIGHTS, ROUNDED, CORRECTIONS, SMOOTHING, NORMS = "weights", "rounded", "corrections", "smoothing", "norms"
SCALES, MOVED = "scales", "moved"
"""Prefixes of tensor names: ``<kind>.<name>`` for each layer or value."""


def plan_to_json(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a plan as a JSON document and tensors; of its scheme only the parts needed after placement."""
    document = {
        "version": VERSION,
        "activations": dataclasses.asdict(plan.scheme.activations),
        "weights": dataclasses.asdict(plan.scheme.weights),
        "integer_bias": sorted(plan.scheme.integer_bias),
        "flat_bias": sorted(plan.scheme.flat_bias),
        "joined": sorted(plan.scheme.joined),
        "is_all_or_none": plan.scheme.is_all_or_none,
        "scales": {name: [scale.scale, scale.zero_point] for name, scale in plan.activations.items()},
        "layers": [*plan.weights],
        "rounded": [*plan.moved],
        "corrected": [*plan.corrections],
        "smoothed": [*plan.smoothing],
        "compressed": {name: [held.bits, held.block_size] for name, held in plan.compressed.items()},
        "moved": [name for name, held in plan.compressed.items() if held.moved is not None],
        "floats": plan.floats,
        "scaled_as": plan.scaled_as,
        "normed": [*plan.norms],
    }
    every = {
        WEIGHTS: plan.weights,
        ROUNDED: plan.moved,
        CORRECTIONS: plan.corrections,
        SMOOTHING: plan.smoothing,
        NORMS: plan.norms,
        SCALES: {name: held.scales for name, held in plan.compressed.items()},
        MOVED: {name: held.moved for name, held in plan.compressed.items() if held.moved is not None},
    }
    return document, {f"{kind}.{name}": tensor for kind, of in every.items() for name, tensor in of.items()}


def plan_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
    """Return the plan that `plan_to_json` converted; executes nothing from the data.

    Raises:
        ModelError: the data has another version, or is damaged.
    """
    try:
        if document["version"] != VERSION:
            msg = f"the quantization is saved in version {document['version']} of its form, this is {VERSION}"
            raise ModelError(msg)
        activations, weights = (Integers(**document[kind]) for kind in ("activations", "weights"))
        biases, flat = (frozenset(map(str, document[kind])) for kind in ("integer_bias", "flat_bias"))
        joined = frozenset(map(str, document.get("joined", ())))
        scheme = QuantizationScheme(activations, weights, integer_bias=biases, flat_bias=flat, joined=joined)
        plan = Plan(dataclasses.replace(scheme, is_all_or_none=bool(document.get("is_all_or_none", False))))
        plan.activations = {name: Scale(float(s), int(zero)) for name, (s, zero) in document["scales"].items()}
        plan.weights = {name: _channels(tensors[f"{WEIGHTS}.{name}"]) for name in document["layers"]}
        plan.moved = {name: _steps(tensors[f"{ROUNDED}.{name}"]) for name in document.get("rounded", ())}
        plan.corrections = {name: _channels(tensors[f"{CORRECTIONS}.{name}"]) for name in document["corrected"]}
        plan.smoothing = {name: _channels(tensors[f"{SMOOTHING}.{name}"]) for name in document["smoothed"]}
        for name, (bits, block_size) in document.get("compressed", {}).items():
            moved = tensors[f"{MOVED}.{name}"] if name in document["moved"] else None
            scales = _of_kind(tensors[f"{SCALES}.{name}"], torch.float32)
            plan.compressed[name] = Compressed(int(bits), int(block_size), scales, _of_kind(moved, torch.int8))
        plan.norms = {name: _channels(tensors[f"{NORMS}.{name}"], torch.float64) for name in document.get("normed", ())}
        plan.scaled_as = {str(name): str(other) for name, other in document.get("scaled_as", {}).items()}
        plan.floats = {str(name): str(reason) for name, reason in document.get("floats", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"the saved quantization is damaged: {type(error).__name__}: {error}; quantize the model again"
        raise ModelError(msg) from error
    return plan


def _steps(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int8:
        msg = f"{tensor.dtype}{list(tensor.shape)} are no integers of a weight"
        raise ValueError(msg)
    return tensor


def _of_kind(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    if tensor is not None and (tensor.dtype != dtype or tensor.ndim != 2):
        msg = f"{tensor.dtype}{list(tensor.shape)} is no matrix of {dtype}"
        raise ValueError(msg)
    return tensor


def _channels(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if tensor.dtype != dtype or tensor.ndim > 1:
        msg = f"{tensor.dtype}{list(tensor.shape)} is no vector of scales"
        raise ValueError(msg)
    return tensor
