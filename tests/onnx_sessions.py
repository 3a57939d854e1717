"""Sessions of ONNX Runtime for the files that tests export."""

import onnxruntime
import torch
from torch.utils import _pytree as pytree


def open_session(path):
    """Open a file in ONNX Runtime on the CPU."""
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def assert_file_equals_eager(path, model, calls):
    """Compare the results of a file in ONNX Runtime with those of the model, for each tuple of its tensors."""
    session = open_session(path)
    for call in calls:
        found = session.run(None, {i.name: x.numpy() for i, x in zip(session.get_inputs(), call, strict=True)})
        for actual, expected in zip(found, pytree.tree_leaves(model(*call)), strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected)
