"""Dynamic sides: found by comparing the inputs, served at lengths that were never traced."""

import itertools

import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch._dynamo import mark_dynamic

from clika_ref import clika_compile
from clika_ref.core.errors import ModelError


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = x + self.deep(x)
        x = nn.functional.adaptive_avg_pool2d(x, 1)
        return self.head(torch.flatten(x, 1))


class Language(nn.Module):
    """A transformer with learned positions, a causal mask and a padding mask that may be left out."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.places = nn.Embedding(300, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids):
        length = input_ids.shape[1]
        x = self.tokens(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.layers(x, mask=mask))


class Vision(nn.Module):
    """A transformer over patches, whose position embedding is interpolated to the size of the image."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 16, 14, 14))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        x = self.patches(x)
        places = nn.functional.interpolate(self.places, x.shape[2:], mode="bilinear")
        return self.layer((x + places).flatten(2).transpose(1, 2)).mean(1)


def images(*shapes):
    return [torch.randn(shape) for shape in shapes]


def ids(*shapes):
    return [{"input_ids": torch.randint(0, 50, shape)} for shape in shapes]


FAQ = {
    "batch": ([(1, 3, 224, 224), (2, 3, 224, 224)], [(3, 3, 224, 224), (7, 3, 224, 224)]),
    "height and width": ([(1, 3, 224, 224), (1, 3, 320, 640)], [(1, 3, 97, 131), (1, 3, 32, 32), (1, 3, 225, 224)]),
    "all three": (
        [(1, 3, 224, 224), (2, 3, 320, 640)],
        [(1, 3, 320, 224), (5, 3, 97, 131), (1, 3, 33, 35), (3, 3, 64, 64)],
    ),
}


@pytest.mark.parametrize("model", [ConvNet, Vision])
@pytest.mark.parametrize(("traced", "unseen"), FAQ.values(), ids=FAQ)
def test_the_examples_of_the_faq_work_on_images_at_sizes_never_traced(agree, model, traced, unseen):
    agree(model(), images(*traced), images(*unseen))


def test_the_faq_example_of_language_models_serves_prefill_and_decoding(agree):
    agree(Language(), ids((1, 1), (1, 256)), ids((1, 2), (1, 3), (1, 100), (1, 255), (1, 299)))


def test_batch_and_length_of_a_language_model_are_free_of_each_other(agree):
    agree(Language(), ids((1, 1), (2, 7)), ids((1, 7), (7, 1), (2, 2), (3, 5), (7, 7), (1, 2)))


def test_a_side_that_all_inputs_share_stays_static():
    module = clika_compile(ConvNet(), tracing_inputs=images((1, 3, 32, 32), (2, 3, 32, 32)))
    with pytest.raises(ModelError, match=r"'x': float32\[1, 3, 33, 32\] .*: dim 2 must be 32. .* compile with tracing"):
        module(torch.randn(1, 3, 33, 32))


CROSSWISE = list(itertools.product((1, 2, 5), (1, 3, 7)))


def test_sides_that_are_1_in_turn_within_one_tensor_serve_every_combination(agree):
    agree(ConvNet(), images((1, 3, 17, 1), (1, 3, 1, 18)), images((1, 3, 1, 1), (1, 3, 9, 11), (1, 3, 2, 3)))


def test_sides_that_are_1_in_turn_over_two_tensors_serve_every_combination(agree):
    def outer(a, b):
        return torch.relu(a[:, None] * b[None, :]).sum(1)

    inputs = [(torch.randn(1), torch.randn(3)), (torch.randn(4), torch.randn(1))]
    agree(outer, inputs, [(torch.randn(m), torch.randn(n)) for m, n in CROSSWISE])


class Added(nn.Module):
    def forward(self, a, b):
        return a + b


def test_crosswise_broadcasting_is_refused_by_that_name():
    inputs = [(torch.randn(1, 4), torch.randn(3, 4)), (torch.randn(3, 4), torch.randn(1, 4))]
    with pytest.raises(
        ModelError, match=r"crosswise broadcasting\), one graph cannot represent both. Expand the tensors before"
    ):
        clika_compile(Added(), tracing_inputs=inputs)


def test_broadcasting_in_one_direction_only_is_no_crosswise_broadcasting(agree):
    inputs = [(torch.randn(1, 4), torch.randn(3, 4)), (torch.randn(1, 4), torch.randn(5, 4))]
    module = agree(Added(), inputs, [(torch.randn(1, 4), torch.randn(1, 4))])
    with pytest.raises(ModelError, match="dim 0 must be 1"):
        module(torch.randn(3, 4), torch.randn(3, 4))


def test_sides_that_always_agree_share_a_symbol_where_the_model_needs_it(agree):
    inputs = [(torch.randn(2, 4), torch.randn(2, 4)), (torch.randn(3, 4), torch.randn(3, 4))]
    module = agree(Added(), inputs, [(torch.randn(1, 4), torch.randn(1, 4)), (torch.randn(6, 4), torch.randn(6, 4))])
    assert [v.type.shape[0].name for v in module.graph.inputs] == ["batch", "batch"]
    with pytest.raises(ModelError, match=r"'b': float32.* dim 0 must be batch = 3. The model requires these"):
        module(torch.randn(3, 4), torch.randn(1, 4))


def test_sides_that_agree_by_chance_stay_free(agree):
    def apart(a, b):
        return a * 2, b * 3

    inputs = [(torch.randn(2), torch.randn(2)), (torch.randn(3), torch.randn(3))]
    agree(apart, inputs, [(torch.randn(1), torch.randn(5)), (torch.randn(4), torch.randn(2))])


def test_integers_that_differ_become_inputs(agree):
    def grid(x, rows, columns):
        return x.sum() * torch.ones(rows, columns + 1), rows * 2

    x = torch.randn(4)
    agree(grid, [(x, 2, 3), (x, 5, 4)], [(x, 7, 7), (x, 1, 1), (x, 3, 9)])


def test_an_integer_that_scales_numbers_is_an_input_as_well(agree):
    def scaled(x, n: int):
        return x * n + n

    x = torch.randn(4)
    agree(scaled, [(x, 2), (x, 5)], [(x, 1), (x, 0), (x, -3)])


def test_an_integer_that_never_differs_is_a_constant():
    def repeated(x, n):
        return x.repeat(n)

    module = clika_compile(repeated, tracing_inputs=[(torch.randn(4), 3)])
    assert module(torch.randn(4), 3).shape == (12,)
    with pytest.raises(ModelError, match=r"argument 'n' is 4, but the graph was compiled for 3. Compile again"):
        module(torch.randn(4), 4)


def test_floats_that_differ_are_refused():
    def scaled(x, factor):
        return x * factor

    with pytest.raises(
        ModelError, match=r"'factor' differs between the tracing inputs \(1.5 \(float\), 2.5 \(float\)\)"
    ):
        clika_compile(scaled, tracing_inputs=[(torch.randn(2), 1.5), (torch.randn(2), 2.5)])


def test_a_side_marked_as_dynamic_is_dynamic_with_a_single_input(agree):
    x = torch.randn(2, 3, 16, 16)
    mark_dynamic(x, 0)
    module = agree(ConvNet(), [x], images((1, 3, 16, 16), (5, 3, 16, 16)))
    with pytest.raises(ModelError, match="dim 2 must be 16"):
        module(torch.randn(2, 3, 17, 16))


def test_a_single_input_whose_marked_sides_are_1_serves_other_lengths(agree):
    x = torch.randn(1, 3, 16, 16)
    mark_dynamic(x, 0)
    agree(ConvNet(), [x], images((3, 3, 16, 16)))


def test_dynamic_false_refuses_inputs_that_differ_and_names_the_sides():
    with pytest.raises(ModelError, match=r"the inputs differ \(dim 0 of 'x': 1, 2\), but dynamic=False"):
        clika_compile(ConvNet(), tracing_inputs=images((1, 3, 32, 32), (2, 3, 32, 32)), dynamic=False)


def test_dynamic_false_makes_a_static_graph_even_of_marked_sides():
    x = torch.randn(2, 3, 16, 16)
    mark_dynamic(x, 0)
    module = clika_compile(ConvNet(), tracing_inputs=[x], dynamic=False)
    assert not module.graph.symbols
    with pytest.raises(ModelError, match="dim 0 must be 2"):
        module(torch.randn(1, 3, 16, 16))


def test_a_side_of_length_0_is_served_where_eager_serves_it(agree):
    def relu(x):
        return torch.relu(x) + 1

    agree(relu, [torch.randn(2, 3), torch.randn(4, 3)], [torch.randn(0, 3)])


def test_sizes_that_depend_on_data_are_found_at_each_call(agree):
    def chosen(x):
        return x[x > 0] * 2

    agree(chosen, [torch.randn(20)], [torch.ones(20), -torch.ones(20)])


def test_a_number_computed_from_sides_decides_the_dtype_of_what_it_fills(agree):
    def filled(x):
        n = x.shape[0]
        return [torch.full((2,), number) for number in (1 / n, n**-0.5, n, n // 2, n > 3, 2 + 3j)]

    agree(filled, [torch.randn(2, 4), torch.randn(3, 4)], [torch.randn(1, 4), torch.randn(8, 4)])


def test_three_inputs_may_vary_other_sides_each(agree):
    traced = images((1, 3, 16, 16), (2, 3, 16, 16), (1, 3, 20, 16))
    module = agree(ConvNet(), traced, images((3, 3, 18, 16), (1, 3, 33, 16)))
    assert list(module.graph.symbols) == ["batch", "x_2"]


def test_an_int_of_a_size_fixes_it_for_one_tracer_and_another_follows(agree):
    def resized(x):
        size = int(x.shape[2] // 2 * 3)
        return torch.nn.functional.interpolate(x, (size, size))

    agree(resized, [torch.randn(1, 2, 8, 8), torch.randn(2, 2, 12, 12)], [torch.randn(3, 2, 10, 10)])


def test_a_graph_that_would_refuse_a_tracing_input_is_refused_itself():
    class Sum(nn.Module):
        def forward(self, *terms):
            return terms[0] + terms[1]

    inputs = [(torch.rand(4, 3), torch.rand(4, 3)), (torch.rand(5, 3), torch.rand(1, 3))]
    with pytest.raises(ModelError, match=r"rejects input 2: input 'terms.1': float32\[1, 3\]"):
        clika_compile(Sum(), tracing_inputs=inputs)


def test_strides_may_be_given_for_any_batch(agree):
    """The importer's own question whether memory is contiguous excluded a batch of 1."""

    def first_columns(x):
        return (x * 2).as_strided((x.shape[0], 3), (x.shape[1], 1))

    agree(first_columns, [torch.randn(2, 6), torch.randn(3, 9)], [torch.randn(1, 7), torch.randn(5, 4)])


@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "mean", "padding_idx": 0}, {"mode": "sum"}])
def test_bags_of_any_lengths_are_looked_up_without_made_up_places(agree, options):
    """PyTorch reads wherever offsets point: on a call that was made up to try a guard the process ended."""

    def bags(count, *starts):
        return torch.randint(10, (count,)), torch.tensor(starts)

    agree(nn.EmbeddingBag(10, 4, **options), [bags(8, 0, 3, 5), bags(9, 0, 3)], [bags(12, 0, 2, 4, 7)])


BITS = {
    "parity": lambda x: x * (x.shape[0] & 1),
    "mask in front": lambda x: x.sum(0) * (7 & x.shape[0]),
    "of a sum": lambda x: x + ((x.shape[0] + x.shape[1]) & 3) * (x.shape[0] & 15),
    "none": lambda x: x + (x.shape[0] & 0),
    "all": lambda x: x * (x.shape[0] & -1),
    "rounded up": lambda x: nn.functional.pad(x, (0, 0, 0, ((x.shape[0] + 7) & ~7) - x.shape[0])),
    "rounded down": lambda x: x[: x.shape[0] & -2] * (~3 & x.shape[0]),
    "of a negative number": lambda x: x * ((3 - x.shape[0]) & -4),
    "as a truth": lambda x: x * (x.shape[0] % 2 == 0) + (x.shape[0] != 3),
    "of truths": lambda x: x * ((x.shape[0] == 6) | (x.shape[0] < 4)),
}


@pytest.mark.parametrize("function", BITS.values(), ids=BITS)
def test_the_last_bits_of_a_size_and_comparisons_are_numbers(agree, function, tmp_path):
    module = agree(function, [torch.rand(3, 4), torch.rand(6, 4)], [torch.rand(n, 4) for n in (2, 4, 7, 9, 16)])
    path = module.clika_export(tmp_path / "m.onnx").path
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for n in (2, 4, 7, 9, 16):
        x = torch.rand(n, 4)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), function(x))


def test_a_branch_on_a_bit_is_a_guard(agree):
    module = agree(lambda x: x * 2 if x.shape[0] & 1 else x * 3, [torch.rand(3, 4), torch.rand(5, 4)])
    with pytest.raises(ModelError, match=r"batch = 4 .*violates Ne\(PythonMod\(batch, 2\), 0\)"):
        module(torch.rand(4, 4))


def test_a_branch_on_a_rounded_size_is_a_guard(agree):
    module = agree(lambda x: x * 2 if x.shape[0] & ~3 > 4 else x * 3, [torch.rand(9, 4), torch.rand(10, 4)])
    assert torch.equal(module(x := torch.rand(8, 4)), x * 2)
    with pytest.raises(ModelError, match=r"batch = 7 .*violates "):
        module(torch.rand(7, 4))


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda x: x * (x.shape[0] & 6), r"batch & 6"),
        (lambda x: x * ((x.shape[0] + 7) & -6), r"\(batch \+ 7\) & -6"),
        (lambda x: x * (x.shape[0] | 1), r"batch \| 1"),
    ],
)
def test_other_bits_are_refused_as_python_writes_them_with_what_to_write(function, shown):
    message = rf"test_dynamic_sides.py:\d+: it uses {shown} of sizes, .* Write it with \+ - \* // % min max"
    with pytest.raises(ModelError, match=message):
        clika_compile(function, tracing_inputs=[torch.rand(3, 4), torch.rand(6, 4)])
