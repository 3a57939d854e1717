"""Tables of embeddings in low bits: INT8 next to INT8 layers, and INT4 or INT8 with weight-only quantization."""

import onnx
import pytest
import torch
from loaded_copies import load_copy
from torch import nn

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    DeploymentSettings_TensorRT_ONNX,
    QuantizationSettings,
    clika_compile,
    export_configuration,
)
from clika_ref import LayerQuantizationSettings as Layer

ROWS, WIDTH = 600, 64
TOKENS = [torch.randint(0, ROWS, (n, 12), generator=torch.Generator().manual_seed(n)) for n in (2, 3, 4, 5, 4)]
TARGETS = {"onnxruntime": DeploymentSettings_ONNXRuntime_ONNX, "openvino": DeploymentSettings_OpenVINO_ONNX}


class Language(nn.Module):
    """A table, a layer and a head, which may have the weight of the table."""

    def __init__(self, *, is_tied=False, rows=ROWS, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hidden = nn.Embedding(rows, width, padding_idx=0), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, rows, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.norm(torch.relu(self.hidden(self.table(tokens)))))


def compile_language(target="onnxruntime", *, layers=None, model=None, is_tied=False, **settings):
    return clika_compile(
        (model or Language(is_tied=is_tied)).eval(),
        tracing_inputs=TOKENS[:2],
        calibration_inputs=TOKENS,
        quantization_settings=QuantizationSettings(**settings),
        layer_quantization_settings=layers,
        deployment_settings=TARGETS[target](),
        discard_input_model=False,
    )


def weight_only(bits):
    return {
        "prefer_weights_only_quantization": True,
        "weights_num_bits": bits,
        "quantization_sensitivity_threshold": 0.5,
    }


def decision_of(module, scope):
    return next(layer for layer in module.clika_summary().layers if layer.scope == scope)


def read_matrices(path):
    """Return the data type and shape of each matrix in a file."""
    tensors = onnx.load(path).graph.initializer
    return sorted((t.data_type, *t.dims) for t in tensors if len(t.dims) == 2 and max(t.dims) > 12 and 1 not in t.dims)


INT8, INT4, UINT8 = onnx.TensorProto.INT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT8


@pytest.mark.parametrize("target", TARGETS)
def test_lookup_quantized_next_to_int8_layers(target, tmp_path):
    """By default a table has INT8 rows in the file, which agrees with the simulation."""
    module = compile_language(target)
    assert (decision_of(module, "table").decision, decision_of(module, "table").bits) == ("quantized", (8, 32))
    module.clika_export(tmp_path / "m.onnx")
    assert read_matrices(tmp_path / "m.onnx") == [(INT8, WIDTH, WIDTH), *[(INT8, ROWS, WIDTH)] * 2]
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert {node.op_type for node in graph.node if "table.weight_integers" in node.input} == {"Gather"}, (
        "no whole table"
    )
    assert (tmp_path / "m.onnx").stat().st_size < 0.3 * 4 * (2 * ROWS * WIDTH + WIDTH * WIDTH)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_lookup_weight_only(target, bits, tmp_path):
    """With weight-only quantization a table has the requested width; 4-bit rows are stored in halves of bytes."""
    module = compile_language(target, **weight_only(bits))
    module.clika_export(tmp_path / "m.onnx")
    tables = {8: (INT8, ROWS, WIDTH), 4: (INT4, ROWS, WIDTH) if target == "onnxruntime" else (UINT8, ROWS, WIDTH // 2)}
    assert tables[bits] in read_matrices(tmp_path / "m.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert ("GatherBlockQuantized" in kinds) == (target == "onnxruntime" and bits == 4)


@pytest.mark.parametrize("settings", [{}, weight_only(8), weight_only(4)], ids=["int8", "weights 8", "weights 4"])
def test_lookup_in_weight_of_head_stored_once(settings, tmp_path):
    """A table that is the weight of the head is stored once, and the reported bytes say so."""
    module = compile_language(is_tied=True, **settings)
    artifact = module.clika_export(tmp_path / "m.onnx")
    matrices = read_matrices(tmp_path / "m.onnx")
    assert len([shape for _, *shape in matrices if ROWS in shape]) == 1
    reported = module.clika_initialize_algorithms(QuantizationSettings(**settings)).bytes
    assert artifact.facts["bytes"] == pytest.approx(reported, abs=10_000)
    table = decision_of(module, "table")
    assert table.bytes_quantized == 4 * ROWS


def test_lookup_in_weight_of_float_head_stays_float():
    """A table whose layer stays in float stays too: low bits would be stored in addition."""
    module = compile_language(is_tied=True, layers={"head": Layer(skip_quantization=True)})
    assert decision_of(module, "table").reason == "its table is also an operand of linear_1, which stays in float"


def test_lookup_too_sensitive_for_tied_width_gets_its_own(tmp_path):
    """A table may have more bits than the layer with the same weight; both are stored then."""
    settings = weight_only([4, 8]) | {"quantization_sensitivity_threshold": 0.02}
    module = compile_language(is_tied=True, **settings)
    bits = {scope: decision_of(module, scope).bits[0] for scope in ("table", "head")}
    module.clika_export(tmp_path / "m.onnx")
    assert bits["table"] >= bits["head"]
    stored = [kind for kind, *shape in read_matrices(tmp_path / "m.onnx") if ROWS in shape]
    assert len(stored) == len(set(bits.values()))


@pytest.mark.parametrize(
    ("layers", "settings", "reason"),
    [
        ({"table": Layer(skip_quantization=True)}, {}, "skip_quantization of 'table'"),
        (None, {"quantization_sensitivity_threshold": 1e-9}, "too sensitive"),
    ],
    ids=["skipped", "sensitive"],
)
def test_lookup_kept_in_float_with_reason(layers, settings, reason):
    """Settings and sensitivity keep a table in float."""
    assert reason in decision_of(compile_language(layers=layers, **settings), "table").reason


def test_lookup_in_small_table_stays_float():
    """A table of a few KB stays in float: low bits save nothing."""
    module = compile_language(model=Language(rows=ROWS, width=16))
    assert decision_of(module, "table").reason == f"its table takes only {4 * ROWS * 16} bytes"


def test_lookup_unsupported_by_target_stays_float():
    """TensorRT reads tables in float."""
    graph = compile_language().clika_initialize_algorithms(deployment_settings=DeploymentSettings_TensorRT_ONNX())
    (reason,) = [layer.reason for layer in graph.layers if layer.scope == "table"]
    assert reason == "the target computes embedding with float weights"


def test_lookup_padding_row_stays_zero():
    """The row of zeros that padding_idx selects is exact."""
    module = compile_language()
    plan = module.clika_state.quantized.plan
    rows = plan.packed_weights["embedding"].dequantize(module.table.weight.detach())
    assert not rows[0].any()
    assert rows[1:].any(1).all()


@pytest.mark.parametrize("settings", [{}, weight_only(4)], ids=["int8", "weights 4"])
def test_lookup_saved_module_matches(settings):
    """A saved module reads the same rows, and its file stores their integers."""
    module = compile_language(**settings).eval()
    again = load_copy(module).eval()
    assert torch.equal(again(TOKENS[0]), module(TOKENS[0]))


def test_lookup_table_trains():
    """Training moves the rows of a quantized table, and the module returns the rounded ones."""
    module = compile_language().train()
    before = module.table.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(TOKENS[0]).square().mean().backward()
    optimizer.step()
    changed = (module.table.weight != before).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(TOKENS[0].flatten().tolist())
    assert len(changed) > 1
    torch.testing.assert_close(module(TOKENS[1]), module.eval()(TOKENS[1]), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("width", [63, 64])
def test_lookup_rows_of_odd_length(width, tmp_path):
    """Rows of an odd number of 4-bit elements end with half a byte."""
    module = compile_language(model=Language(rows=800, width=width), **weight_only(4))
    module.clika_export(tmp_path / "m.onnx")
    assert decision_of(module, "table").bits[0] == 4


@pytest.mark.parametrize("settings", [{}, weight_only(4)], ids=["int8", "weights 4"])
def test_lookup_tied_module_saved_in_low_bits(settings, tmp_path):
    """A saved module stores a table that is also the weight of the head as integers, once."""
    module = compile_language(is_tied=True, **settings).eval()
    module.clika_save(tmp_path / "m.clika")
    again = type(module).clika_load(tmp_path / "m.clika").eval()
    assert torch.equal(again(TOKENS[0]), module(TOKENS[0]))
    assert (tmp_path / "m.clika").stat().st_size < 2 * ROWS * WIDTH


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", [4, 8])
def test_lookup_tied_head_runs_with_low_bit_weight(target, bits):
    """A head that shares its weight with a table still runs as a layer with low-bit weights in the runtime."""
    found = compile_language(target, is_tied=True, **weight_only(bits)).clika_explain()
    (head,) = [node for node in found.nodes if node.scope == "head" and node.macs]
    assert (head.planned, head.runs) == (f"int{bits} weights",) * 2


def test_lookup_int4_table_stored_as_int8_on_request(tmp_path):
    """`export_int4=False` stores tables in a byte for each element, too."""
    module = compile_language(**weight_only(4))
    with export_configuration(export_int4=False):
        module.clika_export(tmp_path / "m.onnx")
    assert {kind for kind, *_ in read_matrices(tmp_path / "m.onnx")} == {INT8}
