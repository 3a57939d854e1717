"""Check of a case: compile it, load it, run it on every set of inputs, and judge the results."""

from __future__ import annotations

import bisect
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from clika_ref.core.ir import Graph
from clika_ref.core.targets import Artifact, Runner
from clika_ref_conformance.cases import Case, Check, Compiled, Outcome, Run
from clika_ref_conformance.execution.blaming import blamed
from clika_ref_conformance.execution.declared_types import mistyped
from clika_ref_conformance.execution.deviating import errors_expected, expected_error, judge_run
from clika_ref_conformance.judged_dtypes import unjudged_in
from clika_ref_conformance.judging.judge import Reference
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import COUNTS, Comparison, Verdict

OUT_OF_MEMORY = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "not enough memory")
"""Messages of libraries that run out of memory without raising a `MemoryError`."""


def case_check(name: str, suite: Suite, make: Callable[[], Case]) -> Check:
    """Return a check that creates a case and compares the target with eager on it."""
    return Check(name, lambda: replace(run_case(make(), suite), name=name))


def run_case(case: Case, suite: Suite) -> Outcome:
    """Compile a case for the target, run it on all its inputs and judge the results.

    The first failure is the verdict, or nondeterminism if a second run on the same inputs gives another result.
    Otherwise, the verdict is a deviation if any was seen, with the worst comparison.
    """
    other = unjudged_in(case.graph)
    if other is not None:
        return Outcome(case.name, other)
    start = time.perf_counter()
    with TemporaryDirectory(dir=suite.folder) as folder:
        trial = Trial(case, suite, Path(folder))
        try:
            trial.go()
            found = trial.worst()
        except _Stop as stop:
            found = stop.comparison
        compiled = trial.compiled() if found.verdict.is_failure else None
    seconds = time.perf_counter() - start
    return Outcome(case.name, found, trial.run, case, sorted(trial.seen), sorted(trial.watched), seconds, compiled)


def most_telling(found: Sequence[tuple[str, Comparison]]) -> tuple[str, Comparison]:
    """Return the run, with its name, that represents all runs of a case; none of them failed.

    This is a deviation, or else the passing run with the largest ratio, or else one that could not be judged. Its
    element counts are the totals of all runs.
    """
    totals = {count: sum(getattr(c, count) for _, c in found) for count in COUNTS}
    for verdicts in ((Verdict.DEVIATION,), (Verdict.PASS,), tuple(Verdict)):
        told = [item for item in found if item[1].verdict in verdicts]
        if told:
            run, worst = max(told, key=lambda item: item[1].ratio)
            return run, replace(worst, **totals)
    return "", Comparison(Verdict.PASS)


def refusal_of(graph: Graph, suite: Suite) -> Comparison | None:
    """Return why the target rejects a node of a lowered graph, before anything is compiled; None if it accepts all.

    If `refusal` raises, the target violates its contract.
    """
    for node in graph.nodes:
        try:
            reason = suite.target.refusal(node)
        except blamed() as error:
            return Comparison(Verdict.CONTRACT, f"refusal({node!r}) failed: {_described(error)}")
        if is_reason(reason):
            return Comparison(Verdict.UNSUPPORTED, f"{node.op.name}: {reason}")
        if reason is not None:
            message = f"refusal({node!r}) is {reason!r}: return None, or say in words why the target does not take it"
            return Comparison(Verdict.CONTRACT, message)
    return None


def is_reason(reason: Any) -> bool:
    """Return whether a target's refusal contains a reason."""
    return isinstance(reason, str) and bool(reason.strip())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports, in any wording, that memory ran out."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or any(words in str(found) for words in OUT_OF_MEMORY):
            return True
        found = found.__cause__
    return False


class _Stop(Exception):  # noqa: N818 - control flow, not an error: the verdict is known
    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.comparison = Comparison(verdict, message)


class Trial:
    """Execution of one case on the target. Steps raise `_Stop` as soon as the verdict is known."""

    def __init__(self, case: Case, suite: Suite, folder: Path) -> None:
        self.case = case
        self.suite = suite
        self.folder = folder
        self.run = ""
        """Name of the inputs that decide."""
        self.found: list[tuple[str, Comparison]] = []
        self.artifact: Artifact | None = None
        """Artifact of the last compilation."""
        self.seen: set[str] = set()
        self.watched: set[str] = set()
        self._weights = {n: v.data for n, v in case.graph.constants.items() if v.formula is None and v.data is not None}
        self._held = [weight.detach().clone() for weight in self._weights.values()]

    def go(self) -> None:
        """Take every step; return if none finds a failure."""
        graph = self._lowered()
        self._refuse(graph)
        references = {id(run): self._reference(run) for run in self.case.runs}
        self.run_all(graph, lambda run, results: self._judge(run, references[id(run)], results))

    def run_all(self, graph: Graph, judge: Callable[[Run, list[torch.Tensor]], None]) -> None:
        """Compile and run a lowered graph on all inputs, with all checks except the numeric one.

        ``judge`` checks the numbers. It is called with the results of each run that does not fail as declared.
        """
        runner = self._runner(graph, "model.onnx")
        is_random = any(node.is_random for node in graph.nodes)
        kept: list[tuple[Run, list[torch.Tensor], list[torch.Tensor]]] = []
        for run in self.case.runs:
            self.run = run.name
            self.watched |= {d.id for d in errors_expected(self.case.graph, run, self.suite.deviations)}
            results = self._results(runner, run, len(graph.outputs))
            if results is not None:
                copies = [t.clone() for t in results]
                try:
                    judge(run, results)
                except _Stop as wrong:
                    if not is_random:  # results that change by themselves are nondeterministic, not wrong
                        self._refuse_change(runner, run, copies, wrong)
                    raise
                kept.append((run, results, copies))
        if kept and not is_random:
            self._repeat(runner, graph, kept)

    def worst(self) -> Comparison:
        """Return the comparison that represents all runs."""
        self.run, worst = most_telling(self.found)
        return worst

    def compiled(self) -> Compiled | None:
        """Return the last artifact with its files; None if it is in another folder, or if its folder has subfolders.

        Compiling again may give another artifact, as targets select kernels by measured speed.
        """
        paths = sorted(self.folder.iterdir())
        is_whole = isinstance(self.artifact, Artifact) and self.artifact.path in paths
        if self.artifact is None or not is_whole or not all(path.is_file() for path in paths):
            return None
        return Compiled(self.artifact, {path.name: path.read_bytes() for path in paths})

    def _lowered(self) -> Graph:
        try:
            return self.suite.lowered(self.case)
        except blamed() as error:
            raise _Stop(Verdict.CONTRACT, f"lowering the graph failed: {_described(error)}") from error

    def _refuse(self, graph: Graph) -> None:
        refused = refusal_of(graph, self.suite)
        if refused is not None:
            raise _Stop(refused.verdict, refused.message)

    def _reference(self, run: Run) -> Reference:
        self.run = run.name
        try:
            trusting, arithmetic = self.suite.profile.trusts_eager, self.suite.arithmetic
            reference = Reference(self.case.graph, run.inputs, trusting=trusting, arithmetic=arithmetic)
        except blamed() as error:
            verdict = Verdict.MEMORY if is_out_of_memory(error) else Verdict.SAMPLE
            raise _Stop(verdict, f"eager refuses the call: {_described(error)}") from error
        problem = mistyped(self.case.graph, run.inputs, reference.eager)
        if problem:
            raise _Stop(Verdict.CONTRACT, problem)
        return reference

    def _runner(self, graph: Graph, file: str) -> Runner:
        """Compile and load; an error in either is a deviation if the target declares it."""
        target, verdict = self.suite.target, Verdict.UNDECLARED
        self.run = ""
        try:
            self.artifact = target.compile(graph.clone(), self.folder / file)
            self._refuse_written_weights()
            verdict = Verdict.ARTIFACT
            return target.load(self.artifact)
        except _Stop:
            raise
        except blamed() as error:
            doing = "compiling" if verdict is Verdict.UNDECLARED else "loading the artifact"
            raise self._error(error, None, verdict, doing) from error

    def _results(self, runner: Runner, run: Run, count: int) -> list[torch.Tensor] | None:
        """Run the target once and check everything except the numbers; return None if it fails as declared."""
        before = [t.clone() for t in run.inputs]
        try:
            results: Any = runner(run.inputs)
        except blamed() as error:
            put_back(run.inputs, before)
            stop = self._error(error, run, Verdict.UNDECLARED, "running")
            if stop.comparison.verdict is not Verdict.DEVIATION:
                raise stop from error
            self.found.append((run.name, stop.comparison))
            return None
        written = put_back(run.inputs, before)
        self._refuse_written_weights()
        if not isinstance(results, list | tuple) or not all(isinstance(r, torch.Tensor) for r in results):
            raise _Stop(Verdict.STRUCTURE, f"the runner returned a {_kind(results)} instead of a list of tensors")
        if len(results) != count:
            raise _Stop(Verdict.STRUCTURE, f"the runner returned {len(results)} outputs instead of {count}")
        for index, result in enumerate(results):
            if result.device.type != "cpu" or result.layout is not torch.strided:
                kind = f"{str(result.layout).removeprefix('torch.')} on {result.device}"
                raise _Stop(Verdict.STRUCTURE, f"output {index} is {kind}; a runner returns strided tensors on the CPU")
        if written:
            raise _Stop(Verdict.CONTRACT, f"the target wrote into its input {written[0]}")
        spans = sorted((*_span(t), i) for i, t in enumerate(run.inputs) if t.numel())
        for index, result in enumerate(results):
            start, end = _span(result)
            place = bisect.bisect_left(spans, (end,))
            if result.numel() and place and spans[place - 1][1] > start:
                shared = spans[place - 1][2]
                raise _Stop(Verdict.CONTRACT, f"output {index} is a view of input {shared}; a runner returns copies")
        return list(results)

    def _refuse_written_weights(self) -> None:
        """Fail a target that wrote into the weights, which are shared with the model, before anything reads them."""
        with torch.no_grad():
            written = put_back([*self._weights.values()], self._held)
        if written:
            name = [*self._weights][written[0]]
            raise _Stop(Verdict.CONTRACT, f"the target wrote into the weight {name}, which is the model's own")

    def _error(self, error: BaseException, run: Run | None, verdict: Verdict, doing: str) -> _Stop:
        if is_out_of_memory(error):
            return _Stop(Verdict.MEMORY, f"{doing} ran out of memory: {_described(error)}")
        declared = expected_error(self.case.graph, run, error, self.suite.deviations)
        if declared is None:
            return _Stop(verdict, f"{doing} failed, and the target did not refuse: {_described(error)}")
        self.seen.add(declared.id)
        self.watched.add(declared.id)
        return _Stop(Verdict.DEVIATION, f"{declared.id}: {declared.reason}")

    def _judge(self, run: Run, reference: Reference, results: list[torch.Tensor]) -> None:
        judgement = judge_run(reference, run, results, self.suite.deviations)
        self.seen.update(judgement.seen)
        self.watched.update(judgement.watched)
        comparison = judgement.comparison
        if comparison.verdict.is_failure:
            raise _Found(comparison)
        self.found.append((run.name, comparison))

    def _repeat(
        self, runner: Runner, graph: Graph, kept: Sequence[tuple[Run, list[torch.Tensor], list[torch.Tensor]]]
    ) -> None:
        """Run again, and compile a share of the cases again: the results must be bit-identical."""
        for run, results, copies in kept:
            self.run = run.name
            if not all(map(same_bits, results, copies)):
                raise _Stop(Verdict.CONTRACT, "a later run changed the tensors that this one had returned")
        run, results, _ = kept[0]
        self.run = run.name
        self._same(runner, run, results, "on a second run")
        if is_chosen(self.case.name, self.suite.profile.share_of_artifacts):
            self._same(self._runner(graph, "again.onnx"), run, results, "after a second compilation")

    def _refuse_change(self, runner: Runner, run: Run, results: list[torch.Tensor], wrong: _Stop) -> None:
        """Repeat a failing run once; report nondeterminism if the second result differs or the second run fails."""
        try:
            self._same(runner, run, results, "on a second run")
        except _Stop as other:
            if other.comparison.verdict is Verdict.NONDETERMINISTIC:
                raise
            message = f"on a second run: {other.comparison.message}; on the first: {wrong.comparison.message}"
            raise _Stop(Verdict.NONDETERMINISTIC, message) from other

    def _same(self, runner: Runner, run: Run, results: list[torch.Tensor], when: str) -> None:
        self.run = run.name
        again = self._results(runner, run, len(results))
        for index, (old, new) in enumerate(zip(results, again or (), strict=again is not None)):
            if not same_bits(old, new):
                raise _Stop(Verdict.NONDETERMINISTIC, _change(index, old, new, when))


class _Found(_Stop):
    """The judge found a failure."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__(comparison.verdict, comparison.message)
        self.comparison = comparison


AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype with the same bits, by element size in bytes."""


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype, shape and every bit, apart from the payload of NaN."""
    if not same_type(a, b):
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    if torch.equal(a.view(AS_INTEGER[a.itemsize]), b.view(AS_INTEGER[b.itemsize])):
        return True
    return bool(_alike(a, b).all())


def _alike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())


def same_type(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors agree in dtype and shape, the only invariants of two runs of a random call."""
    return a.dtype == b.dtype and a.shape == b.shape


def put_back(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> list[int]:
    """Return the indices of modified tensors and restore their contents, as other checks use the tensors too."""
    written = [i for i, (tensor, held) in enumerate(zip(tensors, before, strict=True)) if not same_bits(held, tensor)]
    for tensor, held in ((tensors[i], before[i]) for i in written):
        if tensor.shape != held.shape:
            tensor.data = held
            continue
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
        tensor[once].copy_(held[once])  # broadcast elements share memory: write them once
    return written


def is_chosen(name: str, share: float) -> bool:
    """Return whether a name belongs to a pseudo-random share of all names; the same in every process."""
    return zlib.crc32(name.encode()) % 1000 < share * 1000


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end address of a tensor's storage; a view of an array starts within the array's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _change(index: int, old: torch.Tensor, new: torch.Tensor, when: str) -> str:
    """Describe how an output changed, with enough digits to distinguish the two values."""
    if not same_type(old, new):
        now, before = (f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (new, old))
        return f"output {index} is {now} {when}, and was {before}"
    other = ~_alike(old, new)
    place = other.nonzero()[0].tolist()
    now, before = (t[tuple(place)].item() for t in (new, old))
    counts = f"{int(other.sum()):,} of {old.numel():,} elements are others"
    return f"output {index}{place or ''} is {now!r} {when}, and was {before!r}; {counts}"


def _kind(results: Any) -> str:
    if isinstance(results, list | tuple):
        return f"{type(results).__name__} of {', '.join(sorted({type(r).__name__ for r in results}))}"
    return type(results).__name__
