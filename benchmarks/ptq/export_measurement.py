"""Measure the export of one model by one method, in its own process.

Another process builds models and data (`benchmarks.ptq.subjects`), so that its peak memory does not count.
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
from benchmarks.ptq.subjects import load_subject

# isort: split
import torch


def main(runtime: str, method: str, location: str) -> dict[str, Any]:
    """Return the seconds and the increase in peak memory from module to file, and the size of the file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder, suffix = Path(location), RUNTIMES[runtime].suffix
    export, path = RUNTIMES[runtime].methods[method], folder / f"{method}{suffix}"
    with TemporaryDirectory() as warm_up_folder, contextlib.redirect_stdout(io.StringIO()):
        tiny_data = [{"x": torch.randn(2, 3, 8, 8)} for _ in range(2)]
        export(Tiny().eval(), tiny_data, Path(warm_up_folder) / f"tiny{suffix}", is_transformer=False)
        prepared = load_subject(folder)
        gc.collect()
        before, start = read_peak_bytes(), time.perf_counter()
        export(prepared.model, prepared.calibration, path, is_transformer=prepared.is_transformer)
        seconds = time.perf_counter() - start
    files = [file for file in (path, path.with_suffix(".bin")) if file.exists()]
    return {"seconds": seconds, "peak": read_peak_bytes() - before, "bytes": sum(f.stat().st_size for f in files)}
