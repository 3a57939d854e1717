"""``ClikaModule``: what compilation returns, an ``nn.Module`` that behaves like the original and can be exported."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from clika_ref.autocast import outside_autocast, surrounding_autocast
from clika_ref.capture.inputs import pack
from clika_ref.capture.origins import is_users
from clika_ref.core.errors import ModelError
from clika_ref.core.execution import interpret, read_sizes, to_fx
from clika_ref.core.ir import Graph
from clika_ref.core.operators import Operator
from clika_ref.core.registry import Registry, load_registry
from clika_ref.core.symbols import resolve
from clika_ref.core.targets import Artifact
from clika_ref.exporting.examples import telling_example
from clika_ref.exporting.export import ExportRequest, export
from clika_ref.exporting.interface import chosen_names
from clika_ref.generic import find_operator, torchlib_operator
from clika_ref.input_checks import check_inputs
from clika_ref.reporting.log import CompilationLog
from clika_ref.saving.graph_format import graph_from_json, graph_to_json, same_graph
from clika_ref.saving.signature_format import signature_from_json, signature_to_json
from clika_ref.settings import BaseDeploymentSettings, ClikaCompileOptions, DeploymentSettings_ONNXRuntime_ONNX
from clika_ref.signature import ConstantLeaf, NumberLeaf, Signature
from clika_ref.weights import (
    Weights,
    bind_weights,
    cast_weight,
    named_tensors,
    non_persistent,
    register_weights,
    weight_places,
)

PATTERN_LIMIT = 4096
"""Combinations of input shapes whose check is remembered; beyond, the check is made again."""

UNSAVED = frozenset({"_clika_forward", "_clika_run", "_clika_registry"})
"""Attributes that copies make anew."""


class ClikaModule(nn.Module):
    """A compiled model: the original's call signature, parameters and ``state_dict`` keys around a graph.

    Made by `clika_compile`. An empty one, ``ClikaModule()``, takes the graph from the ``_extra_state`` of a state dict.
    It computes in train mode what was traced: dropout is off and batch norm uses its running statistics, unless
    ``skip_eval_set_mode=True`` kept the model in training mode while it was traced.
    """

    _clika_run: Callable[..., Sequence[torch.Tensor]]

    def __init__(
        self,
        graph: Graph | None = None,
        signature: Signature | None = None,
        *,
        persistent: frozenset[str] = frozenset(),
        registry: Registry | None = None,
    ) -> None:
        super().__init__()
        self._clika_registry = registry
        self._clika_deployment: BaseDeploymentSettings | None = None
        self._clika_options = ClikaCompileOptions()
        self._clika_logs_dir: Any = None
        self._clika_timings: dict[str, float] = {}
        self._clika_examples: list[list[torch.Tensor]] = []
        if graph is not None and signature is not None:
            register_weights(self, graph, persistent)
            self._install(graph, signature)

    @property
    def forward(self) -> Any:  # type: ignore[override] - a callable all the same
        """The method that computes the graph, under the original's signature, which tools inspect."""
        # Bound anew at each access: copies of ``__dict__``, which DataParallel makes, must not call another module.
        return MethodType(self.__dict__.get("_clika_forward", ClikaModule._require_graph), self)

    def clika_configure(
        self, deployment: BaseDeploymentSettings | None, options: ClikaCompileOptions, logs_dir: Any = None
    ) -> None:
        """Choose where exports go to, their options, and the folder of their logs."""
        self._clika_deployment, self._clika_options, self._clika_logs_dir = deployment, options, logs_dir

    def clika_remember(self, examples: list[list[torch.Tensor]], timings: Mapping[str, float]) -> None:
        """Keep the inputs to compare artifacts on, and the seconds that compilation took; neither is saved."""
        self._clika_examples = examples
        self._clika_timings.update(timings)

    # Running

    def _install(self, graph: Graph, signature: Signature) -> None:
        self._clika_graph = graph
        self._clika_signature = signature
        self._clika_accepted: set[Any] = set()
        elements = {s.side.name for s in graph.symbols.values() if s.side.dim is None}
        self._clika_numbers = [v.name in elements for v in graph.inputs]
        self.__dict__["_clika_run"] = compile_graph(graph)
        self.__dict__["_clika_forward"] = _forward_under(signature.parameters)

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        signature = self._clika_signature
        inputs = signature.graph_inputs(signature.flatten(args, kwargs))
        self._check(inputs)
        if signature.autocast is None:
            results = self._clika_run(self, *inputs)
        else:
            self._warn_of_autocast(signature.autocast)
            with outside_autocast():
                results = self._clika_run(self, *inputs)
        sizes = read_sizes(self._clika_graph, inputs) if signature.needs_sizes else {}
        return signature.unflatten(results, sizes)

    def _warn_of_autocast(self, compiled_in: str) -> None:
        """Warn where the autocast regions around a call would cast otherwise than the graph, which holds its casts."""
        around = surrounding_autocast()
        if around != compiled_in:
            compiled, called = (f"in torch.autocast ({text})" if text else "outside" for text in (compiled_in, around))
            msg = (
                f"{self.graph.name} is called {called}, but was compiled {compiled}, and computes as it would there; "
                "compile it where it is called"
            )
            warnings.warn(msg, stacklevel=2 if torch.compiler.is_compiling() else _level_of_the_user())

    def _check(self, inputs: list[torch.Tensor]) -> None:
        """Refuse inputs that the graph was not made for: it would return wrong numbers in silence."""
        if torch.compiler.is_compiling():
            return  # sizes are symbols then; the tracer's own guards take over
        numbers = self._clika_numbers
        key = tuple((int(t) if n else t.shape, t.dtype) for t, n in zip(inputs, numbers, strict=True))
        if key in self._clika_accepted:
            return
        check_inputs(self._clika_graph, inputs)
        if len(self._clika_accepted) < PATTERN_LIMIT:
            self._clika_accepted.add(key)

    @property
    def graph(self) -> Graph:
        """The stored graph, its constants bound to the current parameters and buffers."""
        graph = self._require_graph()
        bind_weights(self, graph)
        return graph

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each stage of compilation and of the last export."""
        return self._clika_timings

    def _require_graph(self, *_: Any, **__: Any) -> Graph:
        graph = self.__dict__.get("_clika_graph")
        if graph is None:
            msg = "this ClikaModule is empty; compile a model, or load a state_dict that a ClikaModule saved"
            raise ModelError(msg)
        return graph

    # Export

    def clika_generate_dummy_inputs(self) -> dict[str, Any]:
        """Return inputs of the traced shapes by argument, nested as in a call: ``module(**inputs)``."""
        return dummy_inputs(self._require_graph(), self._clika_signature)

    def clika_export(
        self,
        file: Any,
        example_inputs: Any = None,
        input_names: list[str] | None = None,
        output_names: list[str] | None = None,
        dynamic_axes: Mapping[str, Any] | None = None,
    ) -> Artifact:
        """Write the artifact for the deployment target to ``file`` and return what is known of it.

        Args:
            file: where to write.
            example_inputs: one element as in ``tracing_inputs``; the artifact is compared with this module on it. By
                default on the tracing inputs.
            input_names: names of the inputs, in order; None or empty: those of the signature.
            output_names: names of the outputs, in order.
            dynamic_axes: ``{input: [axis, ...]}`` or ``{input: {axis: name}}``: the sides to leave dynamic. By default
                all that were found dynamic; a side that is not listed is fixed to its length in ``example_inputs``.
                Sides of one name are equal in every call of the artifact.

        Raises:
            ModelError: an argument does not fit the model, or ``file`` cannot be written.
            TargetError: the target cannot run the model, or disagrees with this module.

        """
        self._require_exportable()
        inputs = chosen_names("input_names", input_names, [v.name for v in self._clika_graph.inputs])
        defaults = self._clika_signature.output_names(inputs)
        request = ExportRequest(
            self.graph.clone(),
            file,
            self._examples(example_inputs),
            self._graph_outputs,
            inputs,
            chosen_names("output_names", output_names, defaults, taken=inputs),
            dynamic_axes,
            self._clika_options,
        )
        deployment = self._clika_deployment or DeploymentSettings_ONNXRuntime_ONNX()
        with CompilationLog.open(self._clika_logs_dir) as log, outside_autocast():
            artifact = export(request, deployment, self._clika_registry or load_registry(), log)
            self._clika_timings.update(log.timings)
        return artifact

    def _require_exportable(self) -> None:
        graph = self.graph
        if not graph.outputs:
            msg = f"{graph.name} returns no tensor, so there is nothing to export"
            raise ModelError(msg)
        moved = [
            (v, v.data.dtype) for v in graph.constants.values() if v.data is not None and v.data.dtype != v.type.dtype
        ]
        if moved:
            value, dtype = moved[0]
            raise cast_weight(value.name, dtype, value.type.dtype)

    def _examples(self, given: Any) -> list[list[torch.Tensor]]:
        if given is None and self._clika_examples:
            return self._clika_examples
        if given is None:
            dummy = self._as_inputs((), self.clika_generate_dummy_inputs())
            return [list(telling_example(self.graph, dummy))]
        call = pack(self._clika_signature.parameters, given)
        return [self._as_inputs(call.args, call.kwargs)]

    def _as_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        inputs = self._clika_signature.graph_inputs(self._clika_signature.flatten(args, kwargs))
        check_inputs(self._clika_graph, inputs)
        return inputs

    def _graph_outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Compute the graph on copies of inputs, leaving buffers as they are."""
        with torch.no_grad():
            outputs, _ = interpret(self.graph, [t.clone() for t in inputs])
        return outputs

    def clika_initialize_algorithms(self) -> None:
        """Calibrate and quantize later; not available yet.

        Raises:
            ModelError: always, in this version.
        """
        msg = "quantization is not available in this version: clika_initialize_algorithms() has nothing to initialize"
        raise ModelError(msg)

    # Saving

    def get_extra_state(self) -> torch.Tensor:
        """Return the graph, the signature and the buffers that the original does not save, as bytes."""
        graph = self._require_graph()
        document = {
            "graph": graph_to_json(graph),
            "signature": signature_to_json(self._clika_signature),
            "persistent": sorted(named_tensors(self).keys() - non_persistent(self).keys()),
            "parameters": {n: p.requires_grad for n, p in self.named_parameters(remove_duplicate=False)},
        }
        tensors = {n: t.detach().cpu().contiguous() for n, t in non_persistent(self).items()}
        blob = safetensors.torch.save(tensors, {"clika": json.dumps(document, separators=(",", ":"))})
        return torch.frombuffer(bytearray(blob), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Leave the graph as it is: it is rebuilt before the weights are loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load weights, as a module of its own or as a part of another; what PyTorch calls for every module.

        An empty module first rebuilds itself from the ``_extra_state``. A state dict of the original model is accepted
        too: what compression added keeps its values.
        """
        key = f"{prefix}_extra_state"
        if "_clika_graph" not in self.__dict__:
            if key not in state_dict:
                self._require_graph()
            self._rebuild({k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)})
        elif key in state_dict:
            self._require_same_graph(state_dict[key])
        for name, value in self.state_dict().items():
            if name == "_extra_state" or name.startswith("clika."):
                state_dict.setdefault(f"{prefix}{name}", value)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _require_same_graph(self, state: torch.Tensor) -> None:
        document, _ = _read_extra_state(state)
        if not same_graph(document["graph"], graph_to_json(self._clika_graph)):
            msg = "the state dict holds another graph than this module; load it into an empty ClikaModule()"
            raise ModelError(msg)

    def _rebuild(self, state_dict: Mapping[str, Any]) -> None:
        document, extra = _read_extra_state(state_dict["_extra_state"])
        tensors = {n: t for n in document["graph"]["constants"] if (t := state_dict.get(n, extra.get(n))) is not None}
        lacking = [name for name in document["graph"]["constants"] if name not in tensors]
        if lacking:
            msg = f"the state dict lacks {', '.join(map(repr, lacking))}, which its graph needs; load a whole one"
            raise ModelError(msg)
        registry = self._clika_registry or load_registry()
        trained: Mapping[str, bool] = document["parameters"]
        weights = {n: nn.Parameter(t.clone(), trained[n]) if n in trained else t.clone() for n, t in tensors.items()}
        graph = graph_from_json(document["graph"], _finder(registry), weights)
        register_weights(self, graph, frozenset(document["persistent"]))
        self._install(graph, signature_from_json(document["signature"]))

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in UNSAVED}
        state["_clika_examples"] = []
        if "_clika_graph" in state:
            document = {
                "graph": graph_to_json(self._clika_graph),
                "signature": signature_to_json(self._clika_signature),
            }
            state["_clika_graph"] = json.dumps(document)
            del state["_clika_signature"], state["_clika_accepted"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        text = state.pop("_clika_graph", None)
        super().__setstate__(state)
        self._clika_registry = None
        if text is not None:
            document = json.loads(text)
            graph = graph_from_json(document["graph"], _finder(load_registry()), named_tensors(self))
            self._install(graph, signature_from_json(document["signature"]))

    def extra_repr(self) -> str:
        """Show how much there is inside."""
        graph = self.__dict__.get("_clika_graph")
        return "empty" if graph is None else f"{graph.name}: {len(graph)} nodes, {len(graph.constants)} constants"


def _read_extra_state(state: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the document and the tensors of an ``_extra_state``, whose bytes are a safetensors file."""
    blob = state.cpu().numpy().tobytes()
    try:
        length = int.from_bytes(blob[:8], "little")
        document = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["clika"])
        return document, safetensors.torch.load(blob)
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        msg = f"the _extra_state of {len(blob)} bytes, which holds the graph, is damaged: {error}"
        raise ModelError(msg) from error


def _level_of_the_user() -> int:
    """Return how far above the caller the frame is that called the module, by way of whatever hooks and containers."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def _finder(registry: Registry) -> Callable[[str], Operator | None]:
    return partial(find_operator, declared=registry.operators, generic=torchlib_operator)


def _forward_under(signature: inspect.Signature) -> Callable[..., Any]:
    """Return a ``forward`` that shows a signature as its own."""

    def forward(clika_module: ClikaModule, /, *args: Any, **kwargs: Any) -> Any:
        return clika_module._call(args, kwargs)

    own = inspect.Parameter("clika_module", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = inspect.Signature([own, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward


def compile_graph(graph: Graph) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the fast form of a graph as a function of a module that holds its weights, and of its inputs."""
    code = to_fx(graph).python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, "<graph>", "exec"), namespace)  # noqa: S102 - source that FX wrote, without names of the graph
    places, run = weight_places(graph), namespace["forward"]
    return lambda module, *inputs: run(Weights(module, places), *inputs)


def dummy_inputs(graph: Graph, signature: Signature) -> dict[str, Any]:
    """Return zeros and ones of the traced shapes, constants as they were, in the structure of a call."""
    sizes = {s.name: s.example for s in graph.symbols.values() if s.example is not None}
    types = {v.name: v.type for v in graph.inputs}
    leaves: list[Any] = []
    for leaf in signature.leaves:
        if isinstance(leaf, ConstantLeaf):
            leaves.append(leaf.value)
        elif isinstance(leaf, NumberLeaf):
            leaves.append(next(s.example for s in graph.symbols.values() if s.side.name == leaf.name))
        else:
            shape = resolve(types[leaf.name].shape, sizes)
            leaves.append(torch.ones(shape, dtype=types[leaf.name].dtype))
    return signature.nested(leaves)
