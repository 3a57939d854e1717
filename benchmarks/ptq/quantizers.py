"""Methods from a module to a quantized ONNX file: clika-ref, two peers, and the least cost of any method."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.ptq.subjects import Batch

if TYPE_CHECKING:
    from clika_ref import BaseDeploymentSettings, ClikaModule


class ExportMethod(Protocol):
    """A way from a module and calibration data to a file."""

    def __call__(self, model: torch.nn.Module, calibration: list[Batch], path: Path, *, is_transformer: bool) -> None:
        """Export by this method."""


def export_with_clika_ref(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Compile for ONNX Runtime with the default settings, and export."""
    from clika_ref import DeploymentSettings_ONNXRuntime_ONNX  # noqa: PLC0415 - each method is charged for its own memory

    compile_quantized(model, calibration, DeploymentSettings_ONNXRuntime_ONNX()).clika_export(path)


def export_with_clika_ref_for_latency(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Compile for ONNX Runtime, layers left in float where they are timed and integers are no faster, and export."""
    from clika_ref import DeploymentSettings_ONNXRuntime_ONNX  # noqa: PLC0415 - as in `export_with_clika_ref`

    made = compile_quantized(model, calibration, DeploymentSettings_ONNXRuntime_ONNX(), optimize_for="latency")
    made.clika_export(path)


def compile_quantized(
    model: torch.nn.Module, calibration: list[Batch], deployment: BaseDeploymentSettings, **options: Any
) -> ClikaModule:
    """Return a module that is quantized for a target with the default settings and the given options."""
    from clika_ref import (  # noqa: PLC0415 - a method is not charged for unused imports
        ClikaCompileOptions,
        QuantizationSettings,
        clika_compile,
    )

    single = {name: tensor[:1] for name, tensor in calibration[0].items()}
    return clika_compile(
        model,
        tracing_inputs=[single, *calibration[:2]],  # a batch of another size, so that it is dynamic
        calibration_inputs=calibration,
        quantization_settings=QuantizationSettings(),
        deployment_settings=deployment,
        clika_compile_options=ClikaCompileOptions(compare_after_export=False, **options),
        discard_input_model=True,
    )


def export_floating(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Export in float with PyTorch's exporter, the starting point of the peers."""
    torch.onnx.export(
        model,
        (),
        path,
        kwargs=dict(calibration[0]),
        dynamo=True,
        dynamic_shapes=_dynamic(calibration),
        verbose=False,
        external_data=False,
    )


def export_floor(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Trace, and run every batch once."""
    torch.export.export(model, (), dict(calibration[0]), dynamic_shapes=_dynamic(calibration), strict=False)
    with torch.no_grad():
        for batch in calibration:
            model(**batch)
    path.write_bytes(b"")


def export_ort_default(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with onnxruntime's static quantization and its defaults."""
    from onnxruntime.quantization import quantize_static  # noqa: PLC0415 - as in `export_with_clika_ref`

    begun = export_float(model, calibration, path)
    quantize_static(begun, path, _reader(calibration))


def export_ort_best(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with the form of onnxruntime's that runs fastest on x86, after its own preparation."""
    from onnxruntime.quantization import QuantType, quantize_static  # noqa: PLC0415 - as in `export_with_clika_ref`
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    begun = export_float(model, calibration, path)
    prepared = path.with_suffix(".prepared.onnx")
    quant_pre_process(begun, prepared, skip_symbolic_shape=True)
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(prepared, path, _reader(calibration), **kinds)


def export_ort_dynamic(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize the weights of linear layers only; activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 - as in `export_with_clika_ref`

    begun = export_float(model, calibration, path)
    quantize_dynamic(begun, path, weight_type=QuantType.QInt8, per_channel=True)


def export_nncf(model: torch.nn.Module, calibration: list[Batch], path: Path, *, is_transformer: bool) -> None:
    """Quantize with NNCF's default algorithms, with its preset for transformers if the subject is one."""
    import onnx  # noqa: PLC0415 - as in `export_with_clika_ref`

    begun = onnx.load(export_float(model, calibration, path))
    onnx.save(quantize_by_nncf(begun, calibration, for_transformers=is_transformer), path)


def quantize_by_nncf(begun: Any, calibration: list[Batch], *, for_transformers: bool) -> Any:
    """Return a model of ONNX or OpenVINO, quantized by NNCF on all of the data."""
    import nncf as peer  # noqa: PLC0415 - as in `export_with_clika_ref`

    logging.getLogger("nncf").setLevel(logging.ERROR)
    chosen: dict[str, Any] = {"model_type": peer.ModelType.TRANSFORMER} if for_transformers else {}
    feeds = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in calibration]
    return peer.quantize(begun, peer.Dataset(feeds), subset_size=len(feeds), **chosen)


def _dynamic(calibration: list[Batch]) -> dict[str, Any]:
    """Return the dims that differ: the first one, and those that differ between batches."""
    first = calibration[0]
    auto = torch.export.Dim.AUTO
    differing = {n: [{b[n].shape[i] for b in calibration} for i in range(t.ndim)] for n, t in first.items()}
    return {
        name: {size: auto for size, lengths in enumerate(sizes) if not size or len(lengths) > 1}
        for name, sizes in differing.items()
    }


def export_float(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Path:
    """Write a float file next to the quantized one that is made from it."""
    begun = path.with_suffix(".float.onnx")
    export_floating(model, calibration, begun)
    return begun


def _reader(calibration: list[Batch]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader  # noqa: PLC0415 - as in `export_with_clika_ref`

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[Batch] = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:  # type: ignore[override]
            batch = next(self.left, None)
            return None if batch is None else {name: tensor.numpy() for name, tensor in batch.items()}

    return Reader()
