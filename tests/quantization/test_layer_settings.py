"""Layer settings: the nodes that a key matches, precedence, and the error for an unknown key."""

import pytest
import torch

from clika_ref import LayerQuantizationSettings as Layer
from clika_ref import ModelError, QuantizationSettings, clika_compile
from clika_ref.quantization.layer_settings import resolve_node_settings


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) + x


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(4, 4)
        self.blocks = torch.nn.Sequential(Block(), Block())
        self.head = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))


@pytest.fixture(scope="module")
def graph():
    return clika_compile(Net(), tracing_inputs=[torch.ones(1, 4)]).clika_state.graph


def find_skipped_scopes(graph, layers):
    found = resolve_node_settings(graph, QuantizationSettings(), layers)
    return {node.origin.scope for node, choice in found.items() if choice.skipped}


def test_resolve_node_settings_default_without_key(graph):
    """A node without a key has the settings of the model."""
    found = resolve_node_settings(graph, QuantizationSettings(weights_num_bits=[8, 4], activations_num_bits=16), {})
    assert [*found] == [*graph.nodes]
    assert {(c.weights_num_bits, c.activations_num_bits, c.skipped) for c in found.values()} == {((8, 4), 16, "")}


def test_resolve_node_settings_path_and_wildcard(graph):
    """A path matches all nodes below it, and a wildcard each match."""
    skip = Layer(skip_quantization=True)
    assert find_skipped_scopes(graph, {"blocks.0": skip}) == {"blocks.0", "blocks.0.first", "blocks.0.second"}
    assert find_skipped_scopes(graph, {"blocks.*.first": skip}) == {"blocks.0.first", "blocks.1.first"}
    assert find_skipped_scopes(graph, {"blocks.?": skip}) == find_skipped_scopes(graph, {"blocks": skip})


def test_resolve_node_settings_node_name(graph):
    """A node is selected by its name in the graph."""
    (add, *_) = [node for node in graph.nodes if node.op_type == "add"]
    found = resolve_node_settings(graph, QuantizationSettings(), {add.name: Layer(skip_quantization=True)})
    assert [node for node, choice in found.items() if choice.skipped] == [add]
    assert found[add].skipped == f"skip_quantization of {add.name!r}"


def test_resolve_node_settings_most_specific_bits_win(graph):
    """The most specific bit width wins in any order."""
    linear = next(node for node in graph.nodes if node.origin.scope == "blocks.0.first")
    settings = {
        linear.name: Layer(weights_num_bits=2),
        "blocks.0": Layer(weights_num_bits=3, activations_num_bits=16),
        "blocks.0.first": Layer(weights_num_bits=[4, 5]),
        "*": Layer(weights_num_bits=6),
    }
    for names, bits in [
        ([linear.name, "blocks.0", "*"], (2,)),
        (["blocks.0.first", "blocks.0", "*"], (4, 5)),
        (["*", "blocks.0"], (3,)),
        (["*"], (6,)),
    ]:
        found = resolve_node_settings(graph, QuantizationSettings(), {name: settings[name] for name in names})[linear]
        assert found.weights_num_bits == bits
        assert found.activations_num_bits == (16 if "blocks.0" in names else 8)


def test_resolve_node_settings_downstream_and_until(graph):
    """Downstream skips to the outputs, and until stops before the named layers."""
    skipped = find_skipped_scopes(graph, {"blocks.1": Layer(skip_quantization_downstream=True)})
    assert skipped == {"blocks.1", "blocks.1.first", "blocks.1.second", "head"}
    until = Layer(skip_quantization_until=["blocks.1.second"])
    assert find_skipped_scopes(graph, {"blocks.1.first": until}) == {"blocks.1.first", "blocks.1"}


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ({"blocks.0.frist": Layer()}, "layer_quantization_settings: 'blocks.0.frist' is not a layer of Net"),
        ({"blocks.0.frist": Layer()}, "Near matches: 'blocks.0.first'"),
        ({"zzz": Layer()}, "Available: "),
        ({"blocks.[5-9]": Layer()}, "is not a layer"),
        ({"stem": Layer(skip_quantization_until=["haed"])}, "skip_quantization_until of 'stem': 'haed' is not a"),
        ({"head": Layer(skip_quantization_until=["stem"])}, "'stem' does not depend on 'head'. Name a later layer."),
    ],
)
def test_resolve_node_settings_unknown_key_suggests_near(graph, layers, what):
    """An unknown key raises an error with similar names."""
    with pytest.raises(ModelError) as caught:
        resolve_node_settings(graph, QuantizationSettings(), layers)
    assert what in str(caught.value)


def test_resolve_node_settings_folded_or_removed_layer_raises():
    """A folded or removed layer raises an error with the reason."""

    class Normalized(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.drop = torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Dropout()

        def forward(self, x):
            return self.drop(self.norm(self.conv(x)))

    model = clika_compile(Normalized().eval(), tracing_inputs=[torch.ones(1, 3, 2, 2)]).clika_state.graph
    written = model.clone()
    (norm,) = (node for node in written.nodes if node.op_type == "batch_norm")
    written.replace(norm.output, norm.inputs[0])
    written.erase(norm)
    for key in ("norm", "batch_norm"):
        with pytest.raises(ModelError, match=f"'{key}' is folded into other layers. Name .* such as 'conv2d'"):
            resolve_node_settings(written, QuantizationSettings(), {key: Layer(skip_quantization=True)}, model)
    with pytest.raises(ModelError, match=r"'drop' is not a layer .* such as Dropout, are removed."):
        resolve_node_settings(written, QuantizationSettings(), {"drop": Layer(skip_quantization=True)}, model)


@pytest.mark.parametrize("name", ["weights_num_bits", "activations_num_bits"])
def test_resolve_node_settings_bits_without_weights_raise(graph, name):
    """A bit width for a node without weights raises an error."""
    with pytest.raises(ModelError, match=f"'relu' has no quantized multiplication, so {name} cannot apply. Name"):
        resolve_node_settings(graph, QuantizationSettings(), {"relu": Layer(**{name: 8})})
