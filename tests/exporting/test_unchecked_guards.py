"""Guards that the module checks and the artifact does not are named when it is exported."""

import pytest
import torch

from clika_ref import clika_compile

SIZES = [torch.rand(6, 4), torch.rand(8, 4)]


def branching(x):
    return x * 2 if x.shape[0] > 4 else x * 3


def exported(function, inputs, tmp_path, **options):
    """Return what the log says of an export."""
    logs = tmp_path / "logs"
    module = clika_compile(function, tracing_inputs=inputs, logs_dir=logs)
    module.clika_export(tmp_path / "m.onnx", **options)
    return "".join(path.read_text() for path in logs.iterdir())


def test_a_branch_is_named_once_with_its_line(tmp_path, capsys):
    text = exported(branching, SIZES, tmp_path)
    warning = (
        "Warning: the artifact does not check, as the module does, that batch > 4 (from test_unchecked_guards.py:12): "
        "where that does not hold, it may return other numbers than the model"
    )
    assert text.count(warning) == 1
    assert "the artifact does not check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "inputs", "options"),
    [
        (branching, SIZES[:1], {}),
        (branching, SIZES, {"dynamic_axes": {}, "example_inputs": SIZES[0]}),
        (lambda x: x * 2, SIZES, {}),
        (lambda x: x.amax(1), [torch.rand(2, 3), torch.rand(3, 4)], {}),
    ],
    ids=["static", "fixed", "no branch", "no empty side"],
)
def test_nothing_is_said_where_nothing_but_empty_calls_is_unchecked(function, inputs, options, tmp_path):
    assert "does not check" not in exported(function, inputs, tmp_path, **options)
