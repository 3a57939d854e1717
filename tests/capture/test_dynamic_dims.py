"""Dynamic dims: found by comparing the inputs, and supported at sizes that were never traced."""

import itertools

import pytest
import torch
from onnx_sessions import open_session
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
    """A transformer over patches that interpolates its position embedding to the size of the image."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 16, 16)
        self.places = nn.Parameter(torch.randn(1, 16, 14, 14))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        x = self.patches(x)
        places = nn.functional.interpolate(self.places, x.shape[2:], mode="bilinear")
        return self.layer((x + places).flatten(2).transpose(1, 2)).mean(1)


def make_images(*shapes):
    return [torch.randn(shape) for shape in shapes]


def make_ids(*shapes):
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
def test_dynamic_dims_faq_images_serve_unseen_sizes(compile_and_compare, model, traced, unseen):
    """The FAQ examples for images work at sizes that were not traced."""
    compile_and_compare(model(), make_images(*traced), make_images(*unseen))


def test_dynamic_dims_faq_language_model_serves_decoding(compile_and_compare):
    """The FAQ example for language models serves prefill and decoding."""
    compile_and_compare(Language(), make_ids((1, 1), (1, 256)), make_ids((1, 2), (1, 3), (1, 100), (1, 255), (1, 299)))


def test_dynamic_dims_batch_and_length_independent(compile_and_compare):
    """Batch and length of a language model are independent."""
    compile_and_compare(Language(), make_ids((1, 1), (2, 7)), make_ids((1, 7), (7, 1), (2, 2), (3, 5), (7, 7), (1, 2)))


def test_dynamic_dims_equal_dim_stays_static():
    """A dim that is equal in all inputs stays static."""
    module = clika_compile(ConvNet(), tracing_inputs=make_images((1, 3, 32, 32), (2, 3, 32, 32)))
    with pytest.raises(ModelError, match=r"'x': float32\[1, 3, 33, 32\] .*: dim 2 must be 32. .* compile with tracing"):
        module(torch.randn(1, 3, 33, 32))


CROSSWISE = list(itertools.product((1, 2, 5), (1, 3, 7)))


def test_dynamic_dims_ones_in_one_tensor_serve_all(compile_and_compare):
    """Dims of one tensor that are 1 in turn serve every combination."""
    compile_and_compare(
        ConvNet(), make_images((1, 3, 17, 1), (1, 3, 1, 18)), make_images((1, 3, 1, 1), (1, 3, 9, 11), (1, 3, 2, 3))
    )


def test_dynamic_dims_ones_in_two_tensors_serve_all(compile_and_compare):
    """Dims of two tensors that are 1 in turn serve every combination."""

    def outer(a, b):
        return torch.relu(a[:, None] * b[None, :]).sum(1)

    inputs = [(torch.randn(1), torch.randn(3)), (torch.randn(4), torch.randn(1))]
    compile_and_compare(outer, inputs, [(torch.randn(m), torch.randn(n)) for m, n in CROSSWISE])


class Added(nn.Module):
    def forward(self, a, b):
        return a + b


def test_dynamic_dims_crosswise_broadcasting_rejected():
    """Crosswise broadcasting raises an error that names it."""
    inputs = [(torch.randn(1, 4), torch.randn(3, 4)), (torch.randn(3, 4), torch.randn(1, 4))]
    with pytest.raises(
        ModelError, match=r"crosswise broadcasting\), one graph cannot represent both. Expand the tensors before"
    ):
        clika_compile(Added(), tracing_inputs=inputs)


def test_dynamic_dims_one_way_broadcasting_accepted(compile_and_compare):
    """Broadcasting in one direction is captured."""
    inputs = [(torch.randn(1, 4), torch.randn(3, 4)), (torch.randn(1, 4), torch.randn(5, 4))]
    module = compile_and_compare(Added(), inputs, [(torch.randn(1, 4), torch.randn(1, 4))])
    with pytest.raises(ModelError, match="dim 0 must be 1"):
        module(torch.randn(3, 4), torch.randn(3, 4))


def test_dynamic_dims_needed_equality_shares_symbol(compile_and_compare):
    """Dims that the model needs to be equal share a symbol."""
    inputs = [(torch.randn(2, 4), torch.randn(2, 4)), (torch.randn(3, 4), torch.randn(3, 4))]
    module = compile_and_compare(
        Added(), inputs, [(torch.randn(1, 4), torch.randn(1, 4)), (torch.randn(6, 4), torch.randn(6, 4))]
    )
    assert [v.type.shape[0].name for v in module.graph.inputs] == ["batch", "batch"]
    with pytest.raises(ModelError, match=r"'b': float32.* dim 0 must be batch = 3. The model requires these"):
        module(torch.randn(3, 4), torch.randn(1, 4))


def test_dynamic_dims_coincidental_equality_independent(compile_and_compare):
    """Dims that are equal by coincidence stay independent."""

    def compute_separately(a, b):
        return a * 2, b * 3

    inputs = [(torch.randn(2), torch.randn(2)), (torch.randn(3), torch.randn(3))]
    compile_and_compare(
        compute_separately, inputs, [(torch.randn(1), torch.randn(5)), (torch.randn(4), torch.randn(2))]
    )


def test_dynamic_dims_varying_integers_become_inputs(compile_and_compare):
    """Integers that differ become inputs."""

    def make_grid(x, rows, columns):
        return x.sum() * torch.ones(rows, columns + 1), rows * 2

    x = torch.randn(4)
    compile_and_compare(make_grid, [(x, 2, 3), (x, 5, 4)], [(x, 7, 7), (x, 1, 1), (x, 3, 9)])


def test_dynamic_dims_integer_factor_becomes_input(compile_and_compare):
    """An integer factor that differs becomes an input."""

    def scale(x, n: int):
        return x * n + n

    x = torch.randn(4)
    compile_and_compare(scale, [(x, 2), (x, 5)], [(x, 1), (x, 0), (x, -3)])


def test_dynamic_dims_constant_integer_checked():
    """An integer that never differs is a constant, checked at each call."""

    def repeat(x, n):
        return x.repeat(n)

    module = clika_compile(repeat, tracing_inputs=[(torch.randn(4), 3)])
    assert module(torch.randn(4), 3).shape == (12,)
    with pytest.raises(ModelError, match=r"argument 'n' is 4, but the graph was compiled for 3. Compile again"):
        module(torch.randn(4), 4)


def test_dynamic_dims_varying_floats_rejected():
    """Floats that differ raise an error."""

    def scale(x, factor):
        return x * factor

    with pytest.raises(
        ModelError, match=r"'factor' is 1.5 \(float\) in tracing input 1 and 2.5 \(float\) in tracing input 2"
    ):
        clika_compile(scale, tracing_inputs=[(torch.randn(2), 1.5), (torch.randn(2), 2.5)])


def test_mark_dynamic_single_input_makes_dim_dynamic(compile_and_compare):
    """A marked dim is dynamic with a single input."""
    x = torch.randn(2, 3, 16, 16)
    mark_dynamic(x, 0)
    module = compile_and_compare(ConvNet(), [x], make_images((1, 3, 16, 16), (5, 3, 16, 16)))
    with pytest.raises(ModelError, match="dim 2 must be 16"):
        module(torch.randn(2, 3, 17, 16))


def test_mark_dynamic_dim_of_one_serves_other_lengths(compile_and_compare):
    """A marked dim of length 1 serves other lengths."""
    x = torch.randn(1, 3, 16, 16)
    mark_dynamic(x, 0)
    compile_and_compare(ConvNet(), [x], make_images((3, 3, 16, 16)))


def test_dynamic_false_varying_inputs_rejected():
    """`dynamic=False` with inputs that differ raises an error that names the dims."""
    with pytest.raises(ModelError, match=r"the inputs differ \(dim 0 of 'x': 1, 2\), but dynamic=False"):
        clika_compile(ConvNet(), tracing_inputs=make_images((1, 3, 32, 32), (2, 3, 32, 32)), dynamic=False)


def test_dynamic_false_ignores_marked_dims():
    """`dynamic=False` gives a static graph in spite of marked dims."""
    x = torch.randn(2, 3, 16, 16)
    mark_dynamic(x, 0)
    module = clika_compile(ConvNet(), tracing_inputs=[x], dynamic=False)
    assert not module.graph.symbols
    with pytest.raises(ModelError, match="dim 0 must be 2"):
        module(torch.randn(1, 3, 16, 16))


def test_dynamic_dims_length_zero_served(compile_and_compare):
    """A length of 0 is served if eager accepts it."""

    def relu(x):
        return torch.relu(x) + 1

    compile_and_compare(relu, [torch.randn(2, 3), torch.randn(4, 3)], [torch.randn(0, 3)])


def test_dynamic_dims_data_dependent_size_served(compile_and_compare):
    """Data-dependent sizes are computed at each call."""

    def select_positive(x):
        return x[x > 0] * 2

    compile_and_compare(select_positive, [torch.randn(20)], [torch.ones(20), -torch.ones(20)])


def test_dynamic_dims_full_of_size_keeps_dtype(compile_and_compare):
    """A number computed from sizes determines the dtype of `torch.full`."""

    def fill(x):
        n = x.shape[0]
        return [torch.full((2,), number) for number in (1 / n, n**-0.5, n, n // 2, n > 3, 2 + 3j)]

    compile_and_compare(fill, [torch.randn(2, 4), torch.randn(3, 4)], [torch.randn(1, 4), torch.randn(8, 4)])


def test_dynamic_dims_three_inputs_vary_different_dims(compile_and_compare):
    """Three inputs may vary different dims."""
    traced = make_images((1, 3, 16, 16), (2, 3, 16, 16), (1, 3, 20, 16))
    module = compile_and_compare(ConvNet(), traced, make_images((3, 3, 18, 16), (1, 3, 33, 16)))
    assert list(module.graph.symbols) == ["batch", "x_2"]


def test_dynamic_dims_int_of_size_captured_by_other_tracer(compile_and_compare):
    """If `int` fixes a size for one tracer, another tracer captures it."""

    def resize(x):
        size = int(x.shape[2] // 2 * 3)
        return torch.nn.functional.interpolate(x, (size, size))

    compile_and_compare(resize, [torch.randn(1, 2, 8, 8), torch.randn(2, 2, 12, 12)], [torch.randn(3, 2, 10, 10)])


def test_dynamic_dims_graph_rejecting_traced_input_raises():
    """A graph that does not accept a tracing input raises an error."""

    class Sum(nn.Module):
        def forward(self, *terms):
            return terms[0] + terms[1]

    inputs = [(torch.rand(4, 3), torch.rand(4, 3)), (torch.rand(5, 3), torch.rand(1, 3))]
    with pytest.raises(ModelError, match=r"rejects input 2: input 'terms.1': float32\[1, 3\]"):
        clika_compile(Sum(), tracing_inputs=inputs)


def test_as_strided_serves_any_batch(compile_and_compare):
    """Strides computed from sizes serve a batch of 1."""

    def view_first_columns(x):
        return (x * 2).as_strided((x.shape[0], 3), (x.shape[1], 1))

    compile_and_compare(
        view_first_columns, [torch.randn(2, 6), torch.randn(3, 9)], [torch.randn(1, 7), torch.randn(5, 4)]
    )


@pytest.mark.parametrize("options", [{"mode": "max"}, {"mode": "mean", "padding_idx": 0}, {"mode": "sum"}])
def test_embedding_bag_serves_any_lengths(compile_and_compare, options):
    """Bags of any lengths are served, and no offsets are drawn at random."""

    def make_bags(count, *starts):
        return torch.randint(10, (count,)), torch.tensor(starts)

    compile_and_compare(
        nn.EmbeddingBag(10, 4, **options), [make_bags(8, 0, 3, 5), make_bags(9, 0, 3)], [make_bags(12, 0, 2, 4, 7)]
    )


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
def test_dynamic_dims_low_bits_and_comparisons_match_eager(compile_and_compare, function, tmp_path):
    """Low bits of sizes and comparisons match eager, in the module and the artifact."""
    module = compile_and_compare(
        function, [torch.rand(3, 4), torch.rand(6, 4)], [torch.rand(n, 4) for n in (2, 4, 7, 9, 16)]
    )
    path = module.clika_export(tmp_path / "m.onnx").path
    session = open_session(path)
    for n in (2, 4, 7, 9, 16):
        x = torch.rand(n, 4)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), function(x))


def test_dynamic_dims_branch_on_bit_guarded(compile_and_compare):
    """A branch on a bit of a size is guarded."""
    module = compile_and_compare(lambda x: x * 2 if x.shape[0] & 1 else x * 3, [torch.rand(3, 4), torch.rand(5, 4)])
    with pytest.raises(ModelError, match=r"batch = 4 .*violates Ne\(PythonMod\(batch, 2\), 0\)"):
        module(torch.rand(4, 4))


def test_dynamic_dims_branch_on_rounded_size_guarded(compile_and_compare):
    """A branch on a rounded size is guarded."""
    module = compile_and_compare(
        lambda x: x * 2 if x.shape[0] & ~3 > 4 else x * 3, [torch.rand(9, 4), torch.rand(10, 4)]
    )
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
def test_dynamic_dims_other_bits_rejected_with_remedy(function, shown):
    """Other bit operations on sizes raise an error with the remedy."""
    message = rf"test_dynamic_dims.py:\d+: it uses {shown} of sizes, .* Write it with \+ - \* // % min max"
    with pytest.raises(ModelError, match=message):
        clika_compile(function, tracing_inputs=[torch.rand(3, 4), torch.rand(6, 4)])
