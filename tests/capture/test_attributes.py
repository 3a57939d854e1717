"""The graph computes values that forward caches in attributes; state in attributes is rejected."""

import copy
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clika_ref import ModelError, clika_compile
from clika_ref.capture import attribute_snapshot, capture
from clika_ref.capture.attribute_snapshot import AttributeSnapshot
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


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("within", [lambda model: model, Nested], ids=["root", "part"])
def test_capture_cache_of_weight_computed_original_empty(within):
    """A cached function of a weight is computed by the graph, and the original's cache stays empty."""
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


class CachedGrid(nn.Module):
    """Keeps a grid for the shape of the last input, as YOLO's heads do; the class has the first values."""

    shape = None
    grid = torch.empty(0)

    def forward(self, x):
        if self.shape != x.shape:
            self.grid = torch.arange(x.shape[1]) + torch.arange(x.shape[0])[:, None]
            self.shape = x.shape
        return x + self.grid


@pytest.mark.parametrize("earlier", [(3, 7), (2, 4)], ids=["another shape", "that of a tracing input"])
def test_capture_cache_of_earlier_call_starts_from_class_default(earlier):
    """A cache that an earlier call filled leaves no guard, and stays as it is in the original."""
    model = CachedGrid()
    model(torch.ones(earlier))
    grid = model.grid
    module = clika_compile(model, tracing_inputs=[torch.ones(2, 4), torch.ones(5, 6)], discard_input_model=False)
    assert model.grid is grid
    for shape in ((3, 7), (2, 4), (4, 9)):
        assert torch.equal(module(torch.ones(shape)), CachedGrid()(torch.ones(shape)))


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


def test_capture_growing_table_serves_every_length():
    """A table that grows with the inputs serves every length."""
    module = clika_compile(Rotating(), tracing_inputs=[torch.ones(2, 5), torch.ones(3, 7)])
    for length in (3, 7, 12, 1):
        x = torch.rand(2, length)
        torch.testing.assert_close(module(x), Rotating()(x))


class Counting(nn.Module):
    """A buffer and an attribute that change with each call; only the buffer affects the result."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.count = self.count + 1
        return x + self.count


def test_capture_counter_attribute_unused_by_result_accepted():
    """An attribute that no result depends on may change next to a buffer."""
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
    """Like `Growing`, in a buffer: a graph can change its elements, but not its size."""

    def forward(self, x):
        self.count = torch.cat([self.count.view(-1), x])
        return self.count.sum()


AGAIN = r"Nested returns a different result when it is called again .* forward changes self\.inner\."


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (Stepping, "calls", f"{AGAIN}calls, and a graph"),
        (Growing, "past", f"{AGAIN}past, and a graph"),
        (
            Lengthening,
            "count",
            r"forward assigns 'inner.count' to float32\[3\] from float32\[\], and the next call reads it",
        ),
    ],
)
def test_capture_result_depends_on_previous_call_rejected(kind, name, message):
    """Results that depend on an attribute of the previous call raise an error."""
    model = Nested(kind())
    before = getattr(model.inner, name)
    with pytest.raises(ModelError, match=message):
        clika_compile(model, tracing_inputs=[torch.ones(2)])
    assert getattr(model.inner, name) is before


class Swapping(nn.Module):
    """Rebinds two buffers; a third one is None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("first", torch.tensor(1.0))
        self.register_buffer("second", torch.tensor(2.0))

    def forward(self, x):
        self.first, self.second = self.second, self.first
        return x + self.first


@pytest.mark.parametrize("within", [lambda model: model, Nested], ids=["root", "part"])
def test_capture_rebound_buffers_follow_eager(within):
    """Rebound buffers follow eager, in the root module and in parts."""
    x = torch.zeros(2)
    module, eager = clika_compile(within(Swapping()), tracing_inputs=[x]), within(Swapping())
    for _ in range(3):
        assert torch.equal(module(x), eager(x))


def test_capture_rebound_buffer_without_trace_rejected(monkeypatch):
    """A rebound buffer that the trace does not see raises an error that names it."""
    monkeypatch.setattr(capture, "select_tracers", lambda dynamic: TRACERS[-1:])
    with pytest.raises(ModelError, match=r"forward writes to inner.count in a way that this trace does not record"):
        clika_compile(Nested(Counting()), tracing_inputs=[torch.zeros(2)])


class Kept(dict):
    def clear(self):
        raise RuntimeError("is never emptied")


def test_capture_nested_containers_restored():
    """Containers of any depth and class are restored."""

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


def test_attribute_snapshot_long_container_not_opened():
    """The elements of a long container are not compared, only the container itself."""
    module = nn.Module()
    module.rows = [[number] for number in range(2000)]
    before = AttributeSnapshot(module)
    module.rows[5].append(1)
    assert before.find_changes() == []
    module.rows.append([])
    assert before.find_changes() == ["self.rows"]
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


def test_capture_hooks_of_forward_registered_once():
    """Hooks that forward registers are registered once."""
    original, x = Hooked(), torch.randn(2, 3)
    module = clika_compile(original, tracing_inputs=[x], discard_input_model=False)
    assert not original.linear._forward_hooks
    for _ in range(2):
        torch.testing.assert_close(module(x), original(x))
    assert len(original.linear._forward_hooks) == 1


def test_capture_hooks_of_user_kept():
    """Hooks of the user are kept."""
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


@pytest.mark.parametrize("factor", [0, 1])
def test_capture_plain_tensors_written_in_forward_restored(factor):
    """Tensors in attributes that forward writes to are restored, as attributes."""
    original = Writing(factor)
    clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    assert not original.calls.any()
    assert "calls" in vars(original)
    assert not [*original.buffers()]


def test_capture_written_plain_tensor_becomes_state():
    """A tensor in an attribute keeps what forward writes, like a buffer that is not in the state dict."""
    original = Writing(1)
    module = clika_compile(original, tracing_inputs=[torch.randn(2, 3)], discard_input_model=False)
    for x in torch.randn(3, 2, 3):
        torch.testing.assert_close(module(x), original(x))
    assert "calls" not in module.state_dict()
    torch.testing.assert_close(module.calls, torch.full((3,), 3.0))


class PlainCache(nn.Module):
    """A cache of keys in a plain attribute, moved to the device of the input in each call."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.keys = torch.zeros(2, 16, 4)

    def forward(self, x, position: int):
        batch, length, _ = x.shape
        self.keys = self.keys.to(x)
        self.keys[:batch, position : position + length] = self.project(x).detach()
        return self.keys[:batch, : position + length].sum(1)


def test_capture_cache_in_attribute_follows_eager(tmp_path):
    """A cache in a plain attribute keeps the positions of earlier calls, at sizes never traced."""
    original = PlainCache().eval()
    inputs = [(torch.randn(1, 4, 4), 0), (torch.randn(2, 3, 4), 4)]
    module = clika_compile(original, tracing_inputs=inputs, discard_input_model=False)
    position = 0
    with torch.no_grad():
        for length in (5, 1, 6):
            x = torch.randn(2, length, 4)
            torch.testing.assert_close(module(x, position), original(x, position))
            position += length
    module.clika_export(tmp_path / "cache.onnx", example_inputs=(torch.randn(2, 2, 4), 12))


@dataclass(frozen=True, slots=True)
class Slotted:
    """An object with slots and without ``__dict__``; assignment raises an error."""

    seen: list = field(default_factory=list)
    mean: torch.Tensor | None = None


class Noting(nn.Module):
    """Records its inputs in an object, by a given function; the results do not depend on it."""

    classwide = None
    seen = ()

    def __init__(self, stored, note):
        super().__init__()
        self.held, self.note = stored, note

    def forward(self, x):
        self.note(self, x * 1)
        return x * 2


NOTES = {
    "object": (SimpleNamespace(mean=None), lambda model, x: setattr(model.held, "mean", x)),
    "object of a library": (UserDict(), lambda model, x: model.held.update(mean=x)),
    "object in a container": ([{"a": SimpleNamespace()}], lambda model, x: setattr(model.held[0]["a"], "mean", x)),
    "container in an object": (SimpleNamespace(seen=[]), lambda model, x: model.held.seen.append(x)),
    "slot": (Slotted(), lambda model, x: object.__setattr__(model.held, "mean", x)),
    "container in a slot": (Slotted(), lambda model, x: model.held.seen.append(x)),
    "tensor in a list": ([torch.zeros(2, 3)], lambda model, x: model.held[0].copy_(x)),
    "tensor in a dict": ({"a": torch.zeros(2, 3)}, lambda model, x: model.held["a"].add_(x)),
    "tensor in an object": (SimpleNamespace(a=torch.zeros(2, 3)), lambda model, x: model.held.a.add_(x)),
}


@pytest.mark.parametrize("unsupported", [False, True])
@pytest.mark.parametrize(("stored", "note"), NOTES.values(), ids=NOTES)
def test_capture_writes_to_objects_and_containers_undone(stored, note, unsupported):
    """Fake tensors and proxies that forward stores in objects are removed."""

    def note_and_write(model, x):
        note(model, x)
        if unsupported and x.sum() > 0:
            x.add_(1)

    model = Noting(copy.deepcopy(stored), note_and_write)
    if unsupported:
        with pytest.raises(ModelError, match="cannot be captured as one graph"):
            clika_compile(model, tracing_inputs=[torch.ones(2, 3)])
    else:
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)], discard_input_model=False)
    assert str(copy.deepcopy(model).held) == str(stored)


def test_capture_self_referencing_object_opened_once():
    """An object that refers to itself is opened once."""
    ring = SimpleNamespace(mean=None)
    ring.itself = [ring]
    clika_compile(Noting(ring, lambda model, x: setattr(model.held, "mean", x)), tracing_inputs=[torch.ones(2, 3)])
    assert ring.mean is None


def test_capture_class_attributes_set_by_forward_restored():
    """Attributes that forward sets on its class are restored."""

    def set_class_attributes(model, x):
        type(model).classwide, type(model).added = x, x

    clika_compile(Noting(None, set_class_attributes), tracing_inputs=[torch.ones(2, 3)])
    assert Noting.classwide is None
    assert not hasattr(Noting, "added")


class Accumulating(nn.Module):
    """Adds its inputs up in an object, and returns the sum."""

    def __init__(self):
        super().__init__()
        self.held = SimpleNamespace(total=torch.zeros(3), calls=[0])

    def forward(self, x):
        self.held.total += x.sum(0)
        self.held.calls[0] += 1
        return x + self.held.total


def test_capture_result_depends_on_object_state_rejected():
    """Results that depend on the state of an object raise an error that names it."""
    model = Nested(Accumulating())
    with pytest.raises(
        ModelError, match=r"forward changes self\.inner\.held\.calls, self.inner.held.total, and a graph does not keep"
    ):
        clika_compile(model, tracing_inputs=[torch.ones(2, 3)])
    assert (model.inner.held.total.sum(), model.inner.held.calls) == (0, [0])


class Viewing(nn.Module):
    """Writes to a buffer that has a view as an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.front = self.count[:2]

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_capture_view_of_buffer_changes_with_buffer():
    """A view of a buffer in an attribute changes with the buffer."""
    model, x = Viewing(), torch.ones(2, 4)
    module = clika_compile(model, tracing_inputs=[x], discard_input_model=False)
    assert (model.count.sum(), model.front.sum()) == (0, 0)
    assert [module(x)[0, 0].item() for _ in range(2)] == [2, 3]


SEEN: list = []
LAST = None


def record_in_global(x):
    SEEN.append(x)


def test_capture_trace_leaves_no_proxies_in_globals():
    """Tensors that eager stores in globals and closures stay; those of a trace are removed."""
    mine: list = []
    SEEN.clear()

    def record_in_globals(x):
        global LAST  # noqa: PLW0603 - as models do
        LAST = x * 3
        mine.append(x * 2)
        record_in_global(x * 1)
        return x * 2

    clika_compile(record_in_globals, tracing_inputs=[torch.ones(2, 3)])
    assert {type(x) for x in (LAST, *mine, *SEEN)} == {torch.Tensor}


class Calling(nn.Module):
    @staticmethod
    def seen(x):
        record_in_global(x)

    @torch.no_grad()
    def forward(self, x):
        self.seen(x * 1)
        return x * 2


@pytest.mark.parametrize(
    "model", [Calling(), Noting(None, lambda _model, x: record_in_global(x))], ids=["method", "stored"]
)
def test_capture_module_functions_leave_no_proxies_in_globals(model):
    """Functions of a module leave no traced tensors in globals."""
    SEEN.clear()
    clika_compile(model, tracing_inputs=[torch.ones(2, 3)])
    assert {type(x) for x in SEEN} == {torch.Tensor}


def test_attribute_snapshot_many_objects_limited(monkeypatch):
    """Objects beyond the limit are treated as data."""
    monkeypatch.setattr(attribute_snapshot, "MAX_OPENED_OBJECTS", 10)
    module = nn.Module()
    module.first, module.nodes = SimpleNamespace(), [SimpleNamespace() for _ in range(100)]
    before = AttributeSnapshot(module)
    for node in module.nodes:
        node.mark = True
    assert 0 < len(before.find_changes()) <= 10
