"""Compile and export the first float32 sample of each operator in PyTorch's own test data (OpInfo).

An operator passes if the ClikaModule and its ONNX Runtime file agree with eager. Operators whose first sample is sparse
are left out. Random operators are compared by shape and dtype, and so are those that return uninitialized memory.

Some results are not unique, such as the signs of eigenvectors. OpInfo's samples have a function for these, which keeps
the unique part (`SampleInput.output_process_fn_grad`). If the results themselves are not equal, its results must be.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.measuring import CALL_MAIN_PROGRAM, MEASURED_ENVIRONMENT, ROOT, Names
from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, clika_compile
from clika_ref.reporting.tables import print_table

MAX_SECONDS = 60
"""Time limit of an operator."""

UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators that return uninitialized memory."""

PASSED = ""
"""The reason of an operator that passes."""


@dataclass(frozen=True)
class OperatorResult:
    """The result of one operator: its name, and the reason if it fails."""

    operator: str
    reason: str


def run(names: Names = None) -> None:
    """Print each operator that fails, and the share of those that pass."""
    found = [r for r in _measure() if not names or any(part in r.operator for part in names)]
    failed = [r for r in found if r.reason != PASSED]
    print_table(("operator", "reason"), [(r.operator, r.reason) for r in failed])
    kinds = Counter(r.reason.partition(":")[0] for r in failed)
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    print(f"{len(found) - len(failed)} of {len(found)} operators pass: {1 - len(failed) / len(found):.1%}")


def _measure() -> Iterator[OperatorResult]:
    """Yield the result of each operator. A process that dies ends its operator, and another one goes on after it."""
    position: int | None = 0
    while position is not None:
        command = [sys.executable, "-W", "ignore", "-c", CALL_MAIN_PROGRAM, "benchmarks.opinfo", str(position)]
        process = subprocess.Popen(  # noqa: S603 - our own module
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, **MEASURED_ENVIRONMENT}
        )
        started, position = "", None
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            message: Mapping[str, Any] = json.loads(line)
            if "reason" in message:
                yield OperatorResult(message["operator"], message["reason"])
                started = ""
            else:
                started, position = message["operator"], message["next"]
        if process.wait() == 0:
            return
        if started:
            yield OperatorResult(started, f"crash: exit status {process.returncode}, or more than {MAX_SECONDS} s")


def main(start: str) -> None:
    """Write a line of JSON before and after each operator, from a position in OpInfo's list on."""
    import signal  # noqa: PLC0415 - only this process sets an alarm

    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 - it takes seconds

    for number, info in enumerate(itertools.islice(op_db, int(start), None), int(start) + 1):
        if torch.float32 not in info.dtypes:
            continue
        name = ".".join(filter(None, (info.name, info.variant_test_name)))
        print(json.dumps({"operator": name, "next": number}), flush=True)
        signal.alarm(MAX_SECONDS)  # ends the process
        reason = _try_operator(info)
        signal.alarm(0)
        if reason is not None:
            print(json.dumps({"operator": name, "reason": reason}), flush=True)


def _try_operator(info: Any) -> str | None:
    """Return why an operator fails, "" if it passes, None if it has no dense sample."""
    torch.manual_seed(0)
    sample = next(iter(info.sample_inputs("cpu", torch.float32)), None)
    if sample is None:
        return None
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    if any(isinstance(x, torch.Tensor) and x.layout != torch.strided for x in leaves):
        return None
    tensors = tuple(x for x in leaves if isinstance(x, torch.Tensor))
    if info.name in UNINITIALIZED:
        return _try_function(_make_function(info.op, leaves, spec, torch.zeros_like), tensors)
    reason = _try_function(_make_function(info.op, leaves, spec), tensors)
    if reason == PASSED:
        return PASSED
    unique = _make_function(info.op, leaves, spec, sample.output_process_fn_grad)  # by default, it changes nothing
    return PASSED if _try_function(unique, tensors) == PASSED else reason


def _try_function(function: Any, tensors: tuple[torch.Tensor, ...]) -> str:
    """Return why a function fails, "" if it passes."""
    try:
        module = clika_compile(
            function, tracing_inputs=[tensors], deployment_settings=DeploymentSettings_ONNXRuntime_ONNX()
        )
        with TemporaryDirectory() as folder:
            module.clika_export(Path(folder) / "operator.onnx")
    except Exception as error:  # noqa: BLE001 - any error is a result
        first = next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), "") or str(error)
        return f"{type(error).__name__}: {' '.join(first.split())[:160]}"
    return PASSED


def _make_function(op: Any, leaves: list[Any], spec: pytree.TreeSpec, select: Any = lambda result: result) -> Any:
    """Return a function of the tensors of a sample, which returns what ``select`` returns of the result."""

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        given = [next(rest) if isinstance(x, torch.Tensor) else x for x in leaves]
        first, args, kwargs = pytree.tree_unflatten(given, spec)
        return select(op(first, *args, **kwargs))

    return call
