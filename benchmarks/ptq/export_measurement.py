"""Measure the export of one model by one method, in a fresh process and with default arguments, as a user meets it.

The clock starts after the imports of torch, torchvision and the model. It includes the imports of the method itself.
Peak memory counts from the same moment. Another process builds the model and its data (`benchmarks.ptq.subjects`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.measuring import read_peak_bytes, reset_peak_bytes
from benchmarks.ptq.prepared_subjects import load_subject
from benchmarks.ptq.runtimes import RUNTIMES


def main(runtime: str, method: str, location: str) -> dict[str, Any]:
    """Return the seconds and the increase in peak memory from module to file, and the size of the file."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    folder, suffix = Path(location), RUNTIMES[runtime].suffix
    export, path = RUNTIMES[runtime].methods[method], folder / f"{method}{suffix}"
    prepared = load_subject(folder)
    gc.collect()
    with contextlib.redirect_stdout(io.StringIO()):
        before, start = reset_peak_bytes(), time.perf_counter()
        export(prepared.model, prepared.calibration, path, is_transformer=prepared.is_transformer)
        seconds = time.perf_counter() - start
    files = [file for file in (path, path.with_suffix(".bin")) if file.exists()]
    return {"seconds": seconds, "peak": read_peak_bytes() - before, "bytes": sum(f.stat().st_size for f in files)}
