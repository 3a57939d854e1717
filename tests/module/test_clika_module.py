"""``ClikaModule``: a drop-in for the original that trains, moves, copies, saves and loads."""

import copy
import enum
import inspect
import io
import pickle
import re

import pytest
import torch
from loaded_copies import load_copy
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


def test_forward_signature_equals_original(original, module):
    """The signature of forward equals that of the original."""
    assert inspect.signature(module.forward) == inspect.signature(original.forward)
    assert isinstance(module, nn.Module)


def test_forward_kwargs_shown_as_traced_keywords():
    """Keywords of `**kwargs` are shown as traced, and others raise an error."""

    class Sum(nn.Module):
        def forward(self, x, **others):
            return x + sum(others.values())

    x = torch.ones(2)
    module = clika_compile(Sum().eval(), tracing_inputs=[{"x": x, "y": x, "z": x}])
    assert str(inspect.signature(module.forward)) == "(x, *, y, z)"
    assert torch.equal(module(x, z=x, y=x), x * 3)
    with pytest.raises(ModelError, match="argument 'w' was omitted when the model was compiled"):
        module(x, y=x, z=x, w=x)


def test_state_dict_has_original_keys_and_graph(original, module):
    """The state dict has the original's keys and values, and the graph."""
    assert set(module.state_dict()) == {*original.state_dict(), "_extra_state"}
    for name, value in original.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert dict(module.named_buffers()).keys() == dict(original.named_buffers()).keys()


def test_load_state_dict_accepts_original(module, x):
    """A state dict of the original loads."""
    torch.manual_seed(1)
    other = Net().eval()
    other.offset.copy_(module.offset)  # not saved, so not loaded
    missing = module.load_state_dict(other.state_dict())
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    torch.testing.assert_close(module(x), other(x))


def test_state_dict_loads_into_original(original, module):
    """The original loads the state dict without the graph."""
    state = {k: v for k, v in module.state_dict().items() if k != "_extra_state" and not k.startswith("clika.")}
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    original.load_state_dict(state)
    assert all(torch.equal(weight, state[name]) for name, weight in original.state_dict().items())


def test_load_state_dict_into_empty_module_rebuilds_graph(module, x):
    """An empty module is rebuilt from a state dict, with its own weights."""
    empty = load_copy(module)
    assert torch.equal(empty(x), module(x))
    assert str(empty.graph) == str(module.graph)
    assert inspect.signature(empty.forward).parameters.keys() == inspect.signature(module.forward).parameters.keys()
    empty.head.weight.data.zero_()
    assert module.head.weight.any(), "the new module must have weights of its own"


def test_load_state_dict_rebuilds_requires_grad():
    """A rebuilt module trains the same parameters."""
    original = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    original[2].weight = nn.Parameter(original[2].weight.detach(), requires_grad=False)
    saved = clika_compile(original, tracing_inputs=[torch.ones(2, 2)])
    again = load_copy(saved)
    trained = {name: p.requires_grad for name, p in saved.named_parameters()}
    assert {name: p.requires_grad for name, p in again.named_parameters()} == trained
    assert sorted(trained.values()) == [False, *[True] * 5]
    assert [name for name, _ in again.named_buffers()] == [name for name, _ in saved.named_buffers()]
    again(torch.ones(2, 2)).sum().backward()
    assert again.get_parameter("0.weight").grad is not None


def test_clika_module_empty_raises_with_remedy(x):
    """Using an empty module raises an error with the remedy."""
    for use in (lambda m: m(x), lambda m: m.graph, lambda m: m.clika_export("a.onnx")):
        with pytest.raises(
            ModelError, match=r"this ClikaModule is empty. Compile a model, or load a state_dict that a"
        ):
            use(ClikaModule())
    assert "empty" in repr(ClikaModule())


def test_state_dict_torch_save_weights_only_round_trip(module, x):
    """The state dict is restored by `torch.save` and `torch.load(weights_only=True)`."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = ClikaModule()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(x), module(x))


def test_load_state_dict_strict_names_keys(module):
    """A strict load names missing and unexpected keys."""
    state = module.state_dict()
    del state["head.bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"head.bias"'):
        module.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"other"'):
        module.load_state_dict({**module.state_dict(), "other": torch.ones(1)})


def test_backward_weight_gradients_match_original(original, module, x):
    """The gradients of weights equal those of the original."""
    for net in (original, module):
        net(x, bias=0.5).square().sum().backward()
    for name, weight in original.named_parameters():
        gradient = dict(module.named_parameters())[name].grad
        if weight.grad is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, weight.grad)


def test_backward_input_gradients_match_original(original, module, x):
    """The gradients of inputs equal those of the original."""
    gradients = []
    for net in (original, module):
        inputs = x.clone().requires_grad_()
        net(inputs).sum().backward()
        gradients.append(inputs.grad)
    torch.testing.assert_close(*gradients)


def test_train_mode_steps_match_original():
    """Training steps in train mode follow the original."""
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


def test_to_moves_parameters_and_buffers(module, x):
    """The module moves to another device."""
    moved = copy.deepcopy(module).to("meta")
    assert moved(x.to("meta")).shape == (4, 2)
    assert all(t.device.type == "meta" for t in [*moved.parameters(), *moved.buffers()])


def test_to_moves_constants_of_forward():
    """Constants that forward creates move with the module."""

    def add_positions(x):
        return x + torch.arange(x.shape[1], device=x.device) + torch.tensor([0.5], device=x.device)

    module = clika_compile(add_positions, tracing_inputs=[torch.randn(2, 3), torch.randn(2, 4)])
    assert module.to("meta")(torch.randn(2, 5, device="meta")).device.type == "meta"


def test_copies_equal_and_independent(module, x):
    """Copies and pickles have equal outputs and independent weights."""
    expected = module(x)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(made(x), expected)
        with torch.no_grad():
            made.head.bias.add_(1)
        torch.testing.assert_close(made(x), expected + 1)
        assert torch.equal(module(x), expected)
        assert set(made.state_dict()) == set(module.state_dict())


def test_copies_export_same_bytes(module, tmp_path):
    """Copies and pickles export the same bytes."""
    for number, made in enumerate((copy.deepcopy(module), pickle.loads(pickle.dumps(module)))):  # noqa: S301 - our own
        made.clika_export(tmp_path / f"{number}.onnx")
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()


def test_copies_keep_tied_weights():
    """Copies, pickles and loaded modules keep tied weights."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            return self.head(self.embed(ids))

    module = clika_compile(Tied(), tracing_inputs=[torch.randint(0, 10, (2, 3))])
    loaded = load_copy(module)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):  # noqa: S301 - our own bytes
        assert made.head.weight is made.embed.weight


def test_functional_call_uses_given_weights(module, x):
    """`torch.func.functional_call` uses the given weights."""
    state = {n: p * 2 for n, p in module.named_parameters()}
    result = torch.func.functional_call(module, state, (x,))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    torch.testing.assert_close(result, module(x))


def test_torch_export_accepts_module(original, module, x):
    """`torch.export` exports the module."""
    program = torch.export.export(module, (x,))
    torch.testing.assert_close(program.module()(x), original(x))


@pytest.mark.slow
def test_torch_compile_accepts_other_sizes(original, module):
    """`torch.compile` compiles the module for several sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager")
    for rows in (2, 5, 7):
        x = torch.randn(rows, 3, 8, 8)
        torch.testing.assert_close(compiled(x), original(x))


def test_type_forward_called_with_module(module, x):
    """`type(module).forward(module, x)` equals `module(x)`."""
    assert torch.equal(type(module).forward(module, x), module(x))
    assert "args" in inspect.signature(type(module).forward).parameters


def test_clika_module_as_submodule_saves_and_loads(original, module, x):
    """The module can be a submodule that saves and loads its state."""
    whole = nn.Sequential(module, nn.Linear(2, 2))
    assert {"0.conv.weight", "0._extra_state", "1.weight"} <= set(whole.state_dict())
    state = whole.state_dict()
    twin = nn.Sequential(copy.deepcopy(module), nn.Linear(2, 2))
    twin.load_state_dict(state)
    assert torch.equal(twin(x), whole(x))
    torch.testing.assert_close(whole(x), whole[1](original(x)))


def test_submodule_loads_state_of_original(original, module, x):
    """As a submodule, the module loads the state of the original."""
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
def test_load_state_dict_without_graph_explains_key(module, renamed, hint):
    """A state dict without a graph raises an error that explains the keys."""
    state = {renamed(name): tensor for name, tensor in module.state_dict().items()}
    with pytest.raises(
        ModelError, match=rf"empty ClikaModule: it has no '_extra_state', which holds the graph. {hint}"
    ):
        ClikaModule().load_state_dict(state)


def test_empty_submodule_rebuilt_from_state(module, x):
    """An empty submodule is rebuilt from the state."""
    whole = nn.Sequential(nn.Identity(), ClikaModule())
    whole.load_state_dict(nn.Sequential(nn.Identity(), module).state_dict())
    assert torch.equal(whole(x), module(x))


def test_submodule_state_of_other_graph_raises(module):
    """As a submodule, the module rejects the state of another graph."""
    other = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.ones(2, 3)])
    with pytest.raises(ModelError, match="cannot load the state dict: it holds another graph than this module"):
        nn.Sequential(module).load_state_dict(nn.Sequential(other).state_dict())


class UnsavableDefaults(nn.Module):
    """Defaults that have no saved form: a function, an enumeration, a tensor."""

    def forward(self, x, flag=True, act=torch.relu, kind=enum.Enum("Kind", "A B").A, z=torch.ones(3)):  # noqa: B008
        return act(x) + z if flag and kind.name == "A" else x


def test_copies_keep_defaults_without_saved_form():
    """Defaults without a saved form work in copies, and other values raise an error."""
    x = torch.randn(2, 3)
    module = clika_compile(UnsavableDefaults(), tracing_inputs=[x])
    for twin in (copy.deepcopy(module), copy.deepcopy(copy.deepcopy(module)), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        assert torch.equal(twin(x), torch.relu(x) + 1)
        assert torch.equal(twin(x, True), torch.relu(x) + 1)
        with pytest.raises(ModelError, match="argument 'act' was omitted when the model was compiled"):
            twin(x, act=torch.tanh)


def test_copy_without_saved_default_requires_argument():
    """An argument whose default was not copied is required."""
    x, z = torch.randn(2, 3), torch.full((3,), 2.0)
    twin = copy.deepcopy(clika_compile(UnsavableDefaults(), tracing_inputs=[(x, {"z": z})]))
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
        (
            lambda m: m([torch.randn(2, 3, 8, 8)]),
            "argument 'x' is a list of 1 value, but the model was compiled for one value",
        ),
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
def test_forward_unsupported_call_raises(module, call, message):
    """A call that the graph does not support raises an error that names the argument."""
    with pytest.raises(ModelError, match=message):
        call(module)


def test_forward_size_below_minimum_raises(module):
    """A size below the minimum raises an error."""
    with pytest.raises(Exception, match=r"violates|Kernel size|smaller"):
        module(torch.randn(2, 3, 2, 8))


def test_clika_generate_dummy_inputs_fit_forward(module):
    """The dummy inputs fit forward."""
    inputs = module.clika_generate_dummy_inputs()
    assert inputs.keys() == {"x"}
    assert inputs["x"].shape[1] == 3
    assert module(**inputs).shape[1] == 2


def test_clika_generate_dummy_inputs_keep_constants_and_nesting():
    """The dummy inputs have the traced constants and nesting."""

    def scale_nested(items, flag, n):
        return items["a"] * n if flag else items["a"]

    inputs = [({"a": torch.randn(2, 3)}, True, 4), ({"a": torch.randn(3, 3)}, True, 5)]
    module = clika_compile(scale_nested, tracing_inputs=inputs)
    made = module.clika_generate_dummy_inputs()
    assert made["flag"] is True
    assert made["items"]["a"].shape[1] == 3
    assert made["n"] in (4, 5)
    module(**made)


def test_graph_str_has_line_per_node(module):
    """The printed graph has a line for each node, with type, scope and source line."""
    text = str(module.graph)
    lines = text.splitlines()
    assert lines[0] == "graph Net(%x: float32[batch, 3, x_2, 8])"
    (conv,) = [line for line in lines if "= conv2d[" in line]
    assert "%conv2d: float32[batch, 4, x_2 - 2, 6] = conv2d[stride=(1, 1)" in conv
    assert re.search(r"# conv at test_clika_module.py:\d+$", conv)
    assert lines[-1].startswith("  return %")


def test_graph_constants_follow_current_weights(module):
    """The constants of the graph are the current weights."""
    module.double()
    assert module.graph.constants["head.weight"].data is module.head.weight
    assert module.graph.constants["head.weight"].data.dtype == torch.float64


def test_repr_shows_node_and_constant_counts(module):
    """The representation shows the number of nodes and constants."""
    assert f"Net: {len(module.graph)} nodes, {len(module.graph.constants)} constants" in repr(module)


def test_submodule_call_raises(module, x):
    """Submodules hold weights only; calling them raises an error."""
    with pytest.raises(NotImplementedError, match=r"only holds weights. Call the ClikaModule itself"):
        module.conv(x)


def test_forward_hook_runs(module, x):
    """Forward hooks of the module run."""
    seen = []
    module.register_forward_hook(lambda m, args, result: seen.append(result.shape))
    module(x)
    assert seen == [(4, 2)]


def test_scalar_tensor_input_accepts_any_number():
    """A scalar tensor input may have any value, also inf and NaN."""
    module = clika_compile(lambda x, t: x * t, tracing_inputs=[(torch.ones(2), torch.tensor(0.5))])
    for number in (2.0, float("inf"), float("nan")):
        expected = torch.ones(2) * number
        torch.testing.assert_close(module(torch.ones(2), torch.tensor(number)), expected, equal_nan=True)


def test_load_state_dict_other_graph_raises():
    """A state dict of another graph raises an error."""
    inputs = [torch.rand(2, 3), torch.rand(4, 3)]
    one, same, other = (
        clika_compile(nn.Sequential(nn.Linear(3, 3), last), tracing_inputs=inputs)
        for last in (nn.ReLU(), nn.ReLU(), nn.Sigmoid())
    )
    one.load_state_dict(same.state_dict())
    with pytest.raises(ModelError, match=r"another graph than this module. Load it into an empty"):
        one.load_state_dict(other.state_dict())


def test_load_state_dict_wrong_shape_raises():
    """A weight of another shape than in the saved graph raises an error."""
    state = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.rand(2, 3)]).state_dict()
    state["weight"] = torch.zeros(2, 5)
    with pytest.raises(ModelError, match=r"weight: float32\[2, 5\] does not match float32\[3, 3\] of the saved graph"):
        ClikaModule().load_state_dict(state)
