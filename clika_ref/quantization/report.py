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
    if found.kept_in_float:
        log.detail(
            f"Not in this table: {', '.join(found.kept_in_float)}. mixed_precision='off' quantizes them as well."
        )


NO_DECISIONS_MESSAGE = (
    "no decisions are known: the module is float, or was loaded, and files store only quantized weights. "
    "clika_initialize_algorithms(calibration_inputs=...) decides again. For pruning, see the log and the result of "
    "clika_prune."
)


def float_only_reason(found: Quantization) -> str:
    """Return the most common reason if all layers stay in float; empty if some do not, or there are none."""
    reasons = Counter(layer.reason for layer in found.layers)
    if not reasons or "" in reasons:
        return ""
    ((reason, count),) = reasons.most_common(1)
    return f"No layer is quantized; {count:,} of {len(found.layers):,} because: {reason}"
