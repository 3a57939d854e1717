"""Dynamo's graphs: their inputs, the names of their weights, and a graph rebuilt as a module."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.fx.traceback import preserve_node_meta

from clika_ref.compiled.weights import register_weight
from clika_ref.partial_graphs.dynamo import list_number_outputs, read_size_source
from clika_ref.torch_internals.dynamo import tag_activation_checkpoint
from clika_ref.torch_internals.tracing import ENTER_AUTOCAST, ENTER_INFERENCE_MODE, EXIT_AUTOCAST, EXIT_INFERENCE_MODE

INPUT_KINDS = ("tensor", "integer", "number")
"""The kinds of placeholders that are inputs of a rebuilt module."""


@dataclass(frozen=True)
class Placeholder:
    """One input of Dynamo's graph: a weight, a tensor or integer of the caller, a size, or a float.

    Dynamo passes a float as a 0-d tensor. Its kind is "constant", or "number" if it differs between calls.
    """

    kind: str
    name: str
    tensor: str = ""
    dim: int = 0

    @classmethod
    def of(cls, node: fx.Node) -> Placeholder:
        """Return the input that a placeholder of Dynamo's graph stands for."""
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        text = "" if source is None else str(source.name)
        size = read_size_source(source)
        if size is not None:
            return cls("size", text, *size)
        if getattr(argument, "pass_arg_as_tensor", False):
            return cls("constant", text)
        if _WEIGHT_SOURCE.search(text):
            return cls("weight", text)
        fake = node.meta.get("example_value")
        return cls("integer" if isinstance(fake, torch.SymInt | int) else "tensor", text)


def read_placeholders(program: fx.GraphModule) -> list[Placeholder]:
    """Return the inputs of a graph; a size of a tensor that is no input itself is an integer."""
    found = [Placeholder.of(node) for node in program.graph.find_nodes(op="placeholder")]
    tensors = {p.name for p in found if p.kind == "tensor"}
    return [replace(p, kind="integer") if p.kind == "size" and p.tensor not in tensors else p for p in found]


_WEIGHT_SOURCE = re.compile(r"\._(parameters|buffers)\['[^']+'\]$")
"""Matches the end of a Dynamo source that names a parameter or buffer."""

_MODULE_DICTS = ("_modules", "_parameters", "_buffers")
"""The dicts of a module that hold its parts: steps in Dynamo's sources that qualified names omit."""


def weight_names(sources: Sequence[str]) -> dict[str, str]:
    """Return a unique qualified name for each of Dynamo's weight sources.

    A name consists of the words of its source, without a root that all share, such as ``L['self']``.

    >>> weight_names(["L['self']._modules['fc']._parameters['weight']"])
    {"L['self']._modules['fc']._parameters['weight']": 'fc.weight'}
    >>> list(weight_names(["G['a']._parameters['weight']", "L['p'].b._parameters['weight']"]).values())
    ['a.weight', 'p.b.weight']
    """
    words = {s: _words_of(s)[1:] for s in sources}
    shared = len({(s[0], path[0]) for s, path in words.items()}) == 1
    tree: _NameTree = {}
    return {source: ".".join(_insert_name(path[shared:], tree)) for source, path in words.items()}


_NameTree = dict[str, Any]
"""Names assigned so far: a submodule is another tree, a weight is None."""


def _insert_name(path: Sequence[str], tree: _NameTree) -> list[str]:
    """Insert a weight into a tree of names; return its path, with a suffix where a name is taken.

    The keys 1 and '1' of a dict, or 'a-b' and one 'b' of 'a', map to one path, and a weight has no children.
    """
    *scopes, leaf = [f"{w}_" if hasattr(_EMPTY_MODULE, w) else w for w in path]
    placed: list[str] = []
    for scope in scopes:
        spelling = next(s for s in _name_candidates(scope) if tree.get(s, {}) is not None)
        placed.append(spelling)
        tree = tree.setdefault(spelling, {})
    spelling = next(s for s in _name_candidates(leaf) if s not in tree)
    tree[spelling] = None
    return [*placed, spelling]


def _name_candidates(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{count}" for count in itertools.count(1))


_EMPTY_MODULE = nn.Module()
"""Its attributes are names that a submodule cannot have, though a variable can."""


_REGION_CONTEXTS: dict[Any, Callable[..., contextlib.AbstractContextManager[Any]]] = {
    ENTER_AUTOCAST: torch.autocast,
    ENTER_INFERENCE_MODE: torch.inference_mode,
}
"""The functions by which Dynamo's graph enters a region, with the equivalent context managers."""


class _RegionInterpreter(fx.Interpreter):
    """Runs Dynamo's graph. Regions are entered as context managers, since tracers record the bare calls at most."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program)
        self._regions: list[contextlib.AbstractContextManager[Any]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._regions:  # after an error inside a region
                self._regions.pop().__exit__(None, None, None)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _REGION_CONTEXTS:
            self._regions.append(_REGION_CONTEXTS[target](*args))
            return self._regions[-1].__enter__()
        if target in (EXIT_AUTOCAST, EXIT_INFERENCE_MODE):
            return self._regions.pop().__exit__(None, None, None)
        if target is tag_activation_checkpoint:  # keep the results instead of recomputing them in backward
            return _RegionInterpreter(args[0]).run(*args[1:])
        return super().call_function(target, args, kwargs)


class RebuiltModule(nn.Module):
    """Dynamo's graph as a module: weights under their names, tensors as arguments, sizes read from tensors.

    It returns a number that is computed from elements of tensors as a 0-d tensor.
    """

    _program: fx.GraphModule
    _number_outputs: Mapping[int, type[int | float]]
    _placeholders: Sequence[Placeholder]
    _constants: dict[str, float]

    def __init__(self, program: fx.GraphModule, placeholders: Sequence[Placeholder], values: Sequence[Any]) -> None:
        super().__init__()
        self.__dict__["_program"] = program
        self.__dict__["_number_outputs"] = list_number_outputs(program)
        self.__dict__["_placeholders"] = placeholders
        self.__dict__["_constants"] = {
            p.name: float(v) for p, v in zip(placeholders, values, strict=True) if p.kind == "constant"
        }
        for p, value in zip(placeholders, values, strict=True):
            if p.kind == "weight":
                register_weight(self, p.name, value, is_saved=True)

    def forward(self, *inputs: Any) -> Any:
        """Run the graph on its tensors and integers, in order."""
        given = iter(inputs)
        tensors: dict[str, Any] = {}
        for p in self._placeholders:
            if p.kind in INPUT_KINDS:
                tensors[p.name] = next(given)
        arguments = [self._argument(p, tensors) for p in self._placeholders]
        # Traced calls have the lines and modules of the graph's own.
        is_kept = not torch.compiler.is_dynamo_compiling()
        with preserve_node_meta() if is_kept else contextlib.nullcontext():
            results = [*_RegionInterpreter(self._program).run(*arguments)]
            for index, kind in self._number_outputs.items():
                dtype = torch.float64 if kind is float else torch.int64
                results[index] = torch.full((), results[index], dtype=dtype)
        return tuple(results)

    def _argument(self, p: Placeholder, tensors: Mapping[str, Any]) -> Any:
        if p.kind == "weight":
            *path, leaf = p.name.split(".")
            return getattr(self.get_submodule(".".join(path)), leaf)
        if p.kind == "size":
            return tensors[p.tensor].shape[p.dim]
        return torch.tensor(self._constants[p.name], dtype=torch.float64) if p.kind == "constant" else tensors[p.name]


def set_module_paths(program: fx.GraphModule, names: Mapping[str, str]) -> None:
    """Replace the module paths of a graph's calls, which are relative to local variables, by those in the model.

    Args:
        program: the graph; several models or layers may share it, so the original paths are kept in its metadata.
        names: the name in the model of each weight, by Dynamo's source. Calls of modules that share no weight with
            these keep no path.
    """
    bases = dict(_split_common_suffix(_words_of(source), name.split(".")) for source, name in names.items())
    # The module whose code this is, if all weights are reached from it.
    frame = {"frame": (".".join(*bases.values()), nn.Module)} if len(bases) == 1 and any(bases.values()) else {}
    for node in program.graph.nodes:
        original = node.meta.setdefault("clika_module_stack", node.meta.get("nn_module_stack") or {})
        paths = {key: (_rebase(_words_of(str(path)), bases), kind) for key, (path, kind) in original.items()}
        node.meta["nn_module_stack"] = frame | {key: (path, kind) for key, (path, kind) in paths.items() if path}


def _words_of(source: str) -> tuple[str, ...]:
    """Return the words of a source, without the dicts of modules."""
    return tuple(w for w in re.findall(r"\w+", source) if w not in _MODULE_DICTS)


def _split_common_suffix(source: Sequence[str], name: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return both sequences without the words that they end in alike."""
    shared = 0
    while shared < min(len(source), len(name)) and source[-1 - shared] == name[-1 - shared]:
        shared += 1
    return tuple(source[: len(source) - shared]), tuple(name[: len(name) - shared])


def _rebase(words: Sequence[str], bases: Mapping[tuple[str, ...], tuple[str, ...]]) -> str:
    """Return the path in the model of a module that is reached from one of the roots; empty if there is none."""
    roots = [root for root in bases if tuple(words[: len(root)]) == root]
    if not roots:
        return ""
    longest = max(roots, key=len)
    return ".".join([*bases[longest], *words[len(longest) :]])


def fingerprint_graph(program: fx.GraphModule) -> str:
    """Return a hash of the calls of a graph, with its constants but without names and weights."""
    return hashlib.sha256("\n".join(_describe_calls(program)).encode()).hexdigest()[:16]


def _describe_calls(program: fx.GraphModule) -> Iterator[str]:
    numbers = {node: f"%{index}" for index, node in enumerate(program.graph.nodes)}

    def describe(leaf: Any) -> str:
        if isinstance(leaf, fx.Node):
            return numbers[leaf]
        if callable(leaf) and hasattr(leaf, "__qualname__"):
            return f"{getattr(leaf, '__module__', '')}.{leaf.__qualname__}"
        return re.sub(r" at 0x[0-9a-f]+", "", repr(leaf))

    for node in program.graph.nodes:
        if node.op == "placeholder":
            yield f"placeholder {Placeholder.of(node).kind}"
            continue
        target = describe(node.target) if callable(node.target) else str(node.target)
        arguments = map_aggregate((node.args, node.kwargs), describe)
        yield f"{node.op} {target} {arguments}"
        body = getattr(program, target, None) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _describe_calls(body)
