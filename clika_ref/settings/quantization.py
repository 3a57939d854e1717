"""Quantization settings of the user, for the whole model and for single layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from clika_ref.settings.validation import CheckedSettings, check_flag, check_threshold, is_integer, make_optional

MIN_BITS, MAX_BITS = 2, 16
INT8_BITS = 8
MIN_BLOCK_SIZE = 16

WIDTH_RULE = f"a number of bits from {MIN_BITS} to {MAX_BITS}"
BLOCK_SIZE_RULE = f"0 for one scale per channel, or a power of two from {MIN_BLOCK_SIZE}"


def _as_list(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _check_optional_flag(value: Any) -> str:
    return "" if value is None or isinstance(value, bool) else "True, False, or None for automatic"


def _is_width(value: Any) -> bool:
    return is_integer(value) and MIN_BITS <= value <= MAX_BITS


def _is_block(value: Any) -> bool:
    return is_integer(value) and (value == 0 or (value >= MIN_BLOCK_SIZE and value & (value - 1) == 0))


def _is_one_or_list(fits: Callable[[Any], bool], value: Any) -> bool:
    """Return whether the value fits, or is a list of distinct values that fit."""
    if not isinstance(value, list | tuple):
        return fits(value)
    return bool(value) and all(map(fits, value)) and len({*value}) == len(value)


def _check_width(value: Any) -> str:
    return "" if _is_width(value) else WIDTH_RULE


def _check_widths(value: Any) -> str:
    return "" if _is_one_or_list(_is_width, value) else f"{WIDTH_RULE}, or a list to choose from for each layer"


def _check_block_sizes(value: Any) -> str:
    return "" if _is_one_or_list(_is_block, value) else f"{BLOCK_SIZE_RULE}, or a list to choose from for each layer"


def _check_names(value: Any) -> str:
    is_list = isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)
    return "" if is_list else "a list of layer names"


@dataclass
class QuantizationSettings(CheckedSettings):
    """Quantization settings of a model. A field may be assigned later; each value is checked as it is set.

    Raises:
        ModelError: a value is invalid, or contradicts another one.
    """

    weights_num_bits: int | list[int] = 8
    """Bits of a weight; from a list, each layer takes the fewest that the target has and that are accurate enough."""

    activations_num_bits: int = 8
    """Bits of an activation."""

    quantization_sensitivity_threshold: float = 0.005
    """Largest share of the outputs' squared norm that quantizing a single layer may change; above, it stays in float.

    0 keeps all layers in float. Above 0, `ClikaCompileOptions.mixed_precision` also keeps layers in float that cost
    little and cause much of the error.
    """

    prefer_weights_only_quantization: bool | None = None
    """Keep activations in float, and store weights in low-bit types; None for TensorRT-LLM only."""

    weights_only_quantization_block_size: int | list[int] = field(default_factory=lambda: [0, 32, 64, 128, 256])
    """Weights that share a scale in weight-only quantization, 0 for a channel; from a list, each layer takes one."""

    weights_utilize_full_int_range: bool | None = None
    """Use all 8 bits of weights; False uses 7, for CPUs with an accumulator that saturates; None asks the CPU."""

    automatic_skip_quantization: bool = True
    """Keep layers in float that are more sensitive than the threshold; False quantizes all that the target can."""

    skip_tail_quantization: bool | None = None
    """Keep the last layer with weights in float, and all nodes after it; None if they are too sensitive.

    False quantizes these layers regardless of their sensitivity, if the threshold is not 0.
    """

    dynamic_activations: bool = False
    """Round the inputs of linear layers to 8 bits at run time, in the range of a call or block, with 8-bit weights.

    This needs no calibration data: the tracing inputs choose the layers.
    """

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "weights_num_bits": _check_widths,
        "activations_num_bits": _check_width,
        "quantization_sensitivity_threshold": check_threshold,
        "prefer_weights_only_quantization": _check_optional_flag,
        "weights_only_quantization_block_size": _check_block_sizes,
        "dynamic_activations": check_flag,
        "weights_utilize_full_int_range": _check_optional_flag,
        "automatic_skip_quantization": check_flag,
        "skip_tail_quantization": _check_optional_flag,
    }

    def _find_contradiction(self) -> str:
        if self.quantization_sensitivity_threshold == 0 and not self.automatic_skip_quantization:
            return (
                "quantization_sensitivity_threshold=0 keeps every layer in float that changes the outputs, but "
                "automatic_skip_quantization=False keeps none. Choose one."
            )
        if self.prefer_weights_only_quantization and self.activations_num_bits != 8:
            return (
                "prefer_weights_only_quantization keeps activations in float, but "
                f"activations_num_bits={self.activations_num_bits} quantizes them. Choose one."
            )
        if self.dynamic_activations and self.prefer_weights_only_quantization is False:
            return (
                "dynamic_activations quantizes inputs at run time, but prefer_weights_only_quantization=False in fixed "
                "ranges. Choose one."
            )
        if self.dynamic_activations:
            for name in ("weights_num_bits", "activations_num_bits"):
                if INT8_BITS not in _as_list(getattr(self, name)):
                    return f"dynamic_activations needs {name}=8, but it is {getattr(self, name)}."
        return ""

    def with_threshold(self, threshold: float) -> QuantizationSettings:
        """Return settings with a threshold as the only criterion for sensitive layers."""
        return dataclasses.replace(
            self,
            quantization_sensitivity_threshold=threshold,
            automatic_skip_quantization=True,
            skip_tail_quantization=self.skip_tail_quantization or None,
        )


@dataclass
class LayerQuantizationSettings(CheckedSettings):
    """Quantization settings of one layer; None keeps the setting of the model.

    Raises:
        ModelError: a value is invalid, or contradicts another one.
    """

    skip_quantization: bool = False
    """Keep the layer in float."""

    skip_quantization_until: list[str] = field(default_factory=list[str])
    """Keep the layer and the nodes before those named in float; the named ones are quantized again."""

    skip_quantization_downstream: bool = False
    """Keep the layer and all nodes after it in float."""

    weights_num_bits: int | list[int] | None = None
    """Bits of its weight, or a list to choose from."""
    activations_num_bits: int | None = None
    """Bits of its input."""

    _checks: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "skip_quantization": check_flag,
        "skip_quantization_until": _check_names,
        "skip_quantization_downstream": check_flag,
        "weights_num_bits": make_optional(_check_widths, "for the setting of the model"),
        "activations_num_bits": make_optional(_check_width, "for the setting of the model"),
    }

    def _find_contradiction(self) -> str:
        skips = self.skip_quantization or self.skip_quantization_downstream or bool(self.skip_quantization_until)
        if skips and (self.weights_num_bits is not None or self.activations_num_bits is not None):
            return "a layer in float has no number of bits. Remove one of these settings."
        if self.skip_quantization_downstream and self.skip_quantization_until:
            return (
                "skip_quantization_downstream skips all nodes after the layer, skip_quantization_until only "
                "some. Choose one."
            )
        return ""
