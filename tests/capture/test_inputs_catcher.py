"""Moving nested inputs between devices, and catching the inputs of modules and methods."""

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from clika_ref.capture.inputs_catcher import clika_install_inputs_catcher, clika_move_to_device
from clika_ref.core.errors import ModelError

META = torch.device("meta")
"""A device that is always there, and is not where tensors are made."""


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


class SubList(list):
    pass


class SubDict(dict):
    pass


@dataclasses.dataclass(frozen=True)
class Batch:
    images: torch.Tensor
    sizes: list
    made_later: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("x",)
    x: torch.Tensor


class MovesItself:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return MovesItself(self.x.to(device))


def make_x() -> torch.Tensor:
    return torch.ones(2, 3)


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (make_x, lambda r: [r]),
        (lambda: (make_x(), [make_x()]), lambda r: [r[0], r[1][0]]),
        (lambda: {"a": make_x(), "b": {"c": make_x()}}, lambda r: [r["a"], r["b"]["c"]]),
        (lambda: OrderedDict(b=make_x(), a=make_x()), lambda r: [r["b"], r["a"]]),
        (lambda: defaultdict(list, a=make_x()), lambda r: [r["a"]]),
        (lambda: UserDict(a=make_x()), lambda r: [r["a"]]),
        (lambda: SubDict(a=make_x()), lambda r: [r["a"]]),
        (lambda: SubList([make_x()]), lambda r: [r[0]]),
        (lambda: deque([make_x()], maxlen=3), lambda r: [r[0]]),
        (lambda: Pair(make_x(), [make_x()]), lambda r: [r.left, r.right[0]]),
        (lambda: Batch(make_x(), [make_x()]), lambda r: [r.images, r.sizes[0]]),
        (lambda: Slotted(make_x()), lambda r: [r.x]),
        (lambda: MovesItself(make_x()), lambda r: [r.x]),
    ],
)
def test_move_to_device_moves_tensors_and_keeps_types(make, tensors):
    """Every tensor moves, and nesting and types stay."""
    given = make()
    moved = clika_move_to_device(given, META)
    assert type(moved) is type(given)
    assert all(t.device == META for t in tensors(moved))
    assert all(t.device.type == "cpu" for t in tensors(given)), "what was passed has changed"
    if hasattr(given, "keys"):
        assert list(moved) == list(given)


def test_move_to_device_keeps_other_data():
    """Data next to the tensors is kept."""
    moved = clika_move_to_device(Batch(make_x(), [1, "two", None]), "meta")
    assert moved.sizes == [1, "two", None]
    assert moved.made_later == 7
    assert clika_move_to_device(defaultdict(list, a=make_x()), "meta").default_factory is list
    assert clika_move_to_device(deque([make_x()], maxlen=3), "meta").maxlen == 3


def test_move_to_device_keeps_transformers_outputs():
    """Outputs of transformers keep their class."""
    from transformers import BatchEncoding  # noqa: PLC0415 - takes seconds, needed by this test only
    from transformers.modeling_outputs import BaseModelOutput  # noqa: PLC0415

    moved = clika_move_to_device(BaseModelOutput(last_hidden_state=make_x(), hidden_states=(make_x(), make_x())), META)
    assert type(moved) is BaseModelOutput
    assert [t.device for t in (moved.last_hidden_state, moved["last_hidden_state"], *moved.hidden_states)] == [META] * 4
    assert list(moved) == ["last_hidden_state", "hidden_states"]
    given = BatchEncoding({"input_ids": make_x()})
    assert clika_move_to_device(given, META)["input_ids"].device == META
    assert given["input_ids"].device.type == "cpu"


def test_move_to_device_packed_sequence():
    """A packed sequence keeps its batch sizes on the CPU."""
    moved = clika_move_to_device([pack_sequence([make_x(), make_x()[:1]])], META)[0]
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"  # PyTorch wants them there


def test_move_to_device_repeated_tensor_stays_one():
    """A tensor that occurs twice stays one tensor."""
    t = make_x()
    a, b = clika_move_to_device((t, {"again": t}), META)
    assert a is b["again"]


def test_move_to_device_leaves_modules_and_objects():
    """Modules and other objects are left unchanged."""
    module, made = torch.nn.Linear(2, 2), object()
    moved = clika_move_to_device([module, made, torch.Tensor, 3, None], META)
    assert moved[0] is module
    assert module.weight.device.type == "cpu"
    assert moved[1:] == [made, torch.Tensor, 3, None]


@pytest.mark.parametrize("device", ["gpu", 3.5, None])
def test_move_to_device_invalid_device_rejected(device):
    """An invalid device raises an error."""
    with pytest.raises(
        ModelError, match=r"clika_move_to_device\(\.\.\., .*\): not a device \(.+\). Write for example \"cpu\""
    ):
        clika_move_to_device(make_x(), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_move_to_device_unavailable_device_named():
    """A device that is not available is named in the error."""
    with pytest.raises(
        ModelError,
        match=r"cannot move a tensor of shape \[2, 3\] to 'cuda:1': .+. Choose a device that this machine",
    ):
        clika_move_to_device([make_x()], "cuda:1")


class Net(torch.nn.Module):
    def forward(self, x, y=None, *, scale=1.0, options=None):
        return x * scale if y is None else x + y

    def decode(self, z):
        if z.ndim == 0:
            message = "no dims"
            raise ValueError(message)
        return z.mul_(2)


def is_same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same, a, b))
    return a == b


def test_inputs_catcher_records_tracing_input_form():
    """Calls are recorded in the form of tracing inputs."""
    net = Net()
    caught = clika_install_inputs_catcher(net)
    net(make_x())
    net(make_x(), make_x() * 2)
    net(x=make_x(), y=make_x())
    net(make_x(), scale=2.0, options={"deep": [make_x()]})
    net([1.0], [2.0])
    expected = [
        make_x(),
        (make_x(), make_x() * 2),
        {"x": make_x(), "y": make_x()},
        (make_x(), {"scale": 2.0, "options": {"deep": [make_x()]}}),
        ([1.0], [2.0]),
    ]
    assert is_same(caught(), expected)


def test_inputs_catcher_single_list_or_dict_positional():
    """A single list or dict is recorded as one positional argument."""
    net = torch.nn.Identity()
    caught = clika_install_inputs_catcher(net)
    net([make_x()])
    net({"x": make_x()})
    assert is_same(caught(), [([make_x()],), ({"x": make_x()},)])


def test_inputs_catcher_removed_when_called():
    """Calling the catcher removes it."""
    net = Net()
    caught = clika_install_inputs_catcher(net)
    net(make_x())
    assert len(caught()) == 1
    assert not net._forward_pre_hooks
    net(make_x())
    assert len(caught()) == 1
    anew = clika_install_inputs_catcher(net)
    net(make_x(), make_x())
    assert len(anew()) == 1


def test_inputs_catcher_records_copies():
    """Later changes do not affect recorded inputs."""
    net = Net()
    t, deep = torch.ones(3, requires_grad=True), [torch.ones(2), []]
    caught = clika_install_inputs_catcher(net.decode)
    with torch.no_grad():
        net.decode(t)
    deeper = clika_install_inputs_catcher(net)
    net(t, options=deep)
    deep[0].zero_()
    deep[1].append(1)
    (first,), (second,) = caught(), deeper()
    assert first.tolist() == [1, 1, 1]
    assert not first.requires_grad
    assert is_same(second[1], {"options": [torch.ones(2), []]})


def test_inputs_catcher_ignores_user_hooks():
    """Hooks of the user do not change the recorded inputs."""
    net = Net()
    net.register_forward_pre_hook(lambda _, args: (args[0] * 100,))
    caught = clika_install_inputs_catcher(net)
    net(make_x())
    assert is_same(caught(), [make_x()])


def test_inputs_catcher_inference_mode_tensors_trainable():
    """Tensors recorded in inference mode can be used in training."""
    net = Net()
    caught = clika_install_inputs_catcher(net)
    with torch.inference_mode():
        net(make_x())
    (t,) = caught()
    assert not t.is_inference()
    (torch.ones(2, 3, requires_grad=True) * t).sum().backward()


def test_inputs_catcher_method_restored():
    """A method is recorded and restored exactly."""
    net = Net()
    before = dict(vars(net))
    caught = clika_install_inputs_catcher(net.decode)
    assert net.decode(make_x()).sum() == 12
    assert net.decode.__name__ == "decode"
    assert net.decode.__doc__ == Net.decode.__doc__
    assert is_same(caught(), [make_x()])
    assert vars(net) == before
    assert net.decode == Net.decode.__get__(net)


def test_inputs_catcher_instance_method_restored():
    """A method set on the instance is restored."""
    net = Net()
    mine = net.__dict__["decode"] = Net.decode.__get__(net)
    caught = clika_install_inputs_catcher(net.decode)
    net.decode(make_x())
    assert len(caught()) == 1
    assert net.__dict__["decode"] is mine


def test_inputs_catcher_raising_calls_recorded():
    """Calls that raise are recorded, and the method is restored."""
    net = Net()
    caught = clika_install_inputs_catcher(net.decode)
    with pytest.raises(ValueError, match="no dims"):
        net.decode(torch.tensor(1.0))
    net.decode(z=make_x())
    assert is_same(caught(), [torch.tensor(1.0), {"z": make_x()}])
    assert "decode" not in vars(net)


def test_inputs_catcher_forward_as_method():
    """`forward` can be recorded as a method."""
    net = Net()
    caught = clika_install_inputs_catcher(net.forward)
    net.forward(make_x())
    net(make_x())
    assert is_same(caught(), [make_x(), make_x()])


def test_inputs_catcher_uninstall_keeps_records():
    """`uninstall` removes the catcher and keeps its records."""
    net = Net()
    caught = clika_install_inputs_catcher(net.decode)
    net.decode(make_x())
    caught.uninstall()
    caught.uninstall()
    assert "decode" not in vars(net)
    assert is_same(caught(), [make_x()])


@pytest.mark.parametrize("pick", [lambda n: n, lambda n: n.decode])
def test_inputs_catcher_no_call_raises_and_uninstalls(pick):
    """A catcher without calls raises an error and is removed."""
    net = Net()
    caught = clika_install_inputs_catcher(pick(net))
    with pytest.raises(ModelError, match=r"Net(\.decode)? was not called, .* Run the pipeline first"):
        caught()
    assert not net._forward_pre_hooks
    assert "decode" not in vars(net)


def test_inputs_catcher_method_twice_rejected():
    """A method cannot have two catchers."""
    net = Net()
    caught = clika_install_inputs_catcher(net.decode)
    with pytest.raises(ModelError, match=r"the inputs of Net\.decode are already being caught. Call the first catcher"):
        clika_install_inputs_catcher(net.decode)
    caught.uninstall()


class NoSlots:
    __slots__ = ()

    def run(self):
        pass

    @classmethod
    def make(cls):
        pass


def hidden(self):
    pass


class Renamed:
    public = hidden


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            torch.relu,
            r"cannot catch the inputs of .*relu.*: it is a builtin_function_or_method. Pass a module, or a method of",
        ),
        (
            lambda t: t,
            r"cannot catch the inputs of <function .*: it is a function. Pass a module, or a method of an object",
        ),
        (Net, r"cannot catch the inputs of <class .*Net'>: it is a class. Pass a module"),
        (
            NoSlots.make,
            r"cannot catch the inputs of <bound method NoSlots\.make.*: it is a method. Pass a module, or a method of",
        ),
        (None, r"cannot catch the inputs of None: it is a NoneType. Pass a module"),
        (
            NoSlots().run,
            r"cannot catch the inputs of NoSlots\.run: 'NoSlots' object attribute 'run' is read-only. Pass the module",
        ),
        (
            Renamed().public,
            r"cannot catch the inputs of hidden: its object does not have it as 'hidden'. Pass the module",
        ),
    ],
)
def test_inputs_catcher_unsupported_callable_rejected(target, message):
    """An unsupported callable raises an error with the remedy."""
    with pytest.raises(ModelError, match=message):
        clika_install_inputs_catcher(target)
    assert not hasattr(target, "hidden")


def test_inputs_catcher_module_copyable_afterwards():
    """A module can be copied after its catcher was removed."""
    net = Net()
    caught = clika_install_inputs_catcher(net)
    net(make_x())
    caught()
    assert copy.deepcopy(net)(make_x()).shape == (2, 3)
