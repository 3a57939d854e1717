"""Serialization of a plan as JSON and tensors: the quantization of a module without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.packed_weights import PackedWeight
from clika_ref.quantization.qdq.qparams import QParams

PLAN_FORMAT_VERSION = 2
"""Version of this format; raised when older data can no longer be read."""

WEIGHTS_PREFIX, OFFSETS_PREFIX, CORRECTIONS_PREFIX, SMOOTHING_PREFIX, NORMS_PREFIX = (
    "weights",
    "rounded",
    "corrections",
    "smoothing",
    "norms",
)
PACKED_SCALES_PREFIX, PACKED_OFFSETS_PREFIX = "scales", "moved"
"""Prefixes of tensor names: ``<kind>.<name>`` for each layer or value."""


def plan_to_json(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a plan as a JSON document and tensors; of its scheme only the parts needed after placement."""
    document = {
        "version": PLAN_FORMAT_VERSION,
        "activations": dataclasses.asdict(plan.scheme.activations),
        "weights": dataclasses.asdict(plan.scheme.weights),
        "integer_bias": sorted(plan.scheme.int32_bias),
        "flat_bias": sorted(plan.scheme.int32_bias_2d_or_static),
        "joined": sorted(plan.scheme.joins),
        "is_all_or_none": plan.scheme.is_all_or_none_quantized,
        "scales": {name: [scale.scale, scale.zero_point] for name, scale in plan.activations.items()},
        "layers": [*plan.weights],
        "rounded": [*plan.offsets],
        "corrected": [*plan.corrections],
        "smoothed": [*plan.smoothing],
        "compressed": {name: [packed.bits, packed.block_size] for name, packed in plan.packed_weights.items()},
        "moved": [name for name, packed in plan.packed_weights.items() if packed.offsets is not None],
        "floats": plan.floats,
        "scaled_as": plan.scale_sources,
        "normed": [*plan.norms],
    }
    every = {
        WEIGHTS_PREFIX: plan.weights,
        OFFSETS_PREFIX: plan.offsets,
        CORRECTIONS_PREFIX: plan.corrections,
        SMOOTHING_PREFIX: plan.smoothing,
        NORMS_PREFIX: plan.norms,
        PACKED_SCALES_PREFIX: {name: packed.scales for name, packed in plan.packed_weights.items()},
        PACKED_OFFSETS_PREFIX: {
            name: packed.offsets for name, packed in plan.packed_weights.items() if packed.offsets is not None
        },
    }
    return document, {f"{kind}.{name}": tensor for kind, of in every.items() for name, tensor in of.items()}


def plan_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
    """Return the plan that `plan_to_json` converted; executes nothing from the data.

    Raises:
        ModelError: the data has another version, or is damaged.
    """
    try:
        if document["version"] != PLAN_FORMAT_VERSION:
            msg = (
                f"the quantization is saved in format {document['version']}, but this clika-ref reads "
                f"{PLAN_FORMAT_VERSION}. Quantize the model again."
            )
            raise ModelError(msg)
        activations, weights = (QuantizedType(**document[kind]) for kind in ("activations", "weights"))
        biases, flat = (frozenset(map(str, document[kind])) for kind in ("integer_bias", "flat_bias"))
        joined = frozenset(map(str, document.get("joined", ())))
        scheme = QuantizationScheme(activations, weights, int32_bias=biases, int32_bias_2d_or_static=flat, joins=joined)
        plan = Plan(dataclasses.replace(scheme, is_all_or_none_quantized=bool(document.get("is_all_or_none", False))))
        plan.activations = {name: QParams(float(s), int(zero)) for name, (s, zero) in document["scales"].items()}
        plan.weights = {name: _check_vector(tensors[f"{WEIGHTS_PREFIX}.{name}"]) for name in document["layers"]}
        plan.offsets = {name: _check_int8(tensors[f"{OFFSETS_PREFIX}.{name}"]) for name in document.get("rounded", ())}
        plan.corrections = {
            name: _check_vector(tensors[f"{CORRECTIONS_PREFIX}.{name}"]) for name in document["corrected"]
        }
        plan.smoothing = {name: _check_vector(tensors[f"{SMOOTHING_PREFIX}.{name}"]) for name in document["smoothed"]}
        for name, (bits, block_size) in document.get("compressed", {}).items():
            offsets = tensors[f"{PACKED_OFFSETS_PREFIX}.{name}"] if name in document["moved"] else None
            scales = _check_matrix(tensors[f"{PACKED_SCALES_PREFIX}.{name}"], torch.float32)
            plan.packed_weights[name] = PackedWeight(
                int(bits), int(block_size), scales, _check_matrix(offsets, torch.int8)
            )
        plan.norms = {
            name: _check_vector(tensors[f"{NORMS_PREFIX}.{name}"], torch.float64) for name in document.get("normed", ())
        }
        plan.scale_sources = {str(name): str(other) for name, other in document.get("scaled_as", {}).items()}
        plan.floats = {str(name): str(reason) for name, reason in document.get("floats", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"the saved quantization is damaged: {type(error).__name__}: {error}. Quantize the model again."
        raise ModelError(msg) from error
    return plan


def _check_int8(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.int8:
        msg = f"{tensor.dtype}{list(tensor.shape)} is not a quantized weight"
        raise ValueError(msg)
    return tensor


def _check_matrix(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    if tensor is not None and (tensor.dtype != dtype or tensor.ndim != 2):
        msg = f"{tensor.dtype}{list(tensor.shape)} is not a matrix of {dtype}"
        raise ValueError(msg)
    return tensor


def _check_vector(tensor: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if tensor.dtype != dtype or tensor.ndim > 1:
        msg = f"{tensor.dtype}{list(tensor.shape)} is not a vector of scales"
        raise ValueError(msg)
    return tensor
