"""The state of a partial module: everything but its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clika_ref.capture.calibration_inputs import LazyDataset
from clika_ref.capture.callables import TracedCallable
from clika_ref.core.registry import Registry, load_registry
from clika_ref.partial_graphs.breaks import Break
from clika_ref.partial_graphs.pieces import Piece
from clika_ref.partial_graphs.recording import PieceRunner
from clika_ref.settings.compile_options import (
    BaseDeploymentSettings,
    ClikaCompileOptions,
    DeploymentSettings_ONNXRuntime_ONNX,
)


@dataclass
class PartialState:
    """All of a partial module except its weights."""

    runner: PieceRunner
    """Runs the model with its pieces."""
    callee: TracedCallable
    """The model, and the function that a call runs."""
    breaks: list[Break] = field(default_factory=list[Break])
    registry: Registry = field(default_factory=load_registry)
    """The known operators and targets."""
    deployment: BaseDeploymentSettings | None = None
    """The deployment target; None selects ONNX Runtime."""
    options: ClikaCompileOptions = field(default_factory=ClikaCompileOptions)
    """Options of exports, and of later quantization."""
    logs_dir: Any = None
    """The folder for logs; None writes none."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each stage of the compilation."""
    unread: LazyDataset | None = None
    """Calibration inputs that were given but not read yet."""

    @property
    def pieces(self) -> list[Piece]:
        """The pieces, in the order of their first calls."""
        return self.runner.table.pieces

    def choose_deployment(self, given: BaseDeploymentSettings | None) -> BaseDeploymentSettings:
        """Return the given settings, or those of the module, or ONNX Runtime's."""
        return given or self.deployment or DeploymentSettings_ONNXRuntime_ONNX()
