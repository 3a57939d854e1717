"""L6, artifacts: equal bytes twice and in another process, equal outputs from a file, errors for damaged files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from clika_ref.core.artifacts import Artifact
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import CaseRun, Check, GraphCase, Outcome, Task
from clika_ref_conformance.drawing.graphs.random_graphs import compute_graph_seed, draw_graph_cases
from clika_ref_conformance.drawing.symbolic.calls import make_static_case
from clika_ref_conformance.drawing.symbolic.size_dependence import draw_replayable_call
from clika_ref_conformance.execution.case_checks import (
    find_unsupported,
    has_same_bits,
    has_same_type,
    is_in_share,
    run_case,
)
from clika_ref_conformance.execution.case_reduction import NO_NODES_MESSAGE
from clika_ref_conformance.execution.fresh_process import (
    FreshProcess,
    FreshProcessError,
    digest_folder,
    get_fresh_process,
)
from clika_ref_conformance.judged_dtypes import check_judged_dtypes
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, make_not_run

LEVEL = "artifacts"

EXTERNAL_DATA_OPTIONS = {"external_data": True}
"""Option to store weights in files next to the model; targets without such files ignore it."""

DAMAGED_COPIES = 8
"""Damaged copies of an artifact: three truncated ones, the others with altered bytes."""


GRAPHS_SUBJECT, FILES_SUBJECT = "random graphs", "files"


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator of a pseudo-random share, by name and seed, and tasks for graphs and for files.

    If only some tasks are requested, no operator is left out.
    """
    seed, share = suite.profile.seed, 1.0 if suite.subjects else suite.profile.share_of_artifacts
    operators = [op for op in suite.registry.operators.values() if op.sampler is not None]
    chosen = sorted(op.name for op in operators if is_in_share(f"{op.name}/{seed}", share))
    return [Task(LEVEL, subject) for subject in (*chosen, GRAPHS_SUBJECT, FILES_SUBJECT)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a task; the checks of all tasks share one other process."""
    bench = ArtifactChecks(suite)
    if task.subject == FILES_SUBJECT:
        return _make_file_checks(bench)
    if task.subject == GRAPHS_SUBJECT:
        return [Check(case.name, partial(bench.transfer, case)) for case in draw_graph_share(suite)]
    return [Check("transferred", partial(_transfer_call, task.subject, bench))]


def _transfer_call(name: str, bench: ArtifactChecks) -> Outcome:
    """Transfer a drawn call of an operator to the other process."""
    suite = bench.suite
    case = make_static_case(
        draw_replayable_call(suite.registry.operators[name], f"{suite.profile.seed}-artifact"), "typical"
    )
    if case is None:
        return Outcome("transferred", make_not_run(Reason.REJECTED_CALL, "eager rejects the drawn call"))
    return replace(bench.transfer(case), name="transferred")


def draw_graph_share(suite: Suite) -> list[GraphCase]:
    """Return random graphs, as many as the profile's share."""
    count = math.ceil(suite.profile.graphs * suite.profile.share_of_artifacts)
    drawn = draw_graph_cases(suite, count, compute_graph_seed(LEVEL, suite))
    return [GraphCase(f"graph-{i:03}", case.graph, case.runs[:1], case.facts) for i, case in enumerate(drawn)]


@dataclass
class ArtifactChecks:
    """Compare artifacts that this process and another one write and read."""

    suite: Suite

    @property
    def fresh(self) -> FreshProcess:
        """Other process of all checks of a suite."""
        return get_fresh_process(self.suite)

    def transfer(self, case: GraphCase, options: dict[str, bool] | None = None) -> Outcome:
        """Compile a case twice here and once in the other process, load it there, and compare bytes and outputs.

        A case does not store its compile options, so an outcome with options has no case.
        """
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            comparison = self._compare_processes(case, Path(folder), options or {})
        return Outcome(case.name, comparison, case.runs[0].name, None if options else case)

    def _compare_processes(self, case: GraphCase, folder: Path, options: dict[str, bool]) -> Comparison:
        here, twice, there = (folder / name for name in ("here", "twice", "there"))
        for each in (here, twice, there):
            each.mkdir()
        if not len(case.graph):
            return make_not_run(Reason.NO_NODES, NO_NODES_MESSAGE)
        target, inputs, graph = self.suite.target, case.runs[0].inputs, self.suite.lower_graph(case)
        rejection = check_judged_dtypes(case.graph) or find_unsupported(graph, self.suite)
        if rejection is not None:
            return rejection
        try:
            artifact = target.compile(graph.clone(), here / "model.onnx", **options)
            outputs = target.load(artifact)([t.clone() for t in inputs])
        except Exception as error:  # noqa: BLE001 - a target may raise anything
            return make_not_run(
                Reason.FAILS_ELSEWHERE, f"the target fails on it in this process, too, as other levels report: {error}"
            )
        target.compile(graph.clone(), twice / "model.onnx", **options)
        if digest_folder(here) != digest_folder(twice):
            return Comparison(Verdict.NONDETERMINISTIC, "compiling twice in one process gives other bytes")
        try:
            if self.fresh.compile(graph, there, options) != digest_folder(here):
                return Comparison(
                    Verdict.NONDETERMINISTIC,
                    "another process, with another hash seed and folder, compiles it to other bytes",
                )
            found = self.fresh.run(artifact, inputs)
        except FreshProcessError as error:
            return Comparison(_classify_process_error(error), f"another process failed: {error}")
        alike = has_same_type if any(node.is_random for node in graph.nodes) else has_same_bits
        wrong = [i for i, (a, b) in enumerate(zip(outputs, found, strict=True)) if not alike(a, b)]
        if wrong:
            again = target.load(artifact)([t.clone() for t in inputs])
            if not all(map(alike, outputs, again)):
                return Comparison(
                    Verdict.NONDETERMINISTIC, "loaded and run again in one process, the artifact gives other outputs"
                )
            return Comparison(Verdict.VALUE, f"output {wrong[0]} differs if another process loads the artifact")
        return Comparison(Verdict.PASS)

    def check_damage(self, name: str, case: GraphCase, damage: Callable[[Path], str], *, is_cut: bool) -> Outcome:
        """Damage an artifact, and load and run it in the other process: any error must be a `ClikaError`."""
        graph = self.suite.lower_graph(case)
        rejection = find_unsupported(graph, self.suite)
        if rejection is not None:
            return Outcome(name, rejection, case.runs[0].name)
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            artifact = self.suite.target.compile(graph, Path(folder) / "model.onnx", **EXTERNAL_DATA_OPTIONS)
            description = damage(Path(folder))
            comparison = self._check_damaged_load(artifact, case, description, is_cut=is_cut)
        return Outcome(name, comparison, case.runs[0].name)

    def _check_damaged_load(self, artifact: Artifact, case: GraphCase, damage: str, *, is_cut: bool) -> Comparison:
        try:
            self.fresh.run(artifact, case.runs[0].inputs)
        except FreshProcessError as error:
            if error.kind == "typed":
                return Comparison(Verdict.PASS, f"{damage}: {error}")
            return Comparison(
                _classify_process_error(error), f"{damage}: {error}. Reject a damaged artifact with a ClikaError."
            )
        if is_cut:
            return Comparison(Verdict.ARTIFACT, f"{damage}, but the target loads and runs it without an error")
        return Comparison(Verdict.PASS, f"{damage}: the file is still valid")


def _classify_process_error(error: FreshProcessError) -> Verdict:
    return {"crash": Verdict.CRASH, "hang": Verdict.HANG}.get(error.kind, Verdict.ARTIFACT)


def _make_file_checks(bench: ArtifactChecks) -> list[Check]:
    suite = bench.suite
    order, weights = make_input_order_case(suite), make_weights_case(suite)
    found = [
        Check("inputs of equal shape", partial(bench.transfer, order)),
        Check("external weights", partial(bench.transfer, weights, EXTERNAL_DATA_OPTIONS)),
        Check("external weights, judged", partial(run_case, weights, suite)),
        Check("inputs in other layouts", partial(run_case, make_layouts_case(suite), suite)),
    ]
    for i in range(DAMAGED_COPIES):
        name = f"damaged-{i}"
        damage = partial(_damage_file, i, suite.profile.seed)
        found.append(Check(name, partial(bench.check_damage, name, weights, damage, is_cut=i < len(TRUNCATIONS))))
    return found


TRUNCATIONS = (("truncated to nothing", 0.0), ("truncated by half", 0.5), ("truncated by a tenth", 0.9))


def _damage_file(number: int, seed: int, folder: Path) -> str:
    """Damage the largest file of an artifact, or its model, in place; describe the damage."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name))
    path = files[-1] if number % 2 else files[0]
    data = bytearray(path.read_bytes())
    if number < len(TRUNCATIONS):
        description, part = TRUNCATIONS[number]
        path.write_bytes(data[: int(len(data) * part)])
        return f"{path.name} {description}"
    random = Random(f"{seed}/{number}")  # noqa: S311 - test data, not cryptography
    for _ in range(1 + 4 * (number - len(TRUNCATIONS))):
        data[random.randrange(len(data))] ^= random.randrange(1, 256)
    path.write_bytes(data)
    return f"{path.name} with changed bytes"


def make_input_order_case(suite: Suite) -> GraphCase:
    """Return ``b - a`` of two inputs of the same shape, in reverse alphabetical order."""
    graph = Graph("order")
    first, second = (graph.add_input(TensorType(torch.float32, (2, 3)), name) for name in ("b", "a"))
    graph.add_output(Builder(graph, suite.registry.operators)("sub", first, second))
    generator = torch.Generator().manual_seed(suite.profile.seed)
    return GraphCase("inputs of equal shape", graph, [CaseRun("typical", _draw_tensors(generator, (2, 3), (2, 3)))])


def make_weights_case(suite: Suite) -> GraphCase:
    """Return ``x @ v + w`` with two weights of several pages each, so that the offset of the second is not 0."""
    graph = Graph("weights")
    x = graph.add_input(TensorType(torch.float32, (3, 40)), "x")
    generator = torch.Generator().manual_seed(suite.profile.seed)
    v, w, inputs = _draw_tensors(generator, (40, 50), (3, 50), (3, 40))
    build = Builder(graph, suite.registry.operators)
    product = build("matmul", x, graph.add_constant(v, "v"))
    graph.add_output(build("add", product, graph.add_constant(w, "w")))
    return GraphCase("external weights", graph, [CaseRun("typical", (inputs,))])


def make_layouts_case(suite: Suite) -> GraphCase:
    """Return ``b - a`` with views as inputs: transposed, expanded, every second element, an offset."""
    case = make_input_order_case(suite)
    generator = torch.Generator().manual_seed(suite.profile.seed)
    a, b, row, wide = _draw_tensors(generator, (3, 2), (3, 2), (1, 3), (4, 6))
    runs = [
        CaseRun("transposed", (a.t(), b.t())),
        CaseRun("expanded", (a.t(), row.expand(2, 3))),
        CaseRun("strided", (wide[::2, ::2], wide[1::2, 1::2])),
        CaseRun("offset", (wide[1:3, 2:5], wide[2:4, 3:6])),
    ]
    return GraphCase("inputs in other layouts", case.graph, runs)


def _draw_tensors(generator: torch.Generator, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
