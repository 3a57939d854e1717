"""The pipeline of passes: order, fixed point, and errors that name the faulty pass and its change."""

import re
from dataclasses import dataclass

import pytest
import torch

from clika_ref.core.accuracy import EXACT, ulp
from clika_ref.core.errors import PassError
from clika_ref.core.passes import MAX_ROUNDS, Pass, Phase, Pipeline, check_outputs, sort_passes
from clika_ref.core.rewriter import Skip, apply_rules, rule


@dataclass(frozen=True)
class Step:
    """A pass made of a function."""

    name: str
    work: object = lambda graph, operators: None
    after: tuple[str, ...] = ()
    phase: Phase = Phase.CLEAN
    error: object = EXACT
    removes: str = "node"

    def __call__(self, graph, operators, /):
        self.work(graph, operators)


def erase_unused_nodes(graph, _):
    for node in graph.nodes_backward():
        if not node.output.uses:
            graph.erase(node)


@rule("neg")
def replace_by_add(node, build):
    """``-x`` becomes ``x + 1``, which is wrong."""
    return build("add", node.inputs[0], 1)


@rule("add")
def replace_by_neg(node, build):
    """And back."""
    return build("neg", node.inputs[0])


@rule("add")
def scale_up(node, build):
    """``x + 1`` becomes ``x + 1.000001``."""
    x, y = node.inputs
    return build("add", x, 1.000001) if y == 1 and isinstance(y, int) else Skip("another number")


def make_change(r):
    return lambda graph, operators: apply_rules(graph, [r], operators)


def make_pipeline(table, *passes, **options) -> Pipeline:
    return Pipeline(passes, table, **options)


@pytest.fixture
def chain(graph):
    """``neg(x)``."""
    return graph.returns(graph("neg", graph.takes(3)))


def test_pass_dataclass_with_fields_satisfies_protocol():
    """A dataclass with the required fields is a pass."""
    assert isinstance(Step("x"), Pass)


# Order


def pass_names(passes) -> list[str]:
    return [p.name for p in passes]


def test_sort_passes_orders_by_after_then_name():
    """Passes are sorted by `after`, then by name."""
    passes = [Step("c"), Step("a", after=("b",)), Step("d", after=("a",)), Step("b")]
    assert pass_names(sort_passes(passes)) == ["b", "a", "c", "d"]
    assert sort_passes(passes) == sort_passes(passes[::-1])


def test_sort_passes_absent_predecessor_ignored():
    """A missing pass in `after` is ignored."""
    assert pass_names(sort_passes([Step("a", after=("absent",))])) == ["a"]


def test_sort_passes_cycle_raises_with_constraints():
    """A cycle raises an error that lists the constraints."""
    message = "cannot order the passes a, b: they form a cycle (a after b; b after a). Remove one `after`."
    with pytest.raises(PassError, match=re.escape(message)):
        sort_passes([Step("a", after=("b",)), Step("b", after=("a",)), Step("c")])


def test_pipeline_of_phase_includes_earlier_phases(operator_table):
    """A phase includes the passes of earlier phases."""
    passes = {p.name: p for p in (Step("clean"), Step("fuse", phase=Phase.FUSE))}
    assert pass_names(Pipeline.of(passes, operator_table, Phase.CLEAN).passes) == ["clean"]
    assert pass_names(Pipeline.of(passes, operator_table, Phase.FUSE).passes) == ["clean", "fuse"]


# The fixed point


def test_pipeline_runs_to_fixed_point_and_reports(chain, operator_table):
    """Passes run until the graph is unchanged, and each run is reported."""
    told = []
    reports = make_pipeline(operator_table, Step("to-add", make_change(replace_by_add)), Step("idle")).run(
        chain, told.append
    )
    assert chain.kinds == ["add"]
    assert [(r.name, r.changed, r.removed) for r in reports] == [
        ("to-add", True, 0),
        ("idle", False, 0),
    ]
    assert told == reports


def test_pipeline_changed_graph_runs_pass_again(graph, operator_table):
    """A pass runs again after another pass has changed the graph."""
    graph.returns(graph("add", graph("neg", graph.takes(2)), 1))

    @rule("neg")
    def once(node, build):
        """Replace one neg by the pattern of the first pass."""
        return build("add", node.inputs[0], 1)

    first, second = Step("first", make_change(scale_up)), Step("second", make_change(replace_by_add))
    reports = make_pipeline(operator_table, first, second).run(graph)
    assert [(r.name, r.changed) for r in reports] == [
        *(("first", True), ("second", True)),
        *(("first", True), ("second", False)),
    ]
    assert [node.inputs[1] for node in graph.nodes] == [1.000001] * 2


def test_pipeline_unchanged_graph_runs_pass_once(chain, operator_table):
    """A pass does not run again on an unchanged graph."""
    runs = []
    make_pipeline(operator_table, Step("a", lambda *_: runs.append("a")), Step("b", lambda *_: runs.append("b"))).run(
        chain
    )
    assert runs == ["a", "b"]


def test_pipeline_report_counts_removed_nodes(graph, operator_table):
    """The report counts the nodes that a pass removed."""
    y = graph("neg", graph.takes(2))
    graph.returns(y)
    graph("neg", y)

    (report, *_) = make_pipeline(operator_table, Step("sweep", erase_unused_nodes, removes="unread node")).run(graph)
    assert (report.removed, report.removes) == (1, "unread node")


def test_pipeline_oscillating_passes_raise(chain, operator_table):
    """Passes that undo each other raise an error that names them."""
    passes = (Step("forth", make_change(replace_by_add)), Step("back", make_change(replace_by_neg)), Step("idle"))
    message = (
        f"the passes ['back', 'forth'] still change the graph after {MAX_ROUNDS} rounds: each reverts changes of "
        "another. Remove one of them."
    )
    with pytest.raises(PassError, match=re.escape(message)):
        make_pipeline(operator_table, *passes).run(chain)


# Faults


def test_pipeline_broken_invariant_names_pass(chain, operator_table):
    """An error about a broken invariant names the pass."""

    def make_cycle(graph, _):
        node = next(iter(graph.nodes))
        graph.set_input(node, 0, node.output)

    with pytest.raises(PassError, match="before it is computed") as caught:
        make_pipeline(operator_table, Step("fine"), Step("break", make_cycle)).run(chain)
    assert "after the pass break" in caught.value.__notes__


def test_pipeline_changed_outputs_name_pass_and_error_class(chain, operator_table):
    """A pass with changed outputs raises an error with its name and its error class."""
    x = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(
        PassError,
        match=r"pass wrong: it declares the error class exact, but changed output 0: (?s:.*)Mismatched elements: 3 / 3",
    ):
        make_pipeline(operator_table, Step("fine"), Step("wrong", make_change(replace_by_add)), check_inputs=[x]).run(
            chain
        )


def test_pipeline_without_check_inputs_compares_no_outputs(chain, operator_table):
    """Without check inputs, outputs are not compared."""
    make_pipeline(operator_table, Step("wrong", make_change(replace_by_add))).run(chain)
    assert chain.kinds == ["add"]


def test_pipeline_exact_pass_rejects_one_ulp(graph, operator_table):
    """An exact pass may not change an output by one bit; a pass with a ulp bound may."""
    x = torch.tensor([1.0, 2.0])
    for error, fine in ((EXACT, False), (ulp(8), True)):
        copy = graph.clone() if graph.outputs else graph.returns(graph("add", graph.takes(2), 1)).clone()
        run = make_pipeline(operator_table, Step("scale", make_change(scale_up), error=error), check_inputs=[x])
        if fine:
            run.run(copy)
        else:
            with pytest.raises(PassError, match="pass scale: it declares the error class exact"):
                run.run(copy)


def test_pipeline_changed_state_raises(graph, operator_table):
    """A changed state raises an error as a changed output does."""
    x = graph.takes(2)
    graph.add_constant(torch.zeros(2), "memory")
    graph.set_state("memory", graph("neg", x))
    with pytest.raises(PassError, match="pass wrong: it declares the error class exact, but changed output 0"):
        make_pipeline(operator_table, Step("wrong", make_change(replace_by_add)), check_inputs=[torch.ones(2)]).run(
            graph
        )


def test_pipeline_check_preserves_random_state(graph, operator_table):
    """Both runs of a check draw equal random numbers, and the RNG state is restored."""
    x = graph.takes(2)
    y = graph("noise", x)
    graph("neg", y)
    graph.returns(y)

    state = torch.random.get_rng_state()
    make_pipeline(operator_table, Step("sweep", erase_unused_nodes), check_inputs=[torch.ones(2)]).run(graph)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_check_outputs_compares_nan_and_inf():
    """NaN and infinity are compared too."""
    step = Step("keep", error=ulp(8))
    e = torch.tensor([float("nan"), float("inf"), 1.0])
    check_outputs(step, [e], [e.clone()])
    with pytest.raises(PassError, match="pass keep: it declares the error class ulp"):
        check_outputs(step, [e], [torch.tensor([float("inf"), float("inf"), 1.0])])
