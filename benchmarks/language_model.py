"""A trained decoder in low bits: bits per byte of held-out text, bytes of the file, tokens per second in ONNX Runtime.

It is trained once, on the sources of the standard library (`examples/train_and_generate.py`), and cached.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - first, so that transformers imports with a torch without CUDA

# isort: split
import numpy as np
import onnx
import onnxruntime
import torch
import typer
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from safetensors.torch import load_model, save_model
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor

from benchmarks.measuring import ROOT, Names, format_verdict, run_in_turn
from clika_ref import ClikaCompileOptions, DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile

sys.path.insert(0, str(ROOT / "examples"))
import train_and_generate as example

CACHE = ROOT / "build" / "language-model"
"""The folder of the trained weights and of the tokenizer."""

SIZE = example.ModelSize(vocabulary=6144, width=192, layers=5, steps=700)

MAX_TRAINING_SECONDS = 600.0
"""Limit of the training on two cores."""

MAX_FLOAT_BITS = 2.5
"""Bits per byte of the float model that the other limits need."""

MAX_ADDED_BITS = {"int8": 0.002, "int4": 0.03}
"""Limits of the bits per byte that a form adds to those of the float model."""

MAX_INT4_SIZE = 0.17
"""Limit of the size of the file in 4 bits relative to the float file."""

EVALUATION_FILES = 12
CALIBRATION_CALLS = 16
TOKENS, ROUNDS = 96, 7

FORMS: Mapping[str, tuple[list[int], dict[str, Any]]] = {
    "int8": ([8], {}),
    "int4": ([4], {}),
    "int4, no GPTQ": ([4], {"gptq": "off"}),
    "int4, no AWQ": ([4], {"smooth_quant": "off"}),
}
"""Widths and compile options of each form."""


def load_or_train(tokens: Tensor) -> Any:
    """Return the trained model, from the cache if it is there."""
    path, model = CACHE / "model.safetensors", SIZE.build()
    if path.exists():
        load_model(model, path)
        return model.eval()
    torch.manual_seed(0)
    start = time.perf_counter()
    model = example.train(SIZE, tokens)
    seconds = time.perf_counter() - start
    print(f"seconds of training on {torch.get_num_threads()} threads  {format_verdict(seconds, MAX_TRAINING_SECONDS)}")
    save_model(model, str(path))
    return model


def load_tokenizer(texts: Sequence[str]) -> Any:
    """Return the tokenizer, from the cache if it is there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not (CACHE / "vocab.json").exists():
        example.train_tokenizer(texts, SIZE.vocabulary).save_model(str(CACHE))
    return ByteLevelBPETokenizer(str(CACHE / "vocab.json"), str(CACHE / "merges.txt"))


def compile_form(name: str, model: Any, tokens: Tensor) -> Any:
    """Return the module of a form: of the float model, or with weights in low bits."""
    calls = example.make_tracing_inputs(model, tokens)
    if name == "float":
        return clika_compile(model, tracing_inputs=calls, discard_input_model=False)
    widths, options = FORMS[name]
    parts = tokens[: CALIBRATION_CALLS * example.LENGTH].split(example.LENGTH)
    return clika_compile(
        model,
        tracing_inputs=calls,
        calibration_inputs=[{"input_ids": part[None], "past_key_values": None} for part in parts],
        quantization_settings=QuantizationSettings(prefer_weights_only_quantization=True, weights_num_bits=widths),
        clika_compile_options=ClikaCompileOptions(**options),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
    )


class Decoder:
    """A file in ONNX Runtime, with one thread and without clika-ref."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]
        shapes = {x.name: x.shape for x in self.session.get_inputs() if x.name.startswith("past_key_values")}
        self.empty = {
            name: np.zeros([1, *(size if isinstance(size, int) else 0 for size in shape[1:])], np.float32)
            for name, shape in shapes.items()
        }

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, length, vocabulary]`` of tokens ``[batch, length]``."""
        return torch.from_numpy(self._step(tokens.numpy(), self.empty)["logits"])

    def generate(self, prompt: Tensor) -> float:
        """Return the seconds to generate the most probable tokens after a prompt ``[1, length]``."""
        start = time.perf_counter()
        tokens, past = prompt.numpy(), self.empty
        for _ in range(TOKENS):
            results = self._step(tokens, past)
            past = {name: results[name.replace("past_key_values", "present")] for name in past}
            tokens = results["logits"][:, -1:].argmax(-1)
        return time.perf_counter() - start

    def _step(self, tokens: np.ndarray[Any, Any], past: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.names, self.session.run(None, {"input_ids": tokens, **past}), strict=True))


def quantize_with_onnxruntime(source: Path, path: Path) -> Path:
    """Write the float file with weights in 4 bits, as ONNX Runtime's own quantizer does by default."""
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)
    quantizer = MatMulNBitsQuantizer(onnx.load(source), accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return path


def run(names: Names = None) -> None:
    """Print the bits per byte, size and speed of each form; fails if the float model is not good enough."""
    training, held_out = example.read_sources()
    held_out = held_out[:EVALUATION_FILES]
    count = sum(len(text.encode()) for text in held_out)
    tokenizer = load_tokenizer(training)
    tokens, test_tokens = example.encode(tokenizer, training), example.encode(tokenizer, held_out)
    model = load_or_train(tokens)
    weights = sum(p.numel() for p in model.parameters())
    table = SIZE.vocabulary * SIZE.width / weights
    print(f"{weights / 1e6:.2f} million weights, {table:.0%} in the tied table; {len(test_tokens)} tokens held out")
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        bits: dict[str, float] = {}
        for name in ("float", *(form for form in FORMS if not names or form in names)):
            module = compile_form(name, model, tokens)
            files[name] = module.clika_export(Path(folder) / f"{name}.onnx").path
            bits[name] = example.bits_per_byte(Decoder(files[name]), test_tokens, count)
            _print_form(name, bits, files)
        files["ONNX Runtime's int4"] = quantize_with_onnxruntime(files["float"], Path(folder) / "peer.onnx")
        bits["ONNX Runtime's int4"] = example.bits_per_byte(Decoder(files["ONNX Runtime's int4"]), test_tokens, count)
        _print_form("ONNX Runtime's int4", bits, files)
        _print_speed(files, torch.tensor([tokenizer.encode(example.PROMPT).ids]))
    if bits["float"] > MAX_FLOAT_BITS:
        raise typer.Exit(1)


def _print_form(name: str, bits: Mapping[str, float], files: Mapping[str, Path]) -> None:
    kind, size = name.partition(",")[0], files[name].stat().st_size
    print(f"{name}: {bits[name]:.4f} bits per byte, {size / 1e6:.2f} MB", flush=True)
    if name == "float":
        print(f"  bits per byte  {format_verdict(bits[name], MAX_FLOAT_BITS)}")
    if kind in MAX_ADDED_BITS:
        print(f"  added bits per byte  {format_verdict(bits[name] - bits['float'], MAX_ADDED_BITS[kind], digits=4)}")
    if kind == "int4":
        print(f"  size / float  {format_verdict(size / files['float'].stat().st_size, MAX_INT4_SIZE, digits=3)}")


def _print_speed(files: Mapping[str, Path], prompt: Tensor) -> None:
    decoders = {name: Decoder(path) for name, path in files.items()}
    calls: dict[str, Callable[[], float]] = {name: lambda d=d: d.generate(prompt) for name, d in decoders.items()}
    seconds = run_in_turn(calls, ROUNDS)
    best = {name: min(taken) for name, taken in seconds.items()}
    for name, taken in best.items():
        print(f"{name}: {TOKENS / taken:.0f} tokens/s, {best['float'] / taken:.2f} of float")
