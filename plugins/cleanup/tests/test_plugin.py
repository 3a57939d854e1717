"""All passes together: their names, their order, and the number of runs."""

import sys
from collections.abc import Callable

import pytest
import torch
from clika_ref_cleanup.plugin import clika_ref_passes
from pass_sketches import OPERATORS, Sketch

from clika_ref.core.ir import Value
from clika_ref.core.passes import Pass, Phase, Pipeline, sort_passes

PASSES = {p.name: p for p in clika_ref_passes()}


def test_passes_declare_contract():
    """Each pass declares its order, its purpose and its options."""
    for p in clika_ref_passes():
        assert isinstance(p, Pass)
        assert set(p.after) <= PASSES.keys(), p.name
        assert p.removes
        assert p.__doc__
        assert p == type(p)(), "a pass is data"


def test_sort_passes_respects_declared_order():
    """The sorted order respects the declared order of each pass."""
    names = [p.name for p in sort_passes(clika_ref_passes())]
    assert all(names.index(a) < names.index(p.name) for p in clika_ref_passes() for a in p.after)


def build_chain(length: int) -> Sketch:
    """Return many small repeated motifs, one after another."""
    sketch = Sketch()
    x = sketch.input(2, 3, 4, 4)
    weight = sketch.constant(torch.ones(3, 3, 1, 1))
    facts = [sketch.constant(torch.ones(3), f"fact{i}") for i in range(4)]
    for _ in range(length):
        y = sketch("permute", x, dims=(0, 2, 3, 1))
        y = sketch("identity", sketch("dropout", sketch("relu", y), p=0.5, train=False))
        y = sketch("reshape", sketch("permute", y, dims=(0, 3, 1, 2)), shape=(6, 16))
        y = sketch("batch_norm", sketch("conv2d", sketch("reshape", y, shape=(2, 3, 4, 4)), weight, None), *facts)
        sketch("abs", y)
        x = sketch("add", y, sketch("neg", sketch("exp", sketch("full", size=(4,), fill_value=1.0))))
    return sketch.returns(sketch("tanh", x))


def build_star(length: int) -> Sketch:
    """Return many users of one value, one permute and one constant."""
    sketch = Sketch()
    x, c = sketch("relu", sketch.input(2, 3)), sketch.constant(torch.ones(3, 2))
    turned = sketch("permute", x, dims=(1, 0))
    total = x
    for i in range(length):
        y = sketch("identity", sketch("reshape", sketch("reshape", turned, shape=(6,)), shape=(3, 2)))
        y = sketch("add", sketch("mul", sketch("identity", y), i % 7), sketch("mul", c, i % 5))
        total = sketch("add", total, sketch("permute", sketch("add", y, sketch("neg", turned)), dims=(1, 0)))
        sketch("identity", x)
    return sketch.returns(total)


def build_permuted_region(length: int) -> Sketch:
    """Return a region of nodes that compute the same in any order of dims."""
    sketch = Sketch()
    x = sketch("permute", sketch.input(2, 3, 4, 5), dims=(0, 2, 3, 1))
    for i in range(length):
        x = sketch("add", x, sketch("mul", x, i))
    return sketch.returns(sketch("tanh", sketch("permute", x, dims=(0, 3, 1, 2))))


def count_steps(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
    """Count calls of functions while running, and the readers of values that are listed."""
    count = 0
    listing = Value.uses.fget

    def uses(value):
        nonlocal count
        found = listing(value)
        count += len(found)
        return found

    def count_call(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    monkeypatch.setattr(Value, "uses", property(uses))
    sys.setprofile(count_call)
    try:
        run()
    finally:
        sys.setprofile(None)
        monkeypatch.undo()
    return count


@pytest.mark.slow_cases("push-transposes-build_star")
@pytest.mark.parametrize("draw", [build_chain, build_star, build_permuted_region])
@pytest.mark.parametrize("p", PASSES.values(), ids=lambda p: p.name)
def test_pass_steps_grow_linearly_with_nodes(p, draw, monkeypatch):
    """The number of steps grows linearly with the nodes."""
    graphs = [draw(length).graph for length in (20, 160)]
    sizes = [len(graph) for graph in graphs]
    few, many = (count_steps(lambda graph=graph: p(graph, OPERATORS), monkeypatch) for graph in graphs)
    assert many / few < 1.5 * sizes[1] / sizes[0], "eight times the nodes take far more than eight times the steps"


@pytest.mark.parametrize("draw", [build_chain, build_star, build_permuted_region])
def test_pipelines_settle_and_keep_results(draw):
    """The pipelines settle and keep the results."""
    graph = draw(6).graph
    inputs = [torch.randn(tuple(v.type.shape), generator=torch.Generator().manual_seed(0)) for v in graph.inputs]
    for phase in Phase:
        before = len(graph)
        Pipeline.of(PASSES, OPERATORS, phase, check_inputs=inputs).run(graph)
        assert len(graph) < before
        Pipeline.of(PASSES, OPERATORS, phase).run(graph)
