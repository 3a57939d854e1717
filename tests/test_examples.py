"""The examples run and show what they promise."""

import importlib.util
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def digits(monkeypatch):
    """The demonstration, with less training and less timing."""
    monkeypatch.setenv("CLIKA_REF_PLUGINS", "aten,cleanup,onnxruntime")
    spec = importlib.util.spec_from_file_location("digits", EXAMPLES / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
