"""One case on one target: each fault of a target has its verdict, and a target without fault passes."""

import re
import signal
from dataclasses import replace

import pytest
import torch
from clika_ref_conformance.cases import Case, Run
from clika_ref_conformance.execution.case_checks import (
    has_same_bits,
    is_in_share,
    run_case,
    select_representative,
)
from clika_ref_conformance.execution.error_attribution import reset_sigint
from clika_ref_conformance.verdicts import Comparison, Verdict
from small_cases import REGISTRY, X, case_of, suite_for

from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.types import TensorType


@pytest.mark.parametrize("x", [X.clone(), X.clone()[:1].expand(X.shape), X.clone().mT])
def test_inputs_that_a_target_writes_into_hold_again_what_they_held(tmp_path, x):
    held = x.clone()
    for _ in range(2):  # a target that writes the same again would pass the second time
        outcome = run_case(case_of(("relu", {}), x=x), suite_for(tmp_path, "writes-alike"))
        assert outcome.verdict is Verdict.CONTRACT
        assert torch.equal(x, held)


@pytest.mark.parametrize("passes", [False, True])
def test_a_target_without_fault_passes(tmp_path, passes):
    outcome = run_case(case_of(("exp", {}), ("relu", {}), passes=passes), suite_for(tmp_path))
    assert outcome.verdict is Verdict.PASS, outcome.comparison
    assert outcome.comparison.elements == 12
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "verdict", "message"),
    [
        ("refuses", Verdict.UNSUPPORTED, "relu: it is a Tuesday"),
        ("refusal-raises", Verdict.CONTRACT, "unsupported_reason.* failed: KeyError: 'rank'"),
        ("refusal-empty", Verdict.CONTRACT, "unsupported_reason.* is '': return None, or the reason in words"),
        ("refusal-number", Verdict.CONTRACT, "unsupported_reason.* is 3: return None, or the reason in words"),
        ("compile-raises", Verdict.UNDECLARED, "compiling failed, and the target did not refuse.*no such kernel"),
        ("compile-leaves", Verdict.UNDECLARED, "compiling failed, and the target did not refuse.*usage: compiler FILE"),
        ("load-raises", Verdict.ARTIFACT, "loading the artifact failed.*the file is damaged"),
        ("run-raises", Verdict.UNDECLARED, "running failed.*illegal instruction"),
        ("memory", Verdict.MEMORY, "compiling ran out of memory"),
        ("no-list", Verdict.STRUCTURE, "returned a Tensor instead of a list of tensors"),
        ("arrays", Verdict.STRUCTURE, "returned a list of ndarray instead"),
        ("elsewhere", Verdict.STRUCTURE, "output 0 is strided on meta; a runner returns strided tensors on the CPU"),
        ("sparse", Verdict.STRUCTURE, "output 0 is sparse_coo on cpu; a runner returns strided tensors on the CPU"),
        ("too-many", Verdict.STRUCTURE, "returned 2 outputs instead of 1"),
        ("too-few", Verdict.STRUCTURE, "returned 0 outputs instead of 1"),
        ("dtype", Verdict.STRUCTURE, "float64"),
        ("shape", Verdict.STRUCTURE, r"\[1, 2, 3\]"),
        ("view", Verdict.CONTRACT, "output 0 is a view of input 0"),
        ("array-view", Verdict.CONTRACT, "output 0 is a view of input 0"),
        ("writes", Verdict.CONTRACT, "wrote into its input 0"),
        ("reuses", Verdict.CONTRACT, "a later run changed the tensors"),
        ("value", Verdict.VALUE, ""),
    ],
)
def test_each_fault_of_a_target_has_its_verdict(tmp_path, fault, verdict, message):
    x = X.abs() + 1
    outcome = run_case(case_of(("relu", {}), x=x), suite_for(tmp_path, fault))
    assert outcome.verdict is verdict, outcome.comparison
    assert re.search(message, outcome.comparison.message, re.DOTALL), outcome.comparison.message
    assert outcome.case is not None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["compile", "load", "run"])
def test_a_target_that_writes_into_weights_is_blamed_and_the_weights_hold_again_what_they_held(
    tmp_path, monkeypatch, when
):
    g = Graph("weighted")
    weight = torch.ones(2, 3)
    value = g.add_constant(weight, "weight")
    g.add_output(Builder(g, REGISTRY.operators)("add", g.add_input(TensorType(X.dtype, tuple(X.shape)), "x"), value))
    suite = suite_for(tmp_path)
    whole = {name: getattr(type(suite.target), name) for name in ("compile", "load")}

    def spoil(name):
        def spoiled(*args, **kwargs):
            weight.view(-1)[:1].mul_(-3)
            return whole[name](*args, **kwargs)

        return spoiled

    if when == "run":
        monkeypatch.setattr(type(suite.target), "load", lambda *args: lambda inputs: [weight.mul_(-3)[:2] + inputs[0]])
    else:
        monkeypatch.setattr(type(suite.target), when, spoil(when))
    outcome = run_case(Case("weighted", g, [Run("x", (X,))]), suite)
    assert (outcome.verdict, outcome.comparison.message) == (
        Verdict.CONTRACT,
        "the target wrote into the weight weight, which is the model's own",
    )
    assert torch.equal(weight, torch.ones(2, 3))


def test_a_keyboard_interrupt_is_the_fault_of_a_target_where_no_person_can_have_made_it(tmp_path):
    case, suite = case_of(("relu", {})), suite_for(tmp_path, "compile-interrupts")
    with pytest.raises(KeyboardInterrupt):
        run_case(case, suite)
    before = signal.getsignal(signal.SIGINT)
    reset_sigint()
    try:
        outcome = run_case(case, suite)
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.verdict is Verdict.UNDECLARED
    assert outcome.comparison.message == "compiling failed, and the target did not refuse: KeyboardInterrupt: "


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("fault", "share"), [("drifts", 0.0), ("depends-on-compilation", 1.0)])
def test_results_that_change_are_found_where_the_judge_would_not_mind(tmp_path, fault, share, dtype):
    suite = suite_for(tmp_path, fault)
    suite = replace(suite, profile=replace(suite.profile, share_of_artifacts=share))
    case = case_of(("detach", {}), x=torch.full((2, 3), 1000).to(dtype))
    found = run_case(case, suite)
    assert found.verdict is Verdict.NONDETERMINISTIC
    assert re.match(
        r"output 0\[0, 0\] is (1001|1000.0\d+|1004.0|False) .*, and was (1000(.0)?|True); 6 of 6",
        found.comparison.message,
    )
    assert run_case(case, suite_for(tmp_path)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("wrong-in-turn", r"output 0.* on a second run, and was .* elements are others"),
        ("wrong-in-turn-reused", r"output 0.* on a second run, and was .* elements are others"),
        ("wrong-then-raises", r"on a second run: running failed.*; on the first: output 0.* instead of "),
    ],
)
def test_what_is_wrong_on_one_run_and_right_on_another_is_no_wrong_value(tmp_path, fault, said):
    outcome = run_case(case_of(("relu", {})), suite_for(tmp_path, fault))
    assert outcome.verdict is Verdict.NONDETERMINISTIC
    assert re.match(said, outcome.comparison.message, re.DOTALL), outcome.comparison
    assert run_case(case_of(("relu", {})), suite_for(tmp_path, "value")).verdict is Verdict.VALUE


def test_a_case_is_compiled_once_unless_its_share_says_twice(tmp_path):
    for share, compilations in ((0.0, ["model.onnx"]), (1.0, ["model.onnx", "again.onnx"])):
        suite = suite_for(tmp_path)
        run_case(case_of(("relu", {})), replace(suite, profile=replace(suite.profile, share_of_artifacts=share)))
        assert suite.target.compilations == compilations


def test_random_calls_may_differ_between_runs(tmp_path):
    case = case_of(("dropout", {"p": 0.5, "train": True}), x=torch.ones(100))
    assert run_case(case, suite_for(tmp_path)).verdict is Verdict.PASS


def test_an_output_that_is_an_input_or_stands_twice_can_be_compiled(tmp_path):
    graph = Graph("pass-through")
    x = graph.add_input(TensorType(X.dtype, tuple(X.shape)), "x")
    y = Builder(graph, REGISTRY.operators)("relu", x)
    for value in (x, y, y):
        graph.add_output(value)
    suite = replace(suite_for(tmp_path), target=REGISTRY.targets["onnxruntime"])
    outcome = run_case(Case("pass-through", graph, [Run("typical", (X,))]), suite)
    assert outcome.verdict is Verdict.PASS, outcome.comparison


def test_a_call_that_eager_refuses_is_the_fault_of_the_sample(tmp_path):
    case = case_of(("relu", {}))
    case = replace(case, runs=[Run("wrong", (torch.ones(1, dtype=torch.complex64),))])
    outcome = run_case(case, suite_for(tmp_path))
    assert outcome.verdict is Verdict.SAMPLE
    assert "eager refuses the call" in outcome.comparison.message


def test_the_run_that_decides_is_named(tmp_path):
    case = case_of(("exp", {}))
    runs = [*case.runs, Run("last", (torch.full_like(X, torch.nan),))]
    outcome = run_case(replace(case, runs=runs), suite_for(tmp_path, "no-nan"))
    assert (outcome.verdict, outcome.run) == (Verdict.SPECIAL, "last")


def test_same_bits_minds_dtype_shape_and_the_sign_of_zero_but_not_nan():
    zero, nan = torch.zeros(2), torch.tensor([torch.nan, 1.0])
    assert has_same_bits(nan, nan.clone())
    assert not has_same_bits(zero, -zero)
    assert not has_same_bits(zero, zero.double())
    assert not has_same_bits(zero, zero[None])
    assert not has_same_bits(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_a_share_is_chosen_by_name():
    chosen = [name for name in map(str, range(2000)) if is_in_share(name, 0.1)]
    assert 150 < len(chosen) < 250
    assert all(is_in_share(name, 0.5) for name in chosen)
    assert not any(is_in_share(name, 0.0) for name in chosen)


def test_inputs_that_prove_too_little_leave_the_word_to_others(tmp_path):
    graph = Graph("step")
    x = graph.add_input(TensorType(torch.float32, (4,)), "x")
    build = Builder(graph, REGISTRY.operators)
    graph.add_output(build("floor", build("exp", build("log", x))))
    near, clear = Run("near", (torch.tensor([2.0, 3.0, 5.0, 7.0]),)), Run("clear", (torch.tensor([2.5] * 4),))
    suite = suite_for(tmp_path)
    strict = replace(suite, profile=replace(suite.profile, trusts_eager=False))
    alone = run_case(Case("step", graph, [near]), strict)
    assert alone.verdict is Verdict.NOT_RUN
    assert alone.comparison.message == "rounding decides 4 of 4 elements: either is right"
    both = run_case(Case("step", graph, [near, clear]), strict)
    assert (both.verdict, both.run) == (Verdict.PASS, "clear")
    assert run_case(Case("step", graph, [near]), suite).verdict is Verdict.PASS, "these are eager's bits"


def test_a_deviation_speaks_before_what_passed_and_that_before_what_could_not_be_judged():
    lost = ("lost", Comparison(Verdict.NOT_RUN, ratio=3.0))
    right, worse = ("right", Comparison(Verdict.PASS)), ("worse", Comparison(Verdict.PASS, ratio=0.5))
    other = ("other", Comparison(Verdict.DEVIATION))
    assert select_representative([lost, right, other, worse]) == other
    assert select_representative([lost, right, worse]) == worse
    assert select_representative([lost]) == lost


def test_the_elements_of_all_runs_are_counted():
    few = ("few", Comparison(Verdict.PASS, ratio=0.5, elements=3, unstable=1))
    many = ("many", Comparison(Verdict.PASS, elements=40, ambiguous=2, unstable=4))
    run, told = select_representative([few, many])
    assert (run, told.elements, told.ambiguous, told.unstable) == ("few", 43, 2, 5)
