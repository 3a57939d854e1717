"""Faults of the code around the lowerings: constants, names, casts, and tensor transfer to the runtime."""

from __future__ import annotations

import torch
from clika_ref_onnxruntime import target

from clika_ref.onnx_export import emission
from clika_ref.onnx_export.builder import OnnxBuilder
from clika_ref_conformance.mutants.seeding import Catalogue

FAULTS = Catalogue("emission")


@FAULTS.function(
    "graphs",
    "constants of equal dtype and elements are stored once, whatever their shape",
    OnnxBuilder,
    "constant",
    "graphs",
)
def _(original, self, data, dtype):
    key = (dtype, tuple(torch.as_tensor(data).flatten().tolist()))
    known = self.__dict__.setdefault("known", {})
    if key not in known:
        known[key] = original(self, data, dtype)
    return known[key]


@FAULTS.function("to", "a cast between floats is omitted", OnnxBuilder, "cast", "operators")
def _(original, self, x, dtype):
    return x if self.dtype(x).is_floating_point and dtype.is_floating_point else original(self, x, dtype)


@FAULTS.function("add", "operands of another dtype are cast through int32", OnnxBuilder, "cast", "operators")
def _(original, self, x, dtype):
    through = dtype.is_floating_point and self.dtype(x) == torch.int64
    return original(self, original(self, x, torch.int32) if through else x, dtype)


@FAULTS.function("graphs", "a returned input loses its name", emission._Emission, "_outputs", "graphs")
def _(original, self):
    for value in self.graph.outputs:
        self.values[value].name = value.name
    return original(self)


@FAULTS.function(
    "graphs", "results of later nodes are named like that of the first", emission._Emission, "_outputs", "graphs"
)
def _(original, self):
    return sorted(original(self), key=lambda value: value.name)


@FAULTS.function("add", "a non-contiguous tensor is read as contiguous", target, "to_onnxruntime", "operators")
def _(original, tensor):
    flat = tensor.as_strided((min(tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize),), (1,), 0)
    return original(flat.reshape(tensor.shape) if flat.numel() == tensor.numel() else tensor)


@FAULTS.function("add", "a view into a larger tensor is read from its start", target, "to_onnxruntime", "operators")
def _(original, tensor):
    return original(tensor.as_strided(tensor.shape, tensor.stride(), 0))


@FAULTS.function("sub", "inputs are passed in reverse order", target.OnnxRuntimeRunner, "__call__", "operators")
def _(original, self, inputs):
    return original(self, inputs[::-1])


@FAULTS.function(
    "mul",
    "a later run writes into the results of the first",
    target.OnnxRuntimeRunner,
    "__call__",
    "operators",
)
def _(original, self, inputs):
    results = original(self, inputs)
    kept = self.__dict__.setdefault("kept", results)
    return [old.copy_(new) if old.shape == new.shape else new for old, new in zip(kept, results, strict=True)]


@FAULTS.function(
    "relu",
    "the memory of a smaller result ends with elements of a larger one",
    target.OnnxRuntimeRunner,
    "__call__",
    "dynamic",
)
def _(original, self, inputs):
    results = original(self, inputs)
    kept = self.__dict__.setdefault("kept", [r.flatten() for r in results])
    for i, result in enumerate(results):
        if result.numel() > kept[i].numel():
            kept[i] = result.flatten()
        elif result.numel():
            kept[i][: result.numel() - 1] = result.flatten()[: result.numel() - 1]
            results[i] = kept[i][: result.numel()].clone().reshape(result.shape)
    return results


@FAULTS.function(
    "identity", "a result shares the memory of an input", target.OnnxRuntimeRunner, "__call__", "operators"
)
def _(original, self, inputs):
    return list(inputs[:1])
