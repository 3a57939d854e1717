"""L4, quantization: codes equal integer arithmetic, errors are within bounds, and MACs are exact in 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.int4 import pack_int4, unpack_int4
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.quantized.layers import QUANTIZED_LAYERS, make_layer_case
from clika_ref_conformance.drawing.quantized.ranges import (
    ELEMENTS_SHAPE,
    QuantizationGrid,
    draw_quantization_grids,
    make_elements,
)
from clika_ref_conformance.drawing.quantized.stored_weights import (
    STORED_WEIGHTS,
    make_stored_weight_case,
)
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "quantization"

MIN_RANGES = 60
"""Minimum number of ranges: combines each scale, zero point, axis and width several times."""

REQUIRED_OPERATORS = ("quantize", "dequantize")

PACKED_DTYPES = {"int4": torch.int8, "uint4": torch.uint8}
"""INT4 dtypes, and the dtype that holds one element before packing."""

PACKED_LENGTHS = (0, 1, 2, 3, 7, 16, 31, 33)
"""Numbers of packed elements: none, pairs, and odd ones."""

VerifyOutputs = Callable[[CaseRun, Sequence[torch.Tensor]], str | None]
"""Function that describes errors in the outputs of a run, or returns None."""


def tasks(suite: Suite) -> list[Task]:
    """Return one task each for ranges, layers, stored weights and packing, if the two operators are declared."""
    if any(name not in suite.registry.operators for name in REQUIRED_OPERATORS):
        return []
    return [Task(LEVEL, name) for name in ("quantize+dequantize", "layers", "stored weights", "packing")]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a task."""
    seed = suite.profile.seed
    if task.subject == "packing":
        every = [(name, n) for name in PACKED_DTYPES for n in PACKED_LENGTHS]
        return [
            Check(f"{name}-{n}", partial(_check_packing, f"{name}-{n}", n, PACKED_DTYPES[name], seed))
            for name, n in every
        ]
    if task.subject == "layers":
        scheme = suite.target.scheme
        make = partial(make_layer_case, bits=scheme.weights.bits if scheme else 8)
        layers = [layer for layer in QUANTIZED_LAYERS if layer.is_known(suite.registry)]
        return [Check(layer.name, partial(_check_integers, partial(make, layer), suite)) for layer in layers]
    if task.subject == "stored weights":
        known = [weight for weight in STORED_WEIGHTS if weight.is_known(suite.registry)]
        make = make_stored_weight_case
        return [Check(weight.name, partial(_check_integers, partial(make, weight), suite)) for weight in known]
    found = draw_quantization_grids(max(MIN_RANGES, suite.profile.drawn), seed)
    return [Check(f"range-{i:03}", partial(_check_range, f"range-{i:03}", grid, suite)) for i, grid in enumerate(found)]


def verify_case(case: GraphCase, suite: Suite, verify: VerifyOutputs) -> Outcome:
    """Compare eager, and then the target, with integer arithmetic; between the two, the judge checks the target.

    A failure that only integer arithmetic shows has no case, as replaying one runs the judge.
    """
    for run in case.runs:
        with torch.no_grad():
            problem = verify(run, interpret(case.graph, run.inputs)[0])
        if problem is not None:
            wrong = Comparison(Verdict.CONTRACT, f"the eager reference is wrong: {problem}")
            return Outcome(case.name, wrong, run.name)
    outcome = run_case(case, suite)
    if outcome.verdict not in (Verdict.PASS, Verdict.NOT_RUN):  # integer arithmetic also judges results without a bound
        return outcome
    with TemporaryDirectory(dir=suite.folder) as folder:
        runner = suite.target.load(suite.target.compile(case.graph.clone(), Path(folder) / "model.onnx"))
        for run in case.runs:
            problem = verify(run, runner(run.inputs))
            if problem is not None:
                return replace(outcome, comparison=Comparison(Verdict.VALUE, problem), run=run.name, case=None)
    return outcome


def _check_range(name: str, grid: QuantizationGrid, suite: Suite) -> Outcome:
    runs = [CaseRun(kind, (torch.from_numpy(x),)) for kind, x in make_elements(grid, suite.profile.seed)]
    case = GraphCase(name, make_range_graph(grid, suite), runs, {"range": str(grid)})
    return verify_case(case, suite, partial(_verify_range, grid))


def make_range_graph(grid: QuantizationGrid, suite: Suite) -> Graph:
    """Return the graph that quantizes and dequantizes its input; it returns the codes and the values."""
    graph = Graph("quantized")
    x = graph.add_input(TensorType(torch.float32, ELEMENTS_SHAPE), "x")
    build = Builder(graph, suite.registry.operators)
    dtype = getattr(torch, grid.dtype)
    own = torch.iinfo(dtype)
    if grid.axis is None:
        scale, zero = float(grid.scale), int(grid.zero_point)
    else:
        scale = graph.add_constant(torch.from_numpy(grid.scale), "scale")
        zero = graph.add_constant(torch.from_numpy(grid.zero_point).to(dtype), "zero_point")
    ends: dict[str, Any] = {
        "quant_min": None if grid.low == own.min else grid.low,
        "quant_max": None if grid.high == own.max else grid.high,
    }
    codes = build("quantize", x, scale, zero, dtype=dtype, axis=grid.axis, **ends)
    graph.add_output(codes)
    graph.add_output(build("dequantize", codes, scale, zero, axis=grid.axis))
    return graph


def _verify_range(grid: QuantizationGrid, run: CaseRun, outputs: Sequence[torch.Tensor]) -> str | None:
    x, codes, values = run.inputs[0].numpy(), outputs[0].numpy().astype(int), outputs[1].numpy()
    expected = grid.quantize(x)
    wrong = expected != codes
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        tie = ", a tie" if grid.find_ties(x)[at] else ""
        element = f"element {list(at)} of {run.name}: {float(x[at])!r}{tie}"
        return f"{element}, on {grid} becomes {codes[at]}, expected {expected[at]}"
    if not np.array_equal(grid.values(codes), values):
        wanted = grid.values(codes)
        at = tuple(int(i) for i in np.argwhere(wanted != values)[0])
        return f"{codes[at]} on {grid} becomes {float(values[at])!r}, expected {float(wanted[at])!r}"
    return grid.find_error(x, codes, values)


def _check_integers(make: Callable[..., tuple[GraphCase, Mapping[str, np.ndarray]]], suite: Suite) -> Outcome:
    case, expected = make(suite.registry, suite.profile.seed)
    return verify_case(case, suite, partial(_verify_integers, case.name, expected))


def _verify_integers(
    name: str, expected: Mapping[str, np.ndarray], run: CaseRun, outputs: Sequence[torch.Tensor]
) -> str | None:
    wanted, found = expected[run.name], outputs[0].numpy()
    if np.array_equal(found, wanted):
        return None
    at = tuple(int(i) for i in np.argwhere(found != wanted)[0])
    return f"{name}, {run.name}: element {list(at)} is {found[at]}, integer arithmetic gives {wanted[at]}"


def _check_packing(name: str, length: int, dtype: torch.dtype, seed: int) -> Outcome:
    low, high = (-8, 7) if dtype == torch.int8 else (0, 15)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(low, high + 1, (length,), generator=generator).to(dtype)
    packed, expected = pack_int4(x), pack_by_rule(x.tolist())
    message = f"{x.tolist()} is packed as {packed.tolist()}, not {expected}" if packed.tolist() != expected else ""
    if not message:
        back = unpack_int4(torch.tensor(expected, dtype=torch.uint8), (length,), dtype)
        message = "" if torch.equal(back, x) else f"{expected} is unpacked as {back.tolist()}, not {x.tolist()}"
    return Outcome(name, Comparison(Verdict.VALUE if message else Verdict.PASS, message))


def pack_by_rule(codes: Sequence[int]) -> list[int]:
    """Return the bytes of packed INT4 codes: the first of a pair is the low half; an odd last one gets 0 above.

    Implements the rule itself, as packing and unpacking with our own functions would hide an error in both.

    Source: ONNX, "4bit integer types", packing and unpacking.
    """
    halves = [code % 16 for code in codes] + [0] * (len(codes) % 2)
    return [low + 16 * high for low, high in zip(halves[::2], halves[1::2], strict=True)]
