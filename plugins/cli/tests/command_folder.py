"""Shared by tests of commands: a folder with a small model, and the command line in it."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clika_ref_cli import cli
from typer.testing import CliRunner

SOURCE = '''
import torch

class Net(torch.nn.Module):
    """A model of two layers that prints to stdout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)

    def forward(self, x):
        print("a model that talks")
        return self.second(torch.relu(self.first(x)))


class Wider(Net):
    def __init__(self):
        super().__init__()
        self.second = torch.nn.Linear(64, 9)


class Keyed(Net):
    def forward(self, batch):
        return self.second(torch.relu(self.first(batch["text"]))) + batch["image"]


def dictionaries():
    for size in (2, 3):
        yield {"text": torch.randn(size, 32), "image": torch.randn(size, 8)}


def dictionaries_in_tuples():
    for batch in dictionaries():
        yield ({"image": batch["image"], "text": batch["text"]},)


class Random(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def batches():
    print("data that talks")
    spread = torch.Generator().manual_seed(1)
    for _ in range(4):
        yield torch.randn(8, 32, generator=spread)
    yield torch.randn(4, 32, generator=spread)
'''

MANUAL = Path(__file__).parents[3] / "docs/command-line.md"

PLUGINS = "aten,cleanup,onnxruntime,openvino,tensorrt,visualize"


def run_command(*words):
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def make_quantized_folder(folder):
    """Fill a folder with a model, its quantized files and data; return it with the result of ``quantize``."""
    (folder / "talking_model.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        words = ("--input", "1x32", "--input", "2x32", "-o", "q.onnx", "--save", "q.clika", "--keep-inputs", "--json")
        result = run_command("quantize", "talking_model:Net", "--calibrate", "talking_model:batches", *words)
        assert result.exit_code == 0, result.output
        np.save("x.npy", np.random.default_rng(0).standard_normal((6, 32)))
    return SimpleNamespace(folder=folder, quantized=result)


def enter(folder, patch):
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    patch.delitem(sys.modules, "talking_model", raising=False)
    patch.setenv("CLIKA_REF_PLUGINS", PLUGINS)


def run_json(*words, status=0):
    """Run a command with ``--json``; check its keys against the manual, and return its document."""
    result = run_command(*words, "--json")
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    assert set(iterate_keys(found)) <= set(list_documented_keys(words[0])), words
    return found


def iterate_keys(item):
    """Yield every key of a document, except names of stages and attributes."""
    if isinstance(item, list):
        yield from (key for part in item for key in iterate_keys(part))
    if isinstance(item, dict):
        for key, part in item.items():
            yield key
            yield from () if key in ("seconds", "attributes") else iterate_keys(part)


def list_documented_keys(command):
    """Return the keys in the manual's rows for a command, and those of tensors."""
    text = MANUAL.read_text(encoding="utf-8").partition("## JSON output")[2].partition("## ")[0]
    rows = [row for row in text.splitlines() if row.startswith("|") and f"`{command}`" in row.split("|")[1]]
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)} | {"name", "dtype", "shape"}
