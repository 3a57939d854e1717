"""Decoders with their caches as ONNX files: seconds and tokens, next to transformers' own exporter."""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - first, so that transformers imports with a torch without CUDA

# isort: split
import torch
from transformers.exporters import OnnxConfig, OnnxExporter

from benchmarks.generation import (
    MODELS,
    SEED,
    TOKENS,
    GeneratedModel,
    Step,
    generate,
    make_file_step,
    vary,
)
from benchmarks.measuring import Names, run_in_fresh_process
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, clika_compile
from clika_ref.reporting.tables import print_table

METHODS = ("clika-ref", "transformers")


def main(name: str, method: str) -> dict[str, Any]:
    """Export one decoder; return the seconds, and whether its file generates the tokens of eager."""
    logging.disable(logging.WARNING)
    torch.manual_seed(SEED)
    subject = GeneratedModel(vary(MODELS[name]().eval()))
    expected = generate(subject.make_step(subject.model))
    model, calls = copy.deepcopy(subject.model), subject.tracing_inputs()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            export = _export_with_clika if method == "clika-ref" else _export_with_transformers
            step = export(model, calls, subject, Path(folder))
        except Exception as error:  # noqa: BLE001 - any failure of an exporter is a result
            return {"seconds": time.perf_counter() - start, "result": f"export: {_shorten(error)}"}
        seconds = time.perf_counter() - start
        try:
            found = generate(step)
        except Exception as error:  # noqa: BLE001
            return {"seconds": seconds, "result": f"run: {_shorten(error)}"}
    equal = next((n for n, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), TOKENS)
    return {"seconds": seconds, "result": "equal" if equal == TOKENS else f"differs at token {equal + 1}"}


def _export_with_clika(model: torch.nn.Module, calls: list[Any], subject: GeneratedModel, folder: Path) -> Step:
    settings = DeploymentSettings_ONNXRuntime_ONNX()
    module = clika_compile(model, tracing_inputs=calls, deployment_settings=settings)
    return make_file_step(module, module.clika_export(folder / "model.onnx"), subject)


def _export_with_transformers(model: Any, calls: list[Any], subject: GeneratedModel, folder: Path) -> Step:
    exported = OnnxExporter().export(model, calls[-1], OnnxConfig(dynamic=True))
    exported.save_pretrained(folder)

    def step(tokens: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
        past = _make_empty_cache(subject) if past is None else past
        found = exported(**subject.constants(1), **{subject.tokens_name: tokens}, past_key_values=past)
        return found["logits"], found["past_key_values"]

    return step


def _make_empty_cache(subject: GeneratedModel) -> Any:
    """Return a cache with tensors of no positions, which the runner of transformers needs."""
    cache = subject.tracing_inputs()[-1]["past_key_values"]
    for part in (cache.self_attention_cache, cache.cross_attention_cache) if subject.is_encoder_decoder else (cache,):
        for layer in part.layers:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    return cache


def _shorten(error: Exception) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:90]


def run(names: Names = None) -> None:
    """Print the seconds from module to file, and whether 64 greedy tokens after a prompt are equal to eager's."""
    rows: list[tuple[str, ...]] = []
    for name in MODELS:
        if names and not any(part in name for part in names):
            continue
        found = {method: run_in_fresh_process("benchmarks.exporters", name, method) for method in METHODS}
        ours, theirs = (found[method] for method in METHODS)
        ratio = f"{ours['seconds'] / theirs['seconds']:.2f}"
        rows.append((name, *(f"{found[m]['seconds']:.1f} s, {found[m]['result']}" for m in METHODS), ratio))
        print(" | ".join(rows[-1]), flush=True)
    print_table(("model", *METHODS, "ratio"), rows, title="From module to file, with a cache, dynamic sizes; 64 tokens")
