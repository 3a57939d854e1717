"""Models that no tracer captures as one graph: compiled in pieces, quantized, trained."""

import contextlib
import copy
import inspect
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from clika_ref import (
    ClikaModule,
    DeploymentSettings_ONNXRuntime_ONNX,
    LayerQuantizationSettings,
    LoraSettings,
    ModelError,
    PartialClikaModule,
    PruningSettings,
    QuantizationSettings,
    clika_compile,
)
from clika_ref.partial_graphs.dynamic_sizes import RECOMPILE_LIMIT

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo, which hides it from users

ONNX_RUNTIME = DeploymentSettings_ONNXRuntime_ONNX()

BATCH_SIZES = (1, 2, 3, 5, 8, 13, 21, 34, 55, 89)


class Layer(nn.Module):
    """A residual layer; ``checks`` makes it branch on the elements of a tensor, which breaks its graph."""

    def __init__(self, checks: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)
        self.checks = checks

    def forward(self, x):
        y = self.norm(x)
        if self.checks and torch.isnan(y).any():
            raise ValueError("NaN")
        return x + torch.relu(self.linear(y))


class Encoder(nn.Module):
    """Layers in a loop, between library modules that Python calls."""

    def __init__(self, checks: bool = True, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.layers = nn.ModuleList(Layer(checks) for _ in range(depth))
        self.head = nn.Linear(32, 4)
        self.calls = 0

    def forward(self, x):
        x = self.embed(x) * 2
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Branching(nn.Module):
    """Takes a branch by the elements of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(8, 8)
        self.negative = nn.Linear(8, 8)

    def forward(self, x):
        return self.positive(x) + 1 if x.sum() > 0 else self.negative(x) - 1


def make_encoder(checks=True, depth=3):
    torch.manual_seed(0)
    return Encoder(checks, depth).eval()


def make_inputs(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 5, 8, generator=generator) for size in sizes]


def make_branching():
    torch.manual_seed(0)
    return Branching().eval()


def compile_branching(**arguments):
    """Each tracing input takes another branch, so that only the comparison of both shows the dynamic dim."""
    return compile_in_pieces(make_branching(), [torch.ones(2, 8), -torch.ones(3, 8)], **arguments)


def compile_in_pieces(model=None, inputs=None, **arguments):
    model = make_encoder() if model is None else model
    module = clika_compile(model, tracing_inputs=inputs or make_inputs(1, 3), fullgraph=False, **arguments)
    assert isinstance(module, PartialClikaModule)
    return module


def sqnr(expected, found):
    return float(10 * torch.log10(expected.pow(2).mean() / (expected - found).pow(2).mean()).detach())


@pytest.fixture(scope="module")
def float_module():
    return compile_in_pieces()


@pytest.fixture(scope="module")
def quantized_module():
    return compile_in_pieces(
        calibration_inputs=make_inputs(4, 4, 6),
        quantization_settings=QuantizationSettings(),
        deployment_settings=ONNX_RUNTIME,
    )


def test_model_with_one_graph_compiled_as_one_graph():
    module = clika_compile(make_encoder(checks=False), tracing_inputs=make_inputs(1, 3), fullgraph=False)
    assert isinstance(module, ClikaModule)


def test_breaks_rejected_by_default():
    with pytest.raises(ModelError, match="cannot be captured as one graph") as caught:
        clika_compile(make_encoder(), tracing_inputs=make_inputs(1, 3))
    assert "fullgraph=False" in caught.value.__notes__[0]


@pytest.mark.slow
def test_pieces_equal_eager_at_untraced_sizes_without_further_graphs(float_module):
    module, model = float_module, make_encoder()
    before = counters["stats"]["unique_graphs"]
    for x in make_inputs(*BATCH_SIZES):
        torch.testing.assert_close(module(x), model(x))
    assert counters["stats"]["unique_graphs"] == before


def test_piece_for_each_layer_and_library_module(float_module):
    scopes = [piece.scope for piece in float_module.clika_pieces]
    layers = [f"layers.{i}.{part}" for i in range(3) for part in ("norm", "linear")]
    assert scopes == ["embed", *layers, "head"]
    assert all(isinstance(piece.module, ClikaModule) for piece in float_module.clika_pieces)


def test_node_origins_are_those_of_the_model(float_module):
    piece = next(piece for piece in float_module.clika_pieces if piece.scope == "layers.1.linear")
    origins = {node.op_type: node.origin for node in piece.module.graph.nodes}
    assert origins["linear"].scopes == ("layers.1", "layers.1.linear")
    assert origins["relu"].line.startswith("test_partial_module.py:")


def test_breaks_listed_with_position_and_change(float_module):
    found = float_module.clika_breaks
    inner, outer = found.breaks
    assert outer.position == f"test_partial_module.py:{inspect.getsourcelines(Encoder.forward)[1]}"
    assert outer.reason.endswith(f"in a call at {inner.position}")
    assert inner.position.startswith("test_partial_module.py:")
    assert (inner.is_skipped, outer.is_skipped) == (False, True)
    assert "torch.where" in inner.advice
    assert "all of forward, which cannot resume after the break" in str(found)


@pytest.mark.slow
def test_breaks_in_a_function_that_runs_in_python_listed():
    """Dynamo stops at the loop, and never reaches the branch after it."""

    class Branched(Encoder):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            if x.sum() > 0:
                return x
            return x * 2 + 1

    found = compile_in_pieces(Branched().eval()).clika_breaks.breaks
    first = inspect.getsourcelines(Branched.forward)[1]
    assert f"test_partial_module.py:{first + 4}" in [entry.position for entry in found]
    assert any(entry.is_skipped and entry.position.endswith(f":{first}") for entry in found)
    assert "torch.where" in found[-1].advice


def test_state_dict_keys_and_weights_are_the_models(float_module):
    model = make_encoder()
    assert [*float_module.state_dict()] == [*model.state_dict()]
    assert {n for n, _ in float_module.named_parameters()} == {n for n, _ in model.named_parameters()}


def test_loaded_weights_used():
    module, other, x = compile_branching(), make_branching(), torch.ones(4, 8)
    with torch.no_grad():
        other.positive.weight.mul_(2)
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x))
    module.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    torch.testing.assert_close(module(x), other(x))


def test_gradients_equal_eager(float_module):
    model = make_encoder()
    (x,) = make_inputs(4)
    float_module.zero_grad()
    float_module(x).square().sum().backward()
    model(x).square().sum().backward()
    found = dict(float_module.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad)


def test_original_kept_if_not_discarded():
    model = make_branching().train()
    module = compile_in_pieces(model, [torch.ones(2, 8), torch.ones(3, 8)], discard_input_model=False)
    assert model.training
    assert module.get_parameter("positive.weight") is not model.positive.weight
    x = torch.ones(4, 8)
    torch.testing.assert_close(module(x), model.eval()(x))


@pytest.mark.slow
def test_each_layer_has_its_own_ranges(quantized_module):
    linears = [piece.module for piece in quantized_module.clika_pieces if piece.scope.endswith(".linear")]
    ranges = [str(module.clika_state.calibration.table.values) for module in linears]
    assert len(linears) == 3
    assert len({*ranges}) == 3


@pytest.mark.slow
def test_int8_as_accurate_as_one_graph(quantized_module):
    arguments = {
        "calibration_inputs": make_inputs(4, 4, 6),
        "quantization_settings": QuantizationSettings(),
        "deployment_settings": ONNX_RUNTIME,
    }
    whole = clika_compile(make_encoder(checks=False), tracing_inputs=make_inputs(1, 3), **arguments)
    (x,) = make_inputs(16)
    expected = make_encoder()(x)
    assert sqnr(expected, quantized_module(x)) > sqnr(expected, whole(x)) - 0.5
    assert {row.scope: bool(row.reason) for row in quantized_module.clika_summary()} == {
        row.scope: bool(row.reason) for row in whole.clika_summary().layers
    }


@pytest.mark.slow
def test_calibration_runs_the_model_once_for_each_batch():
    runs = []

    class Counting(Branching):
        def forward(self, x):
            runs.append(len(x))
            return super().forward(x)

    module = compile_in_pieces(Counting(), [torch.ones(2, 8), torch.ones(3, 8)])
    runs.clear()
    module.clika_initialize_algorithms(calibration_inputs=[torch.rand(size, 8) for size in (4, 5, 6)])
    assert runs == [4, 5, 6]


@pytest.mark.slow
def test_quantized_pieces_trained():
    module = compile_in_pieces(
        calibration_inputs=make_inputs(4, 4),
        quantization_settings=QuantizationSettings(),
        deployment_settings=ONNX_RUNTIME,
    )
    (x,) = make_inputs(16)
    target = make_encoder(depth=3)(x).detach() * 1.5
    module.train()
    assert any(name.startswith("piece_") for name, _ in module.named_parameters())  # scales
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (module(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    trained = module(x)
    assert sqnr(trained, module.eval()(x)) > 25


@pytest.mark.slow
def test_layer_settings_apply_to_the_pieces_that_they_name():
    module = compile_in_pieces()
    skip = {"layers.1.*": LayerQuantizationSettings(skip_quantization=True)}
    summary = module.clika_initialize_algorithms(calibration_inputs=make_inputs(4), layer_quantization_settings=skip)
    reasons = {row.scope: row.reason for row in summary}
    assert "skip_quantization" in reasons["layers.1.linear"]
    assert not reasons["layers.0.linear"]
    with pytest.raises(ModelError, match=r"'layer\.7' is not a layer of any piece"):
        module.clika_initialize_algorithms(
            calibration_inputs=make_inputs(4),
            layer_quantization_settings={"layer.7": LayerQuantizationSettings(skip_quantization=True)},
        )


def test_branches_of_the_tracing_inputs_compiled():
    model = make_branching()
    compiled = compile_branching()
    for x in (torch.ones(7, 8), -torch.ones(1, 8)):
        torch.testing.assert_close(compiled(x), model(x))


class Masked(nn.Module):
    """Calls functions with an argument of one name: its dim 1 is dynamic in one, and broadcast in the other."""

    def forward(self, x, mask):
        y = (x * mask[..., None]).sum(1)
        if y.isnan().any():
            return y
        return attend(x[:, None].expand(-1, 4, -1, -1), mask[:, None, None, :])


def attend(x, mask):
    if mask.isnan().any():
        return x
    return (x * mask[..., None, :, None].sum(3)).relu()


@pytest.mark.slow
def test_dynamic_dims_belong_to_their_function():
    model, compiled = Masked(), compile_in_pieces(Masked(), [make_masked(2, 3), make_masked(1, 5)])
    for sizes in ((4, 7), (1, 1), (3, 2)):
        torch.testing.assert_close(compiled(*make_masked(*sizes)), model(*make_masked(*sizes)))


def make_masked(batch, length):
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(length)), torch.ones(batch, length)


def test_branch_that_no_input_took_rejected():
    compiled = compile_in_pieces(Branching(), [torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(ModelError, match=r"forward resumed at .*: it takes a branch.* Add such an input"):
        compiled(-torch.ones(2, 8))


def test_piece_that_no_batch_reached_stays_in_float():
    compiled = compile_branching()
    compiled.clika_initialize_algorithms(calibration_inputs=[torch.rand(4, 8)])
    quantized = {piece.scope: piece.module.clika_state.quantized for piece in compiled.clika_pieces}
    assert quantized["positive"] is not None
    assert quantized["negative"] is None


def scale(x, text):
    y = x * int(text)
    return y + 1 if y.sum() > 1e30 else y


class ManyGraphs(nn.Module):
    """Calls a function with another string each time, which is a constant of its graph."""

    def forward(self, x):
        for index in range(RECOMPILE_LIMIT + 2):
            x = scale(x, f"{index}")
        return x


@pytest.mark.slow
def test_too_many_graphs_rejected():
    """The message names the function, its line and the value that differs."""
    expected = (
        rf"scale at test_partial_module.py:\d+ needs more than {RECOMPILE_LIMIT} graphs: text is '\d+', and .*text =="
    )
    with pytest.raises(ModelError, match=expected):
        compile_in_pieces(ManyGraphs(), [torch.ones(2), torch.ones(3)])


def test_errors_of_the_model_are_those_of_one_graph():
    class Failing(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise ValueError("not this")
            return x

    with pytest.raises(Exception, match="not this"):
        clika_compile(Failing(), tracing_inputs=[torch.ones(2)], fullgraph=False)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pruning_settings": PruningSettings()}, "pruning_settings"),
        ({"global_lora_settings": LoraSettings()}, "global_lora_settings"),
    ],
)
def test_arguments_that_need_one_graph_rejected(arguments, name):
    with pytest.raises(ModelError, match=f"in pieces: {name} needs one graph"):
        compile_in_pieces(**arguments)


def test_copy_and_pickle_rejected(float_module):
    for action in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ModelError, match="Save it with clika_save"):
            action(float_module)


def test_compiled_again_rejected(float_module):
    with pytest.raises(ModelError, match="it is a PartialClikaModule already"):
        clika_compile(float_module, tracing_inputs=make_inputs(1))


class Rewriting(nn.Module):
    """Writes to a tensor and to a buffer of the pieces before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = self.linear(x)
        if y.isnan().any():
            return y
        y.add_(1)
        self.count += 1
        z = y * 2
        if z.isnan().any():
            return z
        return y + z + self.count


@pytest.mark.slow
def test_writes_seen_by_later_pieces():
    torch.manual_seed(0)
    model, x = Rewriting(), torch.randn(4, 8)
    compiled = compile_in_pieces(copy.deepcopy(model), [x[:2], x[:3]])
    for calls in (1, 2):
        torch.testing.assert_close(compiled(x), model(x))
        assert int(compiled.count) == calls


@pytest.mark.slow
def test_dry_run_returns_the_model():
    model = make_branching()
    assert clika_compile(model, tracing_inputs=[torch.ones(2, 8)], fullgraph=False, is_dry_run=True) is model


@torch.library.custom_op("clika_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3)


@cube.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.slow
def test_piece_with_unsupported_call_runs_in_eager():
    class Cubed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            if x.sum() > 1e30:
                return x
            return torch.ops.clika_tests.cube(x)

    model = Cubed().eval()
    compiled = compile_in_pieces(model, [torch.ones(2, 8), torch.ones(3, 8)])
    (eager,) = [piece for piece in compiled.clika_pieces if piece.module is None]
    assert "clika_tests.cube" in eager.eager_reason
    x = torch.randn(5, 8)
    torch.testing.assert_close(compiled(x), model(x))


@contextlib.contextmanager
def enter_region():
    """A context manager that Dynamo does not resume in."""
    yield


class BreakInContext(nn.Module):
    """A branch on elements inside a context manager."""

    def __init__(self, context) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.context = context

    def forward(self, x):
        with self.context():
            h = self.inner(x)
            if (h > 0).any():
                h = h * 2
        return self.outer(h)


@pytest.mark.slow
@pytest.mark.parametrize("context", [torch.no_grad, enter_region, threading.Lock])
def test_break_inside_context_manager_compiled(context):
    """Where Dynamo cannot resume inside a context manager, the function runs in Python, and its layers are pieces."""
    torch.manual_seed(0)
    model = BreakInContext(context).eval()
    inputs = [(torch.randn(2, 4),), (torch.randn(3, 4),)]
    module = clika_compile(model, tracing_inputs=inputs, fullgraph=False, discard_input_model=False)
    x = torch.randn(5, 4)
    torch.testing.assert_close(module(x), model(x))
    assert module.clika_breaks.breaks
    assert ("cannot resume after the break" in str(module.clika_breaks)) == (context is not torch.no_grad)
