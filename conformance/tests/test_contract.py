"""L0: each hole in a declaration is named, and a whole one passes."""

import re
from dataclasses import dataclass, replace

import bad_samples
import pytest
import torch
from clika_ref_conformance.cases import Task
from clika_ref_conformance.drawing.calls.attribute_variation import record_call, vary_single_attributes
from clika_ref_conformance.levels import contract
from clika_ref_conformance.targets.identity import Identity
from clika_ref_conformance.verdicts import Verdict
from sampled_operators import named, shift, suite_of
from torch import Tensor, float32

from clika_ref.core.errors import ClikaError
from clika_ref.core.inference import infer_types
from clika_ref.core.ir import Graph, Node
from clika_ref.core.operators import operator
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import TensorSample
from clika_ref.core.traits import SHARED_QPARAMS
from clika_ref.core.types import TensorType
from clika_ref.onnx_export.emission import emit

OPERATORS = load_registry().operators


def outcome(op, folder, name, **changes):
    suite = suite_of(op, folder=folder, **changes)
    (task,) = contract.tasks(suite)
    assert task == Task("contract", op.name)
    return named(contract.checks(task, suite), name).run()


def declared():
    @operator()
    def bare(x: Tensor, *, k: int = 1, note: str = "") -> Tensor:
        """``k * x``."""
        return x * k

    @bare.onnx
    def _(op, x, *, k, note):
        return op.Mul(x, op.like(x, k))

    return bare


def test_a_whole_declaration_passes_every_check(tmp_path):
    suite = suite_of(shift, folder=tmp_path)
    found = {c.name: c.run().verdict for c in contract.checks(Task("contract", "shift"), suite)}
    names = {
        "schema",
        "samples",
        "unsupported-reason",
        "consumption",
        "sensitivity-by",
        "sensitivity-dim",
        "sensitivity-twice",
    }
    assert found == dict.fromkeys(names, Verdict.PASS)


def test_types_and_a_docstring_are_asked_for(tmp_path):
    @operator()
    def vague(x, *, k=1):
        return x

    found = outcome(vague, tmp_path, "schema")
    assert (found.verdict, found.comparison.message) == (Verdict.CONTRACT, "vague(x, *, k=1): give x, k a type")

    @operator()
    def silent(x: Tensor) -> Tensor:
        return x

    assert (
        outcome(silent, tmp_path, "schema").comparison.message == "silent has no docstring that says what it computes"
    )


def test_an_operator_without_samples_is_named_and_nothing_else_is_looked_at(tmp_path):
    mute = declared()
    found = outcome(mute, tmp_path, "samples")
    assert found.verdict is Verdict.CONTRACT
    assert "bare has no samples, so nothing is known of it; declare some with @bare.samples" in found.comparison.message
    assert outcome(mute, tmp_path, "consumption").verdict is Verdict.NOT_RUN


def test_an_attribute_of_which_one_value_is_drawn_is_named(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note="a"))
    message = outcome(bare, tmp_path, "samples").comparison.message
    assert message == "the samples of bare draw one value only of note: draw at least two"


def test_an_attribute_that_decides_and_is_never_read_is_named(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert outcome(bare, tmp_path, "consumption").verdict is Verdict.PASS

    @bare.onnx
    def _(op, x, *, k, note):
        return op.Identity(x)

    found = outcome(bare, tmp_path, "consumption")
    assert found.verdict is Verdict.CONTRACT
    assert "the lowering of bare never reads k in bare(float32[" in found.comparison.message
    assert "which eager computes differently with k=" in found.comparison.message


def test_a_lowering_that_hands_all_attributes_on_reads_them(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    bare.onnx(lambda op, x, **attrs: op.Mul(x, op.like(x, attrs["k"])))
    assert outcome(bare, tmp_path, "consumption").verdict is Verdict.PASS


def test_a_call_that_the_operator_does_not_take_is_blamed_on_the_samples_that_return_it(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), kay=draw(s.choice(1, 2)), note="a"))
    message = outcome(bare, tmp_path, "samples").comparison.message
    assert re.search(r"\(in test_contract\.py, line \d+: in what the samples that begin there return\)", message), (
        message
    )


def test_samples_that_raise_are_blamed_with_what_they_had_drawn_and_leave_the_rest_unknown(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor(rank=0, dtype=(float32,))), k=draw(s.choice(3)) // 0))
    found = outcome(bare, tmp_path, "samples")
    assert found.verdict is Verdict.SAMPLE
    message = found.comparison.message
    assert message.startswith("the samples of bare raise ZeroDivisionError: ")
    assert "(in test_contract.py, line " in message
    assert "after it drew TensorSample(dtype=torch.float32, shape=()" in message
    assert message.endswith(", 3")
    for name in ("unsupported-reason", "consumption", "sensitivity-k"):
        found = outcome(bare, tmp_path, name)
        assert found.verdict is Verdict.NOT_RUN
        assert found.comparison.message.endswith("; see contract/bare")


@pytest.mark.parametrize("source", ["random", "torch", "numpy"])
def test_samples_that_draw_from_a_generator_of_the_process_are_blamed(tmp_path, source):
    bare = declared()
    drawn = bad_samples.SOURCES[source]
    bare.samples(lambda draw, s: s.call(draw(s.tensor(dtype=(float32,))), k=drawn(), note=draw(s.choice("a", "b"))))
    found = outcome(bare, tmp_path, "samples")
    assert found.verdict is Verdict.SAMPLE
    assert re.search(r"the samples of bare draw bare\(.*, and with the same seed bare\(", found.comparison.message)
    assert found.comparison.message.endswith("nothing from the generators of random, torch or numpy")


def test_tensors_that_samples_make_are_compared_by_their_elements(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(torch.rand(2000), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert outcome(bare, tmp_path, "samples").verdict is Verdict.SAMPLE
    bare.samples(lambda draw, s: s.call(torch.ones(2000), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert outcome(bare, tmp_path, "samples").verdict is Verdict.PASS


def test_a_vacuous_attribute_says_so(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2)), note=draw(s.choice("a", "b"))))
    assert outcome(bare, tmp_path, "sensitivity-k").verdict is Verdict.PASS
    found = outcome(bare, tmp_path, "sensitivity-note")
    assert found.verdict is Verdict.NOT_RUN
    assert found.comparison.message == (
        "note never changes what the samples of bare draw, on typical elements: that a target honours it shows only in "
        "calls that differ in more, and on special elements"
    )


def test_an_operator_without_a_lowering_is_refused_with_a_reason(tmp_path):
    bare = declared()
    bare.samples(lambda draw, s: s.call(draw(s.tensor()), k=draw(s.choice(1, 2))))
    bare.lowering = None
    assert outcome(bare, tmp_path, "unsupported-reason").verdict is Verdict.PASS
    assert outcome(bare, tmp_path, "consumption").comparison.message == "bare has no ONNX lowering"


def test_a_refusal_without_a_reason_is_named(tmp_path):
    @dataclass(frozen=True)
    class Mute(Identity):
        def unsupported_reason(self, node):
            return " "

    suite = replace(suite_of(shift, folder=tmp_path), target=Mute())
    found = named(contract.checks(Task("contract", "shift"), suite), "unsupported-reason").run()
    assert found.verdict is Verdict.CONTRACT
    assert found.comparison.message == "identity refuses shift without a reason: ' '"


def test_a_refusal_without_a_reason_is_named_whichever_call_it_is_of(tmp_path):
    @dataclass(frozen=True)
    class MuteAtTimes(Identity):
        def unsupported_reason(self, node):
            return "" if node.inputs[0].type.rank > 1 else None

    suite = replace(suite_of(shift, folder=tmp_path), target=MuteAtTimes())
    found = named(contract.checks(Task("contract", "shift"), suite), "unsupported-reason").run()
    assert found.verdict is Verdict.CONTRACT


def test_an_operand_that_is_never_drawn_is_named(tmp_path):
    @operator()
    def two(x: Tensor, y: Tensor | None = None) -> Tensor:
        """``x`` or ``x + y``."""
        return x if y is None else x + y

    two.samples(lambda draw, s: s.call(draw(s.tensor())))
    assert outcome(two, tmp_path, "samples").comparison.message == "the samples of two never draw y"


def test_all_that_samples_leave_out_is_told_at_once(tmp_path):
    @operator()
    def three(x: Tensor, y: Tensor | None = None, z: Tensor | None = None, *, k: int = 1) -> Tensor:
        """``x`` and what is there of the others."""
        return x if z is None else x + z

    three.samples(lambda draw, s: s.call(x := draw(s.tensor()), None, draw(s.tensor(shape=x.shape)), k=2))
    assert outcome(three, tmp_path, "samples").comparison.message == (
        "the samples of three draw one value only of k: draw at least two; they never draw y; they never leave out z"
    )


def test_neighbours_differ_in_one_attribute_and_in_no_operand():
    traced = record_call(shift, "seed")
    found = list(vary_single_attributes(shift, traced))
    assert {name for name, _ in found} <= {"by", "dim", "twice"}
    assert found
    for name, call in found:
        assert call.operands == traced.call.operands
        assert [n for n in call.attrs if call.attrs[n] != traced.call.attrs[n]] == [name]


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_samples_of_every_declared_operator_vary_every_attribute(name, tmp_path):
    assert outcome(OPERATORS[name], tmp_path, "samples").comparison.message == ""


def test_an_attribute_of_a_wrong_kind_is_taken_or_refused_by_an_error_of_ours():
    refused = 0
    for op in (op for op in OPERATORS.values() if op.sampler is not None and op.lowering is not None):
        call = record_call(op, "seed").call
        operands = [TensorType(o.dtype, o.shape) if isinstance(o, TensorSample) else o for o in call.operands]
        for name in op.attributes:
            graph = Graph("wrong")
            inputs = [graph.add_input(o, "x") if isinstance(o, TensorType) else o for o in operands]
            try:
                graph.insert(
                    node := Node(op, inputs, {**call.attrs, name: "no such value"}), infer_types(op, inputs, node.attrs)
                )
                emit(graph)
            except ClikaError:
                refused += 1
    assert refused > 300


def test_a_trait_that_claims_too_much_breaks_the_contract_and_a_random_call_tells_nothing(tmp_path):
    @operator(quant=SHARED_QPARAMS)
    def halved(x: Tensor, *, random: bool = True) -> Tensor:
        """``x / 2``."""
        return x / 2

    halved.samples(lambda draw, s: s.call(draw(s.tensor(rank=(1, 2))), random=draw(s.booleans())))
    found = outcome(halved, tmp_path, "trait")
    assert found.verdict is Verdict.CONTRACT
    assert "is declared as shared-qparams, but it returns" in found.comparison.message
    halved.random = True
    found = outcome(halved, tmp_path, "trait")
    assert found.verdict is Verdict.NOT_RUN
    assert found.comparison.message == "no call of halved is the same twice and taken by eager"
