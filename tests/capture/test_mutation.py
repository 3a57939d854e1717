"""In-place writes to views, bases, inputs and buffers have the same effect as in eager."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from clika_ref import ModelError, clika_compile


def write_view_then_base(x):
    x = x.clone()
    x[:, 1].mul_(3)
    return x + 1


def write_base_then_view(x):
    x = x.clone()
    part = x[:, 1:]
    x.add_(1)
    return part * 2


def write_overlapping_views(x):
    x = x.clone()
    left, right = x[:, :3], x[:, 1:]
    left.mul_(2)
    right.add_(left.sum())
    return left, right, x


def write_view_of_view(x):
    x = x.clone()
    x.t()[1:].transpose(0, 1)[:, 0].fill_(7.0)
    return x


def write_copying_reshape(x):
    x = x.clone()
    flat = x.t().reshape(-1)
    flat.mul_(5)
    return x, flat


def write_viewing_reshape(x):
    x = x.clone()
    flat = x.reshape(-1)
    flat.mul_(5)
    return x, flat


def write_contiguous(x):
    x = x.clone()
    x.contiguous().add_(1)
    x.t().contiguous().add_(10)
    return x


def flatten_in_place(x):
    x = x.clone()
    torch.flatten(x).relu_()
    return x


def write_chunks(x):
    x = x.clone()
    a, b = x.chunk(2, 1)
    a.mul_(2)
    b.add_(a)
    return x, a, b


def write_unbound_rows(x):
    x = x.clone()
    for i, row in enumerate(x.unbind(0)):
        row.add_(i)
    return x


def split(x):
    x = x.clone()
    a, b = x.split([1, 3], 1)
    b.copy_(a)
    return x


def write_by_index(x):
    x = x.clone()
    x[1:, ::2] = 0
    x[0] += 5
    x[x > 2] = -1
    return x


def put_by_index(x):
    x = x.clone()
    x.index_put_((torch.tensor([0, 1, 0]),), torch.ones(3, 4), accumulate=True)
    return x.index_fill_(1, torch.tensor([2]), 4)


def write_narrow_views(x):
    x = x.clone()
    x.narrow(1, 1, 2).zero_()
    x.select(0, 0).exp_()
    x.diagonal().fill_(9)
    x.unsqueeze(1).squeeze(1).sub_(1)
    x.permute(1, 0)[0].neg_()
    return x


def write_other_dtype(x):
    x = x.clone().long()
    x += 1
    x.copy_(torch.full((3, 4), 2.9))
    return x


def write_broadcast(x):
    x = x.clone()
    x.copy_(x[0] * 2)
    return x


def write_new_tensor(x):
    out = torch.zeros(x.shape[0], 2)
    out[:, 0] = x.sum(1)
    out[:, 1] = x.mean(1)
    return out


def write_expanded_base(x):
    x = x.clone()
    wide = x[:1].expand(3, 4)
    x[0].mul_(2)
    return wide + 0


def swap_rows(x):
    x = x.clone()
    a, b = x[0], x[1]
    a_before = a.clone()
    a.copy_(b)
    b.copy_(a_before)
    return x


def write_out_argument(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return y


def write_out_arguments(x):
    values, places = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.max(x, 1, out=(values, places))
    return values, places


@pytest.mark.parametrize(
    "function",
    [
        write_view_then_base,
        write_base_then_view,
        write_overlapping_views,
        write_view_of_view,
        write_copying_reshape,
        write_viewing_reshape,
        write_contiguous,
        flatten_in_place,
        write_chunks,
        write_unbound_rows,
        split,
        write_by_index,
        put_by_index,
        write_narrow_views,
        write_other_dtype,
        write_broadcast,
        write_new_tensor,
        write_expanded_base,
        swap_rows,
        write_out_argument,
        write_out_arguments,
    ],
)
def test_writes_through_views_change_shared_memory_only(compile_and_compare, function):
    """Writes through views change the tensors that share their memory, and no others."""
    compile_and_compare(function, [torch.randn(3, 4)], [torch.arange(12.0).reshape(3, 4)])


@pytest.mark.parametrize(
    "function", [write_chunks, write_overlapping_views, write_new_tensor, write_by_index, write_copying_reshape]
)
def test_writes_through_views_dynamic_dims_match_eager(compile_and_compare, function):
    """Writes match eager with dynamic dims."""
    compile_and_compare(function, [torch.randn(3, 4), torch.randn(5, 4)], [torch.randn(2, 4), torch.randn(9, 4)])


def test_writes_to_input_change_tensor_of_caller():
    """A written input changes the tensor of the caller, also if it is returned."""

    def fill(x, y):
        x.add_(y)
        y[0] = 0
        return x

    x, y = torch.ones(3), torch.arange(3.0)
    module = clika_compile(fill, tracing_inputs=[(torch.zeros(3), torch.zeros(3))])
    result = module(x, y)
    assert torch.equal(x, torch.tensor([1.0, 2, 3])), "the caller's tensor must change as eager changes it"
    assert torch.equal(y, torch.tensor([0.0, 1, 2]))
    assert torch.equal(result, x)


def test_tracing_inputs_not_changed():
    """Tracing inputs are not changed."""

    def fill(x):
        return x.fill_(4)

    x = torch.zeros(3)
    clika_compile(fill, tracing_inputs=[x, torch.zeros(5)])
    assert torch.equal(x, torch.zeros(3))


class Counter(nn.Module):
    """Updates one buffer twice and reads it between."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.steps += 1
        self.count.add_(x)
        first = self.count * 2
        self.count[0] = self.steps.float()
        return first + self.count


def test_buffer_updated_twice_follows_eager(compile_and_compare):
    """A buffer that is updated twice follows eager over several calls."""
    original, x = Counter(), torch.randn(3)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    assert original.steps == 0, "compiling must not count"
    for _ in range(3):
        torch.testing.assert_close(module(x), original(x))
        torch.testing.assert_close(module.count, original.count)
        assert module.steps == original.steps


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(4, momentum=0.3)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.instance(self.conv(self.first(x)))


def test_running_stats_in_train_mode_follow_eager():
    """Running statistics in train mode follow eager over three steps."""
    torch.manual_seed(0)
    original = Normed().train()
    inputs = [torch.randn(4, 4, 5, 5), torch.randn(3, 4, 6, 5)]
    module = clika_compile(original, tracing_inputs=inputs, skip_eval_set_mode=True, discard_input_model=False)
    for step in range(3):
        x = torch.randn(2 + step, 4, 5, 5) * 3 + step
        torch.testing.assert_close(module(x), original(x))
        for name, buffer in original.named_buffers():
            torch.testing.assert_close(dict(module.named_buffers())[name], buffer, msg=f"{name} after step {step}")


def test_copy_of_tensor_not_treated_as_view(compile_and_compare):
    """Separate memory is not treated as a view."""

    def write_copies(x):
        y = x.clone()
        z = y + 0
        y.zero_()
        return z, y

    compile_and_compare(write_copies, [torch.randn(4)])


class Counting(nn.Module):
    """A buffer that is written and returned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count, self.count


class Rebinding(nn.Module):
    """Rebinds a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + 1
        return x + self.count


class Averaging(nn.Module):
    """A moving average that is used and returned."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return x - self.mean, self.mean


@pytest.mark.parametrize("kind", [Counting, Rebinding, Averaging])
def test_written_and_used_buffer_follows_eager(kind):
    """A buffer that is written and used follows eager."""
    model, eager = kind(), kind()
    module = clika_compile(model, tracing_inputs=[torch.rand(2, 3), torch.rand(4, 3)], discard_input_model=False)
    for (name, buffer), (_, untouched) in zip(model.named_buffers(), kind().named_buffers(), strict=True):
        assert torch.equal(buffer, untouched), f"compiling changed {name} of the original"
    for batch in (2, 4, 5):
        x = torch.rand(batch, 3)
        for found, wanted in zip(pytree.tree_leaves(module(x)), pytree.tree_leaves(eager(x)), strict=True):
            assert torch.equal(found, wanted)


def transpose_in_place(x):
    y = x.clone()
    row = y[0]
    y.t_()
    return y * 1, row * 1


def unsqueeze_in_place(x):
    y = x.clone()
    y.unsqueeze_(0)
    return y + 1


def squeeze_in_place(x):
    y = x.unsqueeze(0).clone()
    y.squeeze_(0)
    return y + 1


def transpose_and_write(x):
    y = x.clone()
    flat = y.view(-1)
    y.transpose_(0, 1)
    y[0].mul_(2)
    return y, flat


@pytest.mark.parametrize("model", [transpose_in_place, unsqueeze_in_place, squeeze_in_place, transpose_and_write])
def test_inplace_shape_change_writes_no_elements(compile_and_compare, model):
    """In-place changes of shape write no elements."""
    compile_and_compare(model, [torch.rand(3, 4)])


def test_constant_in_forward_not_state_keeps_gradients():
    """A constant made in forward is not state and lets gradients through."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x)[:, torch.tensor([2, 0, 1])] * torch.tensor([1.0, 2.0, 3.0])

    module = clika_compile(Scaled(), tracing_inputs=[torch.rand(2, 3), torch.rand(4, 3)])
    assert not module.graph.state
    module(torch.rand(2, 3)).sum().backward()
    assert module.get_parameter("layer.weight").grad is not None


def write_expanded_row(x):
    y = x.clone()
    y.expand(2, 4)[1].clamp_(min=0)
    return y


def write_windows(x):
    y = x.clone()
    y.unfold(0, 2, 1).mul_(2)
    return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (write_expanded_row, r"test_mutation\.py:\d+: a write through an expanded view changes several elements"),
        (write_windows, r"test_mutation\.py:\d+: a write through overlapping windows \(unfold\)"),
    ],
)
def test_writes_to_overlapping_views_rejected_with_line(model, message):
    """Writes that reach an element twice raise an error with their line."""
    with pytest.raises(ModelError, match=message):
        clika_compile(model, tracing_inputs=[torch.rand(4)])


def test_strided_write_gradients_match_eager():
    """Overwritten elements get no gradient through a strided write."""

    def clear_strided(x):
        y = x.clone()
        y.as_strided((2,), (1,)).zero_()
        return y

    x = torch.rand(2, 3, requires_grad=True)
    weights = torch.arange(1.0, 7).view(2, 3)
    (clika_compile(clear_strided, tracing_inputs=[torch.rand(2, 3)])(x) * weights).sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0.0, 0, 3], [4, 5, 6]]))
