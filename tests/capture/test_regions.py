"""Autocast and no_grad regions, dtypes, shared weights and constants made in forward."""

import pytest
import torch
from torch import nn

from clika_ref import clika_compile


class Autocast(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dtype = dtype

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", dtype=self.dtype):
            x = torch.softmax(self.second(x) + 1, -1)
            low = x @ x.T
        return self.third(x.float()), low


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_region_computes_in_its_dtype(compile_and_compare, dtype):
    """An autocast region computes in its dtype, with explicit casts."""
    module = compile_and_compare(Autocast(dtype), [torch.randn(3, 8), torch.randn(4, 8)], [torch.randn(1, 8)])
    assert module(torch.randn(2, 8))[1].dtype == dtype
    assert all("autocast" not in node.op.name for node in module.graph.nodes)
    casts = [node for node in module.graph.nodes if node.attrs.get("dtype") == dtype]
    assert casts, "the casts of the region must be explicit"


def test_autocast_disabled_inside_region_casts_no_tensor(compile_and_compare):
    """A disabled region inside an autocast region casts no tensor."""
    linear = nn.Linear(4, 4)

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.linear(x)
                with torch.autocast("cpu", enabled=False):
                    z = self.linear(x)
                return y, z, torch.cat([y.float(), z])

    module = compile_and_compare(Nested(), [torch.randn(2, 4)])
    y, z, _ = module(torch.randn(2, 4))
    assert (y.dtype, z.dtype) == (torch.bfloat16, torch.float32)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            x = self.body(x)
        with torch.set_grad_enabled(True):
            return self.head(x)


def test_no_grad_region_stops_same_gradients():
    """A no_grad region stops the gradients that eager stops."""
    original = Frozen()
    module = clika_compile(original, tracing_inputs=[torch.randn(2, 4)], discard_input_model=False)
    x = torch.randn(2, 4)
    for net in (original, module):
        net(x).square().sum().backward()
    assert original.body.weight.grad is None
    assert module.body.weight.grad is None
    torch.testing.assert_close(module.head.weight.grad, original.head.weight.grad)


def clamp_weight(net, x):
    with torch.no_grad():
        net.weight.clamp_(-1, 1)
    return x @ net.weight


def write_result_column(net, x):
    y = x @ net.weight
    first = y[0]
    with torch.no_grad():
        y[:, 1] = 0
        first.mul_(2)
    return y * first


def clamp_detached(net, x):
    y = x @ net.weight
    y.detach().clamp_(min=0)
    return y * 3


def write_inside_region(net, x):
    with torch.no_grad():
        y = x @ net.weight
        y += 1
    return y * net.weight[0]


class Net(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.weight, self.compute = nn.Parameter(torch.randn(4, 4) * 3), compute

    def forward(self, x):
        return self.compute(self, x)


@pytest.mark.parametrize("compute", [clamp_weight, write_result_column, clamp_detached, write_inside_region])
def test_gradients_flow_past_no_grad_writes(compute):
    """Gradients flow past writes without gradients as in eager."""
    torch.manual_seed(0)
    original, x = Net(compute), torch.randn(2, 4)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    for net in (original, module):
        net(x).square().sum().backward()
    assert original.weight.grad.any()
    torch.testing.assert_close(module.weight.grad, original.weight.grad)
    torch.testing.assert_close(module.weight, original.weight)


def make_complex_inside_region(net, x):
    with torch.no_grad():
        z = torch.complex(x @ net.weight, x)
    return torch.view_as_real(z * net.spectrum[0])


def write_complex_weight(net, x):
    with torch.no_grad():
        net.spectrum.mul_(0.5)
    return torch.view_as_real(net.spectrum * (x @ net.weight)[0])


def write_complex_detached(net, x):
    z = torch.complex(x @ net.weight, x)
    z.detach().mul_(2)
    return torch.view_as_real(z * net.spectrum[0])


def write_complex_row(net, x):
    z = torch.complex(x @ net.weight, x)
    z[0].mul_(2j)
    z[:, 1:3] += net.spectrum[0, 1:3]
    return torch.view_as_real(z)


@pytest.mark.parametrize(
    "compute", [make_complex_inside_region, write_complex_weight, write_complex_detached, write_complex_row]
)
def test_complex_gradients_flow_past_no_grad_writes(compute):
    """Gradients of complex tensors stop and flow past writes as in eager."""
    torch.manual_seed(0)
    original, x = Net(compute), torch.randn(2, 4)
    original.spectrum = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    for net in (original, module):
        net(x).square().sum().backward()
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad, parameter.grad)


def test_embedding_max_norm_trains():
    """An embedding with `max_norm` is trained."""
    original, ids = nn.Embedding(6, 4, max_norm=0.5), torch.tensor([[0, 1], [2, 1]])
    module = clika_compile(original, tracing_inputs=[ids], discard_input_model=False)
    for net in (original, module):
        net(ids).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, original.weight.grad)


def test_inference_mode_region_stops_gradients():
    """An inference mode region stops gradients."""

    class Inferred(Frozen):
        def forward(self, x):
            with torch.inference_mode():
                x = self.body(x)
            with torch.inference_mode(False):
                return self.head(x.clone())

    original = Inferred()
    module = clika_compile(original, tracing_inputs=[torch.randn(2, 4)], discard_input_model=False)
    x = torch.randn(2, 4)
    for net in (original, module):
        net(x).square().sum().backward()
    assert module.body.weight.grad is None
    torch.testing.assert_close(module.head.weight.grad, original.head.weight.grad)
    assert torch.inference_mode.__enter__.__qualname__ == "inference_mode.__enter__"


@pytest.mark.parametrize("outer", [torch.inference_mode, torch.no_grad])
def test_inference_mode_false_inside_region_keeps_gradients(outer):
    """Gradients flow in `inference_mode(False)` inside another region."""

    def resume_gradients(net, x):
        with outer():
            scale = net.weight[0] * 2
            with torch.inference_mode(False):
                y = x.clone() * net.weight[1]
        return y * scale.clone()

    original, x = Net(resume_gradients), torch.randn(2, 4)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    for net in (original, module):
        net(x).square().sum().backward()
    assert original.weight.grad.any()
    torch.testing.assert_close(module.weight.grad, original.weight.grad)


def test_detach_stops_same_gradients():
    """`detach` stops the gradients that eager stops."""

    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            y = self.linear(x)
            return y * y.detach()

    original = Detached()
    module = clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    x = torch.randn(2, 3)
    for net in (original, module):
        net(x).sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, original.linear.weight.grad)


def test_integer_and_bool_inputs_match_eager(compile_and_compare):
    """Integer and bool inputs match eager."""

    def mask_inputs(ids, mask, x):
        return ids // 2 + mask, x.masked_fill(mask, 0), ids[mask.any(1)], (ids > 3) ^ mask, ids / 2

    def make_inputs(rows):
        return (torch.randint(-9, 9, (rows, 3)), torch.rand(rows, 3) > 0.5, torch.randn(rows, 3))

    compile_and_compare(mask_inputs, [make_inputs(2), make_inputs(4)], [make_inputs(1), make_inputs(7)])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.float64])
def test_input_dtypes_kept(compile_and_compare, dtype):
    """Inputs keep their dtype."""
    compile_and_compare(lambda x: x * 2 + x, [torch.arange(6).to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_float16_bfloat16_float64_models_match_eager(compile_and_compare, dtype):
    """FP16, BF16 and float64 models match eager."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.norm(torch.relu(self.conv(x)).mean((2, 3))))

    shapes = [(2, 3, 8, 8), (3, 3, 8, 8)]
    compile_and_compare(
        Net().to(dtype), [torch.randn(s, dtype=dtype) for s in shapes], [torch.randn(1, 3, 8, 8, dtype=dtype)]
    )


class Tied(nn.Module):
    """One embedding also as the output projection, one module used twice, one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.mix = nn.Linear(4, 4)
        self.again = self.mix
        self.scale = nn.Parameter(torch.ones(4))
        self.alias = self.scale

    def forward(self, ids):
        x = self.again(self.mix(self.embed(ids))) * self.scale + self.alias
        return self.head(x)


def test_tied_weights_stay_tied(compile_and_compare):
    """Tied weights stay tied under all their names."""
    original = Tied()
    module = compile_and_compare(original, [torch.randint(0, 10, (2, 3))], discard_input_model=False)
    assert set(module.state_dict()) == {*original.state_dict(), "_extra_state"}
    assert module.head.weight is module.embed.weight
    assert module.again.weight is module.mix.weight
    assert module.alias is module.scale
    assert len(list(module.parameters())) == len(list(original.parameters()))


def test_tied_weights_updated_together():
    """A training step updates tied weights together."""
    torch.manual_seed(0)
    original, ids = Tied(), torch.randint(0, 10, (2, 3))
    module = clika_compile(original, tracing_inputs=[ids], discard_input_model=False)
    for net in (original, module):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        net(ids).square().mean().backward()
        optimizer.step()
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight)
    torch.testing.assert_close(module(ids), original(ids))


def test_constants_in_forward_kept(compile_and_compare):
    """Constants made in forward are kept."""
    table = torch.randn(4)

    def add_constants(x):
        return x + torch.tensor([1.0, 2, 3, 4]) * table + torch.arange(4) + torch.tensor(0.5) + torch.eye(4)[0]

    compile_and_compare(add_constants, [torch.randn(2, 4), torch.randn(3, 4)], [torch.randn(1, 4)])


def test_constants_of_sizes_follow_sizes(compile_and_compare):
    """Constants made from sizes follow the sizes."""

    def add_positions(x):
        return x + torch.arange(x.shape[1]) / x.shape[1] + torch.ones(x.shape[0], 1) * x.numel()

    compile_and_compare(add_positions, [torch.randn(2, 4), torch.randn(3, 5)], [torch.randn(1, 1), torch.randn(7, 7)])


def test_plain_tensor_attribute_stored_with_prefix(compile_and_compare):
    """A tensor attribute that is no buffer is stored under our prefix."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.randn(3)
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.weight + self.table

    module = compile_and_compare(Plain(), [torch.randn(2, 3)])
    added = set(module.state_dict()) - {"weight", "_extra_state"}
    assert added, "a tensor that is no parameter and no buffer must be stored"
    assert all(name.startswith("clika.") for name in added)


def test_nonpersistent_buffers_stored_in_state_dict():
    """Non-persistent buffers are restored by a state dict."""

    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", torch.randn(3), persistent=False)

        def forward(self, x):
            return x * self.angles

    module = clika_compile(Rotary(), tracing_inputs=[torch.randn(2, 3)])
    assert set(module.state_dict()) == {"_extra_state"}
    again = type(module)()
    again.load_state_dict(module.state_dict())
    x = torch.randn(2, 3)
    assert torch.equal(again(x), module(x))


def test_dropout_and_random_tensors_match_eager():
    """Dropout and random tensors draw the numbers of eager in train mode."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(x) + torch.rand_like(x)

    original, x = Noisy().train(), torch.ones(4, 50)
    module = clika_compile(original, tracing_inputs=[x], skip_eval_set_mode=True, discard_input_model=False)
    torch.manual_seed(3)
    expected = original(x)
    torch.manual_seed(3)
    actual = module(x)
    assert torch.equal(actual, expected)
    assert not torch.equal(module(x), module(x))
