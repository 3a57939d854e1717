"""L5: dynamic sizes are found, one artifact serves them all, and faults at other sizes are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.cases import CaseRun, GraphCase, Task
from clika_ref_conformance.drawing.reducing.dims import fix_symbols
from clika_ref_conformance.drawing.symbolic.calls import make_symbolic_call
from clika_ref_conformance.drawing.symbolic.graphs import make_dim_dynamic
from clika_ref_conformance.drawing.symbolic.size_dependence import (
    draw_replayable_call,
    flatten_call,
    infer_size_expressions,
    is_explained,
)
from clika_ref_conformance.execution.case_checks import run_case
from clika_ref_conformance.levels import dynamic
from clika_ref_conformance.levels.dynamic import make_symbolic_case
from clika_ref_conformance.profiles import PROFILES
from clika_ref_conformance.suite import Suite
from clika_ref_conformance.verdicts import Verdict
from torch import Tensor

from clika_ref.core.accuracy import DOT, EXACT
from clika_ref.core.errors import TargetError
from clika_ref.core.execution import interpret
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.symbols import is_symbolic
from clika_ref.core.types import TensorType

PROFILE = replace(PROFILES["quick"], shape_profiles=14)


def declare_operator(reference, sampler, lowering, **facts):
    """Return an operator with samples and a lowering."""
    found = operator(**{"error": EXACT, **facts})(reference)
    found.samples(sampler)
    found.onnx(lowering)
    return found


def rows(x: Tensor, *, size: tuple[int, ...]) -> Tensor:
    """``x`` in the shape ``size``."""
    return x.reshape(size)


def flat(draw, s):
    x = draw(s.tensor(rank=3, size=(2, 5)))
    return s.call(x, size=(x.shape[0], x.shape[1] * x.shape[2]))


def halves(x: Tensor, *, length: int) -> Tensor:
    """The first ``length`` elements of ``x``."""
    return x[:length]


def half(draw, s):
    x = draw(s.tensor(rank=1, size=(2, 9)))
    return s.call(x, length=x.shape[0] // 2)


def raise_columns(x: Tensor, index: Tensor) -> Tensor:
    """Return ``x`` with 1 added to the columns ``index``; eager does not define the result for an empty ``x``."""
    return x.index_add(1, index, torch.ones((x.shape[0], index.shape[0])))


def positions(draw, s):
    x = draw(s.tensor(rank=2, size=(1, 5)))
    last = x.shape[1] - 1
    return s.call(x, draw(s.tensor(rank=1, size=(2, 3), dtype=torch.int64, low=0, high=last, domain=(0, last))))


def negate(x: Tensor) -> Tensor:
    """``-x``."""
    return -x


def any_tensor(draw, s):
    return s.call(draw(s.tensor(rank=(1, 3), size=(1, 5))))


def product(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w``."""
    return x @ w


def matrices(draw, s):
    k = draw(s.integers(1, 4))
    return s.call(draw(s.tensor(shape=(draw(s.integers(2, 5)), k))), draw(s.tensor(shape=(k, 3))))


def make_suite(op, folder, target=None, **changes):
    registry = load_registry()
    only = replace(registry, operators={op.name: op})
    return Suite(only, target or registry.targets["onnxruntime"], replace(PROFILE, **changes), folder)


def run_checks(op, folder, **changes):
    suite = make_suite(op, folder, **changes)
    task, graphs = dynamic.tasks(suite)
    assert graphs.subject == dynamic.GRAPHS_SUBJECT
    assert (task.dtype, task.dynamic) == ("float32", True)
    return [check.run() for check in dynamic.checks(task, suite)]


def run_verdicts(op, folder, **changes):
    return {outcome.verdict for outcome in run_checks(op, folder, **changes)}


def test_make_symbolic_call_numbers_become_size_expressions():
    """Numbers that follow sizes become expressions."""
    found = make_symbolic_call(
        draw_replayable_call(declare_operator(rows, flat, lambda op, x, size: op.reshape(x, size)), "0")
    )
    (node,) = found.graph.nodes
    a, b, c = found.graph.inputs[0].type.shape
    assert node.attrs["size"] == (a, b * c)
    assert set(found.graph.symbols) == {str(a), str(b), str(c)}


def test_make_symbolic_call_equal_dims_of_one_draw_share_symbol():
    """Equal dims from one decision get one symbol."""
    found = make_symbolic_call(
        draw_replayable_call(declare_operator(product, matrices, lambda op, x, w: op.MatMul(x, w), error=DOT), "0")
    )
    x, w = (value.type.shape for value in found.graph.inputs)
    assert x[1] == w[0]
    assert is_symbolic(x[1])
    assert w[1] == 3


def test_make_symbolic_call_nonlinear_number_stays_fixed():
    """A call stays static if its numbers follow sizes by no expression."""
    found = make_symbolic_call(draw_replayable_call(declare_operator(halves, half, lambda op, x, length: x), "0"))
    assert found == "no expression of the sizes gives its numbers"


def test_make_symbolic_call_topk_count_becomes_symbol():
    """A number that is no dim becomes a size where ATen allows a SymInt."""
    operators = load_registry().operators
    found = next(
        c
        for c in (make_symbolic_call(draw_replayable_call(operators["topk"], str(n))) for n in range(20))
        if c.input_sizes
    )
    (node,) = found.graph.nodes
    (place,) = found.input_sizes
    assert node.attrs["k"] == place.symbol
    assert [v.type.shape for v in found.graph.inputs][1:] == [(place.symbol,)]
    for run in found.runs:
        fixed = fix_symbols(make_symbolic_case(found, [run], "sizes"), run).graph.outputs[0].type.shape
        assert run.inputs[1].shape[0] == fixed[node.attrs["dim"]]


def test_make_symbolic_call_conv1d_numbers_stay_fixed():
    """A number that no call computes from sizes stays fixed."""
    found = [make_symbolic_call(draw_replayable_call(load_registry().operators["conv1d"], str(n))) for n in range(20)]
    assert [c for c in found if not isinstance(c, str) and c.input_sizes] == []


def test_make_symbolic_call_clipped_number_stays_valid():
    """A number that a size limits stays as drawn, and eager accepts every run."""
    select = load_registry().operators["select"]
    for found in (make_symbolic_call(draw_replayable_call(select, str(n))) for n in range(30)):
        for run in [] if isinstance(found, str) else found.runs:
            fixed = fix_symbols(make_symbolic_case(found, [run], "sizes"), run)
            assert interpret(fixed.graph, run.inputs)  # raises if eager rejects it


def add_sum(x: Tensor, y: Tensor) -> Tensor:
    """``x`` plus the sum of ``y``."""
    return x + y.sum()


def last_two(draw, s):
    x = draw(s.tensor(rank=1, size=(1, 6)))
    return s.call(x, draw(s.tensor(shape=(min(2, x.shape[0]),))))


def test_make_symbolic_call_clamped_size_has_minimum():
    """A size is dynamic above the length where its numbers become linear in it."""
    op = declare_operator(add_sum, last_two, lambda op, x, y: x)
    drawn = next(
        d for d in (draw_replayable_call(op, str(seed)) for seed in range(20)) if d.call.operands[0].shape[0] > 2
    )
    found = make_symbolic_call(drawn)
    assert list(found.ranges.values()) == [(2, 6)]
    assert [v.type.is_static for v in found.graph.inputs] == [False, True]
    lengths = {run.inputs[0].shape[0] for run in found.runs}
    assert min(lengths) == 2
    assert max(lengths) == 6


def parts(x: Tensor, *, start: int, step: int) -> Tensor:
    """Every ``step``-th element of ``x`` from ``start`` on."""
    return x[start::step].clone()


def any_part(draw, s):
    x = draw(s.tensor(rank=(1, 2), size=(2, 5)))
    return s.call(x, start=draw(s.choice(0, 1, 9, 19)), step=draw(s.choice(1, 2, 3)))


def test_call_pool_calls_differ_and_have_elements():
    """The calls of a pool differ in decisions and have elements."""
    pool = dynamic.CallPool(declare_operator(parts, any_part, lambda op, x, start, step: x), 0, 4)
    calls = [pool.call(i).replayable.call for i in range(4)]
    assert all(call.attrs["start"] < 9 for call in calls)
    assert len({(call.attrs["start"], call.attrs["step"]) for call in calls}) == 4
    assert {call.attrs["step"] for call in calls} == {1, 2, 3}
    assert calls[0].operands[0].rank == 2


def halves_or_one(draw, s):
    x = draw(s.tensor(rank=2, size=(4, 9)))
    halved = draw(s.choice(True, True, False))
    return s.call(x, draw(s.tensor(shape=(x.shape[0], x.shape[1] // 2 if halved else 1))))


def test_call_pool_fully_dynamic_calls_come_first():
    """Calls whose dims may all vary come first."""
    op = declare_operator(add_sum, halves_or_one, lambda op, x, y: x)
    pools = [dynamic.CallPool(op, seed, 4) for seed in range(10)]
    assert sum(len(pool.call(0).varied_sizes) == 2 for pool in pools) >= 8  # 3 or 4 without; it is not asked for ever
    assert any(len(pool.call(3).varied_sizes) == 1 for pool in pools)


def test_redraw_with_sizes_same_sizes_repeats_call():
    """Drawing again with the same sizes gives the same call."""
    op = declare_operator(rows, flat, lambda op, x, size: op.reshape(x, size))
    base = draw_replayable_call(op, "0")
    again = base.redraw_with_sizes({})
    assert list(flatten_call(again.call)) == list(flatten_call(base.call))
    assert is_explained(infer_size_expressions(base), base, again)


def test_symbolic_call_runs_end_with_first_size():
    """The runs go up and down and end with the first size."""
    found = make_symbolic_call(draw_replayable_call(declare_operator(negate, any_tensor, lambda op, x: op.Neg(x)), "0"))
    names = [run.name for run in found.runs]
    assert names[:2] == ["as drawn", "maximum"]
    assert names[-1] == "as drawn again"
    sizes = [run.inputs[0].numel() for run in found.runs]
    assert min(sizes) == sizes[-2] < max(sizes)
    assert {run.inputs[0].numel() for run in found.empty()} == {0}


def test_symbolic_call_indexed_dim_stays_nonempty():
    """A dim that indices point into is never empty."""
    found = make_symbolic_call(
        draw_replayable_call(declare_operator(raise_columns, positions, lambda op, x, index: x), "0")
    )
    assert len(found.runs) > 1
    assert len(found.varied_sizes) == 3
    assert [[0 in t.shape for t in run.inputs] for run in found.empty()] == [[True, False], [False, True]]
    assert all(run.inputs[0].shape[1] for run in found.empty())


def test_dynamic_correct_lowering_passes_at_each_size(tmp_path):
    """A correct lowering passes at every size."""
    for op in (
        declare_operator(rows, flat, lambda op, x, size: op.reshape(x, size)),
        declare_operator(negate, any_tensor, lambda op, x: op.Neg(x)),
        declare_operator(product, matrices, lambda op, x, w: op.MatMul(x, w), error=DOT),
    ):
        assert run_verdicts(op, tmp_path) == {Verdict.PASS}


def test_dynamic_frozen_size_fails(tmp_path):
    """A size that is frozen at compilation is reported."""

    def lower_frozen(op, x, size):
        return op.Reshape(x, op.ints([0, 6]))

    wrong = [o for o in run_checks(declare_operator(rows, flat, lower_frozen), tmp_path) if o.verdict.is_failure]
    assert wrong
    assert "so only the dynamic form is wrong" not in wrong[0].comparison.message


def test_dynamic_failure_reduces_to_one_run_and_dim(tmp_path):
    """A failure is reduced to one run, with only the relevant dim dynamic."""

    def lower_frozen(op, x, size):
        return op.reshape(x, (2 if is_symbolic(size[0]) else size[0], -1))

    wrong = next(o for o in run_checks(declare_operator(rows, flat, lower_frozen), tmp_path) if o.verdict.is_failure)
    assert "compiled for this size only: pass, so only the dynamic form is wrong" in wrong.comparison.message
    (run,) = wrong.case.runs
    assert wrong.run == run.name
    assert [t.numel() for t in run.inputs] == [2]  # the least of which two rows can be made
    assert list(wrong.case.graph.symbols) == ["s0_0"]


class KeepsItsBuffer:
    """ONNX Runtime with a buffer that only grows: a smaller result returns the tail of a larger one."""

    def __init__(self):
        self.inner = load_registry().targets["onnxruntime"]

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def load(self, artifact):
        runner = self.inner.load(artifact)
        kept = []

        def run(inputs):
            (result,) = runner(inputs)
            if kept and kept[0].numel() > result.numel():
                return (
                    [kept[0].flatten()[-result.numel() :].reshape(result.shape).clone()] if result.numel() else [result]
                )
            kept[:] = [result]
            return [result]

        return run


def test_dynamic_stale_buffer_fails_dynamic_form(tmp_path):
    """A buffer that is not overwritten fails, and the dynamic form is blamed."""
    found = run_checks(declare_operator(negate, any_tensor, lambda op, x: op.Neg(x)), tmp_path, target=KeepsItsBuffer())
    wrong = [o for o in found if o.verdict is Verdict.VALUE]
    assert wrong
    assert "so only the dynamic form is wrong" in wrong[0].comparison.message
    assert len(wrong[0].case.runs) == 2


def test_dynamic_unsupported_symbol_fixed_and_others_vary(tmp_path):
    """A size that the target rejects by name is fixed; the others still vary."""

    def picky(op, x):
        first = op.shape(x)[0]
        if is_symbolic(first):
            raise TargetError(f"the first dim {first} must be fixed")
        return op.Neg(x)

    found = run_checks(declare_operator(negate, any_tensor, picky), tmp_path, shape_profiles=42)
    assert {o.verdict for o in found} <= {Verdict.PASS, Verdict.UNSUPPORTED}
    assert any((o.verdict is Verdict.PASS and o.case is None) or o.verdict is Verdict.PASS for o in found)
    rejected = [o for o in found if o.verdict is Verdict.UNSUPPORTED]
    assert all("must be fixed" in o.comparison.message for o in rejected)


def test_dynamic_operator_without_dims_not_run(tmp_path):
    """An operator without dims is not run, with a reason."""
    constant = declare_operator(negate, lambda draw, s: s.call(draw(s.tensor(rank=0))), lambda op, x: op.Neg(x))
    (first, _) = run_checks(constant, tmp_path)
    assert first.verdict is Verdict.NOT_RUN
    assert first.comparison.message == "no dim of the drawn call may vary"


def test_dynamic_random_operator_passes_unless_constant(tmp_path):
    """One artifact of a random operator serves all sizes; a constant one fails."""
    noisy = declare_operator(negate, any_tensor, lambda op, x: op.Neg(x), random=True)
    assert {o.verdict for o in run_checks(noisy, tmp_path)} == {Verdict.PASS}
    stuck = declare_operator(negate, any_tensor, lambda op, x: op.scalar(0.0, torch.float32), random=True)
    assert Verdict.STRUCTURE in {o.verdict for o in run_checks(stuck, tmp_path)}


@pytest.mark.parametrize("name", ["softmax", "cat", "conv2d", "quantize", "slice"])
def test_dynamic_common_operators_pass(tmp_path, name):
    """Common operators pass at every size."""
    op = load_registry().operators[name]
    assert run_verdicts(op, tmp_path) == {Verdict.PASS}


def test_dynamic_plan_and_results_repeat(tmp_path):
    """The plan and its results are the same each time."""
    suite = make_suite(declare_operator(negate, any_tensor, lambda op, x: op.Neg(x)), tmp_path)
    task = Task("dynamic", "negate", "float32", dynamic=True)
    assert [c.name for c in dynamic.checks(task, suite)] == ["sizes-0", "sizes-1"]
    first, second = (dynamic.checks(task, suite)[0].run() for _ in range(2))
    assert (first.verdict, first.comparison) == (second.verdict, second.comparison)


def test_dynamic_tensors_of_sampler_vary(tmp_path):
    """Tensors that a sampler makes itself vary too."""

    def sampler(draw, s):
        n = draw(s.integers(2, 6))
        return s.call(torch.arange(float(n)))

    assert run_verdicts(declare_operator(negate, sampler, lambda op, x: op.Neg(x)), tmp_path) == {Verdict.PASS}


def make_chain_case(folder, *names):
    """Return a case of a chain of operators on x[4, 3]."""
    suite = make_suite(declare_operator(negate, any_tensor, lambda op, x: op.Neg(x)), folder)
    graph = Graph("grown")
    build = Builder(graph, load_registry().operators)
    value = graph.add_input(TensorType(torch.float32, (4, 3)), "x")
    for name, *operands in names:
        value = build(name, value, *(graph.add_constant(o, "w") if isinstance(o, Tensor) else o for o in operands))
    graph.add_output(value)
    return GraphCase("grown", graph, [CaseRun("typical", (torch.randn(4, 3),))]), suite


def test_make_dim_dynamic_fixed_graph_runs_at_each_length(tmp_path):
    """A graph of fixed sizes gets a dynamic dim and runs at every length."""
    case, suite = make_chain_case(tmp_path, ("relu",), ("add", 1.0), ("tanh",))
    found = make_dim_dynamic(case)
    assert len(found.graph) == 3
    assert [str(side) for side in found.graph.inputs[0].type.shape] == ["batch", "3"]
    lengths = [run.inputs[0].shape[0] for run in found.runs]
    assert lengths == [4, 9, 1, 7, 0, 0, 4]
    assert run_case(found, suite).verdict is Verdict.PASS


def test_make_dim_dynamic_drops_nodes_of_fixed_length(tmp_path):
    """Nodes that need one length are dropped with their users."""
    case, _ = make_chain_case(tmp_path, ("relu",), ("neg",), ("add", torch.ones(4, 3)), ("tanh",))
    assert [node.op_type for node in make_dim_dynamic(case).graph.nodes] == ["relu", "neg"]


def test_make_dim_dynamic_dim_valid_only_at_0_stays_fixed():
    """A dim that eager accepts only at length 0 stays fixed."""
    graph = Graph("attention")
    build = Builder(graph, load_registry().operators)
    values = build("relu", graph.add_input(TensorType(torch.float32, (4, 3)), "x"))
    query, key = (graph.add_constant(torch.rand(n, 5), "w") for n in (2, 4))
    graph.add_output(build("scaled_dot_product_attention", query, key, values))
    case = GraphCase("attention", graph, [CaseRun("typical", (torch.rand(4, 3),))])
    assert make_dim_dynamic(case).facts["batch"] == 3  # eager takes 4 keys with no values, but with no other number
