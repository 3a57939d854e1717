"""Broadcast the decisions of rank 0, so that all ranks have one plan regardless of their timings and kernels."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from clika_ref.core.errors import ModelError
from clika_ref.core.quantization_scheme import QuantizationScheme
from clika_ref.distributed.ranks import Message, Ranks
from clika_ref.quantization.decision import LayerReport, Quantization, ThresholdPrediction
from clika_ref.quantization.qdq.plan_format import plan_from_json, plan_to_json

MODEL_MISMATCH = (
    "rank {} has a different model than rank 0: its graph or its weights differ. Load the same weights on all ranks, "
    "broadcast the running statistics of batch norms (DistributedDataParallel lets them differ), and give all ranks "
    "the same tracing_inputs."
)

SETTINGS_MISMATCH = "rank {} has different settings than rank 0: {}. Give all ranks the same settings."

RANK_LOCAL_OPTIONS = frozenset({"check_passes", "compare_after_export", "external_data", "ranges_file"})
"""Options that do not affect the model, and may differ between ranks."""


def decide_on_rank0(make: Callable[[], Quantization], scheme: QuantizationScheme, ranks: Ranks) -> Quantization:
    """Return the decision of rank 0; all ranks call it.

    Args:
        make: makes the decision; called on rank 0 only.
        scheme: the quantization scheme of the target.
        ranks: the processes.
    """
    if not ranks.is_distributed:
        return make()
    return _from_message(*ranks.broadcast_message(lambda: _to_message(make())), scheme)


def check_same_model(fingerprint: str, ranks: Ranks) -> None:
    """Raise an error if ranks work on different models, which would otherwise go unnoticed.

    Raises:
        ModelError: the fingerprint of a graph differs from that of rank 0.
    """
    messages = [document["model"] for document, _ in ranks.gather_messages(({"model": fingerprint}, {}))]
    other = [str(rank) for rank, model in enumerate(messages) if model != messages[0]]
    if other:
        raise ModelError(MODEL_MISMATCH.format(", ".join(other)))


def check_same_settings(settings: Mapping[str, Any], ranks: Ranks) -> None:
    """Raise an error if ranks were given different settings; all call it with the same names.

    Args:
        settings: values by name; dataclasses are compared field by field.
        ranks: the processes.

    Raises:
        ModelError: there are differences to rank 0; each is listed, with both values.
    """
    if not ranks.is_distributed:
        return
    messages = [
        document["settings"] for document, _ in ranks.gather_messages(({"settings": _settings_to_text(settings)}, {}))
    ]
    other = {
        rank: differences
        for rank, own in enumerate(messages)
        if (differences := _describe_differences(own, messages[0]))
    }
    if other:
        raise ModelError("; ".join(SETTINGS_MISMATCH.format(rank, difference) for rank, difference in other.items()))


def _settings_to_text(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as text that is the same in each process, including the fields of dataclasses."""
    texts: dict[str, str] = {}
    for name, value in settings.items():
        is_one = dataclasses.is_dataclass(value)
        texts[name] = type(value).__name__ if is_one else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        for field in dataclasses.fields(value) if is_one else ():
            if field.name not in RANK_LOCAL_OPTIONS:
                texts |= _settings_to_text({f"{name}.{field.name}": getattr(value, field.name)})
    return texts


def _describe_differences(own: Mapping[str, str], first: Mapping[str, str]) -> str:
    """Describe the differences between settings; for different classes, only the class."""
    other = [
        f"{name} ({textwrap.shorten(own[name], 100)} instead of {textwrap.shorten(text, 100)})"
        for name, text in first.items()
        if name in own and own[name] != text
    ]
    return ", ".join([*other[:4], *([f"and {len(other) - 4} more"] if other[4:] else [])])


def _to_message(found: Quantization) -> Message:
    document, tensors = plan_to_json(found.plan)
    message = {
        "plan": document,
        "layers": [dataclasses.asdict(layer) for layer in found.layers],
        "what_if": [dataclasses.asdict(row) for row in found.what_if],
        "observer": found.observer,
        "bytes": found.bytes,
        "kept_in_float": [*found.kept_in_float],
        "observers": {**found.observers},
    }
    return message, tensors


def _from_message(
    document: Mapping[str, Any], tensors: Mapping[str, Tensor], scheme: QuantizationScheme
) -> Quantization:
    plan = dataclasses.replace(plan_from_json(document["plan"], tensors), scheme=scheme)
    layers = [LayerReport(**{**layer, "widths": tuple(layer["widths"])}) for layer in document["layers"]]
    rows = [ThresholdPrediction(**row) for row in document["what_if"]]
    facts = (document[name] for name in ("observer", "bytes", "kept_in_float", "observers"))
    return Quantization(plan, layers, rows, *facts)


def broadcast_score(score: Any, ranks: Ranks) -> Any:
    """Return the score of rank 0, so that all ranks take the same decisions."""
    return ranks.broadcast_message(lambda: ({"score": float(score)}, {}))[0]["score"] if ranks.is_distributed else score
