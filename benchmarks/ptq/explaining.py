"""Explain one subject, as we quantize it, in a runtime."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

from benchmarks.ptq.quantizers import compile_quantized
from benchmarks.ptq.subjects import read
from clika_ref.settings.compile_options import deployment_settings_named


def main(runtime: str, folder: str) -> dict[str, float]:
    """Return which share of products is planned in integers, and of the layers that are, which share runs so."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    prepared = read(Path(folder))
    deployment = deployment_settings_named(runtime)
    explained = compile_quantized(prepared.model, prepared.calibration, deployment).clika_explain()
    planned = [node for node in explained.nodes if node.macs and node.planned != "float"]
    missed = sum(node in explained.not_quantized for node in planned)
    return {
        "planned": explained.share(planned=True),
        "in integers": 1 - missed / len(planned) if planned else 0.0,
    }
