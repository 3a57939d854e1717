"""Export methods for quantized ONNX files: clika-ref, ONNX Runtime, NNCF, and a lower bound of their time."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.ptq.prepared_subjects import Batch

if TYPE_CHECKING:
    from clika_ref import ClikaModule, QuantizationSettings


class ExportMethod(Protocol):
    """A function that writes a file from a module and calibration data."""

    def __call__(self, model: torch.nn.Module, calibration: list[Batch], path: Path, *, is_transformer: bool) -> None:
        """Write the file."""


def export_with_clika_ref(
    model: torch.nn.Module,
    calibration: list[Batch],
    path: Path,
    *,
    target: str = "onnxruntime",
    is_transformer: bool = False,  # noqa: ARG001 - only NNCF needs it
    **options: Any,
) -> None:
    """Quantize with the default settings for a target."""
    compile_quantized(model, calibration, target, **options).clika_export(path)


def compile_quantized(
    model: torch.nn.Module,
    calibration: list[Batch],
    target: str,
    settings: QuantizationSettings | None = None,
    **options: Any,
) -> ClikaModule:
    """Return the model, quantized for a target with the calibration data."""
    from clika_ref import (  # noqa: PLC0415 - imports of one method must not count as memory of another
        ClikaCompileOptions,
        QuantizationSettings,
        clika_compile,
    )
    from clika_ref.settings.compile_options import deployment_settings_named  # noqa: PLC0415 - as above

    single = {name: tensor[:1] for name, tensor in calibration[0].items()}
    return clika_compile(
        model,
        tracing_inputs=[single, *calibration[:2]],  # different batch sizes make dim 0 dynamic
        calibration_inputs=calibration,
        quantization_settings=settings or QuantizationSettings(),
        deployment_settings=deployment_settings_named(target),
        clika_compile_options=ClikaCompileOptions(**options),
        discard_input_model=True,
    )


def export_float(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Export in float with PyTorch's exporter, as the peers require."""
    torch.onnx.export(
        model,
        (),
        path,
        kwargs=dict(calibration[0]),
        dynamo=True,
        dynamic_shapes=_make_dynamic_shapes(calibration),
        verbose=False,
        external_data=False,
    )


def trace_and_run(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Trace, and run every batch once: a lower bound for every method that calibrates."""
    torch.export.export(model, (), dict(calibration[0]), dynamic_shapes=_make_dynamic_shapes(calibration), strict=False)
    with torch.no_grad():
        for batch in calibration:
            model(**batch)
    path.write_bytes(b"")


def export_with_ort_default(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with the default static quantization of ONNX Runtime."""
    from onnxruntime.quantization import quantize_static  # noqa: PLC0415 - as in `compile_quantized`

    quantize_static(export_for_peer(model, calibration, path), path, _make_reader(calibration))


def export_with_ort_best(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize with the options of ONNX Runtime that are fastest on x86, after its preprocessing."""
    from onnxruntime.quantization import QuantType, quantize_static  # noqa: PLC0415 - as in `compile_quantized`
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415 - as above

    preprocessed = path.with_suffix(".preprocessed.onnx")
    quant_pre_process(export_for_peer(model, calibration, path), preprocessed, skip_symbolic_shape=True)
    options = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "per_channel": True}
    quantize_static(preprocessed, path, _make_reader(calibration), **options)


def export_with_ort_dynamic(model: torch.nn.Module, calibration: list[Batch], path: Path, **_: Any) -> None:
    """Quantize the weights of linear layers; activations are quantized dynamically."""
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415 - as in `compile_quantized`

    quantize_dynamic(export_for_peer(model, calibration, path), path, weight_type=QuantType.QInt8, per_channel=True)


def export_with_nncf(model: torch.nn.Module, calibration: list[Batch], path: Path, *, is_transformer: bool) -> None:
    """Quantize with NNCF's default algorithms, or with its preset for transformers."""
    import onnx  # noqa: PLC0415 - as in `compile_quantized`

    float_model = onnx.load(export_for_peer(model, calibration, path))
    onnx.save(quantize_by_nncf(float_model, calibration, for_transformers=is_transformer), path)


def quantize_by_nncf(float_model: Any, calibration: list[Batch], *, for_transformers: bool) -> Any:
    """Return an ONNX or OpenVINO model, quantized by NNCF with all calibration data."""
    nncf: Any = importlib.import_module("nncf")
    logging.getLogger("nncf").setLevel(logging.ERROR)
    preset: dict[str, Any] = {"model_type": nncf.ModelType.TRANSFORMER} if for_transformers else {}
    feeds = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in calibration]
    return nncf.quantize(float_model, nncf.Dataset(feeds), subset_size=len(feeds), **preset)


def _make_dynamic_shapes(calibration: list[Batch]) -> dict[str, Any]:
    """Return the dynamic dims of each input: dim 0, and those with different sizes in different batches."""
    first = calibration[0]
    auto = torch.export.Dim.AUTO
    sizes = {n: [{b[n].shape[dim] for b in calibration} for dim in range(t.ndim)] for n, t in first.items()}
    return {
        name: {dim: auto for dim, sizes_of_dim in enumerate(dims) if not dim or len(sizes_of_dim) > 1}
        for name, dims in sizes.items()
    }


def export_for_peer(model: torch.nn.Module, calibration: list[Batch], path: Path) -> Path:
    """Export in float, to a file next to the quantized one; return its path."""
    float_path = path.with_suffix(".float.onnx")
    export_float(model, calibration, float_path)
    return float_path


def _make_reader(calibration: list[Batch]) -> Any:
    from onnxruntime.quantization import CalibrationDataReader  # noqa: PLC0415 - as in `compile_quantized`

    class BatchReader(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches: Iterator[Batch] = iter(calibration)

        def get_next(self) -> dict[str, Any] | None:  # type: ignore[override]
            batch = next(self.batches, None)
            return None if batch is None else {name: tensor.numpy() for name, tensor in batch.items()}

    return BatchReader()
