"""Artifacts that keep their state from one call to the next, in each runtime and without its help."""

from dataclasses import dataclass

import pytest
import torch
from clika_ref_onnxruntime.target import OnnxRuntime
from clika_ref_openvino.target import OpenVino
from torch import nn

from clika_ref import (
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    clika_compile,
)
from clika_ref.compiled.stateful_runners import find_state, load_stateful_runner

BATCH, LENGTH, WIDTH = 2, 6, 3


class Rows(nn.Module):
    """Writes a row of a buffer in each call; with ``reads_before``, also returns the buffer before the call."""

    def __init__(self, *, reads_before):
        super().__init__()
        self.register_buffer("rows", torch.zeros(BATCH, LENGTH, WIDTH))
        self.reads_before = reads_before

    def forward(self, x, position):
        before = self.rows.exp()
        self.rows.index_copy_(1, position, x)
        return self.rows.cumsum(1), before if self.reads_before else x + 1


@dataclass(frozen=True)
class WithoutState(OnnxRuntime):
    """A target whose runtime keeps nothing."""

    def load_with_state(self, artifact, state):
        """Return None."""


RUNTIMES = {
    "onnxruntime": (OnnxRuntime(), DeploymentSettings_ONNXRuntime_ONNX),
    "passed on": (WithoutState(), DeploymentSettings_ONNXRuntime_ONNX),
    "openvino": (OpenVino(), DeploymentSettings_OpenVINO_ONNX),
}


def draw(seed):
    return torch.randn(BATCH, 1, WIDTH, generator=torch.Generator().manual_seed(seed))


def export(model, runtime, folder):
    """Return the runner of a model, and the names of its state."""
    target, settings = RUNTIMES[runtime]
    calls = [(draw(0), torch.tensor([0])), (draw(1), torch.tensor([1]))]
    module = clika_compile(
        model,
        tracing_inputs=calls,
        clika_compile_options=ClikaCompileOptions(state="io"),
        deployment_settings=settings(),
        discard_input_model=False,
    )
    artifact = module.clika_export(folder / "model.onnx")
    return load_stateful_runner(target, artifact), find_state(artifact)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("reads_before", [False, True])
def test_state_kept_between_calls(runtime, reads_before, tmp_path):
    """Each call continues the state of the one before, also of other samples, until it starts again."""
    runner, state = export(Rows(reads_before=reads_before), runtime, tmp_path)
    assert state == {"rows": "rows.next"}
    model, first = Rows(reads_before=reads_before), torch.full((BATCH, LENGTH, WIDTH), 0.5)
    for _ in range(2):
        model.rows.copy_(first)
        runner.start([first])
        for position, rows in enumerate([None, None, torch.tensor([1, 0]), torch.tensor([1, 1])]):
            if rows is not None:
                model.rows.copy_(model.rows[rows])
            call = draw(position), torch.tensor([position])
            for found, wanted in zip(runner(call, rows), model(*call), strict=True):
                torch.testing.assert_close(found, wanted)
    assert (first == 0.5).all()


def test_state_updated_in_place_if_read_once(tmp_path):
    """ONNX Runtime writes to the memory of a state that nothing else reads."""
    found = [export(Rows(reads_before=reads), "onnxruntime", tmp_path)[0].in_place for reads in (False, True)]
    assert found == [{"rows"}, set()]
