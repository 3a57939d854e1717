"""Check of a case: compile it, load it, run it on every set of inputs, and judge the results."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clika_ref.core.artifacts import Artifact, Runner
from clika_ref.core.ir import Graph
from clika_ref_conformance.cases import CaseRun, Compiled, GraphCase, Outcome
from clika_ref_conformance.execution.declared_types import find_mistyped_output
from clika_ref_conformance.execution.deviation_checks import find_error_deviations, find_expected_error, judge_run
from clika_ref_conformance.execution.error_attribution import exceptions_to_catch
from clika_ref_conformance.judged_dtypes import check_judged_dtypes
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Verdict, sum_counts

OUT_OF_MEMORY_PHRASES = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "not enough memory")
"""Messages of libraries that run out of memory without raising a `MemoryError`."""


def run_case(case: GraphCase, suite: Suite) -> Outcome:
    """Compile a case for the target, run it on all its inputs and judge the results.

    The first failure is the verdict, or nondeterminism if a second run on the same inputs gives another result.
    Otherwise, the verdict is a deviation if any occurred, with the worst comparison.
    """
    other = check_judged_dtypes(case.graph)
    if other is not None:
        return Outcome(case.name, other)
    with TemporaryDirectory(dir=suite.folder) as folder:
        execution = CaseExecution(case, suite, Path(folder))
        try:
            execution.execute()
            execution.run, found = select_representative(execution.found)
        except _VerdictReached as stop:
            found = stop.comparison
        compiled = execution.collect_artifact() if found.verdict.is_failure else None
    occurred, applicable = sorted(execution.occurred), sorted(execution.applicable)
    return Outcome(case.name, found, execution.run, case, occurred, applicable, compiled=compiled)


def select_representative(found: Sequence[tuple[str, Comparison]]) -> tuple[str, Comparison]:
    """Return the run, with its name, that represents all runs of a case; none of them failed.

    This is a deviation, or else the passing run with the largest ratio, or else one that could not be judged. Its
    element counts are the totals of all runs.
    """
    totals = sum_counts([comparison for _, comparison in found])
    for verdicts in ((Verdict.DEVIATION,), (Verdict.PASS,), tuple(Verdict)):
        matching = [item for item in found if item[1].verdict in verdicts]
        if matching:
            run, worst = max(matching, key=lambda item: item[1].ratio)
            return run, replace(worst, **totals)
    return "", Comparison(Verdict.PASS)


def find_unsupported(graph: Graph, suite: Suite) -> Comparison | None:
    """Return why the target rejects a node of a lowered graph, before anything is compiled; None if it accepts all.

    If `unsupported_reason` raises, the target violates its contract.
    """
    for node in graph.nodes:
        try:
            reason = suite.target.unsupported_reason(node)
        except exceptions_to_catch() as error:
            return Comparison(Verdict.CONTRACT, f"unsupported_reason({node!r}) failed: {_format_error(error)}")
        if is_valid_reason(reason):
            return Comparison(Verdict.UNSUPPORTED, f"{node.op.name}: {reason}")
        if reason is not None:
            message = f"unsupported_reason({node!r}) returned {reason!r}. Return None, or the reason as text."
            return Comparison(Verdict.CONTRACT, message)
    return None


def is_valid_reason(reason: Any) -> bool:
    """Return whether a result of a target's `unsupported_reason` contains a reason."""
    return isinstance(reason, str) and bool(reason.strip())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports, in any wording, that memory ran out."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or any(words in str(found) for words in OUT_OF_MEMORY_PHRASES):
            return True
        found = found.__cause__
    return False


def has_memory_error(output: str) -> bool:
    """Return whether the output of a process reports that it ran out of memory."""
    return any(phrase in output for phrase in (*OUT_OF_MEMORY_PHRASES, "MemoryError"))


class _VerdictReached(Exception):  # noqa: N818 - control flow, not an error: the verdict is known
    def __init__(self, verdict: Verdict, message: str, comparison: Comparison | None = None) -> None:
        super().__init__(message)
        self.comparison = comparison or Comparison(verdict, message)


class CaseExecution:
    """Execution of one case on the target. Steps raise `_VerdictReached` as soon as the verdict is known."""

    def __init__(self, case: GraphCase, suite: Suite, folder: Path) -> None:
        self.case = case
        self.suite = suite
        self.folder = folder
        self.run = ""
        """Name of the current inputs, and at the end of those that determine the verdict."""
        self.found: list[tuple[str, Comparison]] = []
        """Comparison of each run, with the name of its inputs."""
        self.artifact: Artifact | None = None
        """Artifact of the last compilation."""
        self.occurred: set[str] = set()
        """Ids of the deviations that occurred."""
        self.applicable: set[str] = set()
        """Ids of the deviations that the target declares for these inputs."""
        self._weights = {
            n: v.data for n, v in case.graph.constants.items() if v.deferred_data is None and v.data is not None
        }
        self._original_weights = [weight.detach().clone() for weight in self._weights.values()]

    def execute(self) -> None:
        """Lower, compile, run and judge the case; return only if no step finds a failure."""
        graph = self._lower()
        rejection = find_unsupported(graph, self.suite)
        if rejection is not None:
            raise _VerdictReached(rejection.verdict, rejection.message)
        references = {id(run): self._compute_reference(run) for run in self.case.runs}
        self.run_all(graph, lambda run, results: self._judge(run, references[id(run)], results))

    def run_all(self, graph: Graph, judge: Callable[[CaseRun, list[torch.Tensor]], None]) -> None:
        """Compile and run a lowered graph on all inputs, with all checks except the numeric one.

        ``judge`` checks the numbers. It is called with the results of each run that does not fail as declared.
        """
        runner = self._compile_and_load(graph, "model.onnx")
        is_random = any(node.is_random for node in graph.nodes)
        kept: list[tuple[CaseRun, list[torch.Tensor], list[torch.Tensor]]] = []
        for run in self.case.runs:
            self.run = run.name
            self.applicable |= {d.id for d in find_error_deviations(self.case.graph, run, self.suite.deviations)}
            results = self._run_once(runner, run, len(graph.outputs))
            if results is not None:
                copies = [t.clone() for t in results]
                try:
                    judge(run, results)
                except _VerdictReached as failure:
                    if not is_random:  # results that differ between equal runs are nondeterministic, not wrong
                        self._check_determinism(runner, run, copies, failure)
                    raise
                kept.append((run, results, copies))
        if kept and not is_random:
            self._check_repeatable(runner, graph, kept)

    def collect_artifact(self) -> Compiled | None:
        """Return the last artifact with its files; None if it is in another folder, or if its folder has subfolders.

        Compiling again may give another artifact, as targets select kernels by measured speed.
        """
        paths = sorted(self.folder.iterdir())
        is_whole = isinstance(self.artifact, Artifact) and self.artifact.path in paths
        if self.artifact is None or not is_whole or not all(path.is_file() for path in paths):
            return None
        return Compiled(self.artifact, {path.name: path.read_bytes() for path in paths})

    def _lower(self) -> Graph:
        try:
            return self.suite.lower_graph(self.case)
        except exceptions_to_catch() as error:
            raise _VerdictReached(Verdict.CONTRACT, f"lowering the graph failed: {_format_error(error)}") from error

    def _compute_reference(self, run: CaseRun) -> CaseReference:
        self.run = run.name
        try:
            trusts_eager, arithmetic = self.suite.profile.trusts_eager, self.suite.arithmetic
            reference = CaseReference(self.case.graph, run.inputs, trusts_eager=trusts_eager, arithmetic=arithmetic)
        except exceptions_to_catch() as error:
            verdict = Verdict.MEMORY if is_out_of_memory(error) else Verdict.SAMPLE
            raise _VerdictReached(verdict, f"eager rejects the call: {_format_error(error)}") from error
        problem = find_mistyped_output(self.case.graph, run.inputs, reference.eager)
        if problem:
            raise _VerdictReached(Verdict.CONTRACT, problem)
        return reference

    def _compile_and_load(self, graph: Graph, file: str) -> Runner:
        """Compile and load; an error in either is a deviation if the target declares it."""
        target, verdict = self.suite.target, Verdict.UNDECLARED
        self.run = ""
        try:
            self.artifact = target.compile(graph.clone(), self.folder / file)
            self._check_weights_unchanged()
            verdict = Verdict.ARTIFACT
            return target.load(self.artifact)
        except _VerdictReached:
            raise
        except exceptions_to_catch() as error:
            doing = "compiling" if verdict is Verdict.UNDECLARED else "loading the artifact"
            raise self._classify_error(error, None, verdict, doing) from error

    def _run_once(self, runner: Runner, run: CaseRun, count: int) -> list[torch.Tensor] | None:
        """Run the target once and check everything except the numbers; return None if it fails as declared."""
        before = [t.clone() for t in run.inputs]
        try:
            results: Any = runner(run.inputs)
        except exceptions_to_catch() as error:
            restore_tensors(run.inputs, before)
            stop = self._classify_error(error, run, Verdict.UNDECLARED, "running")
            if stop.comparison.verdict is not Verdict.DEVIATION:
                raise stop from error
            self.found.append((run.name, stop.comparison))
            return None
        written = restore_tensors(run.inputs, before)
        self._check_weights_unchanged()
        _check_structure(results, count)
        if written:
            raise _VerdictReached(Verdict.CONTRACT, f"the target wrote into its input {written[0]}")
        _check_memory_separate(run.inputs, results)
        return list(results)

    def _check_weights_unchanged(self) -> None:
        """Restore weights that the target wrote into, and raise; the model shares them."""
        with torch.no_grad():
            written = restore_tensors([*self._weights.values()], self._original_weights)
        if written:
            name = [*self._weights][written[0]]
            raise _VerdictReached(
                Verdict.CONTRACT, f"the target wrote into the weight {name}, which belongs to the model"
            )

    def _classify_error(
        self, error: BaseException, run: CaseRun | None, verdict: Verdict, doing: str
    ) -> _VerdictReached:
        if is_out_of_memory(error):
            return _VerdictReached(Verdict.MEMORY, f"{doing} ran out of memory: {_format_error(error)}")
        declared = find_expected_error(self.case.graph, run, error, self.suite.deviations)
        if declared is None:
            return _VerdictReached(
                verdict, f"{doing} failed, and the target did not reject the call: {_format_error(error)}"
            )
        self.occurred.add(declared.id)
        self.applicable.add(declared.id)
        return _VerdictReached(Verdict.DEVIATION, f"{declared.id}: {declared.reason}")

    def _judge(self, run: CaseRun, reference: CaseReference, results: list[torch.Tensor]) -> None:
        judgement = judge_run(reference, run, results, self.suite.deviations)
        self.occurred.update(judgement.occurred)
        self.applicable.update(judgement.applicable)
        comparison = judgement.comparison
        if comparison.verdict.is_failure:
            raise _VerdictReached(comparison.verdict, comparison.message, comparison)
        self.found.append((run.name, comparison))

    def _check_repeatable(
        self, runner: Runner, graph: Graph, kept: Sequence[tuple[CaseRun, list[torch.Tensor], list[torch.Tensor]]]
    ) -> None:
        """Run again, and compile a share of the cases again: the results must be bit-identical."""
        for run, results, copies in kept:
            self.run = run.name
            if not all(map(has_same_bits, results, copies)):
                raise _VerdictReached(Verdict.CONTRACT, "a later run changed the outputs of this run")
        run, results, _ = kept[0]
        self.run = run.name
        self._require_same_results(runner, run, results, "on a second run")
        if is_in_share(self.case.name, self.suite.profile.share_of_artifacts):
            self._require_same_results(
                self._compile_and_load(graph, "again.onnx"), run, results, "after a second compilation"
            )

    def _check_determinism(
        self, runner: Runner, run: CaseRun, results: list[torch.Tensor], failure: _VerdictReached
    ) -> None:
        """Repeat a failing run once; report nondeterminism if the second result differs or the second run fails."""
        try:
            self._require_same_results(runner, run, results, "on a second run")
        except _VerdictReached as second:
            if second.comparison.verdict is Verdict.NONDETERMINISTIC:
                raise
            message = f"on a second run: {second.comparison.message}; on the first: {failure.comparison.message}"
            raise _VerdictReached(Verdict.NONDETERMINISTIC, message) from second

    def _require_same_results(self, runner: Runner, run: CaseRun, results: list[torch.Tensor], when: str) -> None:
        self.run = run.name
        again = self._run_once(runner, run, len(results))
        for index, (old, new) in enumerate(zip(results, again or (), strict=again is not None)):
            if not has_same_bits(old, new):
                raise _VerdictReached(Verdict.NONDETERMINISTIC, _describe_change(index, old, new, when))


def _check_structure(results: Any, count: int) -> None:
    """Check that a runner returned ``count`` strided tensors on the CPU."""
    if not isinstance(results, list | tuple) or not all(isinstance(r, torch.Tensor) for r in results):
        raise _VerdictReached(
            Verdict.STRUCTURE, f"the runner returned a {_describe_type(results)} instead of a list of tensors"
        )
    if len(results) != count:
        raise _VerdictReached(Verdict.STRUCTURE, f"the runner returned {len(results)} outputs instead of {count}")
    for index, result in enumerate(results):
        if result.device.type != "cpu" or result.layout is not torch.strided:
            kind = f"{str(result.layout).removeprefix('torch.')} on {result.device}"
            raise _VerdictReached(Verdict.STRUCTURE, f"output {index} is {kind}. Return strided tensors on the CPU.")


def _check_memory_separate(inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Check that no result shares memory with an input."""
    spans = sorted((*_get_address_range(t), i) for i, t in enumerate(inputs) if t.numel())
    for index, result in enumerate(results):
        start, end = _get_address_range(result)
        position = bisect.bisect_left(spans, (end,))
        if result.numel() and position and spans[position - 1][1] > start:
            shared = spans[position - 1][2]
            raise _VerdictReached(Verdict.CONTRACT, f"output {index} is a view of input {shared}. Return a copy.")


INTEGER_DTYPE_BY_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with the same bits, by element size in bytes."""


def has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit, apart from the payload of NaN."""
    if not has_same_type(a, b):
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if torch.equal(a.view(INTEGER_DTYPE_BY_SIZE[a.itemsize]), b.view(INTEGER_DTYPE_BY_SIZE[b.itemsize])):
        return True
    return bool(_find_equal_elements(a, b).all())


def _find_equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


def has_same_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype and shape, the only invariants of two runs of a random call."""
    return a.dtype == b.dtype and a.shape == b.shape


def restore_tensors(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> list[int]:
    """Restore the contents of modified tensors, which other checks use too, and return their indices."""
    written = [
        i
        for i, (tensor, original) in enumerate(zip(tensors, before, strict=True))
        if not has_same_bits(original, tensor)
    ]
    for tensor, original in ((tensors[i], before[i]) for i in written):
        if tensor.shape != original.shape:
            tensor.data = original
            continue
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
        tensor[once].copy_(original[once])  # broadcast elements share memory: write them once
    return written


def is_in_share(name: str, share: float) -> bool:
    """Return whether a name belongs to a pseudo-random share of all names; the same in every process."""
    return zlib.crc32(name.encode()) % 1000 < share * 1000


def _get_address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor's storage; a view of an array starts within the array's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _format_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _describe_change(index: int, old: torch.Tensor, new: torch.Tensor, when: str) -> str:
    """Describe how an output changed, with enough digits to distinguish the two values."""
    if not has_same_type(old, new):
        now, before = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (new, old))
        return f"output {index} is {now} {when} instead of {before}"
    other = ~_find_equal_elements(old, new)
    position = other.nonzero()[0].tolist()
    now, before = (t[tuple(position)].item() for t in (new, old))
    counts = f"{int(other.sum()):,} of {old.numel():,} elements differ"
    return f"output {index}{position or ''} is {now!r} {when} instead of {before!r}; {counts}"


def _describe_type(results: Any) -> str:
    if isinstance(results, list | tuple):
        return f"{type(results).__name__} of {', '.join(sorted({type(r).__name__ for r in results}))}"
    return type(results).__name__
