"""The quantization of a compiled module: its target and its plan, and their form in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from clika_ref.core.errors import TargetError
from clika_ref.core.registry import Registry
from clika_ref.core.targets import Target
from clika_ref.quantization.decision import Quantization
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.plan_format import plan_from_json, plan_to_json
from clika_ref.serialization.container import strip_prefix
from clika_ref.serialization.vocabulary import QuantizationKey, TensorPrefix
from clika_ref.settings.compile_options import target_hint


@dataclass(frozen=True)
class QuantizationState:
    """The quantization of a module: the target, and the plan with the scales."""

    target: str
    plan: Plan
    model: str = ""
    """`fingerprint` of the graph with the weights that the scales are for; empty if unknown."""
    found: Quantization | None = None
    """Decisions for each layer; None if unknown, as for a loaded module."""

    def to_document(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return a JSON document for `read`, and the plan's tensors, of any shape, under names that no weight has."""
        plan, tensors = plan_to_json(self.plan)
        document: dict[str, Any] = {
            QuantizationKey.TARGET: self.target,
            QuantizationKey.PLAN: plan,
            QuantizationKey.MODEL: self.model,
        }
        return document, {f"{TensorPrefix.QUANTIZATION}{n}": t for n, t in tensors.items()}

    @classmethod
    def read(cls, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> QuantizationState:
        """Restore the result of `to_document` from its ``document`` and ``tensors``, of any shape; others are ignored.

        Raises:
            ModelError: the data has another version, or is damaged.
        """
        plan = plan_from_json(document[QuantizationKey.PLAN], strip_prefix(tensors, TensorPrefix.QUANTIZATION))
        return cls(str(document[QuantizationKey.TARGET]), plan, str(document[QuantizationKey.MODEL]))


def target_of(quantized: QuantizationState, registry: Registry) -> Target:
    """Return the target of a quantized module.

    Raises:
        TargetError: no plugin provides it.
    """
    target = registry.targets.get(quantized.target)
    if target is None:
        raise TargetError(
            f"cannot use the module: it is quantized for the target {quantized.target!r}, which no installed "
            f"plugin provides. {target_hint(quantized.target)} Or quantize it for another one: "
            "clika_initialize_algorithms(calibration_inputs=..., deployment_settings=...)."
        )
    return target


def is_plan_valid(plan: Plan, target: Target, former: Target | None) -> bool:
    """Return whether a plan is valid for the current configuration of its target.

    Other ``shapes`` change nothing, another preset does.

    Args:
        plan: decided for a target of the same name.
        target: as it is configured now.
        former: as it was configured then; None if unknown, as for a loaded module.
    """
    scheme = target.scheme
    if former is not None:
        return former.scheme == scheme
    is_alike = scheme is None or scheme.activations.is_symmetric == plan.scheme.activations.is_symmetric
    return is_alike or not plan.activations  # the CPU decides whether they are signed
