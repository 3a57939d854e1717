"""Guards: a branch on a size is part of the graph, and an input that takes another branch never gets a wrong number."""

import copy
import itertools
import math

import pytest
import sympy
import torch
import transformers
from torch import nn
from torch._dynamo import mark_dynamic
from torch.utils._sympy.functions import FloorDiv
from torchvision.models import swin_transformer

from clika_ref import clika_compile
from clika_ref.capture.tracers import TRACERS
from clika_ref.core.errors import ModelError
from clika_ref.core.guards import check_inputs, is_met
from clika_ref.core.ir import Graph
from clika_ref.core.symbols import Guard, Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType


class Guide(nn.Module):
    """The example of PyTorch's guide to recompilation."""

    def forward(self, x):
        if x.shape[0] == 10:
            return x * 2
        if x.shape[0] <= 30:
            return x * 200
        return x * 20000


def ones(length):
    return torch.ones(length, 3)


def answer(module, x):
    """Return what a module answers: its result, or the text of the error."""
    try:
        return module(x)
    except ModelError as error:
        return str(error)


BRANCH = {10: 2, 20: 200, 30: 200, 31: 20000, 40: 20000}


@pytest.mark.parametrize("lengths", [c for n in (1, 2, 3) for c in itertools.combinations(BRANCH, n)], ids=str)
def test_the_example_of_the_recompilation_guide_never_takes_the_wrong_branch(lengths):
    inputs = [ones(length) for length in lengths]
    if len({BRANCH[length] for length in lengths}) > 1:
        with pytest.raises(
            ModelError, match=r"takes a different branch for input \d.*test_guards.py:\d+.*share a graph"
        ):
            clika_compile(Guide(), tracing_inputs=inputs)
        return
    module = clika_compile(Guide(), tracing_inputs=inputs)
    for length, factor in BRANCH.items():
        result = answer(module, ones(length))
        if isinstance(result, str):
            assert length not in lengths
            assert "dim 0" in result
        else:
            assert torch.equal(result, ones(length) * factor)


def test_a_guarded_module_serves_the_lengths_of_its_branch_and_names_the_guard_for_others():
    module = clika_compile(Guide(), tracing_inputs=[ones(20), ones(25)])
    for length in (2, 9, 11, 20, 30):
        assert torch.equal(module(ones(length)), ones(length) * 200)
    with pytest.raises(
        ModelError, match=r"batch = 10 \(dim 0 of 'x'\) violates Ne\(batch, 10\) \(from test_guards.py:\d+\)"
    ):
        module(ones(10))
    for length in (31, 40):
        with pytest.raises(
            ModelError,
            match=rf"= {length} .* violates batch <= 30 \(from test_guards.py:\d+\). If the model supports it, compile",
        ):
            module(ones(length))


def test_a_branch_that_one_marked_input_takes_is_guarded():
    x = ones(40)
    mark_dynamic(x, 0)
    module = clika_compile(Guide(), tracing_inputs=[x])
    assert torch.equal(module(ones(31)), ones(31) * 20000)
    for length in (10, 20, 30):
        with pytest.raises(ModelError, match=r"violates .*batch"):
            module(ones(length))


def test_the_error_groups_the_inputs_that_would_share_a_graph():
    inputs = [ones(10), ones(20), ones(10), ones(30)]
    with pytest.raises(
        ModelError, match=r"Inputs 2 and 4 would share a graph, inputs 1 and 3 another. Compile once for each"
    ):
        clika_compile(Guide(), tracing_inputs=inputs)


def test_guards_on_two_sides_name_both():
    def compare(x):
        return x * 2 if x.shape[0] > x.shape[1] else x * 3

    module = clika_compile(compare, tracing_inputs=[torch.ones(5, 2), torch.ones(7, 3)])
    assert torch.equal(module(torch.ones(4, 3)), torch.ones(4, 3) * 2)
    with pytest.raises(ModelError, match=r"batch = 3 \(dim 0 of 'x'\), x_1 = 3 \(dim 1 of 'x'\) violates"):
        module(torch.ones(3, 3))


def test_guards_on_products_and_remainders_are_checked():
    def even(x):
        return x * 2 if (x.shape[0] * x.shape[1]) % 2 == 0 else x * 3

    module = clika_compile(even, tracing_inputs=[torch.ones(4, 3), torch.ones(2, 5)])
    assert torch.equal(module(torch.ones(3, 6)), torch.ones(3, 6) * 2)
    with pytest.raises(ModelError, match=r"violates .*from test_guards.py"):
        module(torch.ones(3, 5))


def test_a_branch_on_an_integer_argument_is_guarded():
    def powers(x, n):
        return x * 2 if n > 4 else x * 3

    module = clika_compile(powers, tracing_inputs=[(torch.ones(2), 5), (torch.ones(2), 8)])
    assert torch.equal(module(torch.ones(2), 100), torch.ones(2) * 2)
    with pytest.raises(ModelError, match=r"n = 4 \(n\) violates"):
        module(torch.ones(2), 4)


def test_a_branch_on_the_length_1_is_guarded():
    def squeezed(x):
        return x * 5 if x.shape[0] == 1 else x * 7

    module = clika_compile(squeezed, tracing_inputs=[ones(2), ones(3)])
    with pytest.raises(ModelError, match=r"violates .*from test_guards.py"):
        module(ones(1))
    with pytest.raises(ModelError, match="would share a graph"):
        clika_compile(squeezed, tracing_inputs=[ones(1), ones(3)])


def doubled(x):
    return x * 2 if x.shape[0] == 1 else x * 3


def rectified(x):
    return x.relu() if x.shape[0] == 1 else x


def by_layout(x):
    return x * 2 if x.t().is_contiguous() else x * 3


@pytest.mark.parametrize("values", [torch.zeros, torch.rand], ids=lambda f: f.__name__)
@pytest.mark.parametrize("model", [doubled, rectified, by_layout], ids=lambda f: f.__name__)
def test_a_branch_that_the_values_of_the_inputs_do_not_show_is_guarded_all_the_same(model, values):
    module = clika_compile(model, tracing_inputs=[values(2, 3), values(4, 3)])
    assert torch.equal(module(ones(5)), model(ones(5)))
    with pytest.raises(ModelError, match=r"batch = 1 .*violates Ne\(batch, 1\) \(from "):
        module(ones(1))
    with pytest.raises(ModelError, match=r"Inputs? .* would share a graph"):
        clika_compile(model, tracing_inputs=[values(1, 3), values(4, 3)])


def test_a_branch_of_the_user_is_kept_although_no_result_depends_on_it():
    def idle(x):
        return x + 1 if x.shape[0] == 1 else 1 + x

    module = clika_compile(idle, tracing_inputs=[ones(2), ones(4)])
    with pytest.raises(ModelError, match=r"violates Ne\(batch, 1\)"):
        module(ones(1))


def test_a_branch_of_an_installed_package_on_the_length_1_is_put_to_the_test():
    """``scaled_dot_product_attention`` of transformers asks whether there is more than one query."""
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, use_cache=False)
    model = transformers.GPT2Model(config).eval()
    inputs = [{"input_ids": torch.zeros(1, n, dtype=torch.int64)} for n in (3, 5)]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    ids = torch.tensor([[7]])
    torch.testing.assert_close(module(input_ids=ids)[0], model(input_ids=ids)[0])


def test_the_length_0_is_guarded_where_the_model_treats_it_differently():
    """To torch.export every side is at least 1, so the branch leaves no guard."""

    def averaged(x):
        return x.sum(1) - 7 if x.shape[1] == 0 else x.mean(1)

    module = clika_compile(averaged, tracing_inputs=[torch.ones(2, 3), torch.ones(2, 5)])
    assert torch.equal(module(torch.ones(2, 1)), torch.ones(2))
    assert "symbol x_1: 1.. from dim 1 of 'x'" in str(module.graph)
    with pytest.raises(ModelError, match=r"x_1 = 0 \(dim 1 of 'x'\) violates x_1 >= 1"):
        module(torch.ones(2, 0))


def test_a_size_of_0_that_is_divided_by_violates_a_guard_and_fits_no_side():
    a, b = make_symbol("a"), make_symbol("b")
    guard = Guard(sympy.Eq(FloorDiv(a, b), 2), "")
    assert [is_met(guard, {"a": 4, "b": length}) for length in (2, 1, 0)] == [True, False, False]
    graph = Graph("ratio")
    graph.add_input(TensorType(torch.float32, (a, b)), "x")
    graph.add_input(TensorType(torch.float32, (FloorDiv(a, b),)), "y")
    graph.symbols.update(a=Symbol("a", 0, None, SymbolSource("x", 0)), b=Symbol("b", 0, None, SymbolSource("x", 1)))
    check_inputs(graph, [torch.ones(4, 2), torch.ones(2)])
    with pytest.raises(ModelError, match=r"dim 0 must be .*a//b.* = a division by 0"):
        check_inputs(graph, [torch.ones(4, 0), torch.ones(2)])


def parted(x, y):
    return y.reshape(x.shape[0], -1).sum(1)


def by_remainder(x, y):
    return x * 2 if 64 % x.shape[0] == 0 else y


def by_root(x, y):
    return x * 2 if math.sqrt(x.shape[0] - 2) < 3 else y


@pytest.mark.parametrize(
    ("model", "served"), [(parted, 12), (by_remainder, 16), (by_root, 5)], ids=["parted", "by_remainder", "by_root"]
)
def test_a_guard_without_a_value_for_short_sides_excludes_them(model, served):
    """A guard that divides by a size has none for 0, one that takes a root none for a length below it."""
    y = torch.arange(24.0)
    module = clika_compile(model, tracing_inputs=[(torch.ones(8, 24), y), (torch.ones(4, 24), y)])
    x = torch.ones(served, 24)
    assert torch.equal(module(x, y), model(x, y))
    with pytest.raises(ModelError, match=r"batch = 0 \(dim 0 of 'x'\) violates"):
        module(torch.ones(0, 24), y)


def test_the_length_0_is_served_where_eager_agrees():
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[ones(2), ones(3)])
    assert module(ones(0)).shape == (0, 3)
    assert "symbol batch: 0.. from dim 0" in str(module.graph)


def test_what_a_tracer_assumes_of_lengths_0_and_1_is_guarded(monkeypatch):
    """The second tracer takes every dynamic side to be at least 2 and says so nowhere."""
    plain = next(tracer for tracer in TRACERS if not tracer.oblivious)
    monkeypatch.setattr("clika_ref.capture.tracers.TRACERS", (plain,))

    def special(x):
        return x * 5 if x.shape[0] == 1 else x * 7

    module = clika_compile(special, tracing_inputs=[ones(2), ones(3)])
    assert torch.equal(module(ones(9)), ones(9) * 7)
    with pytest.raises(ModelError, match=r"violates batch >= 2"):
        module(ones(1))


def test_a_length_of_1_that_the_model_treats_like_others_is_served_by_that_tracer_too(monkeypatch):
    plain = next(tracer for tracer in TRACERS if not tracer.oblivious)
    monkeypatch.setattr("clika_ref.capture.tracers.TRACERS", (plain,))
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[ones(2), ones(3)])
    assert module(ones(1)).shape == (1, 3)


def test_squeeze_of_a_side_that_is_1_in_one_input_is_no_silent_change_of_rank():
    def squeezed(x):
        return x.squeeze(0) + 1

    with pytest.raises(ModelError, match="cannot be captured as one graph"):
        clika_compile(squeezed, tracing_inputs=[ones(1), ones(3)])
    module = clika_compile(squeezed, tracing_inputs=[ones(2), ones(3)])
    try:
        result = module(ones(1))
    except ModelError:
        return
    assert result.shape == (3,)


def test_a_loop_over_a_side_fixes_its_length():
    def summed(x):
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + x[i]
        return total

    with pytest.raises(ModelError, match=r"dim 0 of 'x' has the lengths 2, 3 in the inputs, but the model fixes it"):
        clika_compile(summed, tracing_inputs=[ones(2), ones(3)])


def test_an_assertion_on_a_size_holds_in_the_module():
    def halved(x):
        assert x.shape[0] % 2 == 0, "even lengths only"
        return x.reshape(x.shape[0] // 2, 2, 3).sum(1)

    module = clika_compile(halved, tracing_inputs=[ones(4), ones(6)])
    assert torch.equal(module(ones(10)), halved(ones(10)))
    with pytest.raises(ModelError, match="violates"):
        module(ones(5))


def test_a_guard_that_does_not_matter_restricts_nobody(agree):
    """Layout guards of kernels: eager agrees where they do not hold, so they are dropped."""
    agree(nn.Conv2d(3, 4, 3, padding=1), [torch.randn(2, 3, 8, 8), torch.randn(3, 3, 9, 9)], [torch.randn(1, 3, 1, 1)])


def test_guards_survive_a_state_dict_and_a_copy():
    module = clika_compile(Guide(), tracing_inputs=[ones(20), ones(25)])
    again = type(module)()
    again.load_state_dict(module.state_dict())
    for copy_of in (again, copy.deepcopy(module), copy.deepcopy(again)):
        with pytest.raises(ModelError, match="violates"):
            copy_of(ones(10))


def test_an_artifact_records_its_guards(tmp_path):
    module = clika_compile(Guide(), tracing_inputs=[ones(20), ones(25)])
    artifact = module.clika_export(tmp_path / "model.onnx")
    assert any("Ne(batch, 10)" in guard for guard in artifact.facts["guards"])


class Windows(nn.Module):
    """Window attention in small: pads to whole windows, shifts only where there is more than one."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x):
        side = 4
        shift = 0 if side >= x.shape[1] else 2
        x = nn.functional.pad(x, (0, 0, 0, (side - x.shape[1] % side) % side))
        if shift:
            x = torch.roll(x, -shift, 1)
        windows = x.reshape(x.shape[0], x.shape[1] // side, side, 4)
        return self.mix(windows).mean((1, 2))


def test_windows_give_right_numbers_or_an_error_but_never_wrong_numbers():
    torch.manual_seed(0)
    original = Windows().eval()
    inputs = [torch.randn(1, 8, 4), torch.randn(1, 11, 4)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for length in range(1, 14):
        x = torch.randn(1, length, 4)
        result = answer(module, x)
        if isinstance(result, str):
            assert "violates" in result
        else:
            torch.testing.assert_close(result, original(x))
    with pytest.raises(ModelError, match=r"different branch for input \d .*test_guards.py:\d+.*share a graph"):
        clika_compile(original, tracing_inputs=[torch.randn(1, 3, 4), torch.randn(1, 11, 4)])


def test_swin_with_dynamic_height_and_width_names_guard_line_and_groups():
    """A window of 7 over 8 x 10 shifts, over 7 x 7 it does not."""
    torch.manual_seed(0)
    # Two of the four stages of swin_t, one block each, on a quarter of its images: the last stage has the same sizes.
    original = swin_transformer.SwinTransformer([4, 4], 24, [1, 1], [2, 2], [7, 7]).eval()
    inputs = [torch.randn(1, 3, 56, 56), torch.randn(1, 3, 64, 80), torch.randn(1, 3, 64, 64)]
    branch = r"the graph is valid only if .* > 7 \(from torchvision/models/swin_transformer.py:\d+\)"
    groups = "Inputs 2 and 3 would share a graph, input 1 another. Compile once for each group"
    with pytest.raises(ModelError, match=rf"for input 1 \(x_2 = 56, dim 2 of 'x'\): {branch}\. {groups}"):
        clika_compile(original, tracing_inputs=inputs, discard_input_model=False)


def test_swin_serves_the_sizes_that_take_the_same_branches():
    torch.manual_seed(0)
    original = swin_transformer.SwinTransformer([4, 4], 24, [2], [2], [7, 7]).eval()
    inputs = [torch.randn(1, 3, 64, 80), torch.randn(1, 3, 64, 64)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for x in [*inputs, torch.randn(1, 3, 64, 47), torch.randn(1, 3, 64, 28)]:
        result = answer(module, x)
        if isinstance(result, str):
            assert "violates" in result
        else:
            torch.testing.assert_close(result, original(x))
