"""Guards: a branch on a size is part of the graph, and inputs of another branch raise an error."""

import copy
import itertools
import math

import pytest
import sympy
import torch
import transformers
from torch import nn
from torch._dynamo import mark_dynamic
from torch.nn import functional
from torch.utils._sympy.functions import FloorDiv
from torchvision.models import swin_transformer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from clika_ref import clika_compile
from clika_ref.capture.tracers import TRACERS
from clika_ref.core import guards
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


def make_ones(length):
    return torch.ones(length, 3)


def call_or_read_error(module, x):
    """Return the result of a module, or the text of its error."""
    try:
        return module(x)
    except ModelError as error:
        return str(error)


BRANCH = {10: 2, 20: 200, 30: 200, 31: 20000, 40: 20000}


@pytest.mark.parametrize("lengths", [c for n in (1, 2, 3) for c in itertools.combinations(BRANCH, n)], ids=str)
def test_guards_recompilation_guide_never_takes_wrong_branch(lengths):
    """The example of the recompilation guide never takes the wrong branch."""
    inputs = [make_ones(length) for length in lengths]
    if len({BRANCH[length] for length in lengths}) > 1:
        with pytest.raises(
            ModelError, match=r"takes a different branch for input \d.*test_guards.py:\d+.*share a graph"
        ):
            clika_compile(Guide(), tracing_inputs=inputs)
        return
    module = clika_compile(Guide(), tracing_inputs=inputs)
    for length, factor in BRANCH.items():
        result = call_or_read_error(module, make_ones(length))
        if isinstance(result, str):
            assert length not in lengths
            assert "dim 0" in result
        else:
            assert torch.equal(result, make_ones(length) * factor)


def test_guards_serve_branch_and_name_violation():
    """A guarded module serves its branch and names the guard for other lengths."""
    module = clika_compile(Guide(), tracing_inputs=[make_ones(20), make_ones(25)])
    for length in (2, 9, 11, 20, 30):
        assert torch.equal(module(make_ones(length)), make_ones(length) * 200)
    with pytest.raises(
        ModelError, match=r"batch = 10 \(dim 0 of 'x'\) violates Ne\(batch, 10\) \(from test_guards.py:\d+\)"
    ):
        module(make_ones(10))
    for length in (31, 40):
        with pytest.raises(
            ModelError,
            match=rf"= {length} .* violates batch <= 30 \(from test_guards.py:\d+\). If the model supports it, compile",
        ):
            module(make_ones(length))


def test_long_guard_replaced_by_its_line(monkeypatch):
    """The message of a violation names the line of a long guard, not its thousands of characters."""
    module = clika_compile(Guide(), tracing_inputs=[make_ones(20), make_ones(25)])
    monkeypatch.setattr(guards, "MAX_GUARD_LENGTH", 9)
    with pytest.raises(ModelError, match=r"violates a long condition on sizes \(from test_guards.py:\d+\)"):
        module(make_ones(10))


def test_guards_of_single_marked_input():
    """A branch that one marked input takes is guarded."""
    x = make_ones(40)
    mark_dynamic(x, 0)
    module = clika_compile(Guide(), tracing_inputs=[x])
    assert torch.equal(module(make_ones(31)), make_ones(31) * 20000)
    for length in (10, 20, 30):
        with pytest.raises(ModelError, match=r"violates .*batch"):
            module(make_ones(length))


def test_guards_error_groups_inputs_by_graph():
    """The error groups the inputs that would share a graph."""
    inputs = [make_ones(10), make_ones(20), make_ones(10), make_ones(30)]
    with pytest.raises(
        ModelError, match=r"Inputs 2 and 4 would share a graph, inputs 1 and 3 another. Compile once for each"
    ):
        clika_compile(Guide(), tracing_inputs=inputs)


def test_guards_on_two_dims_name_both():
    """A guard on two dims names both."""

    def compare(x):
        return x * 2 if x.shape[0] > x.shape[1] else x * 3

    module = clika_compile(compare, tracing_inputs=[torch.ones(5, 2), torch.ones(7, 3)])
    assert torch.equal(module(torch.ones(4, 3)), torch.ones(4, 3) * 2)
    with pytest.raises(ModelError, match=r"batch = 3 \(dim 0 of 'x'\), x_1 = 3 \(dim 1 of 'x'\) violates"):
        module(torch.ones(3, 3))


def test_guards_on_multiplied_sizes_and_remainders_checked():
    """Guards on multiplied sizes and remainders are checked."""

    def branch_on_even_product(x):
        return x * 2 if (x.shape[0] * x.shape[1]) % 2 == 0 else x * 3

    module = clika_compile(branch_on_even_product, tracing_inputs=[torch.ones(4, 3), torch.ones(2, 5)])
    assert torch.equal(module(torch.ones(3, 6)), torch.ones(3, 6) * 2)
    with pytest.raises(ModelError, match=r"violates .*from test_guards.py"):
        module(torch.ones(3, 5))


def test_guards_on_integer_argument():
    """A branch on an integer argument is guarded."""

    def branch_on_integer(x, n):
        return x * 2 if n > 4 else x * 3

    module = clika_compile(branch_on_integer, tracing_inputs=[(torch.ones(2), 5), (torch.ones(2), 8)])
    assert torch.equal(module(torch.ones(2), 100), torch.ones(2) * 2)
    with pytest.raises(ModelError, match=r"n = 4 \(n\) violates"):
        module(torch.ones(2), 4)


def test_guards_on_length_one():
    """A branch on the length 1 is guarded."""

    def branch_on_length_one(x):
        return x * 5 if x.shape[0] == 1 else x * 7

    module = clika_compile(branch_on_length_one, tracing_inputs=[make_ones(2), make_ones(3)])
    with pytest.raises(ModelError, match=r"violates .*from test_guards.py"):
        module(make_ones(1))
    with pytest.raises(ModelError, match="would share a graph"):
        clika_compile(branch_on_length_one, tracing_inputs=[make_ones(1), make_ones(3)])


def halve(x):
    return functional.max_pool1d(functional.avg_pool1d(x, 2, 1), 3, 2, 1)


def join_pyramid(x):
    """Join features of a stride of 8 with those of a stride of 32, as detectors do."""
    fine = halve(functional.max_pool1d(x, 1, 4))
    return torch.cat([fine, functional.interpolate(halve(halve(fine)), scale_factor=4.0)], 1)


def test_guards_on_nested_divisions_serve_each_equal_size():
    """Sizes after pooling and upsampling must agree: an equation that sympy cannot solve for the length."""
    module = clika_compile(join_pyramid, tracing_inputs=[torch.rand(1, 3, 64), torch.rand(2, 3, 192)])
    for length in (96, 100, 128):
        x = torch.rand(3, 3, length)
        assert torch.equal(module(x), join_pyramid(x))
    with pytest.raises(ModelError, match=r"x_2 = 112 \(dim 2 of 'x'\) violates Eq\(.* \(from .*test_guards.py:"):
        module(torch.rand(3, 3, 112))


def double_if_single(x):
    return x * 2 if x.shape[0] == 1 else x * 3


def rectify_if_single(x):
    return x.relu() if x.shape[0] == 1 else x


def branch_on_layout(x):
    return x * 2 if x.t().is_contiguous() else x * 3


@pytest.mark.parametrize("values", [torch.zeros, torch.rand], ids=lambda f: f.__name__)
@pytest.mark.parametrize("model", [double_if_single, rectify_if_single, branch_on_layout], ids=lambda f: f.__name__)
def test_guards_branch_hidden_by_input_data_kept(model, values):
    """A branch is guarded even if the data of the inputs does not show it."""
    module = clika_compile(model, tracing_inputs=[values(2, 3), values(4, 3)])
    assert torch.equal(module(make_ones(5)), model(make_ones(5)))
    with pytest.raises(ModelError, match=r"batch = 1 .*violates Ne\(batch, 1\) \(from "):
        module(make_ones(1))
    with pytest.raises(ModelError, match=r"Inputs? .* would share a graph"):
        clika_compile(model, tracing_inputs=[values(1, 3), values(4, 3)])


def test_guards_branch_without_effect_kept():
    """A branch of the user is guarded even if no result depends on it."""

    def add_in_either_order(x):
        return x + 1 if x.shape[0] == 1 else 1 + x

    module = clika_compile(add_in_either_order, tracing_inputs=[make_ones(2), make_ones(4)])
    with pytest.raises(ModelError, match=r"violates Ne\(batch, 1\)"):
        module(make_ones(1))


def test_guards_branch_of_package_on_length_one_dropped():
    """Transformers' branch on a query length of 1 is tested and dropped."""
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20, use_cache=False)
    model = transformers.GPT2Model(config).eval()
    inputs = [{"input_ids": torch.zeros(1, n, dtype=torch.int64)} for n in (3, 5)]
    module = clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    ids = torch.tensor([[7]])
    torch.testing.assert_close(module(input_ids=ids)[0], model(input_ids=ids)[0])


class PixelAttention(nn.Module):
    """Attention between all pixels by transformers, which branches on their number."""

    is_causal = False

    def forward(self, x):
        pixels = x.flatten(2).transpose(1, 2)[:, None]
        return sdpa_attention_forward(self, pixels, pixels, pixels, None)[0]


def test_guards_branch_of_package_on_product_of_sizes_dropped():
    """A branch on the number of pixels is tested at an image of one, which no change of a single dim gives."""
    inputs = [torch.rand(1, 3, 4, 5), torch.rand(2, 3, 6, 7)]
    module = clika_compile(PixelAttention(), tracing_inputs=inputs)
    pixel = torch.rand(2, 3, 1, 1)
    torch.testing.assert_close(module(pixel), PixelAttention()(pixel))


def test_guards_on_length_zero():
    """A branch on the length 0 is guarded, although torch.export records no guard for it."""

    def average_or_subtract(x):
        return x.sum(1) - 7 if x.shape[1] == 0 else x.mean(1)

    module = clika_compile(average_or_subtract, tracing_inputs=[torch.ones(2, 3), torch.ones(2, 5)])
    assert torch.equal(module(torch.ones(2, 1)), torch.ones(2))
    assert "symbol x_1: 1.. from dim 1 of 'x'" in str(module.graph)
    with pytest.raises(ModelError, match=r"x_1 = 0 \(dim 1 of 'x'\) violates x_1 >= 1"):
        module(torch.ones(2, 0))


def test_guards_division_by_zero_violates():
    """A division by a size of 0 violates a guard and matches no dim."""
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


def sum_parts(x, y):
    return y.reshape(x.shape[0], -1).sum(1)


def branch_on_remainder(x, y):
    return x * 2 if 64 % x.shape[0] == 0 else y


def branch_on_root(x, y):
    return x * 2 if math.sqrt(x.shape[0] - 2) < 3 else y


@pytest.mark.parametrize(
    ("model", "served"),
    [(sum_parts, 12), (branch_on_remainder, 16), (branch_on_root, 5)],
    ids=["parted", "by_remainder", "by_root"],
)
def test_guards_undefined_for_short_dims_exclude_them(model, served):
    """A guard that is undefined for short dims, by division or root, excludes them."""
    y = torch.arange(24.0)
    module = clika_compile(model, tracing_inputs=[(torch.ones(8, 24), y), (torch.ones(4, 24), y)])
    x = torch.ones(served, 24)
    assert torch.equal(module(x, y), model(x, y))
    with pytest.raises(ModelError, match=r"batch = 0 \(dim 0 of 'x'\) violates"):
        module(torch.ones(0, 24), y)


def test_guards_length_zero_served_if_eager_agrees():
    """A length of 0 is served if eager agrees."""
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[make_ones(2), make_ones(3)])
    assert module(make_ones(0)).shape == (0, 3)
    assert "symbol batch: 0.. from dim 0" in str(module.graph)


def test_guards_of_tracer_assumptions_on_zero_and_one(monkeypatch):
    """The assumption of a tracer about lengths 0 and 1 becomes a guard."""
    plain = next(tracer for tracer in TRACERS if not tracer.oblivious)
    monkeypatch.setattr("clika_ref.capture.tracers.TRACERS", (plain,))

    def branch_on_length_one(x):
        return x * 5 if x.shape[0] == 1 else x * 7

    module = clika_compile(branch_on_length_one, tracing_inputs=[make_ones(2), make_ones(3)])
    assert torch.equal(module(make_ones(9)), make_ones(9) * 7)
    with pytest.raises(ModelError, match=r"violates batch >= 2"):
        module(make_ones(1))


def test_guards_tracer_assumption_dropped_if_eager_agrees(monkeypatch):
    """A length of 1 is served by that tracer if eager agrees."""
    plain = next(tracer for tracer in TRACERS if not tracer.oblivious)
    monkeypatch.setattr("clika_ref.capture.tracers.TRACERS", (plain,))
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[make_ones(2), make_ones(3)])
    assert module(make_ones(1)).shape == (1, 3)


def test_guards_squeeze_keeps_rank():
    """`squeeze` of a dim that is 1 in one input does not change the rank silently."""

    def squeeze(x):
        return x.squeeze(0) + 1

    with pytest.raises(ModelError, match="cannot be captured as one graph"):
        clika_compile(squeeze, tracing_inputs=[make_ones(1), make_ones(3)])
    module = clika_compile(squeeze, tracing_inputs=[make_ones(2), make_ones(3)])
    try:
        result = module(make_ones(1))
    except ModelError:
        return
    assert result.shape == (3,)


def test_guards_irregular_loop_fixes_length():
    """A loop whose iterations compute different things raises an error, because it fixes the length."""

    def sum_of_functions(x):
        total = x[0]
        for i in range(1, x.shape[0]):
            total = total + (torch.sin, torch.cos, torch.exp)[i % 3](x[i])
        return total

    with pytest.raises(ModelError, match=r"dim 0 of 'x' has the lengths 2, 3 in the inputs, but the model fixes it"):
        clika_compile(sum_of_functions, tracing_inputs=[make_ones(2), make_ones(3)])


def test_guards_of_assertion_on_size():
    """An assertion on a size is checked by the module."""

    def halve(x):
        assert x.shape[0] % 2 == 0, "even lengths only"
        return x.reshape(x.shape[0] // 2, 2, 3).sum(1)

    module = clika_compile(halve, tracing_inputs=[make_ones(4), make_ones(6)])
    assert torch.equal(module(make_ones(10)), halve(make_ones(10)))
    with pytest.raises(ModelError, match="violates"):
        module(make_ones(5))


def test_guards_on_layout_dropped_if_eager_agrees(compile_and_compare):
    """Layout guards of kernels are dropped if eager agrees without them."""
    compile_and_compare(
        nn.Conv2d(3, 4, 3, padding=1), [torch.randn(2, 3, 8, 8), torch.randn(3, 3, 9, 9)], [torch.randn(1, 3, 1, 1)]
    )


def test_guards_kept_by_state_dict_and_copy():
    """Guards are kept by a state dict and by copies."""
    module = clika_compile(Guide(), tracing_inputs=[make_ones(20), make_ones(25)])
    again = type(module)()
    again.load_state_dict(module.state_dict())
    for copy_of in (again, copy.deepcopy(module), copy.deepcopy(again)):
        with pytest.raises(ModelError, match="violates"):
            copy_of(make_ones(10))


def test_guards_recorded_in_artifact_facts(tmp_path):
    """An artifact lists its guards."""
    module = clika_compile(Guide(), tracing_inputs=[make_ones(20), make_ones(25)])
    artifact = module.clika_export(tmp_path / "model.onnx")
    assert any("Ne(batch, 10)" in guard for guard in artifact.facts["guards"])


class Windows(nn.Module):
    """A small window attention: pads to whole windows, and shifts only if there are several."""

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


def test_guards_window_attention_correct_or_error():
    """Window attention gives correct results or an error."""
    torch.manual_seed(0)
    original = Windows().eval()
    inputs = [torch.randn(1, 8, 4), torch.randn(1, 11, 4)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for length in range(1, 14):
        x = torch.randn(1, length, 4)
        result = call_or_read_error(module, x)
        if isinstance(result, str):
            assert "violates" in result
        else:
            torch.testing.assert_close(result, original(x))
    with pytest.raises(ModelError, match=r"different branch for input \d .*test_guards.py:\d+.*share a graph"):
        clika_compile(original, tracing_inputs=[torch.randn(1, 3, 4), torch.randn(1, 11, 4)])


@pytest.mark.slow
def test_guards_swin_names_guard_line_and_groups():
    """The error for Swin with dynamic height and width has guard, line and groups."""
    torch.manual_seed(0)
    # Two of the four stages of swin_t, on a quarter of its images: the last stage has the same sizes. The second block
    # of a stage shifts its windows, unless they are as large as the image.
    original = swin_transformer.SwinTransformer([4, 4], 24, [1, 2], [2, 2], [7, 7]).eval()
    inputs = [torch.randn(1, 3, 56, 56), torch.randn(1, 3, 64, 80), torch.randn(1, 3, 64, 64)]
    branch = r"the graph is valid only if .* > 7 \(from torchvision/models/swin_transformer.py:\d+\)"
    groups = "Inputs 2 and 3 would share a graph, input 1 another. Compile once for each group"
    with pytest.raises(ModelError, match=rf"for input 1 \(x_2 = 56, dim 2 of 'x'\): {branch}\. {groups}"):
        clika_compile(original, tracing_inputs=inputs, discard_input_model=False)


@pytest.mark.slow
def test_guards_swin_serves_sizes_of_same_branches():
    """Swin serves the sizes that take the same branches."""
    torch.manual_seed(0)
    original = swin_transformer.SwinTransformer([4, 4], 24, [2], [2], [7, 7]).eval()
    inputs = [torch.randn(1, 3, 64, 80), torch.randn(1, 3, 64, 64)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for x in [*inputs, torch.randn(1, 3, 64, 47), torch.randn(1, 3, 64, 28)]:
        result = call_or_read_error(module, x)
        if isinstance(result, str):
            assert "violates" in result
        else:
            torch.testing.assert_close(result, original(x))


class StepOrPrefix(nn.Module):
    """Adds to each position the mean of all positions up to it; a single position has a branch of its own."""

    def __init__(self, single=1.0):
        super().__init__()
        self.single = single

    def forward(self, x):
        if x.size(1) == 1:
            return x * self.single * 2
        return x + x.cumsum(1) / torch.arange(1, x.size(1) + 1)[:, None]


def test_guards_branch_on_length_1_with_equal_numbers_dropped(tmp_path):
    """A branch of the model for length 1 that computes the same needs no graph of its own."""
    inputs = [torch.randn(1, 1, 4), torch.randn(2, 6, 4)]
    module = clika_compile(StepOrPrefix(), tracing_inputs=inputs)
    for shape in [(1, 1, 4), (3, 1, 4), (2, 9, 4)]:
        x = torch.randn(shape)
        torch.testing.assert_close(module(x), StepOrPrefix()(x))
    module.clika_export(tmp_path / "prefix.onnx", example_inputs=torch.randn(2, 1, 4))


def test_guards_branch_on_length_1_that_agrees_by_chance_kept():
    """A branch that computes something else is rejected, even if it agrees on the values of the tracing input."""
    inputs = [torch.zeros(1, 1, 4), torch.randn(2, 6, 4)]
    with pytest.raises(ModelError, match=r"valid only if Ne\(x_1, 1\).*Compile once for each group"):
        clika_compile(StepOrPrefix(single=3.0), tracing_inputs=inputs)
    nearly = [torch.randn(1, 1, 4), torch.randn(2, 6, 4)]
    with pytest.raises(ModelError, match=r"valid only if Ne\(x_1, 1\).*Compile once for each group"):
        clika_compile(StepOrPrefix(single=1.001), tracing_inputs=nearly)
