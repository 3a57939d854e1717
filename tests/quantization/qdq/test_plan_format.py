"""A plan is saved and loaded unchanged; altered files are rejected."""

import json

import pytest
import torch

from clika_ref import ModelError
from clika_ref.core.quantization_scheme import QuantizationScheme, QuantizedType
from clika_ref.quantization.qdq.insertion import Plan
from clika_ref.quantization.qdq.plan_format import plan_from_json, plan_to_json
from clika_ref.quantization.qdq.qparams import QParams

SCHEME = QuantizationScheme(
    QuantizedType(), QuantizedType(bits=7, is_signed=True, is_symmetric=True), int32_bias=frozenset({"linear"})
)


def make_plan():
    return Plan(
        SCHEME,
        {"relu": QParams(0.1, 0), "input": QParams(1 / 3, 128)},
        {"conv.1": torch.tensor([0.1, 0.2]), "linear": torch.tensor(0.5)},
        {"conv.1": torch.tensor([[1], [-1]], dtype=torch.int8)},
        {"conv.1": torch.tensor([1.0, -1.0])},
        rounded_inputs={"linear": 32},
        scale_sources={"pool": "relu"},
        norms={"conv.1": torch.tensor([2.0, -0.5], dtype=torch.float64)},
    )


def write_and_parse_plan():
    document, tensors = plan_to_json(make_plan())
    return json.loads(json.dumps(document)), tensors


def test_plan_from_json_restores_plan():
    """A plan is restored from JSON and tensors."""
    found, original = plan_from_json(*write_and_parse_plan()), make_plan()
    assert found.scheme == SCHEME
    assert found.activations == original.activations
    assert (found.scale_sources, found.rounded_inputs) == ({"pool": "relu"}, {"linear": 32})
    for kind in ("weights", "offsets", "corrections", "norms"):
        pair = getattr(found, kind), getattr(original, kind)
        assert pair[0].keys() == pair[1].keys()
        assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])


def test_plan_from_json_without_rounded_inputs_reads_older_data():
    """Data from before the runtime rounded inputs is read."""
    document, tensors = write_and_parse_plan()
    del document["rounded_inputs"]
    assert plan_from_json(document, tensors).rounded_inputs == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d, _: d.update(version=99),
            r"^the saved quantization has format 99, but this clika-ref reads formats up to \d\. Update clika-ref\.$",
        ),
        (
            lambda d, _: d.update(version=1),
            "^the saved quantization was saved by a development version; compile again$",
        ),
        (lambda d, _: d.pop("qparams"), "damaged: KeyError: 'qparams'. Quantize the model again."),
        (lambda d, _: d["weight_type"].update(wide=1), "damaged: TypeError"),
        (lambda d, _: d["weights"].append("lost"), "damaged: KeyError: 'weights.lost'"),
        (lambda d, _: d["qparams"].update(relu=[1]), "damaged: ValueError"),
        (
            lambda _, t: t.update({"weights.linear": torch.ones(2, 2)}),
            r"torch.float32\[2, 2\] is not a vector of scales",
        ),
        (lambda _, t: t.update({"norms.conv.1": torch.ones(2)}), r"torch.float32\[2\] is not a vector of scales"),
        (lambda d, _: d.update(scale_sources=["pool"]), "damaged: AttributeError"),
        (lambda _, t: t.update({"gptq.conv.1": torch.ones(2, 1)}), r"torch.float32\[2, 1\] is not a quantized"),
        (
            lambda _, t: t.update({"weights.linear": torch.ones(2).half()}),
            r"torch.float16\[2\] is not a vector of scales",
        ),
    ],
)
def test_plan_from_json_damaged_raises_with_reason(change, message):
    """A damaged plan raises an error with the reason."""
    document, tensors = write_and_parse_plan()
    change(document, tensors)
    with pytest.raises(ModelError, match=message):
        plan_from_json(document, tensors)
