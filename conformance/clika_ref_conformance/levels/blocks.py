"""L3z: small blocks of real architectures, captured, exported and compared with eager as a whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.ir import Graph
from clika_ref.module.clika_module import ClikaModule
from clika_ref_conformance.blocks import sequences, vision
from clika_ref_conformance.blocks.block import BlockSpec
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.eager_calls import call_eagerly
from clika_ref_conformance.execution.case_checks import find_unsupported, select_representative
from clika_ref_conformance.execution.case_reduction import CaseBatch
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "blocks"

BLOCK_BY_NAME = {block.name: block for block in (*vision.VISION_BLOCKS, *sequences.SEQUENCE_BLOCKS)}

CAPTURE_BATCH = 3
"""Batch size for capturing; dynamic batches also use 2."""
STATIC_BATCHES, DYNAMIC_BATCHES = (CAPTURE_BATCH, CAPTURE_BATCH), (CAPTURE_BATCH, 1, 2, 7)
"""Batch sizes to run: the same size with other inputs, or other sizes."""
TOP1_SAMPLES = 32
"""Number of inputs for counting class choices."""
TOP1_MARGIN = 40
"""A choice counts if the best leads by 40 errors of eager: twice the 20 that correct runtimes may reach."""


def tasks(suite: Suite) -> list[Task]:  # noqa: ARG001 - interface of a level
    """Return two tasks for each block: with a fixed batch, and with a dynamic one."""
    return [Task(LEVEL, name, "float32", dynamic) for name in BLOCK_BY_NAME for dynamic in (False, True)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a block: its graph against the module, the target, and the chosen classes."""
    block_checks = BlockChecks(BLOCK_BY_NAME[task.subject], suite, dynamic=task.dynamic)
    found = [
        Check("captured", block_checks.check_capture),
        Check("exported", lambda: CaseBatch(suite).judge(block_checks.case)),
    ]
    if BLOCK_BY_NAME[task.subject].chooses:
        found.append(Check("top-1", block_checks.check_top1))
    return found


class BlockChecks:
    """Checks of one block, which is captured when the first check needs it."""

    def __init__(self, block: BlockSpec, suite: Suite, *, dynamic: bool) -> None:
        self.block = block
        self.suite = suite
        self.dynamic = dynamic
        self.name = f"{block.name}{', dynamic' * dynamic}"

    @functools.cached_property
    def module(self) -> nn.Module:
        """Original module."""
        return self.block.build()

    @functools.cached_property
    def graph(self) -> Graph:
        """Captured graph."""
        batches = (CAPTURE_BATCH, 2) if self.dynamic else (CAPTURE_BATCH,)
        inputs = [self._draw_inputs(batch, 0) for batch in batches]
        compiled = clika_compile(self.module, tracing_inputs=inputs, discard_input_model=False)
        assert isinstance(compiled, ClikaModule)
        return compiled.graph

    @functools.cached_property
    def case(self) -> GraphCase:
        """Captured graph with its runs."""
        batches = DYNAMIC_BATCHES if self.dynamic else STATIC_BATCHES
        runs = [CaseRun(f"batch-{b}-{i}", self._draw_inputs(b, i + 1)) for i, b in enumerate(batches)]
        return GraphCase(self.name, self.graph, runs, {"nodes": len(self.graph)}, passes=True)

    def check_capture(self) -> Outcome:
        """Compare the captured graph with the module.

        A failure has no case: replaying one compares the target with the graph, and the target did not fail.
        """
        every: list[tuple[str, Comparison]] = []
        for run in self.case.runs:
            found = CaseReference(self.graph, run.inputs).judge(_run_module(self.module, run.inputs))
            if found.verdict.is_failure:
                return Outcome("captured", found, run.name)
            every.append((run.name, found))
        name, worst = select_representative(every)
        return Outcome("captured", worst, name, self.case)

    def check_top1(self) -> Outcome:
        """Count the choices where target and eager agree, without choices that rounding decides."""
        lowered = self.suite.lower_graph(self.case)
        rejection = find_unsupported(lowered, self.suite)
        if rejection is not None:
            return Outcome("top-1", rejection)
        inputs = [self._draw_inputs(CAPTURE_BATCH, seed) for seed in range(100, 100 + TOP1_SAMPLES)]
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            runner = self.suite.target.load(self.suite.target.compile(lowered, Path(folder) / "model.onnx"))
            actual = [runner(i)[0] for i in inputs]
        double = copy.deepcopy(self.module).double()
        eager = [_run_module(self.module, i)[0] for i in inputs]
        exact = [_run_module(double, [*map(_to_float64, i)])[0] for i in inputs]
        return Outcome("top-1", compare_top1(torch.cat(eager), torch.cat(exact), torch.cat(actual)))

    def _draw_inputs(self, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        return self.block.inputs(batch, torch.Generator().manual_seed(seed))


def compare_top1(eager: torch.Tensor, exact: torch.Tensor, actual: torch.Tensor) -> Comparison:
    """Compare the best class of each row, from scores of eager, in float64, and of the target, ``[..., classes]``."""
    error = float((eager.double() - exact).abs().max())
    best, second = exact.topk(2, -1).values.unbind(-1)
    clear = best - second > TOP1_MARGIN * error
    same = actual.argmax(-1) == exact.argmax(-1)
    wrong = int((clear & ~same).sum())
    message = f"{int(same.sum())} of {same.numel()} best classes are those of exact arithmetic"
    if wrong:
        message += f"; {wrong} of the others lead by more than {TOP1_MARGIN} times eager's error ({error:.3g})"
    return Comparison(Verdict.VALUE if wrong else Verdict.PASS, message, elements=same.numel())


def _to_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _run_module(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return call_eagerly(module, [t.clone() for t in inputs], {})
