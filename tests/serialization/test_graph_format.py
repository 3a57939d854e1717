"""Graphs as JSON: lossless, without executing content, and with different errors for damage and age."""

import copy
import dataclasses
import enum
import json
import math
import pickle
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import sympy
import torch
from loaded_copies import load_copy
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from clika_ref import ClikaModule, clika_compile
from clika_ref.core.errors import ModelError
from clika_ref.core.registry import load_registry
from clika_ref.core.symbols import SYMPY_TO_PYTHON, evaluate, make_symbol
from clika_ref.serialization.graph_format import decode, encode, graph_from_json, graph_to_json
from clika_ref.serialization.signature_format import signature_from_json, signature_to_json

ITEMS = [
    None,
    True,
    3,
    -2.5,
    math.inf,
    -math.inf,
    1j,
    complex(-math.inf, 2.5),
    "text",
    (1, (2.5, None), [3, "a"]),
    [],
    (),
    torch.float16,
    torch.device("cpu"),
    {"a": 1, "b": (2,)},
    {"tuple": [1]},
    make_symbol("batch") * 2 + 1,
    (make_symbol("batch"), 3),
]


@pytest.mark.parametrize("item", ITEMS, ids=str)
def test_encode_decode_attributes_keep_types(item):
    """Attributes keep their values and types."""
    text = json.dumps(encode(item))
    found = decode(json.loads(text))
    assert found == item
    assert type(found) is type(item) or isinstance(item, sympy.Basic)
    assert isinstance(found, bool) == isinstance(item, bool)


def test_encode_decode_nan():
    """NaN is encoded and decoded."""
    assert math.isnan(decode(json.loads(json.dumps(encode(math.nan)))))


def test_encode_unsupported_value_raises_with_alternatives():
    """A value without an encoding raises an error with alternatives."""
    with pytest.raises(ModelError, match=r"cannot save \{1\}, a set. Pass a number, a string, a dtype or a tensor"):
        encode({1})


@pytest.mark.parametrize("item", [{"code": "1"}, {"a": 1, "b": 2}, {}])
def test_decode_unknown_form_raises(item):
    """An unknown encoding raises an error."""
    with pytest.raises(
        ModelError,
        match=(
            r"cannot load .* in a saved graph: its form is unknown. The graph is damaged, or was saved by a newer "
            r"version."
        ),
    ):
        decode(item)


@pytest.mark.parametrize("power", [["Pow", 10, ["Pow", 10, 10]], ["Pow", "n", 10**9]], ids=["numbers", "a size"])
def test_decode_huge_power_raises(power):
    """A power that would take too long to compute raises an error."""
    with pytest.raises(ModelError, match=r"a saved size expression: the power 10.* of (10|n) is not supported"):
        decode({"expr": power})


@pytest.mark.parametrize("text", ["__import__('os').system('true')", "eval", "S"])
def test_decode_expression_names_never_run_as_code(text):
    """Names in expressions are symbols and never executed."""
    expr = decode({"expr": ["Add", text, 1]})
    assert expr.free_symbols == {make_symbol(text)}
    with pytest.raises(ModelError, match=r"a saved size expression: the function .* is not one of"):
        decode({"expr": [text, 1]})


def test_decode_unknown_dtype_raises():
    """An unknown dtype raises an error."""
    with pytest.raises(ModelError, match="a saved graph: this PyTorch has no dtype 'float3'"):
        decode({"dtype": "float3"})


NUMBERS = {"a": 7, "b": 3}


def make_expressions():
    a, b = make_symbol("a"), make_symbol("b")
    for kind in SYMPY_TO_PYTHON:
        for arguments in ((a, b), (a,), (a, sympy.Integer(2), b), (sympy.Ge(a, b), a, b)):
            try:
                expr = kind(*arguments)
                value = evaluate(expr, NUMBERS)
            except Exception:  # noqa: BLE001, S112 - it takes another number of arguments
                continue
            if isinstance(expr, kind):
                yield pytest.param(expr, value, id=f"{kind.__module__.split('.')[0]}.{kind.__name__}")
                break


@pytest.mark.parametrize(("expr", "value"), list(make_expressions()))
def test_encode_decode_every_sympy_function(expr, value):
    """Expressions of every function have the same value after decoding."""
    found = decode(json.loads(json.dumps(encode(expr))))
    assert found == expr
    assert evaluate(found, NUMBERS) == value


def test_expressions_cover_most_functions():
    """The examples cover most of the functions."""
    assert len(list(make_expressions())) > len(SYMPY_TO_PYTHON) * 0.7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.twin = self.conv

    def forward(self, x, flag=True, n=2):
        if x.shape[0] > 30:
            raise ValueError
        x = self.norm(self.twin(x))
        return {"chunks": x.chunk(2, 1), "rows": x.shape[0] * n, "flat": x.flatten(1), "none": None}


def compile_net():
    inputs = [torch.randn(2, 3, 8, 8), torch.randn(4, 3, 8, 9)]
    return clika_compile(Net().train(), tracing_inputs=inputs, skip_eval_set_mode=True)


def test_graph_from_json_restores_whole_graph():
    """A graph is restored with types, symbols, guards, origins, state and aliases."""
    graph = compile_net().graph
    document = json.loads(json.dumps(graph_to_json(graph)))
    tensors = {n: v.data for n, v in graph.constants.items()}
    again = graph_from_json(document, load_registry().operators.get, tensors)
    assert str(again) == str(graph)
    assert graph_to_json(again) == document
    assert graph.state
    assert again.state.keys() == graph.state.keys()
    assert again.aliases == graph.aliases != {}
    assert [str(g) for g in again.guards] == [str(g) for g in graph.guards] != []
    assert again.symbols == graph.symbols
    assert [n.origin for n in again.nodes] == [n.origin for n in graph.nodes]


def test_signature_from_json_restores_signature():
    """A signature is restored."""
    module = compile_net()
    signature = module.clika_state.signature
    again = signature_from_json(json.loads(json.dumps(signature_to_json(signature))))
    assert again == signature


def test_graph_to_json_equal_for_copies():
    """The document is the same for each copy of a module."""
    module = compile_net()
    assert graph_to_json(copy.deepcopy(module).graph) == graph_to_json(module.graph)
    assert torch.equal(pickle.loads(pickle.dumps(module)).get_extra_state(), module.get_extra_state())  # noqa: S301


def test_graph_from_json_unknown_version_or_operator_raises():
    """A newer or older format and unknown operators raise an error with the remedy."""
    document = graph_to_json(compile_net().graph)
    with pytest.raises(
        ModelError,
        match=r"the saved graph has format 99, but this clika-ref reads formats up to \d+. Update clika-ref.",
    ):
        graph_from_json({**document, "version": 99}, lambda _: None, {})
    with pytest.raises(ModelError, match="the saved graph was saved by a development version; compile again"):
        graph_from_json({**document, "version": 1}, lambda _: None, {})
    with pytest.raises(
        ModelError, match=r"no installed plugin declares the operators \[.*'conv2d'.*\]. Install one that does."
    ):
        graph_from_json(document, lambda _: None, {})


class Pair(NamedTuple):
    left: torch.Tensor
    right: list


@dataclasses.dataclass
class Result:
    values: torch.Tensor
    parts: list


STRUCTURES = [
    lambda x: Pair(x, [x + 1]),
    lambda x: OrderedDict(b=x, a=x + 1),
    lambda x: Result(x, [x + 1, None]),
    lambda x: BaseModelOutput(last_hidden_state=x, attentions=(x + 1,)),
    lambda x: [(), {}, (x, {"a": [x]})],
    lambda x: torch.max(x, 1),
]


@pytest.mark.parametrize(
    "function", STRUCTURES, ids=["namedtuple", "ordered", "dataclass", "output", "nested", "torch"]
)
def test_load_state_dict_restores_output_structures(function):
    """Structures of outputs are restored by saving, copying and pickling."""
    x = torch.randn(2, 3)
    module = clika_compile(function, tracing_inputs=[x])
    again = load_copy(module)
    for made in (again, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301 - our own bytes
        found, expected = made(x), function(x)
        assert type(found) is type(expected)
        assert str(found) == str(expected)


class Mode(enum.Enum):
    DOUBLE = 1
    TRIPLE = 2


class Level(enum.IntEnum):
    LOW = 1


class Kind(str, enum.Enum):  # noqa: UP042 - the older spelling, of which there is more
    PLAIN = "plain"


def branch_on_enums(x, mode=Mode.DOUBLE, level=Level.LOW, kind=Kind.PLAIN):
    return x * 2 if mode is Mode.DOUBLE and level is Level.LOW and kind is Kind.PLAIN else x * 3


def make_copies(module):
    rebuilt = load_copy(module)
    return rebuilt, copy.deepcopy(module), pickle.loads(pickle.dumps(module))  # noqa: S301 - our own bytes


@pytest.mark.parametrize("traced", [(), (Mode.DOUBLE, Level.LOW, Kind.PLAIN)], ids=["defaults", "given"])
def test_load_state_dict_restores_enum_arguments(traced):
    """Enum members are restored as defaults and as constants."""
    x = torch.ones(2)
    for made in make_copies(clika_compile(branch_on_enums, tracing_inputs=[(x, *traced)])):
        assert torch.equal(made(x), x * 2)
        assert torch.equal(made(x, Mode.DOUBLE, Level.LOW, Kind.PLAIN), x * 2)
        with pytest.raises(ModelError, match="argument 'mode'"):
            made(x, Mode.TRIPLE)


def test_encode_local_enum_raises_and_default_dropped():
    """A local enum member cannot be saved; a copied module drops it as a default."""

    class Local(enum.Enum):
        A = 1

    def branch_on_local_enum(x, mode=Local.A, act=torch.relu):
        return act(x) if mode is Local.A else x

    x = torch.ones(2)
    with pytest.raises(ModelError, match=r"cannot save <Local.A: 1>, a Local: only members of enums"):
        encode(Local.A)
    for made in make_copies(clika_compile(branch_on_local_enum, tracing_inputs=[x])):
        assert torch.equal(made(x), x)
        with pytest.raises(ModelError, match=r"'mode' was omitted .* default <Local.A: 1> is not stored in a copied"):
            made(x, Local.A)
    with pytest.raises(ModelError, match=r"was compiled for B of a absent.Mode, but this process has no such class"):
        decode({"enum": ["absent:Mode", "B"]})
    with pytest.raises(ModelError, match=r"was compiled for B of a os.path, but this process has no such class"):
        decode({"enum": ["os:path", "B"]})


def test_signature_from_json_unknown_default_raises_if_given():
    """An unknown default raises an error only in calls that pass the argument."""
    module = clika_compile(branch_on_enums, tracing_inputs=[torch.ones(2)])
    document = json.dumps(signature_to_json(module.clika_state.signature)).replace(
        "test_graph_format:Mode", "absent:Mode"
    )
    signature = signature_from_json(json.loads(document))
    assert signature.flatten((1,), {}) == [1]
    with pytest.raises(ModelError, match=r"its default .*absent:Mode.* is not stored"):
        signature.flatten((1, Mode.DOUBLE), {})


LOADING = """
import sys, torch
from clika_ref import ClikaError, ClikaModule
try:
    ClikaModule().load_state_dict(torch.load(sys.argv[1], weights_only=True))
except ClikaError as error:
    print(error)
"""


@pytest.mark.slow
def test_load_state_dict_unknown_class_named(tmp_path):
    """A class that the process does not know is named, with the remedy."""
    module = clika_compile(STRUCTURES[2], tracing_inputs=[torch.randn(2, 3)])
    torch.save(module.state_dict(), tmp_path / "state.pt")
    run = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path / "state.pt")], capture_output=True, text=True, check=True
    )
    assert "test_graph_format.Result" in run.stdout
    assert "has no such class. Import the module that defines it first" in run.stdout


def test_load_state_dict_damaged_extra_state_raises():
    """A damaged `_extra_state` raises an error."""
    state = compile_net().state_dict()
    for damaged in (state["_extra_state"][:50], torch.zeros(8, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)):
        with pytest.raises(ModelError, match=r"cannot load _extra_state \(the graph\) of .* bytes: it"):
            ClikaModule().load_state_dict({**state, "_extra_state": damaged})


def test_load_state_dict_missing_weight_raises():
    """A state dict without a weight raises an error in an empty module."""
    state = compile_net().state_dict()
    del state["norm.weight"]
    with pytest.raises(ModelError, match=r"lacks 'norm.weight'"):
        ClikaModule().load_state_dict(state)
