"""``PartialClikaModule``: a model whose pieces are compiled, with the Python between them as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, NoReturn, Self

import torch
from torch import nn

from clika_ref.capture.inputs import ForwardFn
from clika_ref.compiled.lowering import target_for
from clika_ref.compiled.state import log_scales_of
from clika_ref.compress.calibrate import CalibrationArguments
from clika_ref.core.errors import ModelError, format_count
from clika_ref.partial_graphs.breaks import BreakReport
from clika_ref.partial_graphs.calibration import list_layers, quantize_pieces
from clika_ref.partial_graphs.partial_artifact import PartialArtifact, export_pieces
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.pieces import Piece
from clika_ref.partial_graphs.saving import load_pieces, save_pieces
from clika_ref.quantization.decision import LAYER_COLUMNS, LayerReport
from clika_ref.quantization.report import NO_DECISIONS_MESSAGE
from clika_ref.quantization.request import QuantizationRequest
from clika_ref.reporting.log import CompilationLog
from clika_ref.reporting.tables import Table
from clika_ref.settings.argument_checks import check_types
from clika_ref.settings.compile_options import BaseDeploymentSettings
from clika_ref.settings.quantization import LayerQuantizationSettings, QuantizationSettings

NO_DATA = "cannot calibrate: no data is given. Pass calibration_inputs."


class PartialClikaModule(nn.Module):
    """A model that Dynamo breaks into several graphs: each is compiled, and Python runs between them.

    Created by ``clika_compile(model, fullgraph=False)`` if no tracer captures the model as one graph. It has the
    submodules, parameters and ``state_dict`` keys of the original, whose code it runs. ``clika_breaks`` lists what
    breaks it. A piece is a graph with the weights that it is called with, and a `ClikaModule` of its own.

    Args:
        state: the pieces and the model.
    """

    clika_state: PartialState

    def __init__(self, state: PartialState) -> None:
        super().__init__()
        self.__dict__["clika_state"] = state
        model = state.callee.module
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]  # the same dicts, so that both have the same weights
        self.training = model.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Args:
            args: the positional arguments of the original.
            kwargs: its keyword arguments.

        Raises:
            ModelError: the call takes a branch that no tracing input took, or a tensor does not fit a piece.
        """
        return self.clika_state.runner(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002 - PyTorch's signature
        """Set train or eval mode of all pieces. The Python between them runs in the mode that it was traced in."""
        self.training = mode
        for piece in self.clika_state.pieces:
            if piece.module is not None:
                piece.module.train(mode)
        return self

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002 - PyTorch's signature
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Any:
        """Yield the parameters of the model, and the log scales that quantized pieces learn in training.

        Args:
            prefix: put before each name.
            recurse: include those of submodules and pieces.
            remove_duplicate: yield shared parameters once.
        """
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for piece in self.clika_state.pieces if recurse else ():
            if piece.module is not None:
                for name, log in log_scales_of(piece.module).items():
                    yield f"{prefix}{'.' if prefix else ''}piece_{piece.number}.{name}", log

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Move the constants and scales of the pieces along with the weights."""
        super()._apply(fn, recurse)
        for piece in self.clika_state.pieces:
            if piece.module is not None:
                piece.module._apply(fn, recurse)  # noqa: SLF001 - as for a submodule
        return self

    def extra_repr(self) -> str:
        """Return the number of pieces and breaks."""
        state = self.clika_state
        return f"{format_count(len(state.pieces), 'piece')}, {format_count(len(state.breaks), 'graph break')}"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            "cannot copy or pickle a PartialClikaModule: Dynamo's compiled code cannot be copied. Save it with "
            "clika_save, and load the file with PartialClikaModule.clika_load(path, model)."
        )

    @property
    def clika_pieces(self) -> tuple[Piece, ...]:
        """The pieces, in the order of their first calls; ``piece.module`` is a `ClikaModule`."""
        return tuple(self.clika_state.pieces)

    @property
    def clika_breaks(self) -> BreakReport:
        """Each graph break: where it is, why, and which change removes it."""
        return BreakReport(self.clika_state.breaks)

    def clika_initialize_algorithms(
        self,
        quantization_settings: QuantizationSettings | None = None,
        *,
        calibration_inputs: Iterable[Any] | None = None,
        deployment_settings: BaseDeploymentSettings | None = None,
        layer_quantization_settings: Mapping[str, LayerQuantizationSettings] | None = None,
        data_transform_fn: Callable[[Any], Any] | None = None,
        forward_fn: ForwardFn | None = None,
    ) -> Table[LayerReport]:
        """Calibrate all pieces in one pass of the data through the model, and quantize them; return the decisions.

        Args:
            quantization_settings: as for `clika_compile`; by default ``QuantizationSettings()``.
            calibration_inputs: the data, as for `clika_compile`; by default the data given there and not read yet.
            deployment_settings: the target; by default that of the module.
            layer_quantization_settings: overrides for single layers of any piece.
            data_transform_fn: applied to each element.
            forward_fn: how to call the model on an element.

        Raises:
            ModelError: there is no data, or it does not fit; or the settings cannot be satisfied.
            TargetError: the target computes in float, or no plugin provides it.
        """
        state = self.clika_state
        given = CalibrationArguments(
            quantization_settings,
            calibration_inputs,
            deployment_settings,
            layer_quantization_settings,
            data_transform_fn,
            forward_fn,
        )
        check_types(vars(given))
        data, state.unread = given.data(state.unread), None
        if data is None:
            raise ModelError(NO_DATA)
        deployment = state.choose_deployment(given.deployment_settings)
        request = QuantizationRequest(
            target_for(deployment, state.registry),
            given.quantization_settings or QuantizationSettings(),
            given.layer_quantization_settings or {},
            state.options,
        )
        with CompilationLog.open(state.logs_dir) as log:
            quantize_pieces(state, data.start(), request, log)
        state.deployment = deployment
        return self.clika_summary()

    def clika_summary(self) -> Table[LayerReport]:
        """Return the decision for each layer of all pieces, with its reason.

        Raises:
            ModelError: nothing was decided, as in a float or loaded module.
        """
        layers = list_layers(self.clika_state.pieces)
        if not layers:
            raise ModelError(NO_DECISIONS_MESSAGE)
        return Table(layers, LAYER_COLUMNS)

    def clika_export(
        self, folder: str | PathLike[str], deployment_settings: BaseDeploymentSettings | None = None
    ) -> PartialArtifact:
        """Write a folder with an artifact for each piece and a manifest; ``artifact.bind(model)`` runs it.

        Args:
            folder: the folder to write; it is created if its parent exists.
            deployment_settings: the target; by default that of the module.

        Raises:
            ModelError: the folder cannot be written.
            TargetError: the target cannot run a piece, or its results differ from the module's.
        """
        return export_pieces(self.clika_state, folder, deployment_settings)

    def clika_save(self, path: str | PathLike[str], *, keep_float_weights: bool = False) -> None:
        """Save the pieces and all weights in one file. The code of the model is not saved: loading needs its class.

        Args:
            path: the file to write; it is replaced atomically.
            keep_float_weights: store all weights as they are, so that training can continue from them.

        Raises:
            ModelError: no file can be written there.
        """
        save_pieces(self.clika_state, path, keep_float_weights=keep_float_weights)

    @classmethod
    def clika_load(cls, path: str | PathLike[str], model: nn.Module) -> Self:
        """Load a file of `clika_save` into an instance of the class that was compiled.

        Args:
            path: the file.
            model: its weights are overwritten; its code runs between the pieces.

        Raises:
            ModelError: the file cannot be read, is damaged or holds no pieces; or the model is not of the saved class.
        """
        return cls(load_pieces(path, model))
