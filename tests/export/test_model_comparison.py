"""Agreement of two models: the statistics of each output, and the limits of agreement."""

import math

import pytest
import torch

from clika_ref.core.errors import ModelError
from clika_ref.export.model_comparison import measure_agreement

X = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])


def make_model_returning(*results):
    return lambda _: list(results)


def test_measure_agreement_equal_outputs_infinite_sqnr():
    """Equal outputs agree within rounding and have infinite SQNR."""
    found = measure_agreement(make_model_returning(X), make_model_returning(X.clone()), [None, None], ["logits"])
    (output,) = found.outputs
    assert (found.inputs, output.name, output.elements) == (2, "logits", 12)
    assert (output.worst, output.largest, output.sqnr, output.decisions) == (0.0, 3.0, math.inf, 1.0)
    assert found.is_within_rounding
    assert str(found).splitlines()[1].split() == ["logits", "12", "3", "0", "equal", "100.00%", "yes"]


def test_measure_agreement_differences_counted_over_inputs():
    """Error, SQNR and decisions are measured over all inputs."""
    far = X + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 3.0]])  # turns the second decision
    found = measure_agreement(make_model_returning(X), lambda call: [X if call else far], [True, False])
    (output,) = found.outputs
    assert (output.worst, output.decisions) == (3.0, 0.75)
    assert output.sqnr == found.sqnr == pytest.approx(10 * math.log10(2 * 28 / 9))
    assert output.beyond_rounding.startswith("off by 3, with a largest element of 3")
    assert not found.is_within_rounding


def test_measure_agreement_several_outputs_reports_worst():
    """The SQNR of several outputs is that of the worst one."""
    found = measure_agreement(make_model_returning(X, X), make_model_returning(X, X * 1.1), [None])
    assert [output.name for output in found.outputs] == ["0", "1"]
    assert found.sqnr == pytest.approx(20, abs=0.01)


def test_measure_agreement_rounding_error_accepted():
    """A difference of one rounding is within rounding, with finite SQNR."""
    found = measure_agreement(make_model_returning(X), make_model_returning(X * (1 + 1e-6)), [None])
    assert found.is_within_rounding
    assert found.sqnr < math.inf


def test_measure_agreement_integer_outputs_no_decisions():
    """Integer outputs are compared element by element and have no decisions."""
    numbers = torch.tensor([1, 2, 3])
    found = measure_agreement(
        make_model_returning(numbers), make_model_returning(numbers + torch.tensor([0, 0, 1])), [None]
    )
    (output,) = found.outputs
    assert (output.worst, output.decisions, output.beyond_rounding) == (1.0, None, "1 of 3 elements differ")


def test_measure_agreement_inf_and_empty_outputs_agree():
    """Infinities in both outputs add no error, and an empty output has no elements."""
    masked = torch.tensor([1.0, -math.inf])
    found = measure_agreement(
        make_model_returning(masked, torch.ones(0, 3)), make_model_returning(masked, torch.ones(0, 3)), [None]
    )
    first, second = found.outputs
    assert (first.largest, first.worst, first.sqnr) == (1.0, 0.0, math.inf)
    assert (second.elements, second.decisions, second.sqnr) == (0, None, math.inf)


def test_measure_agreement_incomparable_outputs_raise():
    """Other output counts, other shapes and missing inputs raise errors."""
    with pytest.raises(ModelError, match=r"the first returns 1 tensor, the second 2. Compare models with the same"):
        measure_agreement(make_model_returning(X), make_model_returning(X, X), [None])
    with pytest.raises(ModelError, match=r"output 0 has the shape \[2, 3\] in the first, and \[2\] in the second"):
        measure_agreement(make_model_returning(X), make_model_returning(X[:, 0]), [None])
    with pytest.raises(ModelError, match=r"there are no inputs. Pass at least one call"):
        measure_agreement(make_model_returning(X), make_model_returning(X), [])
