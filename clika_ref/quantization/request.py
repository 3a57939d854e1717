"""A quantization request of the user for a target, with checks for unsupported and ineffective choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.core.targets import Target
from clika_ref.quantization.algorithms.weight_only import as_list
from clika_ref.quantization.calibration.observer_search import OBSERVER_CANDIDATES
from clika_ref.quantization.qdq.recurrent_layers import find_input_block, list_dynamic_layers
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.quantization import INT8_BITS, LayerQuantizationSettings, QuantizationSettings


@dataclass(frozen=True)
class QuantizationRequest:
    """The choices of the user for the quantization of a model, and the target."""

    target: Target
    """Target of the deployment, as its settings configured it, and as dynamic activations need it."""
    given: QuantizationSettings
    """Settings as the user gave them; fields left to the target may differ for another one."""
    layers: Mapping[str, LayerQuantizationSettings] = field(default_factory=dict[str, LayerQuantizationSettings])
    """Settings of single layers, by name."""
    options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Algorithms to use."""

    def __post_init__(self) -> None:
        """Reject unsupported choices before the data is read.

        Raises:
            ModelError: a choice is unsupported, or a list in the settings was changed to invalid values.
            TargetError: the target computes in float, or is emulated and layers are to be timed.
        """
        for settings in (self.given, *self.layers.values()):
            settings.check()
        self._prepare_dynamic_activations()
        if self.settings.prefer_weights_only_quantization and self.scheme.weights_only is None:
            raise TargetError(
                f"the target {self.target.name} does not support weight-only quantization. Quantize activations as "
                "well: prefer_weights_only_quantization=False."
            )
        wide = [key for key, layer in self.layers.items() if layer.activations_num_bits is not None]
        if self.settings.prefer_weights_only_quantization and wide:
            is_asked = self.given.prefer_weights_only_quantization is not None
            of_target = f"the target {self.target.name}, unless prefer_weights_only_quantization is False,"
            raise ModelError(
                f"{'prefer_weights_only_quantization' if is_asked else of_target} keeps activations in float, but "
                f"activations_num_bits of {wide[0]!r} quantizes them. Choose one."
            )
        if self.options.mixed_precision == "on" and not self.given.automatic_skip_quantization:
            raise ModelError(
                "mixed_precision='on' keeps layers in float, but automatic_skip_quantization=False keeps none. "
                "Choose one."
            )
        if self.options.observer not in OBSERVER_CANDIDATES:
            known = ", ".join(map(repr, OBSERVER_CANDIDATES))
            raise ModelError(f"option 'observer' is {self.options.observer!r}. Choose one of {known}.")
        stand_in = self.target.emulated_by
        if stand_in and self.options.optimize_for == "latency":
            raise TargetError(
                f"optimize_for='latency' measures layers, but {self.target.name} is emulated by {stand_in} here, so "
                "the times would not be its own. Quantize with optimize_for='size'."
            )
        _ = self.scheme

    def _prepare_dynamic_activations(self) -> None:
        """Let the target round inputs of low-bit layers at run time, if it does so on request.

        Raises:
            TargetError: neither its operators nor its runtime round inputs.
        """
        if not self.given.dynamic_activations:
            return
        only = self.scheme.weights_only
        if only is not None:
            object.__setattr__(self, "target", self.target.with_rounded_inputs(only.block_size))
        if not list_dynamic_layers(self.scheme) and not find_input_block(self.scheme):
            raise TargetError(
                f"cannot quantize for the target {self.target.name} with dynamic_activations=True: it does not round "
                "the inputs of INT8 layers at run time. Use static ranges, dynamic_activations=False, or weight-only "
                "quantization."
            )

    @property
    def settings(self) -> QuantizationSettings:
        """The settings, with the defaults of the target for fields left to it.

        With dynamic activations, weights are chosen as in weight-only quantization, with 8 bits and a scale for each
        row.
        """
        if self.given.dynamic_activations:
            bits = self.scheme.weights.bits
            return replace(
                self.given,
                prefer_weights_only_quantization=True,
                weights_num_bits=sorted({INT8_BITS, bits}),
                weights_only_quantization_block_size=0,
            )
        if self.given.prefer_weights_only_quantization is not None:
            return self.given
        only = self.scheme.weights_only
        return replace(self.given, prefer_weights_only_quantization=only is not None and only.is_default)

    @property
    def scheme(self) -> QuantizationScheme:
        """Quantization scheme of the target, with the weight width that the user chose.

        Raises:
            TargetError: the target declares no scheme, as it computes in float.
        """
        scheme = self.target.scheme
        if scheme is None:
            raise TargetError(
                f"cannot quantize for the target {self.target.name}: it computes in float and declares no scheme. "
                "Compile without quantization_settings."
            )
        full = self.given.weights_utilize_full_int_range
        bits = scheme.weights.bits if full is None else 8 if full else 7
        return replace(scheme, weights=replace(scheme.weights, bits=bits))

    @property
    def overflow_warning(self) -> str:
        """A warning if the user asks for all 8 bits of weights where the target uses 7; empty otherwise."""
        full, only = self.given.weights_utilize_full_int_range, self.settings.prefer_weights_only_quantization
        if not full or only or self.target.scheme is None or self.target.scheme.weights.bits == 8:
            return ""
        return (
            f"weights_utilize_full_int_range=True: {self.target.name} adds products in 16 bits on this CPU, and sums "
            "with 8-bit weights can overflow there. Leave it None for 7 bits."
        )

    @property
    def ineffective_options(self) -> list[str]:
        """Options that the user chose without effect, since activations stay in float."""
        if not self.settings.prefer_weights_only_quantization:
            return []
        chosen = {"observer": self.options.observer != "auto"}
        chosen |= {
            name: getattr(self.options, name) == "on" for name in ("equalization", "mixed_precision", "bias_correction")
        }
        return [f"{name}={getattr(self.options, name)!r}" for name, is_chosen in chosen.items() if is_chosen]

    @property
    def ineffective_in_search(self) -> list[str]:
        """Choices of the user without effect in a search for thresholds, which alone decide the layers in float.

        Layers with quantized activations are timed before a search. Those with low-bit weights would have to be timed
        in each of its steps, since their widths change.
        """
        given, is_fast = self.settings, self.options.optimize_for == "latency"
        chosen = {
            "automatic_skip_quantization=False": not given.automatic_skip_quantization,
            "skip_tail_quantization=False": given.skip_tail_quantization is False,
            "optimize_for='latency' with weight-only quantization": is_fast
            and bool(given.prefer_weights_only_quantization),
        }
        return [choice for choice, is_chosen in chosen.items() if is_chosen]

    @property
    def smoothing_purpose(self) -> str:
        """The quantization that channels are smoothed for, in words, independent of the target."""
        smooth_quant, equalization = self.options.smooth_quant, self.options.equalization
        if self.settings.prefer_weights_only_quantization:
            bits, blocks = smallest_width_and_blocks(self.settings)
            sizes = " or ".join(map(str, blocks))
            return NO_SMOOTHING if smooth_quant == "off" else f"{bits}-bit weights, blocks of {sizes} ({smooth_quant=})"
        return (
            NO_SMOOTHING if smooth_quant == equalization == "off" else f"activations ({smooth_quant=}, {equalization=})"
        )


NO_SMOOTHING = "off"
"""Value of `smoothing_purpose` if SmoothQuant is off."""


def smallest_width_and_blocks(settings: QuantizationSettings) -> tuple[int, list[int]]:
    """Return the smallest bit width for weights, and the block sizes."""
    return min(as_list(settings.weights_num_bits)), as_list(settings.weights_only_quantization_block_size)
