"""The examples run and show what they promise."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Return an example by its name, to be run with the plugins of a plain installation."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def digits(example):
    """The demonstration, with less training and less timing."""
    module = example("digits")
    module.EPOCHS, module.TIMED_RUNS = 2, 1
    return module


def test_the_digits_are_told_apart_as_well_by_the_artifact_as_by_eager(digits, tmp_path, capsys):
    digits.main(tmp_path / "build" / "digits.onnx")
    out = capsys.readouterr().out
    rows = {
        name: re.search(rf"{name} +([\d.]+) % +([\d.]+) %", out)
        for name in ("PyTorch, eager", "ClikaModule", "ONNX Runtime")
    }
    assert all(rows.values()), out
    accuracies = {name: float(row[1]) for name, row in rows.items()}
    assert accuracies["PyTorch, eager"] > 90  # guessing gives 10; two epochs give 97
    assert len(set(accuracies.values())) == 1, out
    assert {float(row[2]) for row in rows.values()} == {100.0}, out
    assert "What it took to make" in out
    assert re.search(r"Capturing +[\d.]+", out)
    assert (tmp_path / "build" / "digits.onnx").stat().st_size > 300_000  # 96,000 weights of 4 bytes, less batch norm


def test_two_tasks_are_learned_by_adapters_beside_weights_of_four_bits(example, tmp_path, capsys):
    lora = example("lora")
    lora.EPOCHS, lora.ADAPTER_EPOCHS = 4, 15
    lora.main(tmp_path / "build")
    out = capsys.readouterr().out
    for task in lora.TASKS:
        told = re.search(rf"{task} +([\d.]+) % +([\d.]+) % +(\d+) KiB", out)
        ran = re.search(rf"{task}\.onnx +(\d+) KiB +([\d.]+) %", out)
        assert told, out
        assert ran, out
        assert float(told[1]) < 60, out
        assert float(told[2]) > 85, out
        assert abs(float(ran[2]) - float(told[2])) < 1, "a few images of 450 may lie between two classes"
        assert int(told[3]) < 0.25 * int(ran[1]), "the adapter is a small part of the file in four bits"
    kept = [(tmp_path / "build" / f"{task}.safetensors").read_bytes() for task in lora.TASKS]
    assert kept[0] != kept[1]
