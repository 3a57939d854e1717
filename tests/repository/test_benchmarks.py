"""Benchmarks with figures in the README: their commands print each row. The times themselves are not tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import learning_rates
from benchmarks.measuring import read_peak_bytes, reset_peak_bytes
from benchmarks.ptq import audio, detection
from benchmarks.ptq.decisions import DECISIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_efficientnet_benchmark_prints_each_row():
    """With one round and two crops of each photograph; INT8 files take less than 0.35x the bytes of float."""
    command = [sys.executable, "-m", "benchmarks", "efficientnet", "--rounds", "1", "--crops", "2"]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "10 crops of 5 photographs" in done.stdout
    number = r"([\d.]+|inf)"
    row = rf"^ +(\w[\w ]+, \w+) +{number} +{number} +{number} +{number} +{number} \({number}x\)"
    rows = {name: values for name, *values in re.findall(row, done.stdout, re.MULTILINE)}
    runtimes = ("ONNX Runtime", "OpenVINO")
    assert [*rows] == ["PyTorch, float", *(f"{runtime}, {kind}" for runtime in runtimes for kind in ("float", "INT8"))]
    assert rows["PyTorch, float"][:3] == [rows["ONNX Runtime, float"][0], "100.0", "inf"]
    for runtime in runtimes:
        (*_, float_size, _, _), (_, _, sqnr, size, _, _) = rows[f"{runtime}, float"], rows[f"{runtime}, INT8"]
        assert float(size) <= 0.35 * float(float_size)  # INT8 weights take a quarter, plus scales and the graph
        assert float(sqnr) > 15  # 21 dB measured on 200 crops


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak memory of a process")
def test_reset_peak_bytes_earlier_peak_does_not_count():
    """Memory that was freed before the reset is not in the peak; memory that is used after it is."""
    torch.ones(2**24)  # 64 MB
    before = reset_peak_bytes()
    assert read_peak_bytes() - before < 16 * 2**20
    torch.ones(2**24)
    assert read_peak_bytes() - before > 48 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("module", ["benchmarks.export_measurement", "benchmarks.ptq.export_measurement"])
def test_export_measurement_imports_no_method_before_clock(module):
    """The processes that measure an export import none of the compared libraries before the clock starts."""
    methods = ("clika_ref", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "nncf", "openvino", "transformers", "rich")
    code = f"import sys, {module}; print(*[m for m in {methods!r} if m in sys.modules])"
    command = [sys.executable, "-W", "ignore", "-c", code]
    assert not subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_decode_boxes_suppresses_overlaps_of_one_class():
    """The best box of a class suppresses those that overlap it; other classes and positions keep theirs."""
    cells = sum((64 // stride) ** 2 for stride in detection.STRIDES)
    outputs = torch.zeros(1, 4 + detection.CLASSES, cells)
    outputs[0, :4] = 1.0  # each box reaches one cell into each direction
    outputs[0, 4 + 3, :2] = torch.tensor([0.9, 0.8])
    outputs[0, 4 + 5, 2] = 0.7
    (boxes,) = detection.decode_boxes(outputs, 64)
    assert boxes[:3].tolist() == [[-4, -4, 12, 12, 3], [4, -4, 20, 12, 3], [12, -4, 28, 12, 5]]
    outputs[0, :4, 1] = torch.tensor([2.0, 1, 0, 1])  # now it covers the first one
    (boxes,) = detection.decode_boxes(outputs, 64)
    assert boxes[:2, 4].tolist() == [3, 5]


def test_count_matches_needs_class_and_overlap():
    """A box matches one of its class with an overlap of at least one half."""
    boxes = torch.tensor([[0.0, 0, 10, 10, 1], [20, 20, 30, 30, 2]])
    moved = boxes + torch.tensor([3.0, 0, 3, 0, 0])
    assert detection.count_matches(boxes, moved) == 2
    assert detection.count_matches(boxes, boxes + torch.tensor([4.0, 0, 4, 0, 0])) == 0
    assert detection.count_matches(boxes, boxes + torch.tensor([0.0, 0, 0, 0, 1])) == 0


def test_decisions_share_of_equal_decisions():
    """Each decision is compared for each sample, or for each frame of a sample."""
    exact = np.eye(4, dtype=np.float32) + np.array([[0.0, 0.4, 0, 0]] * 4, np.float32)
    actual = exact.copy()
    actual[0] = exact[1]
    assert DECISIONS["same top-1"]([actual], [exact]) == 0.75
    assert DECISIONS["same top-1 of the last output"]([exact, actual], [actual, exact]) == 0.75
    assert DECISIONS["same pitch"]([actual[None]], [exact[None]]) == 0.75
    assert DECISIONS["same nearest neighbour"]([exact], [exact]) == 1


def test_make_tones_pitch_is_in_its_range():
    """Sounds have their pitch as the period, and the same seed gives the same sounds."""
    sounds = audio.make_tones(4, 4096, 0)
    assert torch.equal(sounds, audio.make_tones(4, 4096, 0))
    assert not torch.equal(sounds, audio.make_tones(4, 4096, 1))
    spectra = audio.make_spectra(sounds, 1024, 256)
    assert (spectra.argmax(1) * audio.SAMPLE_RATE / 1024 < 3000).all()


@pytest.mark.slow
@pytest.mark.parametrize("network", learning_rates.NETWORKS)
def test_learning_rates_benchmark_trains_each_optimizer(network, monkeypatch):
    """Float, fixed and learned scales have an accuracy for each optimizer and learning rate."""
    monkeypatch.setattr(learning_rates, "FLOAT_STEPS", 2)
    found = learning_rates.main(network, "0", "1")
    assert [o.rate for o in learning_rates.OPTIMIZERS if o.name == "SGD"] == [1e-4, 1e-3, 1e-2, 5e-2, 1e-1]
    assert len(found) == len(learning_rates.OPTIMIZERS)
    assert all(each.keys() == {"float", "fixed", "learned"} and min(each.values()) > 0 for each in found)
