"""Serialization of a plan as JSON and tensors: the quantization of a module without its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType, WeightOnlyScheme
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.packed_weights import PackedWeight
from clika_ref.quantization.qdq.qparams import QParams
from clika_ref.serialization.container import check_format
from clika_ref.serialization.vocabulary import PlanKey

PLAN_FORMAT_VERSION = 4
"""Version of this format; raised when older data can no longer be read."""


def plan_to_json(plan: Plan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a plan as a JSON document and tensors; of its scheme only the parts needed after placement."""
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
    document: dict[str, Any] = {
        PlanKey.VERSION: PLAN_FORMAT_VERSION,
        PlanKey.ACTIVATION_TYPE: dataclasses.asdict(plan.scheme.activations),
        PlanKey.WEIGHT_TYPE: dataclasses.asdict(plan.scheme.weights),
        PlanKey.INT32_BIAS: sorted(plan.scheme.int32_bias),
        PlanKey.INT32_BIAS_2D_OR_STATIC: sorted(plan.scheme.int32_bias_2d_or_static),
        PlanKey.SHARED_QPARAMS: sorted(plan.scheme.shared_qparams),
        PlanKey.IS_ALL_OR_NONE_QUANTIZED: plan.scheme.is_all_or_none_quantized,
        PlanKey.QPARAMS: {name: [scale.scale, scale.zero_point] for name, scale in plan.activations.items()},
        PlanKey.WEIGHTS: [*every[PlanKey.WEIGHTS]],
        PlanKey.GPTQ: [*every[PlanKey.GPTQ]],
        PlanKey.CORRECTIONS: [*every[PlanKey.CORRECTIONS]],
        PlanKey.SMOOTHING: [*every[PlanKey.SMOOTHING]],
        PlanKey.PACKED_WEIGHTS: {
            name: [held.bits, held.block_size, held.is_narrow] for name, held in plan.packed_weights.items()
        },
        PlanKey.LOOKUPS: dict(plan.lookups),
        PlanKey.PACKED_GPTQ: [*every[PlanKey.PACKED_GPTQ]],
        PlanKey.DYNAMIC: plan.dynamic,
        PlanKey.ROUNDED_INPUTS: plan.rounded_inputs,
        PlanKey.FLOATS: plan.floats,
        PlanKey.SCALE_SOURCES: plan.scale_sources,
        PlanKey.NORMS: [*every[PlanKey.NORMS]],
    }
    return document, {f"{kind}.{name}": tensor for kind, of in every.items() for name, tensor in of.items()}


def plan_from_json(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Plan:
    """Return the plan that `plan_to_json` converted; executes nothing from the data.

    Raises:
        ModelError: the data has another version, or is damaged.
    """

    def read_tensors(
        key: PlanKey,
        dtype: torch.dtype = torch.float32,
        ranks: Collection[int] | None = (0, 1),
        kind: str = "a vector of scales",
    ) -> dict[str, Tensor]:
        return {name: _check(tensors[f"{key}.{name}"], dtype, ranks, kind) for name in document[key]}

    try:
        check_format("the saved quantization", document[PlanKey.VERSION], PLAN_FORMAT_VERSION)
        scheme = QuantizationScheme(
            QuantizedType(**document[PlanKey.ACTIVATION_TYPE]),
            QuantizedType(**document[PlanKey.WEIGHT_TYPE]),
            int32_bias=frozenset(map(str, document[PlanKey.INT32_BIAS])),
            int32_bias_2d_or_static=frozenset(map(str, document[PlanKey.INT32_BIAS_2D_OR_STATIC])),
            shared_qparams=frozenset(map(str, document[PlanKey.SHARED_QPARAMS])),
            is_all_or_none_quantized=bool(document[PlanKey.IS_ALL_OR_NONE_QUANTIZED]),
            weights_only=_read_lookups(document[PlanKey.LOOKUPS]),
        )
        plan = Plan(scheme)
        plan.activations = {name: QParams(float(s), int(zero)) for name, (s, zero) in document[PlanKey.QPARAMS].items()}
        plan.weights = read_tensors(PlanKey.WEIGHTS)
        plan.offsets = read_tensors(PlanKey.GPTQ, torch.int8, ranks=None, kind="a quantized weight")
        plan.corrections = read_tensors(PlanKey.CORRECTIONS)
        plan.smoothing = read_tensors(PlanKey.SMOOTHING)
        plan.norms = read_tensors(PlanKey.NORMS, torch.float64)
        scales = read_tensors(PlanKey.PACKED_WEIGHTS, ranks=(2,), kind="a matrix of torch.float32")
        offsets = read_tensors(PlanKey.PACKED_GPTQ, torch.int8, ranks=(2,), kind="a matrix of torch.int8")
        for name, (bits, block_size, is_narrow) in document[PlanKey.PACKED_WEIGHTS].items():
            plan.packed_weights[name] = PackedWeight(
                int(bits), int(block_size), scales[name], offsets.get(name), bool(is_narrow)
            )
        plan.scale_sources = {str(name): str(other) for name, other in document[PlanKey.SCALE_SOURCES].items()}
        plan.dynamic = {str(name): bool(is_dynamic) for name, is_dynamic in document[PlanKey.DYNAMIC].items()}
        rounded = document.get(PlanKey.ROUNDED_INPUTS, {})  # missing in older data
        plan.rounded_inputs = {str(name): int(size) for name, size in rounded.items()}
        plan.floats = {str(name): str(reason) for name, reason in document[PlanKey.FLOATS].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"the saved quantization is damaged: {type(error).__name__}: {error}. Quantize the model again."
        ) from error
    return plan


def _read_lookups(document: Mapping[str, Any]) -> WeightOnlyScheme | None:
    """Return the part of a weight-only scheme that lookups need; None if the target has none."""
    lookups = {str(name): bool(is_fused) for name, is_fused in document.items()}
    return WeightOnlyScheme(lookups=lookups) if lookups else None


def _check(tensor: Tensor, dtype: torch.dtype, ranks: Collection[int] | None, kind: str) -> Tensor:
    if tensor.dtype != dtype or (ranks is not None and tensor.ndim not in ranks):
        raise ValueError(f"{tensor.dtype}{list(tensor.shape)} is not {kind}")
    return tensor
