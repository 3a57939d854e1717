"""Lets tests import torchvision, which timm and transformers do, where torch was built without CUDA."""

import gc
import os
from typing import Any

import pytest
from clika_ref_torchvision.kernels import use_python_kernels

os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL else rounds by where operands lie in memory: equal calls would differ
use_python_kernels()
gc.set_threshold(10_000, 20, 20)  # the imported packages alone are a million objects, which each collection visits

END_TIMEOUT_S = 10
"""Time that a worker process whose connection is lost may take to end."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the cases of a test as slow that ``slow_cases`` names by their ids."""
    slow = {name for mark in item.iter_markers("slow_cases") for name in mark.args}
    if isinstance(item, pytest.Function) and slow and item.callspec.id in slow:
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_handlecrashitem(report: Any) -> None:
    """Add the exit status of a worker that ended to the failure of its test: -11 is a segmentation fault."""
    status = report.node.gateway._io.popen.wait(END_TIMEOUT_S)  # noqa: SLF001 - execnet offers no exit status
    report.longrepr = f"{report.longrepr}; its exit status is {status}"
