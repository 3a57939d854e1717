"""One road with one model, in its own process.

Models and data are made by another process (`benchmarks.ptq.subjects`), whose peak of memory is none of the road's.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measuring import read_peak_bytes
from benchmarks.models import Tiny
from benchmarks.ptq.runtimes import RUNTIMES
from benchmarks.ptq.subjects import read

# isort: split
import torch


def main(runtime: str, method: str, location: str) -> dict[str, Any]:
    """Return the seconds from module to file, and by how much they raised the peak of memory."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder, chosen = Path(location), RUNTIMES[runtime]
    export, path = chosen.methods[method], folder / f"{method}{chosen.suffix}"
    with TemporaryDirectory() as other, contextlib.redirect_stdout(io.StringIO()):
        tiny_data = [{"x": torch.randn(2, 3, 8, 8)} for _ in range(2)]
        export(Tiny().eval(), tiny_data, Path(other) / f"tiny{chosen.suffix}", is_transformer=False)
        prepared = read(folder)
        gc.collect()
        before, start = read_peak_bytes(), time.perf_counter()
        export(prepared.model, prepared.calibration, path, is_transformer=prepared.is_transformer)
        seconds = time.perf_counter() - start
    written = [file for file in (path, path.with_suffix(".bin")) if file.exists()]
    return {"seconds": seconds, "peak": read_peak_bytes() - before, "bytes": sum(f.stat().st_size for f in written)}
