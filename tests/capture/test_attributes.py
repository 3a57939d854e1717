"""What forward caches in attributes is computed by the graph, and what it keeps from call to call is refused."""

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture import capturing
from clika_ref.capture.attributes import Attributes
from clika_ref.capture.tracers import TRACERS


class Caching(nn.Module):
    """Fills each kind of cache from its weight when it first needs it; the kinds are an attribute of the class."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.cache = {"nested": []}
        self.lazy = None
        self.last = [0]

    def forward(self, x):
        self.last[0] = x
        if not self.cache["nested"]:
            self.cache["nested"].append(self.weight * 2)
        if self.lazy is None:
            self.lazy = self.weight * 3
        if not hasattr(self, "buffer"):
            self.register_buffer("buffer", self.weight * 4)
        return x * (self.cache["nested"][0] + self.lazy + self.buffer)


class Within(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("within", [lambda model: model, Within], ids=["root", "part"])
def test_what_is_cached_of_a_weight_is_computed_from_it_and_the_original_stays_empty(within):
    caching = Caching()
    model, x = within(caching), torch.ones(2, 4)
    cache, inner = caching.cache, caching.cache["nested"]
    module = clika_compile(model, tracing_inputs=[x, torch.ones(3, 4)], discard_input_model=False)
    assert caching.cache is cache == {"nested": []}
    assert cache["nested"] is inner
    assert (caching.lazy, caching.last, hasattr(caching, "buffer")) == (None, [0], False)
    (weight,) = module.parameters()
    with torch.no_grad():
        weight.fill_(5)
    result = module(x)
    assert torch.equal(result, torch.full((2, 4), 45.0))
    result.sum().backward()
    assert torch.equal(weight.grad, torch.full((4,), 18.0))


class Rotating(nn.Module):
    """Keeps a table for the longest input so far, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.longest = 0

    def forward(self, x):
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table = torch.arange(self.longest).cos()
        return x * self.table[: x.shape[1]]


def test_a_table_that_grows_with_the_inputs_serves_every_length():
    module = clika_compile(Rotating(), tracing_inputs=[torch.ones(2, 5), torch.ones(3, 7)])
    for length in (3, 7, 12, 1):
        x = torch.rand(2, length)
        torch.testing.assert_close(module(x), Rotating()(x))


class Counting(nn.Module):
    """A buffer and an attribute that change with each call, of which the result needs the first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.count = self.count + 1
        return x + self.count


def test_an_attribute_that_no_result_depends_on_may_change_beside_a_buffer():
    model, x = Counting(), torch.zeros(2)
    module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    assert (model.calls, model.count) == (0, 0)
    assert [module(x)[0].item() for _ in range(3)] == [1, 2, 3]


class Stepping(Counting):
    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Growing(Stepping):
    """Grows by the input at each call, as a cache of keys does."""

    past = None

    def forward(self, x):
        self.past = x if self.past is None else torch.cat([self.past, x])
        return self.past


class Lengthening(Counting):
    """As `Growing`, in a buffer, of which a graph keeps the elements and not the length."""

    def forward(self, x):
        self.count = torch.cat([self.count.view(-1), x])
        return self.count.sum()


AGAIN = r"Within returns something else when it is called again .* forward changes self\.inner\."


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (Stepping, "calls", f"{AGAIN}calls, and no"),
        (Growing, "past", f"{AGAIN}past, and no"),
        (
            Lengthening,
            "count",
            r"forward binds 'inner\.count' to float32\[3\] from float32\[\], and the next call reads it",
        ),
    ],
)
def test_results_that_depend_on_an_attribute_of_the_call_before_are_refused(kind, name, message):
    model = Within(kind())
    before = getattr(model.inner, name)
    with pytest.raises(ModelError, match=message):
        clika_compile(model, tracing_inputs=[torch.ones(2)])
    assert getattr(model.inner, name) is before


class Swapping(nn.Module):
    """Binds two buffers anew, beside one that is None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("first", torch.tensor(1.0))
        self.register_buffer("second", torch.tensor(2.0))

    def forward(self, x):
        self.first, self.second = self.second, self.first
        return x + self.first


@pytest.mark.parametrize("within", [lambda model: model, Within], ids=["root", "part"])
def test_buffers_that_are_bound_anew_follow_eager_wherever_they_are(within):
    x = torch.zeros(2)
    module, eager = clika_compile(within(Swapping()), tracing_inputs=[x]), within(Swapping())
    for _ in range(3):
        assert torch.equal(module(x), eager(x))


def test_a_buffer_that_is_bound_anew_unseen_by_a_trace_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(capturing, "applicable", lambda dynamic: TRACERS[-1:])
    with pytest.raises(ModelError, match=r"forward writes to inner\.count where this trace does not see it"):
        clika_compile(Within(Counting()), tracing_inputs=[torch.zeros(2)])


class Kept(dict):
    def clear(self):
        raise RuntimeError("is never emptied")


def test_containers_of_any_depth_and_class_are_restored():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = Kept()
            self.depths = [self.table]
            for _ in range(3000):
                self.depths = [self.depths]

        def forward(self, x):
            self.table.setdefault("twice", self.linear.weight * 2)
            return x @ self.table["twice"]

    model, x = Deep(), torch.ones(2, 2)
    module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    assert model.table == {}
    assert torch.equal(module(x), model(x))


def test_what_stands_in_a_long_container_is_no_cache():
    module = nn.Module()
    module.rows = [[number] for number in range(2000)]
    before = Attributes(module)
    module.rows[5].append(1)
    assert before.changed() == []
    module.rows.append([])
    assert before.changed() == ["rows"]
    before.restore()
    assert len(module.rows) == 2000


class Hooked(nn.Module):
    """Registers a hook when it is first called, as transformers does to collect hidden states."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.collected = []
        self.is_ready = False

    def forward(self, x):
        if not self.is_ready:
            self.linear.register_forward_hook(lambda _module, _args, result: self.collected.append(result))
            self.is_ready = True
        self.collected.clear()
        result = self.linear(x).relu()
        return result, *self.collected


def test_hooks_that_forward_registers_are_registered_once():
    original, x = Hooked(), torch.randn(2, 3)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    assert not original.linear._forward_hooks
    for _ in range(2):
        torch.testing.assert_close(module(x), original(x))
    assert len(original.linear._forward_hooks) == 1


def test_hooks_of_the_user_stay():
    original, seen = nn.Linear(3, 3), []
    handle = original.register_forward_pre_hook(lambda _module, args: seen.append(args))
    clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    assert list(original._forward_pre_hooks) == [handle.id]


class Writing(nn.Module):
    """Writes to a tensor that is no buffer."""

    def __init__(self, factor):
        super().__init__()
        self.calls, self.factor = torch.zeros(3), factor

    def forward(self, x):
        self.calls += 1
        return x + self.factor * self.calls if self.factor else x


def test_tensors_in_attributes_that_forward_writes_to_stay_as_they_were():
    original = Writing(0)
    clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    assert not original.calls.any()


def test_results_that_depend_on_a_tensor_in_an_attribute_are_refused_by_its_name():
    original = Writing(1)
    with pytest.raises(ModelError, match=r"when it is called again .* forward changes self\.calls"):
        clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    assert not original.calls.any()
