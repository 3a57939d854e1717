"""Record the JSON that ``clika-ref ... --json`` prints for small models and for the installation."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import clika_ref
from releasing.baseline.command_options import SCRIPT, load_main
from releasing.baseline.messages import normalize_text

MODEL_FILE = "small_models.py"

MODELS = '''"""Models for the command line."""

import torch
from torch import nn


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.max_pool2d(x, 2).mean((2, 3)))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def _batches(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, *shape, generator=generator) for _ in range(4)]


def images():
    return _batches(3, 8, 8)


def vectors():
    return _batches(64)
'''

MODEL_COMMANDS: Mapping[str, str] = {
    "compile": "compile {model} {inputs} -o model.onnx",
    "compile, OpenVINO": "compile {model} {inputs} --target openvino -o model.xml",
    "compile, dry run": "compile {model} {inputs} --dry-run",
    "compile, no input": "compile {model} -o none.onnx",
    "quantize": "quantize {model} {inputs} {calibrate} --threshold 0.05 -o int8.onnx --save int8.clika --keep-inputs",
    "quantize, TensorRT": "quantize {model} {inputs} {calibrate} --target trt -o trt.onnx",
    "quantize, weights only": "quantize {model} {calibrate} --weights-only --weights-bits 4 -o int4.onnx",
    "quantize, options": "quantize {model} {calibrate} --option smooth_quant=on --option observer=min-max --dry-run",
    "quantize, saved": "quantize int8.clika --keep-float {layer} -o careful.onnx",
    "export": "export int8.clika -o again.onnx",
    "export, OpenVINO": "export int8.clika --target openvino --input {call} -o other.xml",
    "export, half": "export int8.clika --target openvino --fp16 -o half.onnx",
    "inspect": "inspect {model} {inputs}",
    "inspect, saved": "inspect int8.clika",
    "inspect, ONNX": "inspect int8.onnx",
    "explain": "explain int8.clika",
    "explain, OpenVINO": "explain int8.clika --target openvino",
    "explain, ONNX": "explain int8.onnx",
    "explain, xml": "explain other.xml",
    "check": "check model.onnx --target tensorrt",
    "check, saved": "check int8.clika --target tensorrt",
    "check, broken": "check int8.onnx --target tensorrt",
    "compare": "compare model.onnx int8.onnx --input {data} --min-sqnr 20",
    "compare, saved": "compare int8.clika int8.onnx --input {data}",
    "compare, targets": "compare int8.clika --target ort --target ov --target trt",
}
"""Commands for one model, in order: later ones read the files of earlier ones."""

INSTALLATION_COMMANDS: Mapping[str, str] = {
    "plugins": "plugins --names",
    "targets": "targets",
    "explain, operator": "explain softplus",
    "explain, layer": "explain conv2d",
    "explain, ATen call": "explain aten.relu.default",
    "explain, unknown": "explain nothing",
    "new-plugin": "new-plugin my-ops",
}

GROUPS: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "convolutional": (
        MODEL_COMMANDS,
        {
            "model": "small_models:Convolutional",
            "inputs": "--input 2x3x8x8 --input 3x3x8x8",
            "call": "3x3x8x8",
            "data": "small_models:images",
            "calibrate": "--calibrate small_models:images",
            "layer": "head",
        },
    ),
    "linear": (
        MODEL_COMMANDS,
        {
            "model": "small_models:Linear",
            "inputs": "--input 2x64 --input 3x64",
            "call": "3x64",
            "data": "small_models:vectors",
            "calibrate": "--calibrate small_models:vectors",
            "layer": "second",
        },
    ),
    "installation": (INSTALLATION_COMMANDS, {}),
}
"""The groups of commands that are recorded together, with the words that replace ``{...}``."""

TIMED_KEYS = frozenset({"seconds", "ratio"})
"""Keys of times and of quotients of times. Their presence is recorded, not their values."""

NUMBER_DIGITS = 6
"""Significant digits of a recorded number."""


def record_commands(group: str) -> dict[str, Any]:
    """Run the commands of a group in an empty folder; return the status and the JSON of each."""
    commands, words = GROUPS[group]
    clika_ref.ClikaModule()  # imports most modules before the forks
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MODEL_FILE).write_text(MODELS, encoding="utf-8")
        return {name: _run(text.format(**words), Path(folder)) for name, text in commands.items()}


def _run(command: str, folder: Path) -> dict[str, Any]:
    """Run one command with ``--json``. Return its status and its JSON, or the message on stderr.

    It runs in a fork of this process, which has imported PyTorch already: a new interpreter needs seconds for that.
    """
    out, err = (folder / f".std{name}" for name in ("out", "err"))
    words = [*shlex.split(command), "--json"]
    process = multiprocessing.get_context("fork").Process(target=_call_main, args=(words, folder, out, err))
    process.start()
    process.join()
    printed, status = out.read_text(encoding="utf-8"), process.exitcode
    if not printed:
        return {"status": status, "message": normalize_text(err.read_text(encoding="utf-8").strip())}
    try:
        return {"status": status, "json": normalize_json(json.loads(printed))}
    except json.JSONDecodeError:
        return {"status": status, "text": normalize_text(printed)}


def _call_main(words: list[str], folder: Path, out: Path, err: Path) -> None:
    """Call the function of the console script with stdout and stderr in files."""
    os.chdir(folder)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = [SCRIPT, *words]
    load_main()()


def normalize_json(value: Any) -> Any:
    """Return JSON data without times and folders, and with rounded numbers."""
    match value:
        case dict():
            return {key: _without_numbers(v) if key in TIMED_KEYS else normalize_json(v) for key, v in value.items()}
        case list():
            return [normalize_json(item) for item in value]
        case float():
            return float(f"{value:.{NUMBER_DIGITS}g}")
        case str():
            return normalize_text(value)
    return value


def _without_numbers(value: Any) -> Any:
    """Return a time as a placeholder, and a table of times as the list of its keys."""
    return sorted(value) if isinstance(value, dict) else None if value is None else "<time>"
