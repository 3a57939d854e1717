"""Convert the user's inputs to calls of the model: one pair of args and kwargs per element."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from clika_ref.capture.caches import flatten_caches, run_with_caches
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.inputs_catcher import clika_move_to_device
from clika_ref.core.errors import ModelError
from clika_ref.torch_internals.trees import pytree

ForwardFn = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

TRACING_INPUT, CALIBRATION_BATCH = "tracing input", "calibration batch"
"""What messages call an element of ``tracing_inputs``, and one of ``calibration_inputs``."""


@dataclass(frozen=True)
class ModelCall:
    """One call of the model."""

    args: tuple[Any, ...]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    label: str = "the input"
    """Which of the user's inputs it is, for messages: ``calibration batch 4``."""

    def copy(self) -> ModelCall:
        """Return the same call on copies of its tensors, which the model may overwrite."""
        args, kwargs = pytree.tree_map_only(torch.Tensor, _copy_tensor, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def run(self, function: Callable[..., Any]) -> Any:
        """Return the result of a function of the model, with a tree in place of each cache."""
        return run_with_caches(function, self.args, self.kwargs)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def make_calls(
    callee: TracedCallable,
    inputs: Iterable[Any] | None,
    transform: Callable[[Any], Any] | None = None,
    forward_fn: ForwardFn | None = None,
    kind: str = TRACING_INPUT,
) -> list[ModelCall]:
    """Convert the given inputs to calls, on the device of the model.

    Args:
        callee: the model, as returned by `make_callable`.
        inputs: one element for each call.
        transform: applied to each element first.
        forward_fn: calls the model on an element, as in `clika_compile`.
        kind: what messages call an input.

    Raises:
        ModelError: there are no inputs, or one does not fit the model.
    """
    check_iterable(inputs)
    assert inputs is not None
    calls = [
        make_call(callee, element, transform, forward_fn, f"{kind} {number}")
        for number, element in enumerate(inputs, 1)
    ]
    if not calls:
        raise ModelError(
            "the tracing inputs have no elements. Give at least one; two that differ in a dim make that dim dynamic."
        )
    return calls


def check_iterable(inputs: Any, name: str = "inputs") -> None:
    """Check that ``inputs`` is an iterable of elements. It does not iterate: that starts the workers of a DataLoader.

    Raises:
        ModelError: it is not iterable, or it is a single input.
    """
    iterable = hasattr(type(inputs), "__iter__") or hasattr(type(inputs), "__getitem__")
    if not iterable or isinstance(inputs, torch.Tensor | Mapping | str):
        given = "None" if inputs is None else f"a {type(inputs).__name__}"
        raise ModelError(
            f"{name} are {given}. Give a list with one element for each call, for example [x] or [(x, mask), (y, "
            "mask)]."
        )


@contextlib.contextmanager
def _add_error_context(argument: str, label: str) -> Iterator[None]:
    """Add a note to errors raised by a user function: its argument name and the input."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {argument}, called for {label}")
        raise


def check_weights(module: torch.nn.Module) -> None:
    """Check that a graph can hold all weights of a module.

    Raises:
        ModelError: a weight is sparse, quantized, or uninitialized.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ModelError(
                f"weight {name!r} has no shape yet. Call the model once, so that lazy modules are initialized, then "
                "compile."
            )
        check_tensor(tensor, f"weight {name!r}")


def make_call(
    callee: TracedCallable,
    element: Any,
    transform: Callable[[Any], Any] | None = None,
    forward_fn: ForwardFn | None = None,
    label: str = "the input",
) -> ModelCall:
    """Convert an element to a call: transform, pack, move to the device, and pass through ``forward_fn``."""
    if transform is not None:
        with _add_error_context("data_transform_fn", label):
            element = transform(element)
    packed = pack_arguments(callee.parameters, convert_arrays(flatten_caches(element), label))
    device = next((t.device for t in [*callee.module.parameters(), *callee.module.buffers()]), None)
    if device is not None:
        packed = ModelCall(clika_move_to_device(packed.args, device), clika_move_to_device(packed.kwargs, device))
    if forward_fn is not None:
        with _add_error_context("forward_fn", label):
            packed = record_call(callee, packed, forward_fn)
    for leaf in pytree.tree_leaves((packed.args, packed.kwargs)):
        if isinstance(leaf, torch.Tensor):
            check_tensor(leaf, label)
    return replace(packed, label=label)


def is_array(leaf: Any) -> bool:
    """Whether a value is a NumPy array."""
    numpy = sys.modules.get("numpy")  # torch works without NumPy
    return numpy is not None and isinstance(leaf, numpy.ndarray)


def convert_arrays(element: Any, label: str) -> Any:
    """Return an element with tensors in place of NumPy arrays. They share memory if tensors can have its layout.

    Arrays that are read-only, reversed, or of the other byte order are copied.

    Raises:
        ModelError: an array has no numbers.
    """

    def convert(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        is_shared = leaf.flags.writeable and leaf.dtype.isnative and min(leaf.strides, default=0) >= 0
        try:
            return torch.from_numpy(leaf if is_shared else leaf.astype(leaf.dtype.newbyteorder("=")))
        except TypeError as error:
            raise ModelError(
                f"{label} has a NumPy array of dtype {leaf.dtype}, which no tensor can hold. "
                "Convert it to numbers, for example with data_transform_fn."
            ) from error

    has_arrays = any(map(is_array, pytree.tree_leaves(element)))
    return pytree.tree_map(convert, element) if has_arrays else element


def pack_arguments(parameters: inspect.Signature, element: Any) -> ModelCall:
    """Return one element as args and kwargs: a tensor, a tuple, a dict, or a tuple that ends in a dict.

    A dict holds keyword arguments, unless ``forward`` takes a dict as its argument: then the keys do not name
    parameters.
    """
    if isinstance(element, dict):
        return ModelCall((), dict(element)) if _is_keyword_dict(parameters, element) else ModelCall((element,), {})
    if isinstance(element, tuple) and not hasattr(element, "_fields"):
        if element and isinstance(element[-1], dict) and _is_keyword_dict(parameters, element[-1], len(element) - 1):
            return ModelCall(element[:-1], dict(element[-1]))
        return ModelCall(element, {})
    return ModelCall((element,), {})


def _is_keyword_dict(parameters: inspect.Signature, mapping: Mapping[Any, Any], taken: int = 0) -> bool:
    kinds = {name: parameter.kind for name, parameter in parameters.parameters.items()}
    if not all(isinstance(key, str) for key in mapping):
        return False
    by_position = [name for name, kind in kinds.items() if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    free = by_position[taken:] + [name for name, kind in kinds.items() if kind == inspect.Parameter.KEYWORD_ONLY]
    if (
        inspect.Parameter.VAR_KEYWORD in kinds.values()
    ):  # **kwargs takes any key, but required parameters must still be present
        return all(n in mapping for n in free if _is_required(parameters.parameters[n]))
    return bool(mapping) and all(key in free for key in mapping)


def _is_required(parameter: inspect.Parameter) -> bool:
    spread = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not spread


class _CallSeenError(BaseException):
    """Unwinds out of ``forward_fn`` after the model call. Not an Exception, so that handlers do not swallow it."""


class _CallRecorder:
    """Replaces the model inside ``forward_fn``: records the first call and ends there.

    A call of the traced function by name, of ``forward`` or of the compiled method, is also a call of the model.
    """

    def __init__(self, callee: TracedCallable) -> None:
        self._traced_callable = callee
        self.call: ModelCall | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.call = ModelCall(args, kwargs)
        raise _CallSeenError

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._traced_callable.module, name)
        traced = name == "forward" or (inspect.ismethod(value) and value == self._traced_callable.function)
        return self if traced else value


def record_call(callee: TracedCallable, packed: ModelCall, forward_fn: ForwardFn) -> ModelCall:
    """Return the call of the model that ``forward_fn`` makes, without running the model.

    Raises:
        ModelError: ``forward_fn`` returns without calling the model.
    """
    recorder = _CallRecorder(callee)
    try:
        forward_fn(recorder, packed.args, packed.kwargs)
    except _CallSeenError:
        assert recorder.call is not None
        return recorder.call
    raise ModelError(
        f"forward_fn {forward_fn!r} returned without calling the model. It is called as forward_fn(model, args, "
        "kwargs), and must call the model."
    )


def check_tensor(tensor: torch.Tensor, where: str) -> None:
    """Check that a graph can hold a tensor.

    Raises:
        ModelError: the tensor is sparse, quantized, or on the meta device.
    """
    if tensor.is_meta:
        raise ModelError(
            f"{where} is on the device 'meta', where tensors have no elements. Create it on a real device; for a "
            "model, use model.to_empty(device='cpu') and load_state_dict."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else f"sparse ({tensor.layout})"
        remedy = "dequantize()" if tensor.is_quantized else "to_dense()"
        raise ModelError(f"{where} is a {kind} tensor of shape {list(tensor.shape)}. Call .{remedy} on it first.")
