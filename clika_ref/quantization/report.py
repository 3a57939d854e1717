"""What quantization tells: a row for each layer, a row for each threshold, and all of it in one line."""

from __future__ import annotations

from collections.abc import Sequence

from clika_ref.quantization.decision import Quantization
from clika_ref.reporting.tables import table_text

LAYERS = ("layer", "operator", "weights", "activations", "QS", "bytes", "bytes after", "decision")
"""The columns of `layer_rows`: widths in bits, QS as quantization sensitivity."""

WHAT_IF = ("threshold", "layers", "bytes of the file", "predicted SQNR")
"""The columns of `what_if_rows`."""

WHAT_IF_TITLE = "What another quantization_sensitivity_threshold would give"


def layer_rows(found: Quantization) -> list[Sequence[object]]:
    """Return a row for each layer, in order."""
    rows: list[Sequence[object]] = []
    for layer in found.layers:
        name = layer.scope or layer.name
        decision = f"float: {layer.reason}" if layer.reason else "integers"
        rows.append(
            (name, layer.operator, *layer.bits, layer.sensitivity, layer.bytes_before, layer.bytes_after, decision)
        )
    return rows


def what_if_rows(found: Quantization) -> list[Sequence[object]]:
    """Return a row for each threshold at which one more layer is quantized."""
    return [(row.threshold, row.layers, row.bytes, f"{row.sqnr:.1f} dB") for row in found.what_if]


def summary(found: Quantization) -> str:
    """Return both tables as text."""
    layers, rows = table_text(LAYERS, layer_rows(found)), table_text(WHAT_IF, what_if_rows(found))
    return f"{layers}\n\n{WHAT_IF_TITLE}:\n{rows}"


def in_one_line(found: Quantization) -> str:
    """Return how many layers are quantized, what that saves, and what was found best on the data."""
    layers = found.layers
    count = sum(not layer.reason for layer in layers)
    before, after = (
        (sum(size) / 1e6 for size in zip(*((la.bytes_before, la.bytes_after) for la in layers), strict=True))
        if layers
        else (0.0, 0.0)
    )
    sizes = f"{before:,.1f} to {after:,.1f} MB"
    if not found.observer:
        return f"the weights of {count:,} of {len(layers):,} layers in integers, {sizes}"
    biases = "corrected biases" if found.plan.corrections else "biases as they are"
    rounded = f"{len(found.plan.moved)} rounded with feedback, " if found.plan.moved else ""
    return (
        f"{count:,} of {len(layers):,} layers in integers, {rounded}their weights {sizes}; "
        f"ranges by {found.observer}, {biases}"
    )
