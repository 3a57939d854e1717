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
from clika_ref.serialization.vocabulary import PlanKey

PLAN_FORMAT_VERSION = 3
"""Version of this format; raised when older data can no longer be read."""


def plan_to_json(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a plan as a JSON document and tensors; of its scheme only the parts needed after placement."""
    document: dict[str, Any] = {
        PlanKey.VERSION: PLAN_FORMAT_VERSION,
        PlanKey.ACTIVATION_TYPE: dataclasses.asdict(plan.scheme.activations),
        PlanKey.WEIGHT_TYPE: dataclasses.asdict(plan.scheme.weights),
        PlanKey.INT32_BIAS: sorted(plan.scheme.int32_bias),
        PlanKey.INT32_BIAS_2D_OR_STATIC: sorted(plan.scheme.int32_bias_2d_or_static),
        PlanKey.JOINS: sorted(plan.scheme.joins),
        PlanKey.IS_ALL_OR_NONE_QUANTIZED: plan.scheme.is_all_or_none_quantized,
        PlanKey.QPARAMS: {name: [scale.scale, scale.zero_point] for name, scale in plan.activations.items()},
        PlanKey.WEIGHTS: [*plan.weights],
        PlanKey.GPTQ: [*plan.offsets],
        PlanKey.CORRECTIONS: [*plan.corrections],
        PlanKey.SMOOTHING: [*plan.smoothing],
        PlanKey.PACKED_WEIGHTS: {name: [held.bits, held.block_size] for name, held in plan.packed_weights.items()},
        PlanKey.PACKED_GPTQ: [name for name, held in plan.packed_weights.items() if held.offsets is not None],
        PlanKey.FLOATS: plan.floats,
        PlanKey.SCALE_SOURCES: plan.scale_sources,
        PlanKey.NORMS: [*plan.norms],
    }
    every = {
        PlanKey.WEIGHTS: plan.weights,
        PlanKey.GPTQ: plan.offsets,
        PlanKey.CORRECTIONS: plan.corrections,
        PlanKey.SMOOTHING: plan.smoothing,
        PlanKey.NORMS: plan.norms,
        PlanKey.PACKED_WEIGHTS: {name: held.scales for name, held in plan.packed_weights.items()},
        PlanKey.PACKED_GPTQ: {
            name: held.offsets for name, held in plan.packed_weights.items() if held.offsets is not None
        },
    }
    return document, {f"{kind}.{name}": tensor for kind, of in every.items() for name, tensor in of.items()}


def plan_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
    """Return the plan that `plan_to_json` converted; executes nothing from the data.

    Raises:
        ModelError: the data has another version, or is damaged.
    """
    try:
        if document[PlanKey.VERSION] != PLAN_FORMAT_VERSION:
            msg = (
                f"the quantization is saved in format {document['version']}, but this clika-ref reads "
                f"{PLAN_FORMAT_VERSION}. Quantize the model again."
            )
            raise ModelError(msg)
        activations, weights = (
            QuantizedType(**document[kind]) for kind in (PlanKey.ACTIVATION_TYPE, PlanKey.WEIGHT_TYPE)
        )
        biases, flat = (
            frozenset(map(str, document[kind])) for kind in (PlanKey.INT32_BIAS, PlanKey.INT32_BIAS_2D_OR_STATIC)
        )
        joined = frozenset(map(str, document[PlanKey.JOINS]))
        scheme = QuantizationScheme(activations, weights, int32_bias=biases, int32_bias_2d_or_static=flat, joins=joined)
        plan = Plan(
            dataclasses.replace(scheme, is_all_or_none_quantized=bool(document[PlanKey.IS_ALL_OR_NONE_QUANTIZED]))
        )
        plan.activations = {name: QParams(float(s), int(zero)) for name, (s, zero) in document[PlanKey.QPARAMS].items()}
        plan.weights = {name: _check_vector(tensors[f"{PlanKey.WEIGHTS}.{name}"]) for name in document[PlanKey.WEIGHTS]}
        plan.offsets = {name: _check_int8(tensors[f"{PlanKey.GPTQ}.{name}"]) for name in document[PlanKey.GPTQ]}
        plan.corrections = {
            name: _check_vector(tensors[f"{PlanKey.CORRECTIONS}.{name}"]) for name in document[PlanKey.CORRECTIONS]
        }
        plan.smoothing = {
            name: _check_vector(tensors[f"{PlanKey.SMOOTHING}.{name}"]) for name in document[PlanKey.SMOOTHING]
        }
        for name, (bits, block_size) in document[PlanKey.PACKED_WEIGHTS].items():
            offsets = tensors[f"{PlanKey.PACKED_GPTQ}.{name}"] if name in document[PlanKey.PACKED_GPTQ] else None
            scales = _check_matrix(tensors[f"{PlanKey.PACKED_WEIGHTS}.{name}"], torch.float32)
            plan.packed_weights[name] = PackedWeight(
                int(bits), int(block_size), scales, _check_matrix(offsets, torch.int8)
            )
        plan.norms = {
            name: _check_vector(tensors[f"{PlanKey.NORMS}.{name}"], torch.float64) for name in document[PlanKey.NORMS]
        }
        plan.scale_sources = {str(name): str(other) for name, other in document[PlanKey.SCALE_SOURCES].items()}
        plan.floats = {str(name): str(reason) for name, reason in document[PlanKey.FLOATS].items()}
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
