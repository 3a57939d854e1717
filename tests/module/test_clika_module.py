"""``ClikaModule``: a drop-in for the original that trains, moves, copies, saves and loads."""

import copy
import enum
import inspect
import io
import pickle
import re

import pytest
import torch
from torch import nn

from clika_ref import ClikaModule, clika_compile
from clika_ref.core.errors import ModelError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("offset", torch.randn(2), persistent=False)

    def forward(self, x, scale=None, *, bias: float = 0.5):
        y = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3))) + self.offset + bias
        return y if scale is None else y * scale


SHAPES = [(2, 3, 8, 8), (3, 3, 9, 8)]


@pytest.fixture
def original():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def module(original):
    return clika_compile(original, tracing_inputs=[torch.randn(s) for s in SHAPES], discard_input_model=False)


@pytest.fixture
def x():
    return torch.randn(4, 3, 7, 8)


def test_the_call_signature_is_the_originals(original, module):
    assert inspect.signature(module.forward) == inspect.signature(original.forward)
    assert isinstance(module, nn.Module)


def test_keywords_that_only_kwargs_take_are_shown_as_those_that_were_given():
    class Sum(nn.Module):
        def forward(self, x, **others):
            return x + sum(others.values())

    x = torch.ones(2)
    module = clika_compile(Sum().eval(), tracing_inputs=[{"x": x, "y": x, "z": x}])
    assert str(inspect.signature(module.forward)) == "(x, *, y, z)"
    assert torch.equal(module(x, z=x, y=x), x * 3)
    with pytest.raises(ModelError, match="argument 'w' was omitted when the model was compiled"):
        module(x, y=x, z=x, w=x)


def test_the_state_dict_has_the_originals_keys_and_the_graph(original, module):
    assert set(module.state_dict()) == {*original.state_dict(), "_extra_state"}
    for name, value in original.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert dict(module.named_buffers()).keys() == dict(original.named_buffers()).keys()


def test_it_loads_a_state_dict_of_the_original(module, x):
    torch.manual_seed(1)
    other = Net().eval()
    other.offset.copy_(module.offset)  # not saved, so not loaded
    missing = module.load_state_dict(other.state_dict())
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    torch.testing.assert_close(module(x), other(x))


def test_the_original_loads_its_state_dict_but_for_the_graph(original, module):
    state = {k: v for k, v in module.state_dict().items() if k != "_extra_state" and not k.startswith("clika.")}
    original.load_state_dict(state)


def test_an_empty_module_rebuilds_itself_from_a_state_dict(module, x):
    empty = ClikaModule()
    empty.load_state_dict(module.state_dict())
    assert torch.equal(empty(x), module(x))
    assert str(empty.graph) == str(module.graph)
    assert inspect.signature(empty.forward).parameters.keys() == inspect.signature(module.forward).parameters.keys()
    empty.head.weight.data.zero_()
    assert module.head.weight.any(), "the new module must have weights of its own"


def test_a_rebuilt_module_trains_what_the_saved_one_trained():
    original = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    original[2].weight = nn.Parameter(original[2].weight.detach(), requires_grad=False)
    saved = clika_compile(original, tracing_inputs=[torch.ones(2, 2)])
    again = ClikaModule()
    again.load_state_dict(saved.state_dict())
    trained = {name: p.requires_grad for name, p in saved.named_parameters()}
    assert {name: p.requires_grad for name, p in again.named_parameters()} == trained
    assert sorted(trained.values()) == [False, *[True] * 5]
    assert [name for name, _ in again.named_buffers()] == [name for name, _ in saved.named_buffers()]
    again(torch.ones(2, 2)).sum().backward()
    assert again.get_parameter("0.weight").grad is not None


def test_an_empty_module_says_what_to_do(x):
    for use in (lambda m: m(x), lambda m: m.graph, lambda m: m.clika_export("a.onnx")):
        with pytest.raises(ModelError, match="this ClikaModule is empty; compile a model, or load a state_dict that a"):
            use(ClikaModule())
    assert "empty" in repr(ClikaModule())


def test_a_state_dict_passes_through_torch_save_and_a_safe_load(module, x):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = ClikaModule()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(x), module(x))


def test_a_strict_load_names_missing_and_unexpected_keys(module):
    state = module.state_dict()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"head.bias"'):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        module.load_state_dict({**module.state_dict(), "other": torch.ones(1)})


def test_gradients_are_those_of_the_original(original, module, x):
    for net in (original, module):
        net(x, bias=0.5).square().sum().backward()
    for name, weight in original.named_parameters():
        gradient = dict(module.named_parameters())[name].grad
        if weight.grad is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, weight.grad)


def test_gradients_reach_the_input(original, module, x):
    gradients = []
    for net in (original, module):
        inputs = x.clone().requires_grad_()
        net(inputs).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


def test_training_follows_the_original_in_train_mode():
    torch.manual_seed(0)
    original = Net().train()
    inputs = [torch.randn(s) for s in SHAPES]
    module = clika_compile(original, tracing_inputs=inputs, skip_eval_set_mode=True, discard_input_model=False)
    optimizers = [torch.optim.Adam(net.parameters(), 0.05) for net in (original, module)]
    for _ in range(3):
        x = torch.randn(5, 3, 8, 8)
        for net, optimizer in zip((original, module), optimizers, strict=True):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    for name, value in original.state_dict().items():
        # Adam divides by the root of squared gradients: where those are near 0, roundings show.
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-3, atol=1e-4)


def test_it_moves_to_another_device(module, x):
    moved = copy.deepcopy(module).to("meta")
    assert moved(x.to("meta")).shape == (4, 2)
    assert all(t.device.type == "meta" for t in [*moved.parameters(), *moved.buffers()])


def test_constants_made_in_forward_move_as_well():
    def shifted(x):
        return x + torch.arange(x.shape[1], device=x.device) + torch.tensor([0.5], device=x.device)

    module = clika_compile(shifted, tracing_inputs=[torch.randn(2, 3), torch.randn(2, 4)])
    assert module.to("meta")(torch.randn(2, 5, device="meta")).device.type == "meta"


def test_copies_are_independent_and_equal(module, x):
    expected = module(x)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(made(x), expected)
        with torch.no_grad():
            made.head.bias.add_(1)
        torch.testing.assert_close(made(x), expected + 1)
        assert torch.equal(module(x), expected)
        assert set(made.state_dict()) == set(module.state_dict())


def test_copies_export(module, tmp_path):
    for number, made in enumerate((copy.deepcopy(module), pickle.loads(pickle.dumps(module)))):  # noqa: S301 - our own
        made.clika_export(tmp_path / f"{number}.onnx")
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()


def test_a_copy_keeps_tied_weights_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    module = clika_compile(Tied(), tracing_inputs=[torch.randint(0, 10, (2, 3))])
    loaded = ClikaModule()
    loaded.load_state_dict(module.state_dict())
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):  # noqa: S301 - our own bytes
        assert made.head.weight is made.embed.weight


def test_functional_calls_and_other_weights(module, x):
    state = {n: p * 2 for n, p in module.named_parameters()}
    result = torch.func.functional_call(module, state, (x,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(result, module(x))


def test_torch_export_takes_it(original, module, x):
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), original(x))


def test_torch_compile_takes_it_with_other_sizes(original, module):
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3, 8, 8)
        torch.testing.assert_close(compiled(x), original(x))


def test_the_class_can_be_called_for_the_method_of_a_module(module, x):
    assert torch.equal(type(module).forward(module, x), module(x))
    assert "args" in inspect.signature(type(module).forward).parameters


def test_it_is_a_part_of_another_module(original, module, x):
    whole = nn.Sequential(module, nn.Linear(2, 2))
    assert {"0.conv.weight", "0._extra_state", "1.weight"} <= set(whole.state_dict())
    state = whole.state_dict()
    twin = nn.Sequential(copy.deepcopy(module), nn.Linear(2, 2))
    twin.load_state_dict(state)
    assert torch.equal(twin(x), whole(x))
    torch.testing.assert_close(whole(x), whole[1](original(x)))


def test_a_part_of_another_module_loads_the_state_of_the_original(original, module, x):
    whole = nn.Sequential(nn.Identity(), module)
    other = copy.deepcopy(original)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    whole.load_state_dict(nn.Sequential(nn.Identity(), other).state_dict())
    torch.testing.assert_close(whole(x), other(x))


@pytest.mark.parametrize(
    ("renamed", "hint"),
    [
        (
            lambda n: f"module.{n}",
            r"It has 'module._extra_state': remove 'module.' from its names, as torch.nn.modules.util",
        ),
        (
            lambda n: n.replace("_extra_state", "other"),
            "Pass the state dict of a ClikaModule; load that of the original into",
        ),
    ],
    ids=["by DistributedDataParallel", "of the original"],
)
def test_a_state_dict_without_a_graph_says_where_it_is(module, renamed, hint):
    state = {renamed(name): tensor for name, tensor in module.state_dict().items()}
    with pytest.raises(
        ModelError, match=rf"empty ClikaModule: it has no '_extra_state', which holds the graph. {hint}"
    ):
        ClikaModule().load_state_dict(state)


def test_an_empty_part_of_another_module_takes_its_graph_from_the_state(module, x):
    whole = nn.Sequential(nn.Identity(), ClikaModule())
    whole.load_state_dict(nn.Sequential(nn.Identity(), module).state_dict())
    assert torch.equal(whole(x), module(x))


def test_a_part_of_another_module_refuses_the_state_of_another_graph(module):
    other = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.ones(2, 3)])
    with pytest.raises(ModelError, match="cannot load the state dict: it holds another graph than this module"):
        nn.Sequential(module).load_state_dict(nn.Sequential(other).state_dict())


class Odd(nn.Module):
    """Defaults that have no saved form: a function, an enumeration, a tensor."""

    def forward(self, x, flag=True, act=torch.relu, kind=enum.Enum("Kind", "A B").A, z=torch.ones(3)):  # noqa: B008
        return act(x) + z if flag and kind.name == "A" else x


def test_defaults_that_have_no_saved_form_survive_copies():
    x = torch.randn(2, 3)
    module = clika_compile(Odd(), tracing_inputs=[x])
    for twin in (copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module)), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(twin(x), torch.relu(x) + 1)
        assert torch.equal(twin(x, True), torch.relu(x) + 1)
        with pytest.raises(ModelError, match="argument 'act' was omitted when the model was compiled"):
            twin(x, act=torch.tanh)


def test_an_argument_whose_default_was_not_copied_has_to_be_given():
    x, z = torch.randn(2, 3), torch.full((3,), 2.0)
    twin = copy.deepcopy(clika_compile(Odd(), tracing_inputs=[(x, {"z": z})]))
    assert torch.equal(twin(x, z=z), torch.relu(x) + 2)
    with pytest.raises(
        ModelError, match=r"argument 'z' is missing, and its default tensor\(.*\) is not stored in a copied"
    ):
        twin(x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m(torch.randn(2, 4, 8, 8)),
            r"input 'x': float32\[2, 4, 8, 8\] .*: dim 1 must be 3\. .* compile with",
        ),
        (lambda m: m(torch.randn(2, 3, 8, 9)), "dim 3 must be 8"),
        (lambda m: m(torch.randn(3, 8, 8)), r"input 'x': float32\[3, 8, 8\] does not match float32\[batch, 3"),
        (
            lambda m: m(torch.ones(2, 3, 8, 8, dtype=torch.int64)),
            r"input 'x': int64\[2, 3, 8, 8\] does not match",
        ),
        (lambda m: m([torch.randn(2, 3, 8, 8)]), "argument 'x' has the structure"),
        (lambda m: m("image"), "argument 'x' is 'image', a str, but the model expects a tensor"),
        (lambda m: m(), r"do not match forward.*missing a required argument: 'x'"),
        (lambda m: m(torch.randn(SHAPES[0]), wrong=1), r"do not match forward.*unexpected keyword argument 'wrong'"),
        (lambda m: m(torch.randn(SHAPES[0]), bias=1.5), "argument 'bias' was omitted when the model was compiled"),
        (
            lambda m: m(torch.randn(SHAPES[0]), torch.ones(2)),
            "argument 'scale' was omitted when the model was compiled",
        ),
    ],
)
def test_calls_that_the_graph_was_not_made_for_are_refused(module, call, message):
    with pytest.raises(ModelError, match=message):
        call(module)


def test_a_size_below_what_the_model_takes_is_an_error_and_no_number(module):
    with pytest.raises(Exception, match=r"violates|Kernel size|smaller"):
        module(torch.randn(2, 3, 2, 8))


def test_dummy_inputs_are_a_call(module):
    inputs = module.clika_generate_dummy_inputs()
    assert inputs.keys() == {"x"}
    assert inputs["x"].shape[1] == 3
    assert module(**inputs).shape[1] == 2


def test_dummy_inputs_repeat_constants_and_nesting():
    def nested(items, flag, n):
        return items["a"] * n if flag else items["a"]

    inputs = [({"a": torch.randn(2, 3)}, True, 4), ({"a": torch.randn(3, 3)}, True, 5)]
    module = clika_compile(nested, tracing_inputs=inputs)
    made = module.clika_generate_dummy_inputs()
    assert made["flag"] is True
    assert made["items"]["a"].shape[1] == 3
    assert made["n"] in (4, 5)
    module(**made)


def test_the_graph_prints_one_line_for_each_node_with_type_scope_and_line(module):
    text = str(module.graph)
    lines = text.splitlines()
    assert lines[0] == "graph Net(%x: float32[batch, 3, x_2, 8])"
    (conv,) = [line for line in lines if "= conv2d[" in line]
    assert "%conv2d: float32[batch, 4, x_2 - 2, 6] = conv2d[stride=(1, 1)" in conv
    assert re.search(r"# conv at test_clika_module.py:\d+$", conv)
    assert lines[-1].startswith("  return %")


def test_the_graph_is_bound_to_the_current_weights(module):
    module.double()
    assert module.graph.constants["head.weight"].data is module.head.weight
    assert module.graph.constants["head.weight"].data.dtype == torch.float64


def test_its_representation_says_how_much_is_inside(module):
    assert f"Net: {len(module.graph)} nodes, {len(module.graph.constants)} constants" in repr(module)


def test_the_parts_of_a_module_hold_weights_and_refuse_to_compute(module, x):
    with pytest.raises(NotImplementedError, match="only holds weights; call the ClikaModule itself"):
        module.conv(x)


def test_hooks_on_the_module_run(module, x):
    seen = []
    module.register_forward_hook(lambda m, args, result: seen.append(result.shape))
    module(x)
    assert seen == [(4, 2)]


def test_a_scalar_tensor_may_hold_any_number():
    module = clika_compile(lambda x, t: x * t, tracing_inputs=[(torch.ones(2), torch.tensor(0.5))])
    for number in (2.0, float("inf"), float("nan")):
        expected = torch.ones(2) * number
        torch.testing.assert_close(module(torch.ones(2), torch.tensor(number)), expected, equal_nan=True)


def test_a_state_dict_of_another_graph_is_refused():
    inputs = [torch.rand(2, 3), torch.rand(4, 3)]
    one, same, other = (
        clika_compile(nn.Sequential(nn.Linear(3, 3), last), tracing_inputs=inputs)
        for last in (nn.ReLU(), nn.ReLU(), nn.Sigmoid())
    )
    one.load_state_dict(same.state_dict())
    with pytest.raises(ModelError, match=r"another graph than this module. Load it into an empty"):
        one.load_state_dict(other.state_dict())


def test_weights_of_another_shape_do_not_fit_a_saved_graph():
    state = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.rand(2, 3)]).state_dict()
    state["weight"] = torch.zeros(2, 5)
    with pytest.raises(ModelError, match=r"weight: float32\[2, 5\] does not match float32\[3, 3\] of the saved graph"):
        ClikaModule().load_state_dict(state)
