"""Run one method with one model, in its own process: ``python -m benchmarks.ptq.making onnxruntime clika-ref FOLDER``.

Another process makes models and data (`benchmarks.ptq.preparing`), so its peak memory is not charged to the method.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import read_peak_bytes
from benchmarks.ptq.runtimes import RUNTIMES
from benchmarks.ptq.subjects import Batch, read

# isort: split
import torch


class _Tiny(torch.nn.Module):
    """Warms up a method: imports and first calls do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).relu().mean((2, 3)))


def _tiny_data() -> list[Batch]:
    return [{"x": torch.randn(2, 3, 8, 8)}, {"x": torch.randn(2, 3, 8, 8)}]


def main(runtime: str, method: str, location: str) -> dict[str, Any]:
    """Return the seconds from module to file, and by how much they raised the peak of memory."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder, chosen = Path(location), RUNTIMES[runtime]
    export, path = chosen.methods[method], folder / f"{method}{chosen.suffix}"
    with TemporaryDirectory() as other, contextlib.redirect_stdout(io.StringIO()):
        export(_Tiny().eval(), _tiny_data(), Path(other) / f"tiny{chosen.suffix}", is_transformer=False)
        prepared = read(folder)
        gc.collect()
        before, start = read_peak_bytes(), time.perf_counter()
        export(prepared.model, prepared.calibration, path, is_transformer=prepared.is_transformer)
        seconds = time.perf_counter() - start
    written = [file for file in (path, path.with_suffix(".bin")) if file.exists()]
    return {"seconds": seconds, "peak": read_peak_bytes() - before, "bytes": sum(f.stat().st_size for f in written)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
