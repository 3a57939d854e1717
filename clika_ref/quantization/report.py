"""Report of a quantization: log entries on layers and thresholds, and a one-line summary."""

from __future__ import annotations

from collections import Counter

from clika_ref.quantization.decision import THRESHOLD_TABLE_TITLE, Quantization
from clika_ref.reporting.log import CompilationLog


def log_quantization(found: Quantization, log: CompilationLog) -> None:
    """Log the decision for each layer, the tables, and a warning if nothing is quantized."""
    quantized = [layer.name for layer in found.layers if not layer.reason]
    for layer in found.layers:
        if layer.reason:
            log.detail(f"Automatic Quantization: Skipping Quantization for node: '{layer.name}' ({layer.reason})")
    for number, name in enumerate(quantized, 1):
        log.detail(f"Quantization: Processed {number}/{len(quantized)} - '{name}'")
    log.detail("Quantization: done")
    log.table("Summary", found.table)
    log.table(THRESHOLD_TABLE_TITLE, found.prediction_table)
    if reason := float_only_reason(found):
        log.warning(reason)
    if found.spared:
        log.detail(f"In no row of these: {', '.join(found.spared)}; sparing='off' quantizes them as well")


NO_DECISIONS_MESSAGE = (
    "nothing is known here of what was decided: the module is float, or was loaded, which keeps the integers alone; "
    "clika_initialize_algorithms(calibration_inputs=...) decides. "
    "What was pruned is in the log, and what clika_prune returns"
)


def float_only_reason(found: Quantization) -> str:
    """Return the most common reason if all layers stay in float; empty if some do not, or there are none."""
    reasons = Counter(layer.reason for layer in found.layers)
    if not reasons or "" in reasons:
        return ""
    ((reason, count),) = reasons.most_common(1)
    return f"Nothing becomes integers; of {count:,} of {len(found.layers):,} layers because: {reason}"


def summarize_quantization(found: Quantization) -> str:
    """Return a summary: the number of quantized layers, the size reduction, and the algorithms used."""
    layers = found.layers
    count = sum(not layer.reason for layer in layers)
    before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
    unit, name = (1e6, "MB") if before >= 1e6 else (1e3, "KB")
    sizes = f"{before / unit:,.1f} to {after / unit:,.1f} {name}"
    if not found.observer:
        return f"the weights of {count:,} of {len(layers):,} layers in integers, {sizes}"
    biases = "corrected biases" if found.plan.corrections else "biases as they are"
    rounded = f"{len(found.plan.moved)} rounded with feedback, " if found.plan.moved else ""
    return (
        f"{count:,} of {len(layers):,} layers in integers, {rounded}their weights {sizes}; "
        f"ranges by {found.observer}, {biases}"
    )
