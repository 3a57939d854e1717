"""Results of eager that are kept for the comparison after an export: when they are used, and when they are dropped."""

import pytest
import torch
from torch import nn

from clika_ref import ClikaCompileOptions, LoraSettings, clika_compile
from clika_ref.capture import gradients, validation
from clika_ref.compiled.eager_results import hash_tensors
from clika_ref.core import execution
from clika_ref.export import module_export

X, Y = torch.randn(2, 3), torch.randn(4, 3)


class Net(nn.Module):
    """Two layers and a buffer; it writes the batch size of each run to a list."""

    def __init__(self, batches=None):
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.randn(2))
        self.append = (lambda _: None) if batches is None else batches.append

    def forward(self, x):
        if type(x) is torch.Tensor:  # tracers pass other types
            self.append(len(x))
        return self.second(self.first(x).relu()) + self.shift


class Noisy(Net):
    def forward(self, x):
        return super().forward(x) + torch.rand_like(x[:, :2])


class Counting(Net):
    def forward(self, x):
        self.shift.add_(1)
        return super().forward(x)


@pytest.fixture
def graph_runs(monkeypatch):
    """The batch size of each run of a graph in the capture, and in the comparison of an export."""
    runs = {"capture": [], "comparison": []}

    def interpret(graph, inputs, hook=None, enter=None):
        runs["capture"].append(len(inputs[0]))
        return execution.interpret(graph, inputs, hook, enter)

    def compute_outputs(graph, inputs):
        runs["comparison"].append(len(inputs[0]))
        return execution.interpret(graph, inputs)[0]

    monkeypatch.setattr(validation, "interpret", interpret)
    monkeypatch.setattr(module_export, "compute_outputs", compute_outputs)
    return runs


def compile_net(net=None, **options):
    return clika_compile(
        net or Net(), tracing_inputs=[X, Y], clika_compile_options=ClikaCompileOptions(**options) if options else None
    )


def test_export_tracing_input_runs_once_in_eager_and_graph(graph_runs, monkeypatch, tmp_path):
    """From module to verified file, each tracing input runs once in eager and once in the graph."""
    monkeypatch.setattr(gradients, "_iterate_subclasses", lambda _: iter(()))  # other tests define autograd functions
    batches = []
    module = compile_net(Net(batches))
    module.clika_export(tmp_path / "model.onnx")
    assert [n for n in batches if n > 1] == [2, 4]
    assert [n for n in graph_runs["capture"] if n > 1] == [2, 4]
    assert max([n for n in batches if n not in (2, 4)], default=0) <= 1  # synthesized probes are small
    assert graph_runs["comparison"] == []


def take_step(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module.train()(X).sum().backward()
    optimizer.step()
    module.eval()


def write_data(module):
    module.get_parameter("second.weight").data[1, 2] += 1e-3


def write_buffer(module):
    module.get_buffer("shift").data[0] *= 2


def load_other_weights(module):
    other = Net()
    module.load_state_dict({**module.state_dict(), **other.state_dict()})


def merge_adapters(module):
    module.clika_attach_lora(LoraSettings(rank=2))
    for name, parameter in module.named_parameters():
        if "lora" in name:
            parameter.data.fill_(0.1)
    module.clika_merge_lora()


CHANGES = (take_step, write_data, write_buffer, load_other_weights, merge_adapters)


@pytest.mark.parametrize("change", CHANGES)
def test_eager_results_dropped_after_change(change, graph_runs, tmp_path):
    """After any change of a weight or a buffer, the comparison runs the graph again, and the results are dropped."""
    module = compile_net()
    assert module.clika_state.eager_results is not None
    change(module)
    module.clika_export(tmp_path / "model.onnx")
    assert graph_runs["comparison"] == [2, 4]
    assert module.clika_state.eager_results is None


def test_eager_results_same_weights_loaded_kept(graph_runs, tmp_path):
    """Loading the weights that the module has keeps the results, also for a second export."""
    module = compile_net()
    module.load_state_dict(module.state_dict())
    for name in ("first.onnx", "second.onnx"):
        module.clika_export(tmp_path / name)
    assert graph_runs["comparison"] == []


def test_eager_results_input_written_runs_graph(graph_runs, tmp_path):
    """Results are used for the inputs that they belong to, not for other contents of the same tensor."""
    x = X.clone()
    module = clika_compile(Net(), tracing_inputs=[x, Y])
    x[0, 0] += 1
    module.clika_export(tmp_path / "model.onnx")
    assert graph_runs["comparison"] == [2]


@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_eager_results_random_or_stateful_not_kept(kind):
    """No results are kept of a model that draws random numbers or changes its buffers."""
    assert compile_net(kind()).clika_state.eager_results is None


def test_eager_results_above_limit_not_kept(monkeypatch):
    """No results are kept above the limit of their size, here 48 bytes."""
    monkeypatch.setattr(validation, "MAX_KEPT_RESULT_BYTES", 48)
    assert compile_net().clika_state.eager_results is not None
    monkeypatch.setattr(validation, "MAX_KEPT_RESULT_BYTES", 47)
    assert compile_net().clika_state.eager_results is None


def test_eager_results_no_comparison_not_kept():
    """Nothing is hashed if exports are not compared."""
    assert compile_net(compare_after_export=False).clika_state.eager_results is None


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hash_tensors_one_element_changes_hash(dtype):
    """Each single element counts, at the start, at the end, and in the rest after the last whole row."""
    x = torch.zeros(5000, dtype=dtype)
    for index in (0, 1, 2047, 4999):
        y = x.clone()
        y[index] = 1
        assert hash_tensors([y]) != hash_tensors([x])


def test_hash_tensors_order_shape_and_names_change_hash():
    """Swapped rows, columns and tensors, other shapes and other names have other hashes; the memory format has not."""
    x = torch.randn(64, 3000)
    rows, columns = x.clone(), x.clone()
    rows[[3, 9]], columns[:, [7, 8]] = x[[9, 3]], x[:, [8, 7]]
    others = [[rows], [columns], [x.view(3000, 64)], [x, x]]
    assert len({hash_tensors(tensors) for tensors in [[x], *others]}) == 5
    assert hash_tensors([x], ["a"]) != hash_tensors([x], ["b"])
    assert hash_tensors([rows, x]) != hash_tensors([x, rows])
    assert hash_tensors([x.t().contiguous().t()]) == hash_tensors([x])
    assert hash_tensors([torch.zeros(3001)[1:]]) == hash_tensors([torch.zeros(3000)])


def test_hash_tensors_stride_changes_nothing():
    """Equal elements have equal hashes with any strides, also one element with stride 0."""
    x = torch.randn(3, 5)
    assert hash_tensors([x.T.contiguous().T]) == hash_tensors([x])
    assert hash_tensors([torch.ones(()).expand(1, 1)]) == hash_tensors([torch.ones(1, 1)])
