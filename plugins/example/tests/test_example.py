"""Tests that the author of a plugin writes: the operator on its samples, the pass with near misses, the target."""

import random

import pytest
import torch
from clika_ref_example.plugin import DropRelu, Interpreter, call_squared_relu, squared_relu
from torch import nn

import clika_ref
from clika_ref.core.errors import TargetError
from clika_ref.core.inference import Builder, infer_types
from clika_ref.core.ir import Graph
from clika_ref.core.passes import Pipeline
from clika_ref.core.registry import load_registry
from clika_ref.core.samples import Descriptions, random_draw, realize
from clika_ref.core.symbols import Symbol, SymbolSource, make_symbol
from clika_ref.core.types import TensorType
from clika_ref.settings.compile_options import deployment_settings_named


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.example.squared_relu(torch.relu(self.linear(x)))


@pytest.fixture(scope="module")
def operators():
    return load_registry("aten,example").operators


@pytest.fixture
def compiled_example():
    """A model that calls the operator, its input, and its ClikaModule with a dynamic batch."""
    torch.manual_seed(0)
    model = Network().eval()
    inputs = [torch.randn(2, 4), torch.randn(3, 4)]
    return model, inputs[1], clika_ref.clika_compile(model, tracing_inputs=inputs, discard_input_model=False)


@pytest.mark.parametrize("seed", range(20))
def test_squared_relu_call_equals_reference_and_type(seed):
    """The call that models make equals the reference and its inferred type."""
    sample = squared_relu.sampler(random_draw(random.Random(seed)), Descriptions()).operands[0]
    x = realize(sample, torch.Generator().manual_seed(seed))
    result = call_squared_relu(x)
    assert torch.equal(result, squared_relu(x))
    assert infer_types(squared_relu, [TensorType(x.dtype, tuple(x.shape))], {}) == (
        TensorType(result.dtype, tuple(x.shape)),
    )


def test_squared_relu_passes_opcheck():
    """The call passes PyTorch's own checks of custom operators."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.library.opcheck(call_squared_relu, (x,))


def test_squared_relu_gradient_equals_reference():
    """Its gradient equals that of the reference."""
    x = torch.tensor([-2.0, -0.5, 0.5, 3.0])
    by_call, by_reference = (x.clone().requires_grad_() for _ in range(2))
    call_squared_relu(by_call).sum().backward()
    squared_relu(by_reference).sum().backward()
    assert torch.equal(by_call.grad, by_reference.grad)


def build_chain(operators, *kinds: str) -> Graph:
    """A chain of operators."""
    graph = Graph()
    x = graph.add_input(TensorType(torch.float32, (make_symbol("n"), 3)), "x")
    graph.symbols["n"] = Symbol("n", 0, None, SymbolSource("x", 0))
    for kind in kinds:
        x = Builder(graph, operators)(kind, x)
    graph.add_output(x)
    return graph


def drop_relu(operators, graph: Graph) -> list[str]:
    x = torch.tensor([[-1.0, -0.0, 2.0], [float("nan"), float("inf"), -float("inf")]])
    Pipeline((DropRelu(),), operators, check_inputs=[x]).run(graph)
    return [node.op_type for node in graph.nodes]


def test_drop_relu_before_squared_relu_removed(operators):
    """relu before squared_relu is removed."""
    assert drop_relu(operators, build_chain(operators, "relu", "squared_relu")) == ["squared_relu"]


@pytest.mark.parametrize("kinds", [("neg", "squared_relu"), ("squared_relu",), ("relu", "square")])
def test_drop_relu_other_chains_stay(operators, kinds):
    """Other chains stay."""
    assert drop_relu(operators, build_chain(operators, *kinds)) == list(kinds)


def test_drop_relu_relu_with_other_users_stays(operators):
    """A relu with other users stays."""
    graph = build_chain(operators, "relu", "squared_relu")
    graph.add_output(next(iter(graph.nodes)).output)
    assert drop_relu(operators, graph) == ["relu", "squared_relu"]


def test_clika_compile_squared_relu_becomes_one_node(compiled_example):
    """A model that calls the operator compiles to one node."""
    model, x, module = compiled_example
    assert [node.op_type for node in module.graph.nodes] == ["linear", "squared_relu"]
    assert torch.equal(module(x), model(x))


def test_clika_export_onnxruntime_computes_lowering(compiled_example, tmp_path):
    """ONNX Runtime computes the lowering."""
    _, _, module = compiled_example
    artifact = module.clika_export(tmp_path / "model.onnx")  # which compares
    assert artifact.target == "onnxruntime"


def test_interpreter_target_writes_equal_artifact(compiled_example, tmp_path):
    """The target writes a file that computes the same."""
    model, x, module = compiled_example
    module.clika_state.configure(deployment_settings_named("interpreter"), clika_ref.ClikaCompileOptions())
    artifact = module.clika_export(tmp_path / "model.safetensors")
    assert artifact.path.stat().st_size == artifact.facts["bytes"]
    assert torch.equal(Interpreter().load(artifact)([x])[0], model(x))
    assert Interpreter().explain(artifact) == dict.fromkeys(["linear", *artifact.output_names], "float")


def test_interpreter_target_random_numbers_raise(tmp_path):
    """The target rejects random numbers."""
    module = clika_ref.clika_compile(lambda x: x + torch.rand_like(x), tracing_inputs=[torch.ones(2)])
    module.clika_state.configure(deployment_settings_named("interpreter"), clika_ref.ClikaCompileOptions())
    with pytest.raises(TargetError, match=r"interpreter cannot run 1 node .*\n.*: rand draws random numbers"):
        module.clika_export(tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
