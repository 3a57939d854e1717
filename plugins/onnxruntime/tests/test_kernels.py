"""Nodes without a kernel in ONNX Runtime are rejected before a file is written, and no others are."""

import onnx.defs
import pytest
import torch
from clika_ref_onnxruntime.kernels import _list_missing_dtypes, _runtime_version
from clika_ref_onnxruntime.target import OnnxRuntime
from onnxruntime.capi import _pybind_state as runtime
from torch import nn

from clika_ref import clika_compile
from clika_ref.core.errors import TargetError
from clika_ref.core.inference import Builder
from clika_ref.core.ir import Graph
from clika_ref.core.registry import load_registry
from clika_ref.core.types import TensorType
from clika_ref.onnx_export import artifact
from clika_ref.onnx_export.builder import OPSET

OPERATORS = load_registry().operators

LISTED = {
    "float": "float32",
    "double": "float64",
    **{t: t for t in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "bfloat16")},
}
"""The dtypes that the list is about, by the names that the runtime gives them."""


def list_missing_kernels():
    """Return the dtypes of the standard for which the installed runtime has no kernel, in the form of the list."""
    kernels = [k for k in runtime.get_all_opkernel_def() if k.provider == "CPUExecutionProvider" and not k.domain]
    missing = {}
    for name in sorted({s.name for s in onnx.defs.get_all_schemas() if not s.domain}):
        if not onnx.defs.has(name, max_inclusive_version=OPSET):
            continue
        schema = onnx.defs.get_schema(name, OPSET)
        own = [k for k in kernels if k.op_name == name and k.version_range[0] <= schema.since_version]
        own = [k.type_constraints for k in own if schema.since_version <= k.version_range[1]]
        for constraint in schema.type_constraints:
            parameter = constraint.type_param_str
            if schema.has_function or schema.has_context_dependent_function or not own:
                continue
            if all(parameter in kernel for kernel in own):
                taken = {t for kernel in own for t in kernel[parameter]}
                lacking = {n for t, n in LISTED.items() if f"tensor({t})" in {*constraint.allowed_type_strs} - taken}
                if lacking:
                    missing.setdefault(name, {})[parameter] = lacking
    return missing


def test_list_missing_dtypes_equals_installed_runtime():
    """kernels.toml lists the dtypes that the installed runtime does not register."""
    assert _list_missing_dtypes(_runtime_version()) == list_missing_kernels(), (
        "write what the runtime registers into kernels.toml"
    )


def test_list_missing_dtypes_older_runtime_lacks_more():
    """An older runtime lacks the kernels that later ones added."""
    newest, older = _list_missing_dtypes((1, 31)), _list_missing_dtypes((1, 30))
    beyond = {op: {*names["T"]} - {*newest.get(op, {}).get("T", ())} for op, names in older.items() if "T" in names}
    assert {op: names for op, names in beyond.items() if names} == {"Where": {"int8", "uint32"}}


def build_node(kind, *operands, **attrs):
    """Return a call on tensors of given dtypes and shapes."""
    g = Graph("one")
    values = [g.add_input(TensorType(*o), f"x{i}") if isinstance(o, tuple) else o for i, o in enumerate(operands)]
    g.add_output(Builder(g, OPERATORS)(kind, *values, **attrs))
    (node,) = g.nodes
    return node


F64, F16, I64, U8 = torch.float64, torch.float16, torch.int64, torch.uint8


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            build_node("conv2d", (F64, (1, 2, 5, 5)), (F64, (3, 2, 3, 3)), None),
            r"Conv in float64, .* support float16, float32\.",
        ),
        (
            build_node("conv2d", (I64, (1, 2, 5, 5)), (I64, (3, 2, 3, 3)), None),
            r"Conv in int64, .* support float16, float32\.",
        ),
        (
            build_node("relu6", (torch.int16, (3,))),
            r"Clip in int16, but ONNX Runtime's CPU kernels support .*\. Convert",
        ),
        (build_node("outer", (torch.bool, (3,)), (torch.bool, (2,))), "Mul in bool"),
        (
            build_node("upsample_bicubic2d", (U8, (1, 1, 4, 4)), output_size=(6, 6), align_corners=False),
            "Resize in uint8",
        ),
    ],
)
def test_unsupported_reason_missing_kernel_named(node, message):
    """A call that needs a missing kernel is unsupported."""
    with pytest.raises(TargetError, match="it computes " + message):
        raise TargetError(OnnxRuntime().unsupported_reason(node))


@pytest.mark.parametrize(
    "node",
    [
        build_node("conv2d", (F16, (1, 2, 5, 5)), (F16, (3, 2, 3, 3)), None),
        build_node("matmul", (F64, (2, 3)), (F64, (3, 2))),
        build_node("mul", (I64, (2, 3)), 3),
        build_node("add", (F64, ()), 1),
    ],
)
def test_unsupported_reason_existing_kernels_returns_none(node):
    """A call whose kernels exist is supported."""
    assert OnnxRuntime().unsupported_reason(node) is None


def test_unsupported_reason_repeated_call_lowered_once(monkeypatch):
    """A call is lowered once, however often it is checked."""
    lowered = []
    emit = artifact.emit_node
    monkeypatch.setattr(artifact, "emit_node", lambda node: lowered.append(node.op_type) or emit(node))
    for attrs in ({"negative_slope": 0.3}, {"negative_slope": 0.3}, {"negative_slope": 0.7}):
        assert OnnxRuntime().unsupported_reason(build_node("leaky_relu", (F64, (5, 7)), **attrs)) is None
    assert lowered == ["leaky_relu"] * 2


def test_dry_run_reports_unsupported_nodes_of_export(tmp_path, capsys):
    """A dry run reports the nodes that an export rejects."""
    torch.manual_seed(0)
    model, inputs = nn.Conv2d(1, 2, 3).double(), [torch.rand(n, 1, 5, 5, dtype=F64) for n in (1, 2)]
    clika_compile(model, tracing_inputs=inputs, is_dry_run=True, discard_input_model=False)
    captured = capsys.readouterr()
    assert "it computes Conv in float64" in " ".join((captured.out + captured.err).split())
    with pytest.raises(
        TargetError, match=r"onnxruntime cannot run 1 node .*\n  conv2d in .*: it computes Conv in float64"
    ):
        clika_compile(model, tracing_inputs=inputs).clika_export(tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
