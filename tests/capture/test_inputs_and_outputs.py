"""Callables that can be compiled, forms of inputs, and forms of outputs."""

import copy
import dataclasses
import functools
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from loaded_copies import load_copy
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from clika_ref import ClikaModule, clika_compile
from clika_ref.core.errors import ModelError


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Batch:
    images: torch.Tensor
    scales: list
    note: str = "plain"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x, y=None, *, scale=None):
        result = self.linear(x)
        if y is not None:
            result = result + y
        return result if scale is None else result * scale

    def infer(self, x, temperature=2.0):
        return self.linear(x) / temperature


X, Y = torch.randn(3, 4), torch.randn(3, 2)


def test_clika_compile_accepts_modules_and_callables(compile_and_compare):
    """Modules, functions, lambdas, partials and bound methods are compiled."""
    net = Net().eval()
    compile_and_compare(Net(), [X])
    compile_and_compare(lambda x: x * 2, [X])
    compile_and_compare(torch.nn.functional.relu, [X])
    compile_and_compare(functools.partial(torch.mul, other=3), [X])
    module = clika_compile(net.infer, tracing_inputs=[X], discard_input_model=False)
    torch.testing.assert_close(module(X), net.infer(X))
    assert set(module.state_dict()) == {"linear.weight", "linear.bias", "_extra_state"}
    assert "forward" not in vars(net), "the model must have its own forward again"


def test_clika_compile_closure_shares_module_weights():
    """A function that closes over a module shares its weights."""
    net = Net().eval()

    def double(x):
        return net.linear(x) * 2

    module = clika_compile(double, tracing_inputs=[X])
    torch.testing.assert_close(module(X), double(X))
    assert {n for n in module.state_dict() if n.endswith("weight")} == {"net.linear.weight"}
    assert module.net.linear.weight is net.linear.weight


@pytest.mark.parametrize("thing", [3, "model", None, Net])
def test_clika_compile_other_objects_rejected(thing):
    """Other objects raise an error with the accepted ones."""
    with pytest.raises(
        ModelError, match=r"cannot compile .*: it is a .* Pass an nn.Module, a bound method such as model.infer, or a"
    ):
        clika_compile(thing, tracing_inputs=[X])


@pytest.mark.parametrize(
    "element",
    [X, (X,), (X, Y), {"x": X}, {"x": X, "scale": Y}, {"y": Y, "x": X}, (X, {"y": Y}), (X, Y, {"scale": Y})],
    ids=[
        "tensor",
        "tuple of 1",
        "tuple",
        "dict",
        "keyword-only",
        "dict in another order",
        "tuple ending in dict",
        "both",
    ],
)
def test_tracing_inputs_every_form_accepted(compile_and_compare, element):
    """Every form of an element is the call that it describes."""
    compile_and_compare(Net(), [element])


def test_clika_module_arguments_by_position_or_name(compile_and_compare):
    """Arguments are passed by position or by name."""
    module = compile_and_compare(Net(), [(X, Y)])
    torch.testing.assert_close(module(x=X, y=Y), module(X, Y))
    torch.testing.assert_close(module(X, y=Y), module(X, Y))


def test_tracing_inputs_dict_with_other_keys_one_argument(compile_and_compare):
    """A dict is one argument if its keys name no parameters."""

    def add_entries(batch):
        return batch["a"] + batch["b"]["c"]

    element = {"a": X, "b": {"c": X}}
    module = compile_and_compare(add_entries, [element])
    assert list(module.clika_generate_dummy_inputs()) == ["batch"]


def test_tracing_inputs_tuple_ending_in_dict_argument(compile_and_compare):
    """A tuple may end in a dict that is an argument."""

    def scale(x, options):
        return x * options["by"]

    compile_and_compare(scale, [(X, {"by": X})])


def test_tracing_inputs_var_keywords_gathered(compile_and_compare):
    """Keywords are gathered by a model with `**kwargs`."""

    def add_all(x, *more, **others):
        return x + sum(more) + others["a"] * others["b"]

    compile_and_compare(add_all, [{"x": X, "a": X, "b": X}, {"x": X[:2], "a": X[:2], "b": X[:2]}])
    compile_and_compare(add_all, [(X, X, X, {"a": X, "b": X})])


def test_nested_inputs_keep_structure(compile_and_compare):
    """Nested inputs and outputs keep their structure."""

    def compute_nested(items, pair, batch):
        first, (second, third) = items["list"]
        return {
            "sum": first + second + third,
            "pair": Pair(pair.right, pair.left),
            "batch": [batch.images * batch.scales[0], batch.scales[1]],
        }

    def make_nested(rows):
        def make_tensor():
            return torch.randn(rows, 2)

        return (
            {"list": [make_tensor(), (make_tensor(), make_tensor())]},
            Pair(make_tensor(), make_tensor()),
            Batch(make_tensor(), [make_tensor(), make_tensor()]),
        )

    module = compile_and_compare(compute_nested, [make_nested(3), make_nested(5)], [make_nested(1)])
    result = module(*make_nested(2))
    assert list(result) == ["sum", "pair", "batch"]
    assert isinstance(result["pair"], Pair)
    assert isinstance(result["batch"], list)


def test_outputs_dataclass_and_model_output_keep_class():
    """Dataclasses and ModelOutputs are returned with their class."""

    def compute_outputs(x):
        return Batch(x * 2, [x + 1], "result"), BaseModelOutput(last_hidden_state=x * 3, hidden_states=(x, x + 1))

    module = clika_compile(compute_outputs, tracing_inputs=[X, torch.randn(2, 4)])
    batch, output = module(X)
    assert isinstance(batch, Batch)
    assert (batch.note, type(output), list(output)) == (
        "result",
        BaseModelOutput,
        ["last_hidden_state", "hidden_states"],
    )
    assert torch.equal(batch.images, X * 2)
    assert torch.equal(batch.scales[0], X + 1)
    assert torch.equal(output.last_hidden_state, X * 3)
    assert torch.equal(output[1][1], X + 1)


@dataclasses.dataclass
class Doubled:
    x: torch.Tensor
    count: int = dataclasses.field(init=False, default=0)
    nothing: torch.Tensor | None = None

    def __post_init__(self):
        self.x = self.x * 2
        self.count += 1
        self.next = self.x + 1


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenDoubled:
    x: torch.Tensor

    def __post_init__(self):
        object.__setattr__(self, "x", self.x * 2)


def test_outputs_dataclasses_not_initialized_again():
    """Returned dataclasses are not initialized a second time."""

    def double_both(batch):
        return Doubled(batch.x), FrozenDoubled(batch.next)

    batch = Doubled(X)
    module = clika_compile(double_both, tracing_inputs=[(batch,)])
    rebuilt = load_copy(module)
    for made in (module, copy.deepcopy(module), rebuilt):
        doubled, frozen = made(batch)
        assert torch.equal(doubled.x, X * 4)
        assert torch.equal(doubled.next, X * 4 + 1)
        assert (doubled.count, doubled.nothing) == (1, None)
        assert torch.equal(frozen.x, (X * 2 + 1) * 2)


def test_outputs_none_constants_repeated_and_inputs_kept():
    """None, constants, repeated outputs and inputs are returned in place."""

    def compute_outputs(x, flag):
        y = x * 2
        return y, None, 7, "text", y, x, [y, (None, 1.5)], flag, True

    module = clika_compile(compute_outputs, tracing_inputs=[(X, "name")])
    y, nothing, seven, text, again, passed, (inner, (none, number)), flag, true = module(X, "name")
    assert torch.equal(y, X * 2)
    assert again is y
    assert inner is y
    assert passed is X
    assert (nothing, seven, text, none, number, flag, true) == (None, 7, "text", None, 1.5, "name", True)


def test_outputs_weights_and_buffers(compile_and_compare):
    """Weights and buffers may be outputs."""

    class Exposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("mean", torch.randn(4))

        def forward(self, x):
            return x * self.weight, self.weight, self.mean, torch.tensor([1.0, 2.0])

    compile_and_compare(Exposed(), [X])


def test_outputs_sizes_and_arithmetic(compile_and_compare):
    """Sizes and their arithmetic may be outputs."""

    def compute_sizes(x):
        return x + 1, x.shape[0], x.shape[0] * 2 + x.shape[1], tuple(x.shape)

    module = compile_and_compare(compute_sizes, [X, torch.randn(5, 4)], [torch.randn(1, 4)])
    assert module(torch.randn(6, 4))[1:] == (6, 16, (6, 4))


def test_outputs_ordered_dict_keeps_class():
    """An OrderedDict is returned as one."""
    module = clika_compile(lambda x: OrderedDict(b=x, a=x + 1), tracing_inputs=[X])
    assert type(module(X)) is OrderedDict
    assert list(module(X)) == ["b", "a"]


def test_inputs_none_and_flags_constant(compile_and_compare):
    """None and flags in the inputs are constants."""
    module = compile_and_compare(Net(), [(X, None, {"scale": Y})])
    with pytest.raises(ModelError, match=r"argument 'y' is one value|argument 'y' is tensor"):
        module(X, Y, scale=Y)


def test_clika_module_untraced_argument_rejected(compile_and_compare):
    """An argument that was not traced cannot be given later."""
    module = compile_and_compare(Net(), [X])
    torch.testing.assert_close(module(X, None), module(X))
    with pytest.raises(
        ModelError, match=r"argument 'y' was omitted when the model was compiled. To use it, include it"
    ):
        module(X, Y)


class KeywordOptions(nn.Module):
    def forward(self, batch, **options):
        return batch["x"] * options.get("scale", 1)


def test_tracing_inputs_dict_of_forward_with_keywords():
    """One dict is the positional argument of a forward with `**kwargs`."""
    module = clika_compile(KeywordOptions(), tracing_inputs=[{"x": X}])
    assert torch.equal(module({"x": X}), X)
    scaled = clika_compile(KeywordOptions(), tracing_inputs=[{"batch": {"x": X}, "scale": X}])
    torch.testing.assert_close(scaled(batch={"x": X}, scale=X), X * X)


def test_clika_module_untraced_keyword_rejected():
    """A keyword that was not traced raises an error."""
    module = clika_compile(KeywordOptions(), tracing_inputs=[{"x": X}])
    with pytest.raises(ModelError, match="argument 'return_dict' was omitted when the model was compiled"):
        module({"x": X}, return_dict=True)


def test_data_transform_fn_applied_to_each_element():
    """`data_transform_fn` is applied to each element first."""
    seen = []

    def take_image(element):
        seen.append(element)
        return (element["image"] / 255,)

    elements = [{"image": X, "label": 1}, {"image": torch.randn(5, 4), "label": 2}]
    module = clika_compile(Net(), tracing_inputs=elements, data_transform_fn=take_image)
    assert seen == elements
    assert module(torch.randn(9, 4)).shape == (9, 2)


def test_forward_fn_call_traced():
    """The call that `forward_fn` makes is traced."""
    seen = []

    def call_model(model, args, kwargs):
        seen.append((len(args), dict(kwargs)))
        return model(args[0] * 2, y=kwargs["scale"])

    element = (X, {"scale": Y})
    net = Net().eval()
    module = clika_compile(net, tracing_inputs=[element], forward_fn=call_model, discard_input_model=False)
    assert seen == [(1, {"scale": Y})]
    torch.testing.assert_close(module(X, y=Y), net(X, Y))


def test_forward_fn_without_call_rejected():
    """A `forward_fn` that does not call the model raises an error."""
    with pytest.raises(
        ModelError, match=r"forward_fn .* returned without calling the model\. .*forward_fn\(model, args, kwargs\)"
    ):
        clika_compile(Net(), tracing_inputs=[X], forward_fn=lambda model, args, kwargs: None)


@pytest.mark.parametrize("method", ["forward", "infer"])
def test_forward_fn_may_call_method_by_name(method):
    """`forward_fn` may call the compiled method by its name."""

    class Two(nn.Module):
        def forward(self, x):
            return x + 1

        def infer(self, x):
            return x * 2

    model = Two()
    feed = lambda m, args, kwargs: getattr(m, method)(*args)  # noqa: E731
    module = clika_compile(getattr(model, method), tracing_inputs=[X], forward_fn=feed)
    assert torch.equal(module(X), getattr(model, method)(X))


def test_forward_fn_sees_model_attributes():
    """`forward_fn` sees the attributes of the model."""

    def call_model(model, args, kwargs):
        return model(args[0].to(model.linear.weight.dtype))

    module = clika_compile(Net().double(), tracing_inputs=[X], forward_fn=call_model)
    assert module(X.double()).dtype == torch.float64


def test_tracing_inputs_generator_read_once():
    """A generator of tracing inputs is read once and completely."""
    reads = []

    def yield_inputs():
        for rows in (2, 3):
            reads.append(rows)
            yield torch.randn(rows, 4)

    module = clika_compile(Net(), tracing_inputs=yield_inputs())
    assert reads == [2, 3]
    assert module(torch.randn(7, 4)).shape == (7, 2)


def test_calibration_inputs_replace_tracing_inputs():
    """Calibration inputs are traced if there are no tracing inputs."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(5, 4)), batch_size=2)
    module = clika_compile(Net(), calibration_inputs=loader, data_transform_fn=lambda batch: batch[0])
    assert module(torch.randn(9, 4)).shape == (9, 2)


def test_clika_compile_method_keeps_defaults(compile_and_compare):
    """A compiled method keeps its defaults."""
    net = Net().eval()
    module = clika_compile(net.infer, tracing_inputs=[(X, 4.0)])
    assert isinstance(module, ClikaModule)
    torch.testing.assert_close(module(X, 4.0), net.infer(X, 4.0))
    with pytest.raises(ModelError, match=r"argument 'temperature' is 2.0, but the graph was compiled for 4.0"):
        module(X)


class Sized(nn.Module):
    def forward(self, x, size):
        return x.reshape(size) + 1, x.shape, {"inner": [x.size()[1:]]}


def test_outputs_shape_returned_as_torch_size_in_copies():
    """A returned shape is a `torch.Size`, also in copies."""
    x = torch.randn(2, 6)
    module = clika_compile(Sized(), tracing_inputs=[(x, torch.Size([4, 3])), (x.repeat(2, 1), torch.Size([8, 3]))])
    for one in (module, copy.deepcopy(module)):
        given = torch.randn(6, 6), torch.Size([12, 3])
        (_, *actual), (_, *expected) = one(*given), Sized()(*given)
        assert actual == expected
        assert type(actual[0]) is type(actual[1]["inner"][0]) is torch.Size


def test_arange_of_tensor_item_follows_tensor(compile_and_compare, tmp_path):
    """A size that is read from a tensor follows the tensor."""

    def make_mask(lengths):
        return torch.arange(int(lengths.max())) < lengths[:, None]

    module = compile_and_compare(
        make_mask, [torch.tensor([3, 1]), torch.tensor([2, 5, 1])], [torch.tensor([1]), torch.tensor([4, 9])]
    )
    module.clika_export(tmp_path / "mask.onnx")


def test_outputs_integer_from_tensor_rejected():
    """An integer result that is read from a tensor raises an error."""

    def return_longest(x, lengths):
        return x * 2, int(lengths.max()) + 1

    with pytest.raises(ModelError, match=r"returns a number read from a tensor \(in <root> at .*py:\d+\). Return that"):
        clika_compile(return_longest, tracing_inputs=[(torch.randn(2, 3), torch.tensor([1, 2]))])


@pytest.mark.parametrize(
    "function",
    [lambda x: (x * 2, x.mean().item()), lambda x: (x * 2, x[0].tolist()), lambda x: (x * 2, x.mean().item() * 2)],
    ids=["item", "tolist", "computed"],
)
def test_outputs_float_from_tensor_rejected(function):
    """A float result that is read from a tensor raises an error."""
    with pytest.raises(
        ModelError,
        match=r"returns a number read from a tensor \(in <root> at .*py:\d+\). Return that tensor",
    ):
        clika_compile(function, tracing_inputs=[torch.randn(2, 3)])


class KeylessOutput(OrderedDict):
    """A result that is registered without the keys of its children, as those of diffusers."""


class KeylessPair:
    """The same for an object that is no mapping."""

    def __init__(self, first, second):
        self.first, self.second = first, second


pytree.register_pytree_node(
    KeylessOutput, pytree._dict_flatten, lambda values, context: KeylessOutput(zip(context, values, strict=True))
)
pytree.register_pytree_node(
    KeylessPair, lambda pair: ([pair.first, pair.second], None), lambda values, _: KeylessPair(*values)
)


def test_capture_result_registered_without_keys(tmp_path):
    """The result has its class; outputs of the file have the keys of a mapping, or numbers."""

    def sample(x):
        return KeylessOutput(sample=x * 2, pair=KeylessPair(x + 1, x - 1))

    module = clika_compile(sample, tracing_inputs=[torch.ones(2, 3), torch.ones(4, 3)])
    found = module(torch.ones(5, 3))
    assert type(found) is KeylessOutput
    assert type(found["pair"]) is KeylessPair
    assert torch.equal(found["pair"].second, torch.zeros(5, 3))
    artifact = module.clika_export(tmp_path / "model.onnx")
    assert artifact.output_names == ("sample", "pair_0", "pair_1")
