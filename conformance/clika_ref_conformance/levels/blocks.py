"""L3z: small blocks of real architectures, captured, exported and compared with eager as a whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.ir import Graph
from clika_ref.exporting.export import lower
from clika_ref.exporting.interface import name_interface
from clika_ref.module import ClikaModule
from clika_ref_conformance.blocks import sequences, vision
from clika_ref_conformance.blocks.block import Block
from clika_ref_conformance.cases import Case, Check, Outcome, Run, Task
from clika_ref_conformance.execution.batches import Batch
from clika_ref_conformance.execution.case_checks import most_telling, refusal_of
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict

LEVEL = "blocks"

BLOCKS = {block.name: block for block in (*vision.BLOCKS, *sequences.BLOCKS)}

TRACED = 3
"""Batch size for capturing; dynamic batches also use 2."""
STATIC, DYNAMIC = (TRACED, TRACED), (TRACED, 1, 2, 7)
"""Batch sizes to run: the same size with other inputs, or other sizes."""
SAMPLES = 32
"""Number of inputs for counting class choices."""
MARGIN = 40
"""A choice counts if the best leads by 40 errors of eager: twice the 20 that correct runtimes may reach."""


def tasks(suite: Suite) -> list[Task]:  # noqa: ARG001 - interface of a level
    """Return two tasks for each block: with a fixed batch, and with a dynamic one."""
    return [Task(LEVEL, name, "float32", dynamic) for name in BLOCKS for dynamic in (False, True)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a block: its graph against the module, the target, and the chosen classes."""
    trial = Trial(BLOCKS[task.subject], suite, dynamic=task.dynamic)
    found = [Check("captured", trial.captured), Check("exported", trial.exported)]
    if BLOCKS[task.subject].chooses:
        found.append(Check("top-1", trial.chosen))
    return found


class Trial:
    """Checks of one block, which is captured when the first check needs it."""

    def __init__(self, block: Block, suite: Suite, *, dynamic: bool) -> None:
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
        batches = (TRACED, 2) if self.dynamic else (TRACED,)
        inputs = [self._inputs(batch, 0) for batch in batches]
        compiled = clika_compile(self.module, tracing_inputs=inputs, discard_input_model=False)
        assert isinstance(compiled, ClikaModule)
        return compiled.graph

    @functools.cached_property
    def case(self) -> Case:
        """Captured graph with its runs."""
        batches = DYNAMIC if self.dynamic else STATIC
        runs = [Run(f"batch-{b}-{i}", self._inputs(b, i + 1)) for i, b in enumerate(batches)]
        return Case(self.name, self.graph, runs, {"nodes": len(self.graph)}, passes=True)

    def captured(self) -> Outcome:
        """Compare the captured graph with the module.

        A failure has no case: replaying one compares the target with the graph, and the target did not fail.
        """
        every: list[tuple[str, Comparison]] = []
        for run in self.case.runs:
            found = Reference(self.graph, run.inputs).judge(_results(self.module, run.inputs))
            if found.verdict.is_failure:
                return Outcome("captured", found, run.name)
            every.append((run.name, found))
        name, worst = most_telling(every)
        return Outcome("captured", worst, name, self.case)

    def exported(self) -> Outcome:
        """Compare the target with the graph, and reduce a failure to the failing nodes."""
        return replace(Batch(self.suite).outcome(self.case), name="exported")

    def chosen(self) -> Outcome:
        """Count the choices where target and eager agree, without choices that rounding decides."""
        lowered = self._lowered()
        refused = refusal_of(lowered, self.suite)
        if refused is not None:
            return Outcome("top-1", refused)
        inputs = [self._inputs(TRACED, seed) for seed in range(100, 100 + SAMPLES)]
        actual = [result[0] for result in self._run(lowered, inputs)]
        double = copy.deepcopy(self.module).double()
        with torch.no_grad():
            eager = [_results(self.module, i)[0] for i in inputs]
            exact = [_results(double, [*map(_doubled, i)])[0] for i in inputs]
        return Outcome("top-1", agreement(torch.cat(eager), torch.cat(exact), torch.cat(actual)))

    def _lowered(self) -> Graph:
        graph = self.graph.clone()
        lower(graph, self.suite.registry, self.suite.target)
        name_interface(graph, self.suite.registry.operators, (), ())
        return graph

    def _run(self, graph: Graph, inputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            runner = self.suite.target.load(self.suite.target.compile(graph, Path(folder) / "model.onnx"))
            return [runner(i) for i in inputs]

    def _inputs(self, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
        return self.block.inputs(batch, torch.Generator().manual_seed(seed))


def agreement(eager: torch.Tensor, exact: torch.Tensor, actual: torch.Tensor) -> Comparison:
    """Compare the best class of each row, from scores of eager, in float64, and of the target, ``[..., classes]``."""
    error = float((eager.double() - exact).abs().max())
    best, second = exact.topk(2, -1).values.unbind(-1)
    clear = best - second > MARGIN * error
    same = actual.argmax(-1) == exact.argmax(-1)
    wrong = int((clear & ~same).sum())
    message = f"{int(same.sum())} of {same.numel()} choices are eager's"
    if wrong:
        message += f"; in {wrong} the best leads by more than {MARGIN} errors of eager ({error:.3g})"
    return Comparison(Verdict.VALUE if wrong else Verdict.PASS, message, elements=same.numel())


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _results(module: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        result = module(*(t.clone() for t in inputs))
    return [result] if isinstance(result, torch.Tensor) else list(result)
