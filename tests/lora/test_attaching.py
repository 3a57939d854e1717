"""Adapters attached to named layers: parts of the module, and its only trained parameters."""

import copy
import pickle

import pytest
import torch
from adapted_nets import HERE, INT8, Images, Tokens, build_net, compile_net, make_batches, make_lora_settings, train
from torch import nn

from clika_ref import ClikaModule, LoraSettings, ModelError, PruningSettings, clika_compile

KINDS = [Images, Tokens]
ADAPTERS = "clika.adapters."


def list_adapters(module):
    return {name: p for name, p in module.named_parameters() if name.startswith(ADAPTERS)}


def adapter_paths(module):
    return [
        name.removeprefix(ADAPTERS).removesuffix(".lora_A.weight") for name in list_adapters(module) if "_A" in name
    ]


# At first


@pytest.mark.parametrize("kind", KINDS)
def test_clika_attach_lora_initially_keeps_outputs(kind):
    """New adapters change no output, in train and eval mode."""
    x, module = make_batches(kind, 1, seed=5)[0], compile_net(kind)
    before = module(x)
    found = module.clika_attach_lora(LoraSettings(rank=2, dropout_rate=0.5))
    assert len(found.layers) == len(adapter_paths(module)) > 3
    assert torch.equal(module(x), before)
    assert torch.equal(module.train()(x), before), (
        "what the second matrix is multiplied with is no matter while it is 0"
    )


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8), (8,)])
def test_global_lora_settings_linear_any_rank_of_input(shape):
    """Linear layers are adapted for inputs of one to four dims."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).eval(), torch.randn(shape)
    module = clika_compile(model, tracing_inputs=[x], global_lora_settings=make_lora_settings(rank=3))
    down, up = (list_adapters(module)[name].data for name in sorted(list_adapters(module)))
    up.normal_()
    expected = nn.functional.linear(x, model.weight + 4 / 3 * up @ down, model.bias)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel:UserWarning")
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(8, 8, 3),
        nn.Conv2d(8, 12, 1),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(8, 16, 3, groups=2, padding="same"),
        nn.Conv2d(8, 16, (4, 3), padding="same"),
        nn.Conv3d(8, 8, 2),
    ],
    ids=str,
)
def test_global_lora_settings_convolutions_match_merged_weight(layer):
    """Adapters of 1d to 3d, strided, grouped and padded convolutions equal an added low-rank weight."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, *[7] * (layer.weight.ndim - 2))
    module = clika_compile(copy.deepcopy(layer).eval(), tracing_inputs=[x], global_lora_settings=make_lora_settings())
    down, up = (list_adapters(module)[name].data for name in sorted(list_adapters(module)))
    assert down.shape == (2 * layer.groups, *layer.weight.shape[1:])
    up.normal_()
    found = module(x)
    with torch.no_grad():
        for group in range(layer.groups):  # each by itself
            rows = slice(group * layer.out_channels // layer.groups, (group + 1) * layer.out_channels // layer.groups)
            product = up[rows].flatten(1) @ down[2 * group : 2 * group + 2].flatten(1)
            layer.weight[rows] += 2 * product.reshape(layer.weight[rows].shape)
    torch.testing.assert_close(found, layer(x))


# Training


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_training_updates_adapters_only(kind):
    """Training updates the adapters and no other parameter, and reduces the loss."""
    module = compile_net(kind, lora=make_lora_settings())
    held = {name: p.clone() for name, p in module.named_parameters()}
    assert {name for name, p in module.named_parameters() if p.requires_grad} == list_adapters(module).keys()
    x = make_batches(kind, 1)[0]
    before = module(x)
    train(module, kind)
    changed = {name for name, p in module.named_parameters() if not torch.equal(p, held[name])}
    assert changed == list_adapters(module).keys()
    goal = 1.3 * build_net(kind)(x)
    assert (module(x) - goal).square().mean() < 0.95 * (before - goal).square().mean()


def test_adapters_gradients_match_manual_lora():
    """The gradients equal those of LoRA written by hand."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 12).double().eval(), torch.randn(5, 16).double()
    module = clika_compile(
        copy.deepcopy(model), tracing_inputs=[x], global_lora_settings=make_lora_settings(rank=2, alpha=6)
    )
    down, up = (list_adapters(module)[name] for name in sorted(list_adapters(module)))
    up.data.normal_()
    own = [m.detach().clone().requires_grad_() for m in (down, up)]
    module.train()(x).square().sum().backward()
    (model(x) + 3 * x @ own[0].T @ own[1].T).square().sum().backward()
    torch.testing.assert_close([down.grad, up.grad], [m.grad for m in own])


def test_lora_dropout_active_in_train_mode_only():
    """Dropout acts in train mode only, and keeps the expected output."""
    torch.manual_seed(0)
    x, settings = torch.randn(4, 16), LoraSettings(rank=4, dropout_rate=0.5)
    module = clika_compile(nn.Linear(16, 16).eval(), tracing_inputs=[x], global_lora_settings=settings)
    list_adapters(module)["clika.adapters.weight.lora_B.weight"].data.normal_()
    assert torch.equal(module.eval()(x), module(x))
    assert not torch.equal(module.train()(x), module(x))
    found = torch.stack([module(x).detach() for _ in range(1000)]).mean(0)
    added = module.eval()(x) - nn.functional.linear(x, module.weight, module.bias)
    assert (found - module(x)).norm() < 0.1 * added.norm(), "what is kept is larger by as much"


def test_global_lora_settings_kept_original_requires_grad():
    """An original that is not discarded keeps its trainable parameters."""
    model, x = build_net(Tokens), make_batches(Tokens, 1)
    clika_compile(model, tracing_inputs=x, discard_input_model=False, global_lora_settings=make_lora_settings())
    clika_compile(model, tracing_inputs=x, is_dry_run=True, global_lora_settings=make_lora_settings())
    assert all(p.requires_grad for p in model.parameters())


# Which layers


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["query", "value"], ["query", "value"]),
        (["wide", "*row"], ["wide", "narrow"]),
        (["linear_1"], ["value"]),
        (["*"], ["query", "value", "wide", "narrow"]),
    ],
)
def test_lora_target_layers_match_paths_suffixes_nodes_wildcards(names, expected):
    """Layers are selected by paths, suffixes, node names and wildcards."""
    module = compile_net(Tokens, lora=make_lora_settings(target_layers=names))
    assert adapter_paths(module) == expected
    nested = clika_compile(
        nn.Sequential(build_net(Tokens), build_net(Tokens)),
        tracing_inputs=make_batches(Tokens, 1),
        global_lora_settings=make_lora_settings(target_layers=["query", "0.narrow"]),
    )
    assert adapter_paths(nested) == ["0.query", "0.narrow", "1.query"]


def test_clika_attach_lora_reports_layers_and_log(tmp_path):
    """The log and the report list the attached adapters and their size."""
    module = compile_net(Tokens, logs_dir=tmp_path, lora=make_lora_settings(target_layers=["query", "wide"]))
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert "Global LoRA Settings" in text
    assert "2 adapters, 320 parameters, 5.0% of the 6,368 other parameters" in text
    module.clika_merge_lora()
    found = module.clika_attach_lora(make_lora_settings(target_layers=["query"]))
    assert [(layer.path, layer.operator, layer.shape, layer.rank) for layer in found.layers] == [
        ("query", "linear", (32, 32), 2)
    ]
    assert "32x32" in str(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_layers": ["qery"]}, "target_layers: 'qery' is not a layer of Tokens.*Near matches: 'query'"),
        ({"target_layers": ["q_proj"]}, "'q_proj' is not a layer.*Available: 'query'"),
        ({"target_layers": ["norm"]}, "'norm' is not a linear layer or convolution with a weight of its own"),
        ({"target_layers": ["x*"]}, r"'x\*' is not a layer"),
        ({"rank": 40}, r"'\*': rank=40 is too large: an adapter of 'query.weight' \(32x32\) would have 2,560"),
    ],
)
def test_lora_target_layers_unmatched_name_suggests_near(fields, message):
    """A name without a match raises an error with similar names."""
    with pytest.raises(ModelError, match=message):
        compile_net(Tokens, lora=make_lora_settings(**fields))


def test_lora_rank_too_large_skips_unless_named():
    """A wildcard skips layers that are too small for the rank; naming one raises an error."""
    module = compile_net(Images, lora=make_lora_settings(rank=6))
    assert "head" in adapter_paths(module)
    assert "head" not in adapter_paths(compile_net(Images, lora=make_lora_settings(rank=8)))
    with pytest.raises(ModelError, match="'head': rank=8 is too large"):
        compile_net(Images, lora=make_lora_settings(rank=8, target_layers=["head", "stem"]))
    with pytest.raises(ModelError, match="has no linear layer or convolution"):
        clika_compile(nn.ReLU(), tracing_inputs=[torch.randn(2)], global_lora_settings=make_lora_settings())


def test_clika_attach_lora_twice_raises():
    """A second call raises an error that suggests merging; other settings types are rejected."""
    module = compile_net(Tokens, lora=make_lora_settings())
    with pytest.raises(ModelError, match=r"already has adapters of 4 weights, .*'query.weight'. Merge them with"):
        module.clika_attach_lora(make_lora_settings())
    with pytest.raises(ModelError, match=r"lora_settings is 8, a int. Give a LoraSettings"):
        module.clika_attach_lora(8)


class Shared(nn.Module):
    """A layer that is called twice, and a table that shares its weight with the head."""

    def __init__(self):
        super().__init__()
        self.table, self.twice, self.head = nn.Embedding(40, 16), nn.Linear(16, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.twice(self.twice(self.table(x)).relu()))


def compile_shared(**options):
    torch.manual_seed(0)
    return clika_compile(Shared().eval(), tracing_inputs=[torch.arange(40)], **options)


def test_clika_attach_lora_shared_weight_shares_adapter(tmp_path):
    """Layers with a shared weight share an adapter; embeddings have none."""
    module, x = compile_shared(global_lora_settings=make_lora_settings()), torch.arange(40)
    assert adapter_paths(module) == ["twice", "head"]
    for name, matrix in list_adapters(module).items():
        if "lora_B" in name:
            matrix.data.normal_()
    down, up = (list_adapters(module)[f"{ADAPTERS}twice.lora_{which}.weight"].data for which in "AB")
    model = compile_shared()
    twice = model.twice.weight.data + 2 * up @ down
    down, up = (list_adapters(module)[f"{ADAPTERS}head.lora_{which}.weight"].data for which in "AB")
    y = nn.functional.linear(model.table.weight[x], twice, model.twice.bias).relu()
    y = nn.functional.linear(nn.functional.linear(y, twice, model.twice.bias), model.table.weight + 2 * up @ down)
    torch.testing.assert_close(module(x), y)
    module.clika_export(tmp_path / "merged.onnx")  # which compares, and must not change the table
    with pytest.raises(ModelError, match=r"head: its weight is tied, and also read by .*embedding"):
        module.clika_merge_lora()


# A part of the module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [None, INT8], ids=["float", "int8"])
def test_adapters_copied_pickled_and_loaded(kind, settings):
    """Copies, pickles and loaded modules have the adapters, with the same outputs and trainable parameters."""
    module, x, loaded = (
        train(compile_net(kind, settings, make_lora_settings()), kind),
        make_batches(kind, 1, seed=7)[0],
        ClikaModule(),
    )
    loaded.load_state_dict(module.state_dict())
    pickled = pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes
    for other in (copy.deepcopy(module), pickled, loaded.eval()):
        assert torch.equal(other(x), module(x))
        assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in module.parameters()]
        torch.testing.assert_close(other.train()(x), copy.deepcopy(module).train()(x))


def test_load_state_dict_of_original_keeps_adapters():
    """A state dict of the original loads and keeps the adapters."""
    module, model, x = (
        train(compile_net(Tokens, lora=make_lora_settings()), Tokens),
        build_net(Tokens),
        make_batches(Tokens, 1)[0],
    )
    before = module(x)
    assert module.state_dict().keys() - model.state_dict().keys() == list_adapters(module).keys() | {"_extra_state"}
    module.load_state_dict(model.state_dict())
    assert torch.equal(module(x), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
@pytest.mark.parametrize("settings", [None, INT8], ids=["float", "int8"])
def test_torch_compile_adapters_single_graph(settings):
    """`torch.compile` traces a module with adapters as one graph, in both modes."""
    torch._dynamo.reset()  # which counts how often it compiled a function for any module
    module, x = train(compile_net(Tokens, settings, make_lora_settings()), Tokens), make_batches(Tokens, 1)[0]
    for training in (True, False):
        module.train(training)
        expected = copy.deepcopy(module)(x)
        found = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_clika_prune_after_adapters_raises_before_adapts():
    """A module with adapters is not pruned; a pruned module is adapted."""
    module, data = compile_net(Images, lora=make_lora_settings()), make_batches(Images)
    with pytest.raises(ModelError, match=r"cannot prune: the module has adapters.*Prune before"):
        module.clika_prune(PruningSettings("structured", None, 0.5), calibration_inputs=data)
    both = compile_net(Images, INT8, make_lora_settings(), pruning_settings=PruningSettings("structured", None, 0.5))
    assert both.pointwise.weight.shape[0] == 12
    assert list_adapters(both)[f"{ADAPTERS}pointwise.lora_B.weight"].shape[0] == 12


def test_clika_attach_lora_live_batch_norm_raises():
    """Adapters require frozen batch norm."""
    module = clika_compile(
        build_net(Images), tracing_inputs=make_batches(Images, 1), batch_norm="live", deployment_settings=HERE
    )
    with pytest.raises(ModelError, match="Compile with batch_norm='frozen'"):
        module.clika_attach_lora(make_lora_settings())
