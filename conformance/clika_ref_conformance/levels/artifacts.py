"""L6, artifacts: equal bytes twice and in another process, equal outputs from a file, errors for damaged files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.targets import Artifact
from clika_ref.core.types import TensorType
from clika_ref_conformance.cases import Case, Check, Outcome, Run, Task
from clika_ref_conformance.drawing.generation import collect
from clika_ref_conformance.drawing.graphs.growth import graph_cases, growable
from clika_ref_conformance.drawing.symbolic.calls import static_case
from clika_ref_conformance.drawing.symbolic.resizing import draw
from clika_ref_conformance.execution.batches import NO_NODES
from clika_ref_conformance.execution.case_checks import is_chosen, refusal_of, run_case, same_bits, same_type
from clika_ref_conformance.execution.fresh import FreshProcess, FreshProcessError, digest_of, fresh_process
from clika_ref_conformance.judged_dtypes import unjudged_in
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Comparison, Reason, Verdict, not_run

LEVEL = "artifacts"

EXTERNAL = {"external_data": True}
"""Option to store weights in files next to the model; targets without such files ignore it."""

DAMAGES = 8
"""Damaged copies of an artifact: three truncated ones, the others with altered bytes."""


GRAPHS, FILES = "random graphs", "files"


def tasks(suite: Suite) -> list[Task]:
    """Return one task for each operator of a pseudo-random share, by name and seed, and tasks for graphs and for files.

    If only some tasks are requested, no operator is left out.
    """
    seed, share = suite.profile.seed, 1.0 if suite.subjects else suite.profile.share_of_artifacts
    operators = [op for op in suite.registry.operators.values() if op.sampler is not None]
    chosen = sorted(op.name for op in operators if is_chosen(f"{op.name}/{seed}", share))
    return [Task(LEVEL, subject) for subject in (*chosen, GRAPHS, FILES)]


def checks(task: Task, suite: Suite) -> Sequence[Check]:
    """Return the checks of a task; the checks of all tasks share one other process."""
    bench = Bench(suite)
    if task.subject == FILES:
        return _file_checks(bench)
    if task.subject == GRAPHS:
        return [Check(case.name, partial(bench.carried_over, case)) for case in graph_share(suite)]
    return [Check("carried over", partial(_call_carried_over, task.subject, bench))]


def _call_carried_over(name: str, bench: Bench) -> Outcome:
    """Transfer a drawn call of an operator to the other process."""
    suite = bench.suite
    case = static_case(draw(suite.registry.operators[name], f"{suite.profile.seed}-artifact"), "typical")
    if case is None:
        return Outcome("carried over", not_run(Reason.REFUSED_CALL, "eager refuses the call that was drawn"))
    return replace(bench.carried_over(case), name="carried over")


def graph_share(suite: Suite) -> list[Case]:
    """Return random graphs, as many as the profile's share."""
    count = math.ceil(suite.profile.graphs * suite.profile.share_of_artifacts)
    seed = zlib.crc32(f"{LEVEL}/{suite.profile.seed}".encode()) % 2**24
    drawn = collect(graph_cases(growable(suite.registry.operators), suite.target.refusal), count, seed)
    return [Case(f"graph-{i:03}", case.graph, case.runs[:1], case.facts) for i, case in enumerate(drawn)]


@dataclass
class Bench:
    """Compare artifacts that this process and another one write and read."""

    suite: Suite

    @property
    def fresh(self) -> FreshProcess:
        """Other process of all checks of a suite."""
        return fresh_process(self.suite)

    def carried_over(self, case: Case, options: dict[str, bool] | None = None) -> Outcome:
        """Compile a case twice here and once in the other process, load it there, and compare bytes and outputs.

        A case does not store its compile options, so an outcome with options has no case.
        """
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            comparison = self._compared(case, Path(folder), options or {})
        return Outcome(case.name, comparison, case.runs[0].name, None if options else case)

    def _compared(self, case: Case, folder: Path, options: dict[str, bool]) -> Comparison:
        here, twice, there = (folder / name for name in ("here", "twice", "there"))
        for each in (here, twice, there):
            each.mkdir()
        if not len(case.graph):
            return not_run(Reason.NO_NODES, NO_NODES)
        target, inputs, graph = self.suite.target, case.runs[0].inputs, self.suite.lowered(case)
        refused = unjudged_in(case.graph) or refusal_of(graph, self.suite)
        if refused is not None:
            return refused
        try:
            artifact = target.compile(graph.clone(), here / "model.onnx", **options)
            outputs = target.load(artifact)([t.clone() for t in inputs])
        except Exception as error:  # noqa: BLE001 - a target may raise anything
            return not_run(Reason.FAILS_HERE, f"the target fails on it here too, which other levels show: {error}")
        target.compile(graph.clone(), twice / "model.onnx", **options)
        if digest_of(here) != digest_of(twice):
            return Comparison(Verdict.NONDETERMINISTIC, "compiling twice in one process gives other bytes")
        try:
            if self.fresh.compile(graph, there, options) != digest_of(here):
                return Comparison(
                    Verdict.NONDETERMINISTIC,
                    "another process, with other hashes and in another folder, compiles it to other bytes",
                )
            found = self.fresh.run(artifact, inputs)
        except FreshProcessError as error:
            return Comparison(_verdict_of(error), f"another process cannot carry on: {error}")
        alike = same_type if any(node.is_random for node in graph.nodes) else same_bits
        wrong = [i for i, (a, b) in enumerate(zip(outputs, found, strict=True)) if not alike(a, b)]
        if wrong:
            again = target.load(artifact)([t.clone() for t in inputs])
            if not all(map(alike, outputs, again)):
                return Comparison(Verdict.NONDETERMINISTIC, "loaded and run once more in one process, it gives others")
            return Comparison(Verdict.VALUE, f"output {wrong[0]} differs where another process loads the artifact")
        return Comparison(Verdict.PASS)

    def damaged(self, name: str, case: Case, damage: Callable[[Path], str], *, is_cut: bool) -> Outcome:
        """Damage an artifact, and load and run it in the other process: any error must be a `ClikaError`."""
        graph = self.suite.lowered(case)
        refused = refusal_of(graph, self.suite)
        if refused is not None:
            return Outcome(name, refused, case.runs[0].name)
        with TemporaryDirectory(dir=self.suite.folder) as folder:
            artifact = self.suite.target.compile(graph, Path(folder) / "model.onnx", **EXTERNAL)
            what = damage(Path(folder))
            comparison = self._told(artifact, case, what, is_cut=is_cut)
        return Outcome(name, comparison, case.runs[0].name)

    def _told(self, artifact: Artifact, case: Case, what: str, *, is_cut: bool) -> Comparison:
        try:
            self.fresh.run(artifact, case.runs[0].inputs)
        except FreshProcessError as error:
            if error.kind == "typed":
                return Comparison(Verdict.PASS, f"{what}: {error}")
            return Comparison(_verdict_of(error), f"{what}: {error}; a damaged artifact is refused with a ClikaError")
        if is_cut:
            return Comparison(Verdict.ARTIFACT, f"{what}, and it is loaded and run as if it were whole")
        return Comparison(Verdict.PASS, f"{what}: it is legal still")


def _verdict_of(error: FreshProcessError) -> Verdict:
    return {"crash": Verdict.CRASH, "hang": Verdict.HANG}.get(error.kind, Verdict.ARTIFACT)


def _file_checks(bench: Bench) -> list[Check]:
    suite = bench.suite
    order, weights = input_order_case(suite), weights_case(suite)
    found = [
        Check("inputs of one shape", partial(bench.carried_over, order)),
        Check("two weights apart", partial(bench.carried_over, weights, EXTERNAL)),
        Check("two weights apart, judged", partial(run_case, weights, suite)),
        Check("inputs in other layouts", partial(run_case, layouts_case(suite), suite)),
    ]
    for i in range(DAMAGES):
        name = f"damaged-{i}"
        damage = partial(_damage, i, suite.profile.seed)
        found.append(Check(name, partial(bench.damaged, name, weights, damage, is_cut=i < len(CUTS))))
    return found


CUTS = (("cut to nothing", 0.0), ("cut in half", 0.5), ("cut by its last tenth", 0.9))


def _damage(number: int, seed: int, folder: Path) -> str:
    """Damage the largest file of an artifact, or its model, in place; describe the damage."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.stat().st_size, p.name))
    path = files[-1] if number % 2 else files[0]
    data = bytearray(path.read_bytes())
    if number < len(CUTS):
        what, part = CUTS[number]
        path.write_bytes(data[: int(len(data) * part)])
        return f"{path.name} {what}"
    random = Random(f"{seed}/{number}")  # noqa: S311 - test data, not cryptography
    for _ in range(1 + 4 * (number - len(CUTS))):
        data[random.randrange(len(data))] ^= random.randrange(1, 256)
    path.write_bytes(data)
    return f"{path.name} with altered bytes"


def input_order_case(suite: Suite) -> Case:
    """Return ``b - a`` of two inputs of the same shape, in reverse alphabetical order."""
    graph = Graph("order")
    first, second = (graph.add_input(TensorType(torch.float32, (2, 3)), name) for name in ("b", "a"))
    graph.add_output(Builder(graph, suite.registry.operators)("sub", first, second))
    generator = torch.Generator().manual_seed(suite.profile.seed)
    return Case("inputs of one shape", graph, [Run("typical", _tensors(generator, (2, 3), (2, 3)))])


def weights_case(suite: Suite) -> Case:
    """Return ``x @ v + w`` with two weights of several pages each, so that the offset of the second is not 0."""
    graph = Graph("weights")
    x = graph.add_input(TensorType(torch.float32, (3, 40)), "x")
    generator = torch.Generator().manual_seed(suite.profile.seed)
    v, w, inputs = _tensors(generator, (40, 50), (3, 50), (3, 40))
    build = Builder(graph, suite.registry.operators)
    product = build("matmul", x, graph.add_constant(v, "v"))
    graph.add_output(build("add", product, graph.add_constant(w, "w")))
    return Case("two weights apart", graph, [Run("typical", (inputs,))])


def layouts_case(suite: Suite) -> Case:
    """Return ``b - a`` with views as inputs: transposed, expanded, every second element, an offset."""
    case = input_order_case(suite)
    generator = torch.Generator().manual_seed(suite.profile.seed)
    a, b, row, wide = _tensors(generator, (3, 2), (3, 2), (1, 3), (4, 6))
    runs = [
        Run("transposed", (a.t(), b.t())),
        Run("expanded", (a.t(), row.expand(2, 3))),
        Run("every second", (wide[::2, ::2], wide[1::2, 1::2])),
        Run("offset", (wide[1:3, 2:5], wide[2:4, 3:6])),
    ]
    return Case("inputs in other layouts", case.graph, runs)


def _tensors(generator: torch.Generator, *shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
