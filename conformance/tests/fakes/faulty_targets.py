"""Eager targets with one fault, selected by name or by an operator of the graph."""

from dataclasses import dataclass, field

import torch
from clika_ref_conformance.targets.identity import Identity


@dataclass(frozen=True)
class FaultyTarget(Identity):
    name: str = "faulty"
    fault: str = ""
    deviations: str | None = None
    compilations: list = field(default_factory=list)

    def unsupported_reason(self, node):
        if self.fault == "rejects":
            return "it is a Tuesday"
        if self.fault == "refusal-empty":
            return ""
        if self.fault == "refusal-number":
            return 3
        if self.fault == "refusal-raises":
            raise KeyError("rank")
        return None

    def compile(self, graph, path, **options):
        if self.fault == "compile-raises":
            raise RuntimeError("no such kernel")
        if self.fault == "compile-leaves":
            raise SystemExit("usage: compiler FILE")
        if self.fault == "compile-interrupts":
            raise KeyboardInterrupt
        if self.fault == "memory":
            raise RuntimeError("x") from MemoryError()
        self.compilations.append(path.name)
        return super().compile(graph, path, **options)

    def load(self, artifact):
        if self.fault == "load-raises":
            raise RuntimeError("the file is damaged")
        right = super().load(artifact)
        state = {"runs": 0, "kept": None}

        def run(inputs):
            results = right(inputs)
            state["runs"] += 1
            state["compilations"] = len(self.compilations)
            return FAULTS.get(self.fault, lambda r, i, s: r)(results, inputs, state)

        return run


def _raise_error(results, inputs, state):
    raise RuntimeError("illegal instruction")


def _write_to_input(results, inputs, state):
    inputs[0].add_(1)
    return results


def _write_to_input_keeping_strides(results, inputs, state):
    once = inputs[0][tuple(slice(0, 1) if step == 0 else slice(None) for step in inputs[0].stride())]
    once.clamp_(min=0)
    return results


def _reuse_results(results, inputs, state):
    if state["kept"] is None:
        state["kept"] = results
    for kept, result in zip(state["kept"], results, strict=True):
        kept.copy_(result)
    return state["kept"]


def _next_elements(x):
    """Return the next elements: in floats the smallest change that there is."""
    if x.dtype is torch.bool:
        return ~x
    return x.nextafter(torch.full_like(x, torch.inf)) if x.is_floating_point() else x + 1


FAULTS = {
    "run-raises": _raise_error,
    "no-list": lambda r, i, s: r[0],
    "arrays": lambda r, i, s: [t.numpy() for t in r],
    "elsewhere": lambda r, i, s: [t.to("meta") for t in r],
    "sparse": lambda r, i, s: [t.to_sparse() for t in r],
    "too-many": lambda r, i, s: [*r, r[0]],
    "too-few": lambda r, i, s: [],
    "dtype": lambda r, i, s: [t.double() for t in r],
    "shape": lambda r, i, s: [t[None] for t in r],
    "view": lambda r, i, s: [i[0].view_as(r[0])],
    "array-view": lambda r, i, s: [torch.from_numpy(i[0].numpy()[1:])],
    "writes": _write_to_input,
    "writes-alike": _write_to_input_keeping_strides,
    "reuses": _reuse_results,
    "drifts": lambda r, i, s: [_next_elements(t) if s["runs"] > 2 else t for t in r],
    "depends-on-compilation": lambda r, i, s: [_next_elements(t) if s["compilations"] > 1 else t for t in r],
    "wrong-then-raises": lambda r, i, s: _raise_error(r, i, s) if s["runs"] > 1 else [t + 1 for t in r],
    "wrong-in-turn-reused": lambda r, i, s: _reuse_results([t + s["runs"] % 2 for t in r], i, s),
    "wrong-in-turn": lambda r, i, s: [t + s["runs"] % 2 for t in r],
    "value": lambda r, i, s: [t + 1 for t in r],
    "no-nan": lambda r, i, s: [t.nan_to_num(0.0, torch.inf, -torch.inf) for t in r],
    "no-inf": lambda r, i, s: [t.nan_to_num(torch.nan) for t in r],
    "first-index-wrong": lambda r, i, s: [r[0].nan_to_num(), r[1] - torch.tensor([1, 0])],
    "last-index-wrong": lambda r, i, s: [r[0].nan_to_num(), r[1] - torch.tensor([0, 1])],
    "finite": lambda r, i, s: [t.nan_to_num() for t in r],
    "sevens": lambda r, i, s: [torch.full_like(t, 7.0) for t in r],
}


WRONG = FaultyTarget(fault="value")
REJECTING = FaultyTarget(fault="rejects")


def fill_with_sevens(x):
    """Return the results of the target with the fault ``sevens``."""
    return torch.full_like(x, 7.0)


class Negating:
    """Eager, with the results ``-1 - y`` for graphs that contain an operator."""

    def __init__(self, kind):
        self.inner, self.kind = Identity(), kind

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def load(self, artifact):
        runner = self.inner.load(artifact)
        if self.kind not in {op.name for op in artifact.facts["operators"].values()}:
            return runner
        return lambda inputs: [-1 - r if r.is_floating_point() else ~r for r in runner(inputs)]


@dataclass(frozen=True)
class PartialTarget(Identity):
    """Eager for some operators; it rejects all others, and fails on them if asked to compile them anyway."""

    name: str = "beginner"
    known: tuple = ("relu",)

    def unsupported_reason(self, node):
        return None if node.op.name in self.known else f"only {', '.join(self.known)} so far"

    def compile(self, graph, path, **options):
        for node in graph.nodes:
            if self.unsupported_reason(node) is not None:
                raise RuntimeError(f"no kernel of {node.op.name}")
        return super().compile(graph, path, **options)
