"""Packs: many small cases in one graph, so that a target compiles and loads only once for all of them.

A pack only ever reports success. If it cannot be compiled, run or judged correct, each case is run by itself.
Unmodified inputs and repeatable results are checked once for the whole pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from clika_ref.core.errors import TargetError
from clika_ref.core.ir import Graph, Value
from clika_ref.export.interface import name_interface
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome
from clika_ref_conformance.execution.case_checks import CaseExecution, has_same_bits, run_case, select_representative
from clika_ref_conformance.execution.deviation_checks import judge_run
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

Results = Sequence[Sequence[torch.Tensor]]
"""Outputs of each run."""

PACK_SIZE = 25
"""Number of cases in a pack: a session costs ONNX Runtime 0.35 ms, and other runtimes a hundred times that."""


def make_packed_checks(cases: Sequence[GraphCase], suite: Suite) -> list[Check]:
    """Return one check for each case, preceded by one check for each pack.

    The check of a pack tries it. If it kills the process, the next process runs the cases one by one, so that each gets
    its own verdict.
    """
    found: list[Check] = []
    for index in range(0, len(cases), PACK_SIZE):
        pack = CasePack(f"pack-{index // PACK_SIZE}", cases[index : index + PACK_SIZE], suite)
        found.append(Check(pack.name, pack.run))
        found += [
            Check(case.name, lambda case=case, pack=pack: pack.found.get(case.name) or run_case(case, suite))
            for case in pack.cases
        ]
    return found


@dataclass
class CasePack:
    """Cases that are compiled together."""

    name: str
    cases: Sequence[GraphCase]
    suite: Suite
    found: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """Outcomes of cases that passed in the pack, by the name of the case."""

    def run(self) -> Outcome:
        """Run the pack. It passes if any case passes in it, and never fails, as its cases are checks too."""
        ask = self.suite.target.unsupported_reason
        cases = [c for c in self.cases if all(ask(node) is None for node in c.graph.nodes)]
        if not cases:
            if self.cases:
                return Outcome(self.name, make_not_run(Reason.NO_NODES, "the target rejects all of its cases"))
            return Outcome(self.name, make_not_run(Reason.FEW_CALLS, "there are no cases to compile together"))
        message = self._run_or_split(cases)
        if not self.found:
            message = f"no case passes in the pack, so each runs separately: {message or 'wrong results'}"
            return Outcome(self.name, make_not_run(Reason.RUN_SEPARATELY, message))
        return Outcome(self.name, Comparison(Verdict.PASS, message))

    def _run_or_split(self, cases: Sequence[GraphCase]) -> str:
        """Run cases together, or in two halves if that fails."""
        try:
            self._run_together(cases)
        except exceptions_to_catch() as error:  # retried with fewer cases
            if len(cases) == 1:
                return str(error)
            half = len(cases) // 2
            return "; ".join(filter(None, (self._run_or_split(cases[:half]), self._run_or_split(cases[half:]))))
        return ""

    def _run_together(self, cases: Sequence[GraphCase]) -> None:
        graph = merge_graphs([case.graph for case in cases])
        name_interface(graph, self.suite.registry.operators, (), ())
        runs = [CaseRun(f"{self.name}-{i}", tuple(inputs)) for i, inputs in enumerate(_merge_inputs(cases))]
        results: list[list[torch.Tensor]] = []
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            trial = CaseExecution(GraphCase(self.name, graph, runs), self.suite, Path(folder))
            trial.run_all(graph, lambda _, found: results.append(found))
        if trial.found:  # the declared error must be attributed to a case
            raise TargetError(trial.found[0][1].message)
        start = 0
        before: tuple[GraphCase, Results] | None = None
        for case in cases:
            end = start + len(case.graph.outputs)
            outputs = [r[start:end] for r in results]
            start = end
            known = self.found.get(before[0].name) if before and _is_same_prefix(case, outputs, *before) else None
            if known is None:
                self._judge(case, outputs)
                before = case, outputs
            else:
                self.found[case.name] = replace(known, name=case.name, case=case)

    def _judge(self, case: GraphCase, results: Results) -> None:
        trusting, arithmetic = self.suite.profile.trusts_eager, self.suite.arithmetic
        judgements = [
            judge_run(
                CaseReference(case.graph, run.inputs, trusts_eager=trusting, arithmetic=arithmetic),
                run,
                result,
                self.suite.deviations,
            )
            for run, result in zip(case.runs, results, strict=False)
        ]
        if any(j.comparison.verdict.is_failure for j in judgements):
            return
        run, comparison = select_representative(
            [(run.name, j.comparison) for run, j in zip(case.runs, judgements, strict=True)]
        )
        self.found[case.name] = Outcome(
            case.name,
            comparison,
            run,
            case,
            sorted({d for j in judgements for d in j.occurred}),
            sorted({d for j in judgements for d in j.applicable}),
        )


def _is_same_prefix(case: GraphCase, results: Results, whole: GraphCase, more: Results) -> bool:
    """Return whether a case returns the first outputs of another, with bit-identical results of the target."""
    if (
        case.runs is not whole.runs
        or str(case.graph).rpartition("return")[0] != str(whole.graph).rpartition("return")[0]
    ):
        return False
    mine, theirs = case.graph.outputs, whole.graph.outputs[: len(case.graph.outputs)]
    same = [v.name for v in mine] == [v.name for v in theirs]
    return same and all(
        has_same_bits(a, b) for r, m in zip(results, more, strict=True) for a, b in zip(r, m, strict=False)
    )


def _merge_inputs(cases: Sequence[GraphCase]) -> list[list[torch.Tensor]]:
    """Return the inputs of the joint graph for each round; a case with fewer runs than others repeats its first."""
    rounds = max(len(case.runs) for case in cases)
    return [
        [t for case in cases for t in (case.runs[i] if i < len(case.runs) else case.runs[0]).inputs]
        for i in range(rounds)
    ]


def merge_graphs(graphs: Sequence[Graph]) -> Graph:
    """Return one graph of several graphs in parallel: inputs and outputs in order, with unique names."""
    whole = Graph("pack")
    for graph in graphs:
        mapping: dict[Value, Value] = {v: whole.add_input(v.type, v.name) for v in graph.inputs}
        for value in graph.constants.values():
            assert value.data is not None
            mapping[value] = whole.add_constant(value.data, value.name)
        for node in graph.nodes:
            whole.insert_copy(node, mapping)
        for value in graph.outputs:
            whole.add_output(mapping[value])
    return whole
