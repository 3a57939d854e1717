"""Make each variant of a network for each target, and record its files, outputs and state dict."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import clika_ref
from releasing.baseline.artifacts import describe_files, shorten_digest
from releasing.baseline.messages import describe_error
from releasing.baseline.networks import Network

TARGETS: Mapping[str, clika_ref.BaseDeploymentSettings] = {
    "onnxruntime": clika_ref.DeploymentSettings_ONNXRuntime_ONNX(),
    "openvino": clika_ref.DeploymentSettings_OpenVINO_ONNX(),
    "tensorrt": clika_ref.DeploymentSettings_TensorRT_ONNX(),
}

EXPORTED_FILES: Mapping[str, tuple[str, ...]] = {"openvino": ("model.onnx", "model.xml")}
"""The files to export for a target, where it writes more than ``model.onnx``."""

INT8_THRESHOLD = 0.05
"""Ten times the default: random weights are sensitive, and with the default several networks stay float."""

LEARNING_RATE = 0.05

INT8_SETTINGS = clika_ref.QuantizationSettings(quantization_sensitivity_threshold=INT8_THRESHOLD)
INT4_SETTINGS = clika_ref.QuantizationSettings(prefer_weights_only_quantization=True, weights_num_bits=4)
PRUNING_SETTINGS = clika_ref.PruningSettings("structured", pruning_sensitivity_threshold=None, sparsity=0.5)
LORA_SETTINGS = clika_ref.LoraSettings(rank=2, alpha=4)

Deployment = clika_ref.BaseDeploymentSettings
Variant = Callable[[Network, Deployment], Any]
"""Returns the compiled module of a network for a target."""


def compile_float(network: Network, deployment: Deployment, **arguments: Any) -> Any:
    """Compile a network; ``arguments`` are further ones of ``clika_compile``."""
    tracing_inputs = network.tracing_inputs()
    return clika_ref.clika_compile(
        network.make(), tracing_inputs=tracing_inputs, deployment_settings=deployment, **arguments
    )


def compile_int8(network: Network, deployment: Deployment, **arguments: Any) -> Any:
    """Quantize weights and activations to 8 bits."""
    inputs = network.calibration_inputs()
    return compile_float(
        network, deployment, calibration_inputs=inputs, quantization_settings=INT8_SETTINGS, **arguments
    )


def compile_int4(network: Network, deployment: Deployment) -> Any:
    """Quantize to weight-only INT4."""
    inputs = network.calibration_inputs()
    return compile_float(network, deployment, calibration_inputs=inputs, quantization_settings=INT4_SETTINGS)


def compile_pruned(network: Network, deployment: Deployment) -> Any:
    """Remove half of the channels and heads."""
    inputs = network.calibration_inputs()
    return compile_float(network, deployment, calibration_inputs=inputs, pruning_settings=PRUNING_SETTINGS)


def compile_lora(network: Network, deployment: Deployment) -> Any:
    """Attach adapters to the float model and train them for one step. The export merges them."""
    module = compile_float(network, deployment, global_lora_settings=LORA_SETTINGS)
    return train_one_step(module, network)


def compile_int8_lora(network: Network, deployment: Deployment) -> Any:
    """Attach adapters to the INT8 model and train them for one step. The export writes them next to the layers."""
    module = compile_int8(network, deployment)
    module.clika_attach_lora(LORA_SETTINGS)
    return train_one_step(module, network)


def compile_qat(network: Network, deployment: Deployment) -> Any:
    """Quantize to INT8 and train all parameters and scales for one step."""
    return train_one_step(compile_int8(network, deployment, **network.training_options), network)


VARIANTS: Mapping[str, Variant] = {
    "float": compile_float,
    "int8": compile_int8,
    "int4": compile_int4,
    "pruned": compile_pruned,
    "lora": compile_lora,
    "int8-lora": compile_int8_lora,
    "qat": compile_qat,
}


def train_one_step(module: Any, network: Network) -> Any:
    """Take one step of SGD on the mean square of the outputs, and return the module in eval mode."""
    torch.manual_seed(network.seed)
    module.train()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LEARNING_RATE)
    outputs = call_module(module, network.calibration_inputs()[0])
    sum(t.square().mean() for t in outputs if t.is_floating_point()).backward()
    optimizer.step()
    return module.eval()


def call_module(module: Any, given: Any) -> list[torch.Tensor]:
    """Call a module with an element of ``tracing_inputs`` and return the tensors among its results."""
    if isinstance(given, dict):
        results = module(**given)
    else:
        results = module(*given) if isinstance(given, tuple) else module(given)
    return [t for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


def record_network(
    network: Network, variants: Iterable[str] = tuple(VARIANTS), targets: Iterable[str] = tuple(TARGETS)
) -> dict[str, Any]:
    """Return the files, outputs and state dict of each variant for each target.

    Tensors are indices into one list for the network, as most of them are in every state dict.
    """
    names, found = list(targets), dict[str, Any]()
    tensors: dict[str, int] = {}
    for variant in variants:
        found[variant] = {name: _record_variant(network, variant, name, tensors) for name in names}
    return {"variants": found, "tensors": [*tensors]}


def _record_variant(network: Network, variant: str, target: str, tensors: dict[str, int]) -> dict[str, Any]:
    """Make one variant for one target and return its record. Tensors that are new get the next index."""
    torch.manual_seed(network.seed)
    try:
        module = VARIANTS[variant](network, TARGETS[target])
    except Exception as error:  # noqa: BLE001 - combinations that are not supported are recorded as well
        return {"error": describe_error(error)}
    shapes = [f"{name}: {_dtype(t)}{[*t.shape]}" for name, t in module.state_dict().items()]
    indices = [tensors.setdefault(shape, len(tensors)) for shape in shapes]
    outputs = _attempt("outputs", lambda: _digest_outputs(module, network))
    return {"state_dict": indices, **outputs, **_export(module, target)}


def _export(module: Any, target: str) -> dict[str, Any]:
    """Export and save a module, and return the digests of all files, or the errors in their place."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in EXPORTED_FILES.get(target, ("model.onnx",)):
            found |= _attempt(file, lambda file=file: module.clika_export(folder / file))
        found |= _attempt("module.clika", lambda: module.clika_save(folder / "module.clika"))
        failed = {file: error for file, error in found.items() if isinstance(error, dict)}
        return {"files": {**describe_files(folder), **failed}}


def _attempt(name: str, action: Callable[[], Any]) -> dict[str, Any]:
    """Return the result of an action under a name, or its error as a dict."""
    try:
        return {name: action()}
    except Exception as error:  # noqa: BLE001 - recorded, as above
        return {name: {"error": describe_error(error)}}


def _digest_outputs(module: Any, network: Network) -> str:
    """Return the digest of the outputs on all calibration inputs."""
    return shorten_digest(hashlib.sha256(b"".join(_output_bytes(module, network))))


def _output_bytes(module: Any, network: Network) -> Iterator[bytes]:
    with torch.no_grad():
        for given in network.calibration_inputs():
            for tensor in call_module(module, given):
                yield f"{_dtype(tensor)}{[*tensor.shape]}".encode() + tensor.contiguous().numpy().tobytes()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
