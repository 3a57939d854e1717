"""Random calls: their structure is judged, and their distribution compared with eager's."""

import math

import pytest
import random_faults
import torch
from case_references import randn
from clika_ref_conformance.cases import Task
from clika_ref_conformance.judging.distributions import FALSE_ALARM_PROBABILITY, describe_difference
from clika_ref_conformance.judging.judge import CaseReference
from clika_ref_conformance.levels import operators
from clika_ref_conformance.mutants.catalogue import load_mutants
from clika_ref_conformance.verdicts import Verdict
from sampled_operators import find_check, make_suite

from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType

REGISTRY = load_registry()
FAULTS = [*(m for m in load_mutants().values() if m.name.startswith("randomness")), *random_faults.FAULTS.mutants]
COUNT = 700


def plan_checks(name, folder, **changes):
    suite = make_suite(REGISTRY.operators[name], folder=folder, **changes)
    return operators.checks(Task("operators", name, "float32"), suite)


@pytest.mark.parametrize("name", ["randperm", "multinomial", "native_dropout", "log_normal", "feature_alpha_dropout"])
def test_random_correct_lowering_matches_eager_distribution(tmp_path, name):
    """Correct lowerings draw from the distribution of eager."""
    found = {check.name: check.run() for check in plan_checks(name, tmp_path)}
    assert {o.verdict for o in found.values()} == {Verdict.PASS}
    assert found["moments"].comparison.elements > COUNT


@pytest.mark.slow_cases("randomness-3-native_dropout")
@pytest.mark.parametrize("mutant", FAULTS, ids=lambda m: m.name)
def test_random_faulty_lowering_found(tmp_path, mutant):
    """Faults of random operators are found."""
    with mutant.activate(REGISTRY):
        found = {check.name: check.run().verdict for check in plan_checks(mutant.subject, tmp_path, rows=12)}
    assert found["cover-00" if mutant.subject == "rand" else "moments"].is_failure


def test_random_deterministic_calls_skip_moments(tmp_path, monkeypatch):
    """An operator whose calls are deterministic has no check of moments."""
    monkeypatch.setattr(
        REGISTRY.operators["dropout"],
        "sampler",
        lambda draw, s: s.call(draw(s.tensor(rank=1)), p=draw(s.choice(0.0, 1.0)), train=True),
    )
    outcome = find_check(plan_checks("dropout", tmp_path), operators.MOMENTS_CHECK).run()
    assert outcome.verdict is Verdict.NOT_RUN
    assert outcome.comparison.message == "no drawn call is random"


def make_reference(p, x, name="dropout", **attrs):
    op, graph = REGISTRY.operators[name], Graph("call")
    value = graph.add_input(TensorType(torch.float32, tuple(x.shape)), "x")
    call = op.call(value, p=p, **attrs)
    for output in graph.insert(Node(op, call.operands, call.attrs), infer_types(op, call.operands, call.attrs)).outputs:
        graph.add_output(output)
    return CaseReference(graph, [x])


def test_judge_random_operator_with_fixed_result_compared():
    """A random call with a fixed result is judged as any other."""
    x = torch.tensor([1.0, -2.0])
    assert make_reference(0.0, x, train=True).judge([x]).verdict is Verdict.PASS
    assert make_reference(0.0, x, train=True).judge([x + 1]).verdict is Verdict.VALUE
    assert make_reference(1.0, x, train=True).judge([x]).verdict is Verdict.VALUE
    assert make_reference(0.1, x, train=True).judge([x + 1]).verdict is Verdict.PASS


def test_judge_random_output_type_and_nan_checked():
    """A random output has eager's type, and no NaN from finite inputs."""
    x = torch.tensor([1.0, -2.0])
    assert make_reference(0.5, x, train=True).judge([x.double()]).verdict is Verdict.STRUCTURE
    assert make_reference(0.5, x, train=True).judge([x[:1]]).verdict is Verdict.STRUCTURE
    found = make_reference(0.5, x, train=True).judge([x * math.nan])
    assert found.verdict is Verdict.SPECIAL
    assert found.message == "output 0 contains NaN, which eager never draws from finite inputs"
    endless = torch.tensor([math.inf, 1.0])
    assert make_reference(0.5, endless, train=True).judge([endless * 0]).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "kind", [lambda t: t, torch.exp, lambda t: (9 * t).exp(), torch.Tensor.half, torch.Tensor.round]
)
def test_describe_difference_same_distribution_returns_empty(kind):
    """Samples of one distribution are not distinguished."""
    assert [
        describe_difference([kind(randn(COUNT, 4, seed=2 * i))], [kind(randn(COUNT, 4, seed=2 * i + 1))])
        for i in range(50)
    ] == [""] * 50


def test_describe_difference_rounding_ignored():
    """Rounding alone makes no difference."""
    x = torch.linspace(1, 2, 8).expand(COUNT, 8)
    assert describe_difference([x.nextafter(2 * x)], [x]) == ""
    assert describe_difference([x + 0.001], [x]).startswith(
        "the mean of output 0 is 1.001 instead of 1 at 0; 700 draws explain"
    )


def test_describe_difference_bound_equals_theorem():
    """The bound is that of the theorem."""
    ones = torch.ones(COUNT, 1, dtype=torch.float64)
    t = torch.cat([ones, -ones]).reshape(2 * COUNT, 1)
    z = math.sqrt(
        2 * math.log(2 * 5 * 4 / FALSE_ALARM_PROBABILITY)
    )  # of four columns: itself, its square, asinh of it, and that squared
    most = int(z * math.sqrt(2 * COUNT)) // 2
    t[COUNT : COUNT + most] = 1
    flat = torch.zeros_like(t)
    assert "the mean of output 0 is" not in describe_difference([t], [flat])
    t[COUNT + most : COUNT + most + 2] = 1
    assert "the mean of output 0 is" in describe_difference([t], [flat])


def test_describe_difference_outlier_count_reported():
    """Samples beyond eager's min/max are counted and reported."""
    t, e = (torch.randint(0, 8, (COUNT, 1), generator=torch.Generator().manual_seed(i)).float() for i in range(2))
    assert describe_difference([t], [e]) == ""
    t[:60][t[:60] == 7] = 7
    t[::12] = 8
    assert describe_difference([t], [e]).endswith(
        "draws of output 0 by the target are above the maximum by eager, at 0"
    )


def test_describe_difference_compares_correlations():
    """Correlations between outputs and between neighbours are compared."""
    mask = randn(COUNT, 4) > 0
    other = randn(COUNT, 4, seed=1) > 0
    assert describe_difference([mask.float(), mask], [other.float(), other]) == ""
    assert "products of output 1 and an earlier output" in describe_difference(
        [mask.float(), ~mask], [other.float(), other]
    )
    rows, twin = mask[:, :1].expand(-1, 4).float(), other.float()
    assert "products of neighbors in output 0" in describe_difference(
        [rows], [twin]
    ) or "min/max" in describe_difference([rows], [twin])
