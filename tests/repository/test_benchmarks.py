"""Benchmarks with figures in the README: their commands print each row. The times themselves are not tested."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
