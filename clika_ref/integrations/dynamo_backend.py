"""The ``torch.compile`` backend ``clika``: Dynamo's graph is rebuilt as a module and passed to `clika_compile`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

from torch import fx

from clika_ref.api import clika_compile
from clika_ref.capture.inputs import check_iterable
from clika_ref.compiled.weights import register_weight
from clika_ref.core.errors import ModelError
from clika_ref.module import clika_module, running
from clika_ref.module.clika_module import ClikaModule
from clika_ref.partial_graphs.dynamo import copy_with_dynamic_dims, read_break, read_position
from clika_ref.partial_graphs.dynamo_graph import (
    Placeholder,
    RebuiltModule,
    read_placeholders,
    set_module_paths,
    weight_names,
)
from clika_ref.settings.compile_options import BaseDeploymentSettings, ClikaCompileOptions
from clika_ref.settings.settings import Settings
from clika_ref.settings.validation import format_hint
from clika_ref.torch_internals.tracing import tracing

CLIKA_ACE_OPTIONS = ("settings", "example_inputs", "train_dataloader", "apply_on_data_fn")
"""Options of clika-ace releases of 2024, which have newer names in `clika_compile`."""

EXAMPLE_OPTIONS = ("example_inputs", "tracing_inputs")
"""Further calls to trace, in addition to Dynamo's own: the name in clika-ace, and that in `clika_compile`."""

COMPILE_OPTIONS = (
    "deployment_settings",
    "data_transform_fn",
    "quantization_settings",
    "layer_quantization_settings",
    "calibration_inputs",
    "logs_dir",
    "clika_compile_options",
    "discard_input_model",
    "is_model_pretrained",
    "graph_name",
    *(field.name for field in dataclasses.fields(ClikaCompileOptions)),
)
"""Arguments of `clika_compile` that the backend accepts as options."""

WHOLE_MODEL_ARGUMENTS = ("calibration_inputs", "example_inputs")
"""Arguments that hold inputs of the whole model."""

COMPILED_FILES = (running.__file__, clika_module.__file__)
"""The files with the ``forward`` of compiled modules."""

DECIDED_BY_DYNAMO = {
    "dynamic": "Dynamo decides which dims are dynamic. Pass it to torch.compile itself.",
    "fullgraph": "Dynamo decides where graphs end. Pass it to torch.compile itself.",
    "disable": "Dynamo decides whether to compile. Pass it to torch.compile itself.",
    "skip_eval_set_mode": "Dynamo traces the current mode of the model. Call model.eval() or model.train() first.",
    "forward_fn": "Dynamo traces your call of the model. Call it that way, or use clika_compile.",
    "is_dry_run": "Dynamo needs a compiled function to call. Use clika_compile(model, ..., is_dry_run=True).",
}
"""The remaining arguments of `clika_compile`, with the reason why they are no options and the alternative."""


def clika(program: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:  # noqa: ARG001 - torch passes them by this name
    """Compile the graph that Dynamo captured; PyTorch finds this backend under the name ``clika``.

    ``torch.compile(model, backend="clika", options={...})`` takes the options of `clika_compile`, and ``settings``,
    ``example_inputs``, ``train_dataloader`` and ``apply_on_data_fn`` of older releases. With `Settings`,
    ``stats_steps`` batches of the loader are read.

    Each graph of a model that Dynamo breaks is compiled in float. Quantize such a model with
    ``clika_compile(model, fullgraph=False)``.

    Raises:
        ModelError: the model is compiled already; Dynamo broke it into several graphs and data for the whole is given;
            or an option is unknown.
    """
    _reject_compiled()
    options = translate_options(kwargs.pop("options", None) or {})
    _reject_options_for_pieces(program, options)
    placeholders = read_placeholders(program)
    names = weight_names([p.name for p in placeholders if p.kind == "weight"])
    set_module_paths(program, names)
    placeholders = [replace(p, name=names[p.name]) if p.kind == "weight" else p for p in placeholders]
    return _CompiledCallable(program, placeholders, options)


def _reject_compiled() -> None:
    """Reject the graph of a module that is compiled already; a part of another model may be one."""
    if read_position().file in COMPILED_FILES:
        raise ModelError(
            "cannot compile the module with the backend 'clika': it is a ClikaModule already. Compile the original "
            "model, or pass this one to torch.compile with another backend."
        )


def translate_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of the backend to arguments of `clika_compile`.

    Raises:
        ModelError: an option is unknown, or needs an unavailable feature.
    """
    known = (*COMPILE_OPTIONS, "tracing_inputs", *CLIKA_ACE_OPTIONS)
    for name in options:
        if name in DECIDED_BY_DYNAMO:
            raise ModelError(f"the backend 'clika' does not take the option {name!r}: {DECIDED_BY_DYNAMO[name]}")
        if name not in known:
            raise ModelError(
                f"the backend 'clika' has no option {name!r}.{format_hint(name, known)} Choose from {', '.join(known)}."
            )
    result = {k: v for k, v in options.items() if k in COMPILE_OPTIONS}
    result = {**_translate_settings(options), **result}
    _reject_adapters(result)
    if options.get("apply_on_data_fn") is not None:
        result["data_transform_fn"] = options["apply_on_data_fn"]
    for name in EXAMPLE_OPTIONS:
        if options.get(name) is not None:
            check_iterable(options[name], name)
            result["example_inputs"] = [*result.get("example_inputs", ()), *options[name]]
    return result


def _translate_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options ``settings`` and ``train_dataloader`` to arguments of `clika_compile`."""
    settings, loader = options.get("settings"), options.get("train_dataloader")
    if isinstance(settings, str | PathLike):
        settings = Settings.load_from_path(settings)
    data: dict[str, Any] = {} if loader is None else {"calibration_inputs": loader}
    if isinstance(settings, Settings):
        if loader is not None:
            check_iterable(loader, "train_dataloader")
            steps = settings.training_settings.stats_steps
            data["calibration_inputs"] = loader[:steps] if isinstance(loader, list) else _take_first(loader, steps)
        return {**settings.compile_arguments(), **data}
    if settings is None:
        return data
    if isinstance(settings, BaseDeploymentSettings):
        return {"deployment_settings": settings, **data}
    raise ModelError(
        f"settings is {settings!r}. Give Settings, the path of a YAML file with them, or deployment settings, "
        "such as DeploymentSettings_ONNXRuntime_ONNX()."
    )


def _take_first(loader: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield the first elements of a loader; its workers start only on iteration."""
    yield from itertools.islice(loader, count)


def _reject_adapters(arguments: Mapping[str, Any]) -> None:
    options = arguments.get("clika_compile_options")
    in_options = isinstance(options, ClikaCompileOptions) and options.global_lora_settings is not None
    if in_options or arguments.get("global_lora_settings") is not None:
        raise ModelError(
            "the backend 'clika' does not support adapters: their parameters would be inaccessible. Compile with "
            "clika_compile(model, clika_compile_options=ClikaCompileOptions(global_lora_settings=...)), and pass "
            "the result to torch.compile."
        )


def _reject_options_for_pieces(program: fx.GraphModule, options: Mapping[str, Any]) -> None:
    """Reject options with inputs of the whole model if the graph is one of its pieces, which take other inputs."""
    found = read_break(program)
    given = [name for name in WHOLE_MODEL_ARGUMENTS if options.get(name) is not None]
    if given and (found is not None or read_position().is_resumed):
        where = f"at {found.position}: {found.reason}" if found else f"before {read_position()}"
        raise ModelError(
            f"cannot compile the model with {given[0]}: Dynamo breaks it into several graphs, {where}. Compile with "
            "clika_compile(model, fullgraph=False), which runs the data through the whole model, or remove the break. "
            f"{found.advice if found else ''}".rstrip()
        )


class _CompiledCallable:
    """The callable for Dynamo: compiles on the first call, and again when a float constant of the graph has changed."""

    def __init__(self, program: fx.GraphModule, placeholders: list[Placeholder], options: dict[str, Any]) -> None:
        self.program = program
        self.placeholders = placeholders
        self.options = options
        self.modules: dict[tuple[float, ...], ClikaModule] = {}

    def __call__(self, *values: Any) -> Any:
        constants = tuple(float(v) for p, v in self._select(values, "constant"))
        module = self.modules.get(constants)
        if module is None:
            module = self.modules[constants] = self._compile(values)
        for p, weight in self._select(values, "weight"):
            register_weight(module, p.name, weight, is_saved=True)
        return module(*self._inputs(values))

    def _select(self, values: Sequence[Any], kind: str) -> list[tuple[Placeholder, Any]]:
        return [(p, v) for p, v in zip(self.placeholders, values, strict=True) if p.kind == kind]

    def _inputs(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(v for p, v in zip(self.placeholders, values, strict=True) if p.kind in ("tensor", "integer"))

    def _compile(self, values: Sequence[Any]) -> ClikaModule:
        """Compile for the sizes that Dynamo left dynamic, marked on copies of the inputs of this call."""
        options = dict(self.options)
        examples = options.pop("example_inputs", [])
        inputs = self._mark_dynamic(values)
        calls = [inputs, *(e if isinstance(e, tuple) else (e,) for e in examples)]
        if any(p.kind == "integer" for p in self.placeholders):
            calls.append(tuple(i + 1 if isinstance(i, int) else i for i in inputs))
        with tracing(None):
            module = clika_compile(
                RebuiltModule(self.program, self.placeholders, values),
                tracing_inputs=calls,
                skip_eval_set_mode=True,
                **options,
            )
        assert isinstance(module, ClikaModule)
        return module

    def _mark_dynamic(self, values: Sequence[Any]) -> tuple[Any, ...]:
        result: list[Any] = []
        for p, value in zip(self.placeholders, values, strict=True):
            if p.kind == "tensor":
                dims = [size.dim for size in self.placeholders if size.kind == "size" and size.tensor == p.name]
                result.append(copy_with_dynamic_dims(value.detach(), dims))
            elif p.kind == "integer":
                result.append(int(value))
        return tuple(result)
