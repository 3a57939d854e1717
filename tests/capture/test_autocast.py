"""Autocast regions with dynamic dims, and the casts of calls in them."""

import contextlib
import copy
import logging
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from clika_ref_aten.linear import linear
from loaded_copies import load_copy
from torch import nn

from clika_ref import clika_compile
from clika_ref.capture.callables import make_callable
from clika_ref.capture.eager import run_eager
from clika_ref.capture.inputs import ModelCall
from clika_ref.core.errors import ModelError


def disable_onednn():
    """Run LSTM in bfloat16 without oneDNN, which does not support it on processors without AVX-512."""
    return torch.backends.mkldnn.flags(enabled=False)


def view_by_size(net, x):
    return net.layer(x).view(x.shape[0], -1)


def attend(net, x):
    q = net.layer(x).reshape(x.shape[0], x.shape[1], 2, 2).transpose(1, 2)
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return nn.functional.scaled_dot_product_attention(q, q, q, ahead).transpose(1, 2).flatten(2)


def use_sizes(net, x):
    y = net.layer(x) * x.shape[1] + torch.arange(x.shape[1])[:, None]
    return y[:, : x.shape[1] // 2 + 1], y[:1, :1].expand(x.shape) @ net.layer.weight


def pad_and_interpolate(net, x):
    y = torch.cat([net.layer(x), torch.zeros(x.shape[0], 1, 4)], 1)
    return nn.functional.interpolate(y.transpose(1, 2), size=x.shape[1] * 2)


def select_rows(net, x):
    return net.layer(x[x[..., 0] > 0]).sum(0), net.layer(x) * x.sum().item()


class Region(nn.Module):
    """A function of a linear layer within autocast."""

    def __init__(self, compute, layer=None):
        super().__init__()
        self.layer, self.compute = layer or nn.Linear(4, 4), compute

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.compute(self, x)


@pytest.mark.parametrize("compute", [view_by_size, attend, use_sizes, pad_and_interpolate, select_rows])
def test_autocast_region_serves_every_size(compile_and_compare, compute):
    """Sizes in an autocast region do not become guards."""
    compile_and_compare(
        Region(compute), [torch.randn(2, 3, 4), torch.randn(3, 5, 4)], [torch.randn(4, 7, 4), torch.randn(1, 1, 4)]
    )


def test_autocast_transformer_layer_serves_every_size():
    """A transformer layer in an autocast region serves every size."""
    original = Region(lambda net, x: net.layer(x), nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    inputs = [torch.randn(2, 3, 4), torch.randn(3, 5, 4)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    for x in [*inputs, torch.randn(4, 7, 4)]:
        torch.testing.assert_close(module(x), original(x))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize("shapes", [[(2, 3, 4)], [(2, 3, 4), (3, 5, 4)]], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_autocast_recurrent_network_rejected_with_remedy(kind, shapes):
    """A recurrent network in an autocast region raises an error with the remedy."""
    net = Region(lambda net, x: net.layer(x)[0], kind(4, 4))
    said = r"aten\.\w+\.input in .*test_autocast.py:\d+: .*'cpu', enabled=False"
    with disable_onednn(), pytest.raises(ModelError, match=said):
        clika_compile(net, tracing_inputs=[torch.randn(s) for s in shapes])


def test_autocast_disabled_recurrent_network_serves_sizes(compile_and_compare):
    """A recurrent network outside of autocast serves every size."""

    def leave_region(net, x):
        with torch.autocast("cpu", enabled=False):
            y = net.layer(x.float())[0]
        return y @ y.transpose(1, 2)

    compile_and_compare(
        Region(leave_region, nn.LSTM(4, 4)), [torch.randn(2, 3, 4), torch.randn(3, 5, 4)], [torch.randn(4, 7, 4)]
    )


def contract(net, x):
    y, weight = net.layer(x), net.layer.weight
    alike, mixed = (torch.einsum("bij,bkj->bik", z, x) for z in (x, y))
    return alike, mixed, torch.einsum("bij,bkj,jl->bikl", y, x, weight)


def compute_dots(net, x):
    weight = net.layer.weight
    return torch.tensordot(x, weight, dims=([2], [0])), torch.inner(x, weight), torch.dot(x[0, 0], weight[0])


def keep_dtypes(net, x):
    y = net.layer(x)
    return torch.einsum("bij,bij->bij", y, x), y.softmax(-1, dtype=torch.float32), x.type_as(y), y.double()


@pytest.mark.parametrize("ranks", [1, 2], ids=["static", "dynamic"])
@pytest.mark.parametrize("compute", [contract, compute_dots, keep_dtypes])
def test_autocast_casts_inside_composite_call_match_eager(compile_and_compare, compute, ranks):
    """Casts of autocast inside a composite call match eager."""
    inputs = [torch.randn(2, 3, 4), torch.randn(3, 5, 4)][:ranks]
    compile_and_compare(Region(compute), inputs, [torch.randn(4, 7, 4)] * (ranks - 1))


def test_autocast_gradients_flow_through_inner_casts():
    """Gradients flow through casts inside a composite call."""
    original, x = Region(contract), torch.randn(2, 3, 4)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    for net in (original, module):
        sum(y.float().square().sum() for y in net(x)).backward()
    torch.testing.assert_close(module.layer.weight.grad, original.layer.weight.grad)


def test_autocast_cast_composite_call_decomposed(compile_and_compare):
    """A composite call with inner casts is decomposed."""
    module = compile_and_compare(Region(compute_dots), [torch.randn(2, 3, 4)])
    assert not {"tensordot", "inner"} & {node.op.name for node in module.graph.nodes}


def test_autocast_uncast_composite_call_kept(compile_and_compare):
    """A composite call without inner casts stays one call."""
    module = compile_and_compare(Region(keep_dtypes), [torch.randn(2, 3, 4)])
    assert "einsum" in {node.op.name for node in module.graph.nodes}


def test_autocast_mixed_dtype_operands_log_no_error(compile_and_compare, caplog, monkeypatch):
    """Operands with dtypes that only autocast makes equal log no error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    compile_and_compare(Region(contract), [torch.randn(2, 3, 4)])
    assert logger.name not in {record.name for record in caplog.records}


def call_with_two_inputs(net, x):
    return net.layer(x, x * 2)


def test_autocast_bilinear_layer_rejected_with_remedy():
    """A bilinear layer in autocast raises an error, as eager rounds inside its kernel."""
    with pytest.raises(ModelError, match=r"aten\.bilinear\.default in .*: a bilinear layer inside .*enabled=False"):
        clika_compile(Region(call_with_two_inputs, nn.Bilinear(4, 4, 4)), tracing_inputs=[torch.randn(2, 3, 4)])


def test_run_eager_autocast_bilinear_matches_model():
    """The eager reference applies autocast inside kernels."""
    net, x = Region(call_with_two_inputs, nn.Bilinear(4, 4, 4)), torch.randn(2, 3, 4)
    (found,) = run_eager(make_callable(net), ModelCall((x,), {})).leaves
    assert torch.equal(found, net(x))


def test_autocast_region_writes_once_and_undone():
    """State written by a model with an autocast region is written once per call."""

    class Counting(Region):
        def __init__(self):
            super().__init__(view_by_size)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            with torch.no_grad():
                self.layer.bias.add_(1)
            return super().forward(x) + self.count

    original, reference, x = Counting(), Counting(), torch.randn(2, 3, 4)
    reference.load_state_dict(original.state_dict())
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    assert torch.equal(original.layer.bias, reference.layer.bias)
    for _ in range(2):
        torch.testing.assert_close(module(x), reference(x))


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
@pytest.mark.parametrize(
    ("layer", "named"), [(nn.Bilinear(4, 4, 4), "a bilinear layer"), (nn.LSTM(4, 4), "a recurrent network")]
)
def test_clika_compile_in_autocast_unsupported_layer_named(layer, named):
    """Compiling an unsupported layer inside autocast raises an error that names it."""
    inputs = [(torch.randn(2, 3, 4),) * (2 if isinstance(layer, nn.Bilinear) else 1)]
    with (
        disable_onednn(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ModelError, match=rf"{named} inside torch.autocast is not supported"),
    ):
        clika_compile(layer, tracing_inputs=inputs)


def test_clika_compile_in_autocast_matches_eager():
    """A model that is compiled inside autocast matches eager there."""
    original = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
        torch.testing.assert_close(module(x), original(x))


def test_autocast_inference_mode_weights_named_in_error():
    """The error of a model made in inference mode names its weights."""
    with torch.inference_mode():
        model = Region(lambda net, x: net.layer(x))
    x = torch.randn(2, 3, 4)
    with pytest.raises(ModelError, match=r"\nlayer\.weight, layer.bias were created under torch\.inference_mode\(\)"):
        clika_compile(model, tracing_inputs=[x])
    advised = copy.deepcopy(model)
    assert torch.equal(clika_compile(advised, tracing_inputs=[x])(x), model(x))


@pytest.mark.parametrize("compute", [view_by_size, None], ids=["region", "none"])
def test_autocast_second_forward_logged(tmp_path, compute):
    """The log reports the second forward run for autocast."""
    model = Region(compute) if compute else nn.Linear(4, 4)
    clika_compile(model, tracing_inputs=[torch.randn(2, 3, 4)], logs_dir=tmp_path)
    assert next(tmp_path.iterdir()).read_text().count("Ran forward twice on inputs") == (compute is not None)


def compute_outside_region(net, x):
    y = net.layer(x)
    with torch.autocast("cpu", enabled=False):
        return net.layer(y.float())


def widen(net, x):
    y = net.layer(x).float() * 70000.0
    return y, y.logsumexp(-1)


class Calling(Region):
    """The same outside autocast."""

    def forward(self, x):
        return self.compute(self, x)


@pytest.mark.parametrize(
    "model", [Calling(compute_outside_region), Calling(widen), Region(compute_outside_region), Region(widen)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clika_compile_in_autocast_regions_match_eager(model, dtype):
    """The casts of the graph are applied once if the model is compiled inside autocast."""
    x = torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype=dtype), warnings.catch_warnings(action="error"):
        module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
        copied = copy.deepcopy(module)
        torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)
        torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("compiled_in", [False, True])
def test_clika_module_other_autocast_than_compiled_warns(compiled_in):
    """A graph with casts warns if it is called in another autocast mode than compiled."""
    model, x = Calling(compute_outside_region), torch.randn(2, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compiled_in):
        module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
        expected = model(x)
    compiled, called = ["outside", r"in torch.autocast \(cpu bfloat16\)"][:: -1 if compiled_in else 1]
    called_elsewhere = f"is called {called}, but was compiled {compiled}, and computes as compiled"
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=not compiled_in),
        pytest.warns(UserWarning, match=called_elsewhere) as warned,
    ):
        torch.testing.assert_close(nn.Sequential(module)(x), expected, rtol=0, atol=0)
    assert [w.filename for w in warned] == [__file__]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)), (2, 4)),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (2, 3, 4)),
        (nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 3)), (2, 3, 5)),
        (nn.MultiheadAttention(4, 2), None),
    ],
    ids=["linears", "transformer", "convolution", "attention"],
)
def test_clika_module_without_casts_follows_autocast(model, shape):
    """Autocast acts on a graph without casts as on the original."""
    x = (torch.randn(3, 2, 4),) * 3 if shape is None else (torch.randn(shape),)
    module = clika_compile(model.eval(), tracing_inputs=[x], discard_input_model=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(action="error"):
        torch.testing.assert_close(module(*x), model(*x), rtol=0, atol=0)


def test_load_state_dict_keeps_autocast_casts():
    """A loaded module keeps its casts and warns inside autocast."""
    model, x = Region(compute_outside_region), torch.randn(2, 3, 4)
    module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    loaded = load_copy(module)
    with torch.autocast("cpu", dtype=torch.float16), pytest.warns(UserWarning, match="was compiled outside"):
        torch.testing.assert_close(loaded(x), module(x), rtol=0, atol=0)


@pytest.mark.slow
def test_torch_compile_in_other_autocast_warns():
    """A call traced by torch.compile in another autocast mode warns."""
    module = clika_compile(Region(compute_outside_region), tracing_inputs=[torch.randn(2, 3, 4)])
    with torch.autocast("cpu", dtype=torch.float16), pytest.warns(UserWarning, match="was compiled outside"):
        torch.compile(module, backend="eager")(torch.randn(2, 3, 4))


def test_clika_export_in_autocast_succeeds(tmp_path):
    """An export inside autocast succeeds, because it runs without autocast."""
    module = clika_compile(nn.Linear(4, 4), tracing_inputs=[torch.randn(2, 4)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.clika_export(tmp_path / "m.onnx").path.exists()


def test_clika_compile_in_inference_mode_trains():
    """A model that is compiled in inference mode can be trained."""
    model = nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)).eval()
    with torch.inference_mode():
        module = clika_compile(model, tracing_inputs=[torch.randn(2, 3, 5), torch.randn(3, 3, 5)])
    module(torch.randn(4, 3, 5)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_data_transform_fn_sees_surrounding_grad_mode(around):
    """User code sees the gradient mode around the compilation."""
    seen = []

    def transform(x):
        seen.append(torch.is_grad_enabled())
        return x

    with around():
        clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.randn(2, 3)], data_transform_fn=transform)
    assert seen == [around is torch.enable_grad]


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_capture_branch_on_grad_mode_uses_surrounding(around):
    """A branch on the gradient mode is taken as around the compilation."""

    def branch_on_grad_mode(x):
        return x * 2 if torch.is_grad_enabled() else x * 3

    x = torch.randn(2, 3)
    with around():
        module = clika_compile(branch_on_grad_mode, tracing_inputs=[x])
    torch.testing.assert_close(module(x), x * 3)


REGIONS = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "disabled": partial(torch.autocast, "cpu", enabled=False),
    "elsewhere": partial(torch.autocast, "cuda", enabled=False),
}


class Nested(nn.Module):
    """Nested regions, with layers before, between and after them."""

    def __init__(self, regions):
        super().__init__()
        self.layers, self.regions = nn.ModuleList(nn.Linear(4, 4) for _ in range(2 * len(regions) + 1)), regions

    def forward(self, x, depth=0):
        if depth == len(self.regions):
            return self.layers[2 * depth](x)
        y = self.layers[2 * depth](x)
        with REGIONS[self.regions[depth]]():
            inner = self.forward(x, depth + 1)
        return (y + inner + self.layers[2 * depth + 1](x)).float()


AROUND = {"nothing": contextlib.nullcontext, "autocast": REGIONS["autocast"], "no_grad": torch.no_grad}
AROUND["inference_mode"] = torch.inference_mode


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("regions", [*product(REGIONS, repeat=2), ("no_grad", "autocast", "no_grad")], ids=" ".join)
def test_capture_nested_regions_gradients_match_eager(regions, around):
    """Gradients through nested no_grad and autocast regions match eager, in any surrounding mode."""
    model, x = Nested(regions), torch.randn(3, 4)
    with AROUND[around]():
        module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    with REGIONS["autocast"]() if around == "autocast" else contextlib.nullcontext():
        results = [call(x) for call in (model, module)]
    torch.testing.assert_close(*results, rtol=0, atol=0)
    for result in results:
        result.sum().backward()
    for name, parameter in model.named_parameters():
        found = module.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None)
        if found is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=0.01, atol=0.01)  # sums of bfloat16 in another order


class Averaged(nn.Module):
    """A weight whose casts change nothing in a region without gradients, and that is trained outside."""

    def __init__(self, regions):
        super().__init__()
        self.layer, self.regions = nn.Linear(4, 4), regions
        self.register_buffer("mean", torch.zeros(4, 4))

    def forward(self, x):
        with contextlib.ExitStack() as stack:
            for region in self.regions:
                stack.enter_context(REGIONS[region]())
            self.mean.lerp_(self.layer.weight.float().to(x), 0.1)
        return self.layer(x)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("regions", [["no_grad"], ["no_grad", "autocast"], ["autocast", "no_grad"]])
def test_capture_no_grad_region_noop_cast_keeps_history(regions, around):
    """A cast without effect inside a no_grad region does not detach a weight."""
    model, x = Averaged(regions), torch.randn(3, 4)
    with AROUND[around]():
        module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    with REGIONS["autocast"](enabled=around == "autocast"):
        module(x).float().sum().backward()
    assert module.get_parameter("layer.weight").grad is not None


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "compute",
    [
        lambda net, x: net.layer(x * net.layer.weight.mul_(0.9).sum()),
        lambda net, x: torch.stack([part.mul_(2) for part in net.layer(x).unbind(1)]),
        lambda net, x: net.layer(x) * (2 if net.layer(x).requires_grad else 3),
    ],
    ids=["writes to weights", "writes to views", "asks"],
)
def test_capture_no_grad_only_code_traced_without_grad(compute, around):
    """Code that is invalid or different with gradients is traced without them."""

    class Unrecorded(Averaged):
        def forward(self, x):
            return compute(self, x)

    model, x = Unrecorded([]), torch.randn(3, 4)
    with around():
        module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
        torch.testing.assert_close(module(x), model(x), rtol=0, atol=0)


def test_linear_mixed_dtypes_without_autocast_rejected():
    """A linear layer with two dtypes raises an error on devices without autocast."""
    weight = torch.zeros(3, 4, device="meta")
    with pytest.raises(ValueError, match=r"does not support a bias of torch\.float64"):
        linear(weight, weight, torch.zeros(3, device="meta", dtype=torch.float64))
