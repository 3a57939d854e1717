"""Models and inputs that cannot be captured: the error, the line that it names, and its advice."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from clika_ref import DeploymentSettings_ONNXRuntime_ONNX, QuantizationSettings, clika_compile, pipeline
from clika_ref.core.errors import ClikaError, ModelError


def find_line(text):
    """Return the number of the line of this file that starts with a text."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, found in enumerate(lines, 1) if found.strip().startswith(text))


class Branching(nn.Module):
    def forward(self, x):
        x = x + 1
        if x.sum() > 0:
            return x * 2
        return x * 3


def test_capture_branch_on_data_names_line_and_remedy():
    """A branch on data raises an error with its line, the remedy and the reason of each tracer."""
    with pytest.raises(ModelError) as caught:
        clika_compile(Branching(), tracing_inputs=[torch.randn(3)])
    text = str(caught.value)
    assert "Branching cannot be captured as one graph" in text
    assert f"test_failures.py:{find_line('if x.sum')}: if x.sum() > 0:" in text
    assert "Compute both branches and choose with torch.where(condition, a, b)" in text
    assert "Branches on sizes, flags and constants are supported. Compute sizes from sizes (x.shape[1] // 2)" in text
    for tracer in ("torch.export", "dynamo", "torch.fx.symbolic_trace"):
        assert f"  {tracer}: " in text, "each tracer's own reason is part of the message"


def test_capture_loop_on_data_advises_a_loop():
    """A loop that ends by values is advised to use `torch.while_loop`, not to choose with `torch.where`."""

    def halve(x):
        while x.sum() > 1:
            x = x / 2
        return x

    with pytest.raises(ModelError, match=r"torch\.while_loop") as caught:
        clika_compile(halve, tracing_inputs=[torch.ones(4)])
    assert "torch.where" not in str(caught.value)


def test_capture_proposed_remedy_works(compile_and_compare):
    """The remedy that the error proposes can be captured."""

    def select_by_where(x):
        x = x + 1
        return torch.where(x.sum() > 0, x * 2, x * 3)

    compile_and_compare(select_by_where, [torch.ones(3)], [-torch.ones(3) * 9])


def test_capture_branches_on_flags_accepted(compile_and_compare):
    """Branches on flags and constants are captured."""

    class Flagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = True

        def forward(self, x, negate):
            for _ in range(3):
                x = x * 2 if self.twice else x
            return -x if negate else x

    compile_and_compare(Flagged(), [(torch.randn(2), True)])


@torch.library.custom_op("clika_ref_tests::unregistered_operator", mutates_args=())
def unregistered_operator(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@torch.library.custom_op("clika_ref_tests::unknown", mutates_args=())
def unknown(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() + 2)


unregistered_operator.register_fake(torch.empty_like)
unknown.register_fake(torch.empty_like)


class UnregisteredCall(nn.Module):
    def forward(self, x):
        return unregistered_operator(x) + 1


class NestedUnregisteredCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), UnregisteredCall())

    def forward(self, x):
        return unknown(self.inner(x)) + unregistered_operator(x)


def test_capture_missing_operators_listed_together():
    """All missing operators are reported at once, with module and line."""
    with pytest.raises(ClikaError) as caught:
        clika_compile(NestedUnregisteredCall(), tracing_inputs=[torch.randn(3)])
    text = str(caught.value)
    assert "NestedUnregisteredCall makes 3 unsupported calls" in text
    inner, outer = find_line("return unregistered_operator(x) + 1"), find_line("return unknown(self")
    assert (
        f"clika_ref_tests.unregistered_operator.default in inner.1 at test_failures.py:{inner}: no operator is declared"
        in text
    )
    assert f"clika_ref_tests.unknown.default in <root> at test_failures.py:{outer}" in text
    assert f"clika_ref_tests.unregistered_operator.default in <root> at test_failures.py:{outer}" in text
    assert "Declare operators for them in a plugin (see docs/write-an-operator.md), or rewrite those lines" in text


def test_capture_generator_rejected_with_remedy():
    """A generator in forward raises an error with the remedy."""

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(x.shape, generator=self.generator)

    with pytest.raises(ModelError, match=r"forward uses a Generator, .*torch\.manual_seed"):
        clika_compile(Noise(), tracing_inputs=[torch.randn(2, 3)])


def test_clika_compile_no_inputs_shows_form():
    """Missing inputs raise an error that shows the form."""
    net = nn.Linear(3, 3)
    with pytest.raises(
        ModelError, match=r"inputs are None. Give a list with one element for each call, for example \[x\]"
    ):
        clika_compile(net)
    with pytest.raises(
        ModelError, match=r"the tracing inputs have no elements. Give at least one; two that differ in a dim make"
    ):
        clika_compile(net, tracing_inputs=[])
    with pytest.raises(ModelError, match=r"inputs are a Tensor. Give a list with one element for each call"):
        clika_compile(net, tracing_inputs=torch.randn(2, 3))
    with pytest.raises(ModelError, match=r"inputs are a dict. Give a list"):
        clika_compile(net, tracing_inputs={"input": torch.randn(2, 3)})
    with pytest.raises(ModelError, match=r"inputs are a int. Give a list"):
        clika_compile(net, tracing_inputs=3)


def take_first(x, y=None):
    return x[0] if isinstance(x, list) else x


@pytest.mark.parametrize(
    "inputs",
    [
        [torch.ones(2), (torch.ones(2), torch.ones(2))],
        [([torch.ones(2)],), ([torch.ones(2), torch.ones(2)],)],
        [{"x": torch.ones(2)}, {"x": torch.ones(2), "y": torch.ones(2)}],
    ],
)
def test_clika_compile_inputs_of_other_structure_rejected(inputs):
    """Inputs of different structures raise an error."""
    with pytest.raises(
        ModelError,
        match=r"(?s)tracing input 2 has a different structure than tracing input 1: .* Give inputs of one structure",
    ):
        clika_compile(take_first, tracing_inputs=inputs)


def test_clika_compile_inputs_of_other_dtype_or_rank_rejected():
    """Inputs of different dtypes or ranks raise an error."""
    expected = (
        r"input 'x' is torch.float32\[2\] in tracing input 1 and torch.int64\[2\] in tracing input 2. Use one dtype .*"
        "; data_transform_fn can convert each input"
    )
    with pytest.raises(ModelError, match=expected):
        clika_compile(take_first, tracing_inputs=[torch.ones(2), torch.ones(2).long()])
    with pytest.raises(
        ModelError, match=r"input 'x' is torch.float32\[2\] in .* and torch.float32\[2, 2\] .*one number of dims"
    ):
        clika_compile(take_first, tracing_inputs=[torch.ones(2), torch.ones(2, 2)])


def test_clika_compile_inputs_of_other_string_rejected():
    """Inputs that differ in a string raise an error."""
    with pytest.raises(
        ModelError,
        match=r"'y' is 'a' \(str\) in tracing input 1 and 'b' \(str\) in tracing input 2, but .*Make it a tensor, or",
    ):
        clika_compile(take_first, tracing_inputs=[(torch.ones(2), "a"), (torch.ones(2), "b")])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (torch.ones(2, 3), torch.ones(2)),
            r"\(Tensor, Tensor\) do not match forward.*: too many positional arguments",
        ),
        ({"inputs": torch.ones(2, 3), "other": 1}, "do not match forward|itself fails"),
        ((torch.ones(2, 3), {"other": 1}), r"do not match forward.*"),
        ((), r"inputs \(\) do not match forward.*missing a required argument: 'input'"),
    ],
)
def test_clika_compile_mismatched_inputs_quote_signature(inputs, message):
    """Inputs that do not fit forward raise an error with its signature."""
    with pytest.raises(ModelError, match=message):
        clika_compile(nn.Linear(3, 3), tracing_inputs=[inputs])


def test_clika_compile_failing_input_named():
    """An error of the model names the input that causes it."""
    with pytest.raises(
        ModelError, match=r"Linear itself fails in eager mode on tracing input 2: RuntimeError: mat1 and mat2 shapes"
    ):
        clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.ones(2, 3), torch.ones(2, 4)])


@pytest.mark.parametrize("tracing", [{}, {"tracing_inputs": [torch.ones(2, 3)]}])
def test_clika_compile_loader_lists_suggest_transform(tracing):
    """Lists from a DataLoader raise an error that suggests a `data_transform_fn`."""
    loader = DataLoader(TensorDataset(torch.ones(4, 3), torch.ones(4)), batch_size=2)
    how = {
        "quantization_settings": QuantizationSettings(),
        "deployment_settings": DeploymentSettings_ONNXRuntime_ONNX(),
        "calibration_inputs": loader,
        **tracing,
    }
    with pytest.raises(
        ModelError, match=r"data_transform_fn=tuple passes .*data_transform_fn=lambda batch: batch\[0\] passes"
    ):
        clika_compile(nn.Linear(3, 3), **how)
    how["tracing_inputs"] = [*loader]
    assert clika_compile(nn.Linear(3, 3), data_transform_fn=lambda batch: batch[0], **how).clika_summary().layers


def test_clika_compile_dict_batch_suggests_transform():
    """A batch that is a dict with labels raises an error that names it, and suggests to pass one entry."""
    how = {
        "quantization_settings": QuantizationSettings(),
        "deployment_settings": DeploymentSettings_ONNXRuntime_ONNX(),
        "calibration_inputs": [{"pixels": torch.ones(2, 3).numpy(), "label": torch.ones(2).numpy()}],
        "tracing_inputs": [torch.ones(2, 3)],
    }
    with pytest.raises(
        ModelError, match=r"(?s)calibration batch 1: .*data_transform_fn=lambda batch: batch\['pixels'\] passes only"
    ):
        clika_compile(nn.Linear(3, 3), **how)


def test_clika_compile_dict_batch_with_labels_names_extra_key():
    """A batch of keyword arguments and labels raises an error that names the labels, and keeps the other entries."""

    def classify(ids, mask):
        return ids * mask

    data = [{"ids": torch.ones(2, 3), "mask": torch.ones(2, 3), "labels": torch.ones(2)}]
    how = {
        "quantization_settings": QuantizationSettings(),
        "deployment_settings": DeploymentSettings_ONNXRuntime_ONNX(),
        "calibration_inputs": data,
        "tracing_inputs": [{"ids": torch.ones(2, 3), "mask": torch.ones(2, 3)}],
    }
    with pytest.raises(ModelError, match=r"(?s)'labels' is no argument: forward takes ids, mask.*not in \('labels',\)"):
        clika_compile(classify, **how)


def test_clika_compile_sparse_tensors_rejected():
    """Sparse inputs and weights raise an error with the remedy."""
    sparse = torch.eye(3).to_sparse()
    with pytest.raises(
        ModelError,
        match=r"tracing input 1 is a sparse \(torch.sparse_coo\) tensor of shape \[3, 3\]. Call .to_dense\(\)",
    ):
        clika_compile(nn.Linear(3, 3), tracing_inputs=[sparse])
    net = nn.Linear(3, 3)
    net.register_buffer("graph", sparse)
    with pytest.raises(ModelError, match=r"weight 'graph' is a sparse .*\. Call .to_dense\(\) on it first"):
        clika_compile(net, tracing_inputs=[torch.ones(2, 3)])


def test_clika_compile_meta_weights_rejected():
    """Weights on the meta device raise an error with the remedy."""
    with pytest.raises(ModelError, match=r"weight 'weight' is on the device 'meta'.*model.to_empty\(device='cpu'\)"):
        clika_compile(nn.Linear(3, 3, device="meta"), tracing_inputs=[torch.ones(2, 3)])


def test_clika_compile_failure_after_trace_restores_mode(monkeypatch):
    """A failure after the trace restores the training mode."""

    def fail(*_, **__):
        raise RuntimeError

    net = nn.Linear(3, 3)
    monkeypatch.setattr(pipeline, "_clean", fail)
    with pytest.raises(RuntimeError):
        clika_compile(net, tracing_inputs=[torch.ones(2, 3)])
    assert net.training


def test_clika_compile_exported_program_module_needs_option():
    """The module of an ExportedProgram needs `skip_eval_set_mode=True`."""
    x = torch.ones(2, 3)
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    exported = torch.export.export(net, (x,)).module()
    with pytest.raises(ModelError, match=r"cannot set GraphModule to eval mode.*or pass skip_eval_set_mode=True"):
        clika_compile(exported, tracing_inputs=[x])
    assert torch.equal(clika_compile(exported, tracing_inputs=[x], skip_eval_set_mode=True)(x), net(x))


@pytest.mark.filterwarnings("ignore:.*quantize.*")
def test_clika_compile_quantized_tensors_rejected():
    """Quantized tensors raise an error with the remedy."""
    quantized = torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)
    with pytest.raises(
        ModelError, match=r"tracing input 1 is a quantized tensor of shape \[3, 3\]. Call .dequantize\(\) on it first"
    ):
        clika_compile(nn.Linear(3, 3), tracing_inputs=[quantized])


def test_clika_compile_lazy_modules_rejected():
    """Lazy modules raise an error with the remedy."""
    with pytest.raises(
        ClikaError, match=r"weight 'weight' has no shape yet. Call the model once, so that lazy modules are initialized"
    ):
        clika_compile(nn.LazyLinear(3), tracing_inputs=[torch.ones(2, 3)])


def test_clika_compile_nan_weights_warned(capsys):
    """NaN in weights gives a warning that names them."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    net[0].bias.data[1] = float("nan")
    net[1].running_mean[0] = float("nan")
    clika_compile(net, tracing_inputs=[torch.ones(2, 3)])
    assert "NaN in the weights 0.bias, 1.running_mean" in " ".join(capsys.readouterr().err.split())


def test_clika_compile_compiled_module_rejected():
    """A compiled module raises an error."""
    module = clika_compile(nn.Linear(3, 3), tracing_inputs=[torch.ones(2, 3)])
    with pytest.raises(
        ModelError, match=r"it is a ClikaModule already. Compile the original model, or export this one with"
    ):
        clika_compile(module, tracing_inputs=[torch.ones(2, 3)])
    with pytest.raises(ModelError, match="it is a ClikaModule already"):
        clika_compile(module.forward, tracing_inputs=[torch.ones(2, 3)])


def test_clika_compile_failure_keeps_model_and_rng_state():
    """A failed compilation leaves the model and the RNG state unchanged."""
    model = Branching().train()
    inputs = [torch.randn(3)]
    state = torch.random.get_rng_state()
    with pytest.raises(ModelError):
        clika_compile(model, tracing_inputs=inputs, discard_input_model=False)
    assert model.training
    assert "forward" not in vars(model)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.equal(state, torch.random.get_rng_state())


class Cache:
    """Stores tensors in an unregistered container."""

    def __init__(self, x):
        self.x = x


def test_clika_compile_object_in_result_rejected():
    """An unknown object in the result raises an error with its path and class."""
    message = (
        r"return_cache returns a Cache \(result\['states'\]\[1\]\), but its tensors are not known to PyTorch. "
        r"Return tensors in tuples, lists, dicts or dataclasses, or register the class with "
        r"torch.utils._pytree.register_pytree_node. "
        r"Caches are supported if they derive from the class Cache of transformers."
    )

    def return_cache(x):
        return {"logits": x, "states": (x, Cache(x))}

    with pytest.raises(ModelError, match=message):
        clika_compile(return_cache, tracing_inputs=[torch.randn(2)])


@pytest.mark.slow
def test_clika_compile_long_reason_shortened():
    """A long reason is shortened."""

    def branch_after_many_steps(x):
        found = torch.cat([x[x > i] for i in range(60)])
        return found * 2 if found.shape[0] > 5 else found

    with pytest.raises(ModelError) as caught:
        clika_compile(branch_after_many_steps, tracing_inputs=[torch.randn(9)])
    reason = next(line for line in str(caught.value).splitlines() if line.startswith("  torch.export: "))
    assert " ..." in reason
    assert len(reason) < 600


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"zz": torch.ones(2, 2)}, "not dict. No argument 'zz': forward takes input, so the dict is passed as one arg"),
        ({"input": torch.ones(2, 2), "zz": 1, "y": 2}, "not dict. No argument 'zz', 'y': forward takes input, so"),
        ((torch.ones(2, 2), {"zz": 1}), r"too many positional arguments. No argument 'zz': forward takes input, so"),
    ],
)
def test_clika_compile_unknown_keys_named(element, message):
    """Keys that match no argument are named if the call fails."""
    with pytest.raises(ModelError, match=message):
        clika_compile(nn.Linear(2, 2), tracing_inputs=[element])


def test_clika_compile_error_without_stray_keyword_unchanged():
    """Without unknown keywords, the error reports the failed call only."""
    with pytest.raises(ModelError, match=r"too many positional arguments. If a batch is"):
        clika_compile(nn.Linear(2, 2), tracing_inputs=[(torch.ones(2, 2), torch.ones(2))])
    with pytest.raises(ModelError, match=r"KeyError: 'other'$"):
        clika_compile(lambda x, batch: x + batch["other"], tracing_inputs=[(torch.ones(2), {"x": torch.ones(2)})])


def test_capture_missing_operators_in_no_grad_named():
    """Missing operators are named inside a no_grad region and after it."""

    def call_missing_operators(x):
        with torch.no_grad():
            y = torch.linalg.eigvals(x).real
        return torch.linalg.ldl_factor(x).LD + y.sum()

    with pytest.raises(ModelError, match=r"makes 2 unsupported calls.*\n.*linalg_eigvals.*\n.*linalg_ldl_factor"):
        clika_compile(call_missing_operators, tracing_inputs=[torch.rand(3, 3)])


def test_capture_scalar_attribute_from_tensor_names_line():
    """A constant attribute that is read from a tensor raises an error with its line."""

    def lean_on_mean(x):
        return torch.nn.functional.leaky_relu(x, x.mean().item())

    with pytest.raises(ModelError, match=r"test_failures.py:\d+: negative_slope is read from a tensor, as by item"):
        clika_compile(lean_on_mean, tracing_inputs=[torch.randn(2, 3)])
