"""Float files have their weights in the layout of ONNX operators, so that other tools quantize them."""

import numpy as np
import onnx
import pytest
import torch
from onnx_sessions import open_session
from onnxruntime.quantization import CalibrationDataReader, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from torch import nn

from clika_ref import ClikaCompileOptions, clika_compile


class Sequential(nn.Module):
    """Recurrent layers of both kinds, and a linear layer on all positions."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 32, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 48)

    def forward(self, x):
        return self.head(self.gru(self.lstm(x)[0])[0])


class Tied(nn.Module):
    """A head with the weight of the embedding, and a layer that is called twice."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(64, 32), nn.Linear(32, 32)

    def forward(self, ids):
        hidden = self.layer(torch.relu(self.layer(self.table(ids))))
        return nn.functional.linear(hidden, self.table.weight)


@pytest.fixture(scope="module")
def recurrent_file(tmp_path_factory):
    """Return the path of a float file of recurrent layers."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    inputs = [torch.randn(2, 5, 8), torch.randn(3, 7, 8)]
    clika_compile(Sequential().eval(), tracing_inputs=inputs).clika_export(path)
    return path


def test_weights_read_by_layers_directly(recurrent_file):
    """Every weight of a layer is an initializer under its name, and no node moves it."""
    graph = onnx.load(recurrent_file).graph
    sizes = {tensor.name: [*tensor.dims] for tensor in graph.initializer}
    assert sizes["lstm.weight_ih_l0"] == [2, 128, 8]
    assert sizes["lstm.weight_hh_l1"] == [2, 128, 32]
    assert sizes["gru.weight_ih_l0"] == [1, 96, 64]
    assert sizes["head.weight"] == [32, 48]
    assert not [n.op_type for n in graph.node if n.op_type in {"Split", "Transpose"} and n.input[0] in sizes]


def test_tied_weight_stored_once(tmp_path):
    """A weight with other readers stays, with a Transpose after it: a copy would make the file larger."""
    module = clika_compile(Tied().eval(), tracing_inputs=[torch.randint(64, (1, 5)), torch.randint(64, (2, 7))])
    module.clika_export(tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    sizes = [int(np.prod(tensor.dims)) for tensor in graph.initializer]
    assert sorted(sizes)[-2:] == [32 * 32, 64 * 32]
    assert [n.op_type for n in graph.node if "table.weight" in n.input] == ["Gather", "Transpose"]


def count_operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_dynamic_quantization_of_onnxruntime(recurrent_file, tmp_path):
    """Dynamic quantization replaces the linear and the recurrent layers."""
    quantize_dynamic(recurrent_file, tmp_path / "quantized.onnx")
    found = count_operators(tmp_path / "quantized.onnx")
    assert found.count("DynamicQuantizeLSTM") == 2
    assert found.count("MatMulInteger") == 1
    x = {"x": torch.randn(2, 6, 8).numpy()}
    (expected,), (actual,) = (open_session(p).run(None, x) for p in (recurrent_file, tmp_path / "quantized.onnx"))
    assert np.square(actual - expected).mean() < 0.01 * np.square(expected).mean()


class Reader(CalibrationDataReader):
    """Yields one batch."""

    def __init__(self):
        self.batches = iter([{"x": torch.randn(2, 5, 8).numpy()}])

    def get_next(self):
        return next(self.batches, None)


def test_static_quantization_of_onnxruntime(recurrent_file, tmp_path):
    """Static quantization quantizes the weight of the linear layer."""
    quantize_static(recurrent_file, tmp_path / "quantized.onnx", Reader())
    stored = {tensor.name: tensor.data_type for tensor in onnx.load(tmp_path / "quantized.onnx").graph.initializer}
    assert stored["head.weight_quantized"] == onnx.TensorProto.INT8


def test_4_bit_weights_of_onnxruntime(recurrent_file):
    """The quantizer for 4-bit weights replaces the linear layer."""
    quantizer = MatMulNBitsQuantizer(onnx.load(recurrent_file), block_size=32, is_symmetric=True)
    quantizer.process()
    assert [n.op_type for n in quantizer.model.model.graph.node].count("MatMulNBits") == 1


def test_quantization_of_nncf(recurrent_file):
    """NNCF quantizes the weight of the linear layer; it is installed for benchmarks only."""
    nncf = pytest.importorskip("nncf", reason="a package of requirements-peers.txt")
    found = nncf.quantize(onnx.load(recurrent_file), nncf.Dataset([{"x": torch.randn(2, 5, 8).numpy()}]))
    assert any(node.op_type == "DequantizeLinear" for node in found.graph.node)


def test_external_weights_transposed(tmp_path):
    """Weights in a separate file are transposed as well."""
    layer = nn.Sequential(nn.Linear(64, 32), nn.Tanh()).eval()
    inputs, options = [torch.randn(1, 5, 64), torch.randn(2, 3, 64)], ClikaCompileOptions(external_data=True)
    module = clika_compile(layer, tracing_inputs=inputs, clika_compile_options=options)
    module.clika_export(tmp_path / "model.onnx")
    weight = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert np.array_equal(weight["0.weight"], layer[0].weight.detach().numpy().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_output_of_permuted_constants_kept(dtype, tmp_path):
    """An output that only joins and permutes constants is an output of a node."""
    parts = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones(2, 3, dtype=dtype)]

    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            for number, part in enumerate(parts):
                self.register_buffer(f"part{number}", part)

        def forward(self, x):
            return x * 2, torch.cat([self.part0, self.part1]).T

    artifact = clika_compile(Constants(), tracing_inputs=[torch.ones(2)]).clika_export(tmp_path / "model.onnx")
    _, joined = open_session(artifact.path).run(None, {"x": np.ones(2, np.float32)})
    assert np.array_equal(joined, torch.cat(parts).T.numpy())
