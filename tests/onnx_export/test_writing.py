"""ONNX files: with and without external data, streamed, checked, and equal to the files of onnx."""

import weakref
from functools import partial

import onnx
import pytest
import torch
from onnx.external_data_helper import ExternalDataInfo

from clika_ref.core.errors import ModelError, TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType
from clika_ref.onnx_export import writing
from clika_ref.onnx_export.dtypes import bytes_of
from clika_ref.onnx_export.emission import emit

OPERATORS = load_registry().operators


@pytest.fixture
def graph():
    """``x @ weight.T + bias`` with a large weight, a small one, an empty one and one of each odd dtype."""
    g = Graph("linear")
    x = g.add_input(TensorType(torch.float32, (2, 64)), "x")
    build = Builder(g, OPERATORS)
    weight = g.add_constant(torch.randn(64, 64), "layer.weight")
    y = build("linear", x, weight, g.add_constant(torch.randn(64), "layer.bias"))
    g.add_output(y)
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.int8):
        g.add_output(build("reshape", g.add_constant(torch.ones(6).to(dtype), f"odd.{dtype}"), shape=(2, 3)))
    return g


def read_initializers(path):
    model = onnx.load(str(path))
    onnx.checker.check_model(model, full_check=True)
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_write_model_weights_bit_identical(graph, tmp_path):
    """The written weights are bit-identical to those of the graph, for every dtype."""
    size = writing.write_model(emit(graph), tmp_path / "m.onnx")
    found = read_initializers(tmp_path / "m.onnx")
    assert size == (tmp_path / "m.onnx").stat().st_size
    assert found["layer.weight"].tobytes() == graph.constants["layer.weight"].data.numpy().tobytes()
    for name, value in graph.constants.items():
        assert found[name].tobytes() == value.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("apart", [False, True])
def test_write_model_deferred_weights_one_at_a_time(tmp_path, apart):
    """At most one deferred weight exists at a time."""
    alive, most = set(), []

    def make_tracked_weight(number):
        tensor = torch.full((32, 32), float(number))
        alive.add(number)
        most.append(len(alive))
        weakref.finalize(tensor, alive.discard, number)
        return tensor

    g = Graph("scaled")
    build = Builder(g, OPERATORS)
    y = g.add_input(TensorType(torch.float32, (2, 32)), "x")
    for number in range(4):
        weight = g.add_constant(partial(make_tracked_weight, number), f"w{number}", TensorType(torch.float32, (32, 32)))
        y = build("linear", y, weight, None)
    g.add_output(y)
    writing.write_model(emit(g), tmp_path / "m.onnx", external_data=apart)
    assert most == [1, 1, 1, 1]
    assert {name: float(w[0, 0]) for name, w in read_initializers(tmp_path / "m.onnx").items() if w.ndim == 2} == {
        f"w{n}": n for n in range(4)
    }


def test_write_model_external_data_page_aligned(graph, tmp_path):
    """Large weights go to a second file, at page boundaries."""
    size = writing.write_model(emit(graph), tmp_path / "m.onnx", external_data=True)
    model = onnx.load(str(tmp_path / "m.onnx"), load_external_data=False)
    outside = [t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    assert [t.name for t in outside] == ["layer.weight"]
    info = ExternalDataInfo(outside[0])
    assert (info.location, info.offset % writing.DATA_ALIGNMENT, info.length) == ("m.onnx.data", 0, 64 * 64 * 4)
    assert (
        read_initializers(tmp_path / "m.onnx")["layer.weight"].tobytes()
        == graph.constants["layer.weight"].data.numpy().tobytes()
    )
    assert size == sum(f.stat().st_size for f in tmp_path.iterdir())


def test_write_model_above_size_limit_uses_external_data(graph, tmp_path, monkeypatch):
    """A model above the size limit is split into two files without the option."""
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 1000)
    writing.write_model(emit(graph), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").exists()


def test_write_model_keeps_given_model(graph, tmp_path):
    """The given model stays unchanged."""
    model = emit(graph)
    names = list(model.graph.initializers)
    writing.write_model(model, tmp_path / "m.onnx")
    assert list(model.graph.initializers) == names


def test_write_model_rejected_by_checker_writes_no_file(graph, tmp_path):
    """A model that the ONNX checker rejects raises an error, and no file is written."""
    model = emit(graph)
    next(iter(model.graph)).op_type = "NoSuchOperator"
    with pytest.raises(TargetError, match=r"the ONNX checker rejects the model for m\.onnx: .*NoSuchOperator"):
        writing.write_model(model, tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_write_model_missing_folder_raises(graph, tmp_path):
    """A missing folder is named in the error."""
    with pytest.raises(ModelError, match="nowhere"):
        writing.write_model(emit(graph), tmp_path / "nowhere" / "m.onnx")


@pytest.mark.parametrize("apart", [False, True])
def test_write_model_strided_single_element_weight(tmp_path, apart):
    """A strided weight with a single element is written correctly."""
    g = Graph("strided")
    weight = g.add_constant(torch.tensor([2.5, 7.0, 1.0])[::3], "w")  # contiguous, with a stride of 3
    g.add_output(Builder(g, OPERATORS)("add", g.add_input(TensorType(torch.float32, (1,)), "x"), weight))
    writing.write_model(emit(g), tmp_path / "m.onnx", external_data=apart)
    assert read_initializers(tmp_path / "m.onnx")["w"].tolist() == [2.5]


def test_bytes_of_strided_tensors_in_element_order():
    """The bytes follow the order of the elements, for strided and empty tensors."""
    assert bytes_of(torch.tensor([2.5, 7.0])[::2]).view("float32").tolist() == [2.5]
    assert bytes_of(torch.arange(6, dtype=torch.int16).reshape(2, 3).T).view("int16").tolist() == [0, 3, 1, 4, 2, 5]
    assert bytes_of(torch.empty(0)).tolist() == []
