"""A decoder of 58 million weights in low bits: size of the file, seconds and peak memory of compilation and export."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - first, so that transformers imports with a torch without CUDA

# isort: split
import torch
import transformers

from benchmarks.measuring import Names, format_verdict, read_peak_bytes, reset_peak_bytes, run_in_fresh_process
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

VOCABULARY, BATCHES, LENGTH = 32_000, 4, 24

MAX_FLOAT_RATIOS = {"int4": 36 / 232.3, "int4, tied": 36 / 232.3}
"""Limits of issue 41: the size of a file relative to the weights in float32."""

MAX_SECONDS_RATIO, MAX_PEAK_RATIO = 3.0, 2.2
"""Limits of issue 41: seconds relative to `torch.export` and eager on the data, and peak memory, with the
model but without imports, relative to the weights."""

FORMS: Mapping[str, dict[str, Any]] = {
    "int4": {"weights_num_bits": 4},
    "int4, tied": {"weights_num_bits": 4},
    "int8": {"weights_num_bits": 8},
}
"""Settings of each form; the threshold is high, since random weights have no accuracy to keep."""


def make_model(*, is_tied: bool) -> torch.nn.Module:
    """Return a Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        tie_word_embeddings=is_tied, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def make_calls() -> list[dict[str, torch.Tensor]]:
    """Return the calibration data; two calls differ in both dims."""
    sizes = [(1, LENGTH - 8), *[(2, LENGTH)] * (BATCHES - 1)]
    return [{"input_ids": torch.randint(VOCABULARY, size)} for size in sizes]


def main(form: str) -> dict[str, float]:
    """Compile and export one form, or ``float``: `torch.export` and eager on the data."""
    before = reset_peak_bytes()
    model, calls = make_model(is_tied="tied" in form), make_calls()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    start = time.perf_counter()
    size = 0
    if form == "float":
        batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
        torch.export.export(model, (), calls[1], dynamic_shapes={"input_ids": {0: batch, 1: length}}, strict=False)
        with torch.no_grad():
            for call in calls:
                model(**call)
    else:
        settings = QuantizationSettings(
            prefer_weights_only_quantization=True, quantization_sensitivity_threshold=0.5, **FORMS[form]
        )
        module = clika_compile(
            model,
            tracing_inputs=calls[:2],
            calibration_inputs=calls,
            quantization_settings=settings,
            deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        )
        with tempfile.TemporaryDirectory() as folder:
            size = module.clika_export(Path(folder) / "model.onnx").path.stat().st_size
    return {
        "seconds": time.perf_counter() - start,
        "peak": (read_peak_bytes() - before) / weights,
        "bytes": size,
        "weights": weights,
    }


def run(names: Names = None) -> None:
    """Print the size, seconds and peak memory of each form."""
    plain = run_in_fresh_process("benchmarks.decoder", "float")
    print(f"torch.export and eager on the data: {plain['seconds']:.1f} s, peak {plain['peak']:.2f} of the weights")
    for form in FORMS:
        if names and form not in names:
            continue
        found = run_in_fresh_process("benchmarks.decoder", form)
        print(f"{form}: {found['bytes'] / 1e6:.1f} MB, of {found['weights'] / 1e6:.1f} MB in float")
        if form in MAX_FLOAT_RATIOS:
            ratio = found["bytes"] / plain["weights"]
            print(f"  size / weights in float  {format_verdict(ratio, MAX_FLOAT_RATIOS[form])}")
        seconds = found["seconds"] / plain["seconds"]
        print(f"  seconds / torch.export and eager  {format_verdict(seconds, MAX_SECONDS_RATIO)}")
        print(f"  peak memory / weights  {format_verdict(found['peak'], MAX_PEAK_RATIO)}", flush=True)
