"""Comparisons of ``clika-ref compare``: two models on the same inputs, or a saved module on several targets."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import clika_ref
from clika_ref.capture.callables import make_callable
from clika_ref.capture.inputs import pack_arguments
from clika_ref.capture.signature import flatten_call
from clika_ref.compiled.lowering import target_for
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ClikaError, ModelError
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.core.types import TensorType
from clika_ref.export.model_comparison import Agreement, measure_agreement
from clika_ref.export.target_comparison import TargetComparison
from clika_ref.torch_internals.trees import pytree
from clika_ref_cli.arguments import ModelKind, find_model_kind, load_model, require_kind
from clika_ref_cli.artifacts import find_file_targets, find_inputs, make_artifact, open_target_file, read_onnx
from clika_ref_cli.command_settings import deployment_settings_for
from clika_ref_cli.data import DTYPES_BY_NAME, draw_tensor, randomize_floats, read_calls
from clika_ref_cli.exit_status import DEBUG_HINT, MisuseError, print_note
from clika_ref_cli.graphs import onnx_value_as_json
from clika_ref_cli.import_path import describe_raised

UNKNOWN_DIM_SIZE = 2
"""Size used for a dynamic dim if no inputs are given. Models often special-case size 1."""

FileInputs = Mapping[str, tuple[torch.dtype | None, Sequence[Any]]]
"""Inputs of a file by name: the dtype and the shape. Dynamic dims are not integers."""

ANY_KEYWORDS_SIGNATURE = inspect.Signature([inspect.Parameter("keywords", inspect.Parameter.VAR_KEYWORD)])


@dataclass(frozen=True)
class ComparedModel:
    """One of the two compared models: a callable that runs it, its output names, and a source of inputs."""

    run: Callable[[Any], list[torch.Tensor]]
    output_names: Sequence[str]
    draw_inputs: Callable[[], Any] | None
    """Makes inputs of the right shapes; None if the shapes are unknown."""
    unknown_dims: int = 0
    """Number of dims of these inputs with a guessed size."""


def load_compared_model(text: str, target: str | None) -> ComparedModel:
    """Load a model from a command-line argument, ready to run.

    Args:
        text: the argument.
        target: the target that runs the model, for an ONNX file.

    Raises:
        MisuseError: the argument names no model, or no plugin provides the target.
        ModelError: the model cannot be loaded.
        TargetError: the runtime is missing, or rejects the file.
    """
    kind = find_model_kind(text)
    if kind is ModelKind.ONNX:
        return _load_onnx_file(Path(text), target)
    if kind is ModelKind.TARGET_FILE:
        return _load_target_file(Path(text), target)
    if kind is ModelKind.SAVED:
        module = clika_ref.ClikaModule.clika_load(text).eval()
        return ComparedModel(
            _make_runner(text, module), (), lambda: randomize_floats(module.clika_generate_dummy_inputs())
        )
    return ComparedModel(_make_runner(text, load_model(text).eval()), (), None)


def _make_runner(name: str, module: torch.nn.Module) -> Callable[[Any], list[torch.Tensor]]:
    parameters = make_callable(module).parameters

    def run(element: Any) -> list[torch.Tensor]:
        call = pack_arguments(parameters, element).copy()
        try:
            with torch.no_grad():
                returned = module(*call.args, **call.kwargs)
        except ClikaError:
            raise
        except Exception as error:
            raise ModelError(
                f"cannot run {name} on {_describe_call(element)}: {describe_raised(error)}. {DEBUG_HINT}"
            ) from error
        return [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor)]

    return run


def _load_onnx_file(path: Path, name: str | None) -> ComparedModel:
    target = target_for(deployment_settings_for(name), load_registry())
    values = map(onnx_value_as_json, find_inputs(read_onnx(path).graph))
    inputs = {x["name"]: (DTYPES_BY_NAME.get(x["dtype"]), x["shape"]) for x in values}
    return _load_in_runtime(path, target, make_artifact(path, target.name), inputs)


def _load_target_file(path: Path, name: str | None) -> ComparedModel:
    target = target_for(deployment_settings_for(name or find_file_targets(path)[0]), load_registry())
    with tempfile.TemporaryDirectory() as folder:
        opened = open_target_file(path, target, Path(folder))
        return _load_in_runtime(path, target, opened.artifact, opened.inputs)


def _load_in_runtime(path: Path, target: Target, artifact: Artifact, inputs: FileInputs) -> ComparedModel:
    """Load a file in the runtime of a target."""
    unknown = sum(not isinstance(dim, int) for _, shape in inputs.values() for dim in shape)
    runner, named = target.load(artifact), replace(artifact, path=path)

    def run(element: Any) -> list[torch.Tensor]:
        return runner(_order_inputs(named, element))

    return ComparedModel(run, artifact.output_names, partial(_draw_inputs, path, inputs), unknown)


def _order_inputs(artifact: Artifact, element: Any) -> list[torch.Tensor]:
    """Return the tensors of a call in the order of the file's inputs: positional ones first, then keywords.

    Raises:
        ModelError: the call does not match the inputs of the file.
    """
    parts = element if isinstance(element, tuple) else (element,)
    keywords: dict[str, Any] = parts[-1] if parts and isinstance(parts[-1], dict) else {}
    positional = pytree.tree_leaves(parts[:-1] if keywords else parts)
    _, _, names, leaves = flatten_call(ANY_KEYWORDS_SIGNATURE, (), keywords)
    rest = artifact.input_names[len(positional) :]
    pairs = zip(names, leaves, strict=True)
    named = {_match_input_name(name, rest): leaf for name, leaf in pairs if isinstance(leaf, torch.Tensor | int)}
    if set(named) != set(rest) or len(positional) > len(artifact.input_names):
        names = ", ".join(artifact.input_names)
        raise ModelError(
            f"cannot run {artifact.path} on {_describe_call(element)}: its inputs are {names}. Give matching inputs."
        )
    return [torch.as_tensor(leaf) for leaf in (*positional, *(named[name] for name in rest))]


def _match_input_name(name: str, inputs: Sequence[str]) -> str:
    """Return the file's input name for a dictionary entry: the key, or ``<argument>.<key>`` for a nested one."""
    nested = [known for known in inputs if known.endswith(f".{name}")]
    return nested[0] if name not in inputs and len(nested) == 1 else name


def _describe_call(element: Any) -> str:
    """Return a readable form of a call: the dtypes and shapes of its tensors."""
    types = pytree.tree_map_only(torch.Tensor, lambda tensor: str(TensorType.of(tensor)), element)
    return str(types).replace("'", "")


def _draw_inputs(path: Path, inputs: FileInputs) -> dict[str, torch.Tensor]:
    """Return random inputs by name, with the dtypes and shapes that the file declares.

    Raises:
        MisuseError: an input has an unknown dtype, or one that PyTorch lacks.
    """
    drawn: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in inputs.items():
        if dtype is None:
            raise MisuseError(
                f"cannot draw inputs for {path}: the dtype of {name} is unknown or missing in PyTorch. Give --input."
            )
        drawn[name] = draw_tensor(dtype, [dim if isinstance(dim, int) else UNKNOWN_DIM_SIZE for dim in shape])
    return drawn


def select_calls(subjects: Sequence[ComparedModel], inputs: Sequence[str], batch_size: int | None) -> Any:
    """Return the calls to compare on: the given inputs, or else one random call that fits one of the two models.

    Raises:
        MisuseError: no inputs are given and neither model declares its inputs, or the inputs cannot be read.
    """
    if inputs:
        return read_calls(inputs, batch_size=batch_size)
    for subject in sorted(subjects, key=lambda subject: subject.unknown_dims):
        if subject.draw_inputs is not None:
            print_note("inputs are random numbers. Give --input to compare on your data.")
            return [subject.draw_inputs()]
    raise MisuseError("cannot compare: --input is missing. Give a shape such as 1x3x224x224, or a file of inputs.")


def compare_models(first: ComparedModel, second: ComparedModel, calls: Iterable[Any]) -> Agreement:
    """Compare the outputs of two models. Output names come from the first model that has them.

    Raises:
        ModelError: the models take different inputs, or return different numbers of tensors.
        TargetError: a runtime fails.
    """
    return measure_agreement(first.run, second.run, calls, first.output_names or second.output_names)


def compare_targets(text: str, targets: Sequence[str]) -> TargetComparison:
    """Compare several targets on a saved module.

    Raises:
        MisuseError: the argument is no saved module, or no plugin provides a target.
        ModelError: the module was saved without the inputs needed for the comparison.
    """
    require_kind(text, [ModelKind.SAVED], "Give two models, or a saved module and targets.")
    module = clika_ref.ClikaModule.clika_load(text)
    return module.clika_compare_targets(*map(deployment_settings_for, targets))


def agreement_as_json(agreement: Agreement, min_sqnr: float | None) -> dict[str, Any]:
    """Return the agreement of two models as plain data."""
    outputs = [
        {
            "name": output.name,
            "elements": output.elements,
            "largest": output.largest,
            "largest_difference": output.worst,
            "sqnr_db": output.sqnr,
            "same_decisions": output.decisions,
            "beyond_rounding": output.beyond_rounding,
        }
        for output in agreement.outputs
    ]
    agrees = is_in_agreement(agreement, min_sqnr)
    return {"inputs": agreement.inputs, "min_sqnr_db": min_sqnr, "agrees": agrees, "outputs": outputs}


def is_in_agreement(agreement: Agreement, min_sqnr: float | None) -> bool:
    """Whether two models agree: within float rounding, or with at least the given SQNR in dB."""
    return agreement.is_within_rounding if min_sqnr is None else agreement.sqnr >= min_sqnr
