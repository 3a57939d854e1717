"""Pieces: a graph that Dynamo found, with the weights that it is called with, and its compiled form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from clika_ref.compiled.weights import register_weight, tensors_by_name
from clika_ref.core.errors import ModelError
from clika_ref.module.clika_module import ClikaModule
from clika_ref.module.running import call_with_leaves
from clika_ref.partial_graphs.dynamic_sizes import SIZE_ADVICE, CodePosition, DynamicSizes
from clika_ref.partial_graphs.dynamo import (
    copy_with_dynamic_dims,
    list_dynamic_dims,
    list_dynamic_sources,
    list_number_outputs,
    read_position,
)
from clika_ref.partial_graphs.dynamo_graph import (
    INPUT_KINDS,
    RebuiltModule,
    fingerprint_graph,
    read_placeholders,
    set_module_paths,
    weight_names,
)

MAX_RECORDED_CALLS = 8
"""Maximum number of calls of a piece to trace with, each of other shapes than those before."""


@dataclass(frozen=True)
class PieceKey:
    """What identifies a piece: the code, the point where it resumes, its graph, and the weights it is called with."""

    position: CodePosition
    graph: str
    """`fingerprint_graph` of Dynamo's graph."""
    weights: tuple[str, ...]
    """The names of its weights in the model, in the order of the graph's inputs."""

    def matches_without_lines(self, other: PieceKey) -> bool:
        """Return whether another key is the same but for the lines of its code."""
        return replace(self, position=replace(self.position, line=0, file="")) == replace(
            other, position=replace(other.position, line=0, file="")
        )


@dataclass(eq=False)
class Piece:
    """A piece of a model: its key, the calls recorded to trace it, and its compiled module."""

    key: PieceKey
    number: int
    """Its position in the order of the first calls, from 0."""
    calls: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    """Recorded inputs: tensors and integers, without weights and sizes; empty once the piece is compiled."""
    module: ClikaModule | None = None
    """The compiled piece; None if it runs in eager."""
    eager_reason: str = ""
    """Why it runs in eager."""

    @property
    def scope(self) -> str:
        """The path of the innermost module that holds all its weights; empty if there is none."""
        paths = [name.split(".")[:-1] for name in self.key.weights]
        shared: list[str] = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            shared.append(parts[0])
        return ".".join(shared)

    @property
    def label(self) -> str:
        """Where the piece is, for messages: ``layers.3, forward at model.py:8``."""
        return f"{self.scope}{', ' if self.scope else ''}{self.key.position}"

    def record(self, inputs: tuple[Any, ...], dynamic_dims: Sequence[Sequence[int]]) -> None:
        """Keep copies of the inputs of a call, if their shapes are new.

        Args:
            inputs: tensors and integers.
            dynamic_dims: the dims of each input that differ between calls, perhaps of other pieces.
        """
        shapes = _describe_shapes(inputs)
        if len(self.calls) < MAX_RECORDED_CALLS and shapes not in map(_describe_shapes, self.calls):
            marked = zip(inputs, dynamic_dims, strict=True)
            self.calls.append(
                tuple(copy_with_dynamic_dims(x, d) if isinstance(x, torch.Tensor) else x for x, d in marked)
            )


def _describe_shapes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((x.dtype, x.shape) if isinstance(x, torch.Tensor) else x for x in inputs)


class DynamoGraph:
    """A graph that Dynamo found, as the callable that Dynamo runs in its place: finds the piece, and has it run.

    Args:
        program: the graph.
        table: the pieces of the model.
    """

    def __init__(self, program: fx.GraphModule, table: PieceTable) -> None:
        self.program = program
        nodes = program.graph.find_nodes(op="placeholder")
        self.placeholders = [
            replace(p, kind="number") if p.kind == "constant" else p for p in read_placeholders(program)
        ]
        self.position = read_position()
        self.fingerprint = fingerprint_graph(program)
        self._table = table
        self._weights = [i for i, p in enumerate(self.placeholders) if p.kind == "weight"]
        self._numbers = [i for i, p in enumerate(self.placeholders) if p.kind == "number"]
        self._inputs = [i for i, p in enumerate(self.placeholders) if p.kind in INPUT_KINDS]
        self._number_outputs = list_number_outputs(program)
        self.dynamic_dims = [list_dynamic_dims(nodes[i]) for i in self._inputs]
        self._known: dict[tuple[Any, ...], tuple[Piece, list[torch.Tensor]]] = {}

    def __call__(self, *values: Any) -> Any:
        """Run the piece that these inputs of the graph belong to: tensors, weights, sizes and numbers.

        Raises:
            ModelError: there is no such piece, or an input does not fit it.
        """
        key = tuple([id(values[i]) for i in self._weights])
        found = self._known.get(key)
        if found is None:  # the second part keeps the weights alive, and with them their ids
            found = self._known[key] = self._table.find(self, values), [values[i] for i in self._weights]
        try:
            results = self._table.run(found[0], self, values)
        except ModelError as error:
            raise ModelError(f"{found[0].label}: {error}") from error
        if not self._number_outputs:
            return results
        kinds = self._number_outputs
        return tuple(kinds[index](x) if index in kinds else x for index, x in enumerate(results))

    def key_of(self, values: Sequence[Any], names: Mapping[int, str]) -> PieceKey:
        """Return the key of the piece that a call belongs to; ``names`` are those of weights by id."""
        weights = self.named_weights(values, names)
        return PieceKey(self.position, self.fingerprint, tuple(weights))

    def named_weights(self, values: Sequence[Any], names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """Return the weights in a call by their names in the model; those outside it are named by their source."""
        others = weight_names([self.placeholders[i].name for i in self._weights])
        return {names.get(id(values[i]), others[self.placeholders[i].name]): values[i] for i in self._weights}

    def inputs_of(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the tensors, integers and numbers among the values of a call, without weights and sizes."""
        return tuple(values[i] for i in self._inputs)

    def numbers_of(self, values: Sequence[Any]) -> dict[str, float]:
        """Return the floats among the values of a call, which are 0-d tensors, by their sources."""
        return {self.placeholders[i].name: float(values[i]) for i in self._numbers}

    def rebuild(self, values: Sequence[Any], names: Mapping[int, str]) -> RebuiltModule:
        """Return the graph as a module with the weights of a call, under their names in the model."""
        weights = dict(
            zip((self.placeholders[i].name for i in self._weights), self.named_weights(values, names), strict=True)
        )
        set_module_paths(self.program, weights)
        placeholders = [replace(p, name=weights[p.name]) if p.kind == "weight" else p for p in self.placeholders]
        return RebuiltModule(self.program, placeholders, values)


RunPiece = Callable[[Piece, DynamoGraph, Sequence[Any]], Any]
"""Runs a piece on the values of a call, which include weights and sizes."""


def run_in_eager(piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:  # noqa: ARG001 - a `RunPiece`
    """Run the graph of a piece in eager."""
    return graph.program(*values)


def dispatch(piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:
    """Run a piece in its compiled form, or in eager if it has none."""
    if piece.module is None:
        return run_in_eager(piece, graph, values)
    return call_with_leaves(piece.module, graph.inputs_of(values))


class PieceTable:
    """The pieces of a model, and what happens when one is called.

    Args:
        model: the model, whose names the weights get.
        pieces: the pieces, of a saved module; they are called in this order.
    """

    def __init__(self, model: torch.nn.Module, pieces: Iterable[Piece] = ()) -> None:
        self._model = model
        self._pieces = {piece.key: piece for piece in pieces}
        self.is_closed = bool(self._pieces)
        """Whether no further pieces are allowed."""
        self.is_loaded = self.is_closed
        self.run: RunPiece = dispatch
        self.found = DynamicSizes()
        """What is dynamic in the graphs so far."""
        self.sizes = DynamicSizes()
        """What Dynamo treats as dynamic in these graphs; that of the `PieceRunner`."""

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in the order of their first calls."""
        return list(self._pieces.values())

    def backend(self, program: fx.GraphModule, example_inputs: Sequence[Any]) -> DynamoGraph:  # noqa: ARG002 - Dynamo passes them
        """Return the callable for a graph, as a backend of Dynamo."""
        graph = DynamoGraph(program, self)
        self.found.add(graph.position, list_dynamic_sources(program))
        self.sizes.positions.add(graph.position)
        return graph

    def find(self, graph: DynamoGraph, values: Sequence[Any]) -> Piece:
        """Return the piece that a call belongs to, a new one unless the table is closed.

        Raises:
            ModelError: the table is closed, and has no such piece.
        """
        names = names_by_id(self._model)
        key = graph.key_of(values, names)
        piece = self._pieces.get(key)
        if piece is None and self.is_closed:
            piece = self._find_without_lines(key)
        if piece is None:
            piece = self._pieces[key] = Piece(key, len(self._pieces))
        if piece.module is not None:  # its weights may be other tensors than those it was compiled with
            for name, weight in graph.named_weights(values, names).items():
                register_weight(piece.module, name, weight, is_saved=True)
        return piece

    def _find_without_lines(self, key: PieceKey) -> Piece:
        """Return the piece with a key but for the lines of its code, which may have moved since it was saved."""
        found = [piece for piece in self._pieces.values() if piece.key.matches_without_lines(key)]
        if len(found) == 1:
            return found[0]
        if self.is_loaded:
            raise ModelError(
                f"{key.position} does not compute what was compiled: no saved piece matches it. Restore this code, or "
                "compile the model again."
            )
        if key.position in self.sizes.mismatches:
            raise ModelError(f"{key.position}: {self.sizes.mismatches[key.position]}. {SIZE_ADVICE}")
        raise ModelError(
            f"{key.position} was not compiled for this call: it takes a branch, or has a constant, that no tracing "
            "input had. Add such an input to tracing_inputs."
        )


def names_by_id(model: torch.nn.Module) -> dict[int, str]:
    """Return the name of each parameter and buffer of a model by its ``id``; the first one of shared tensors."""
    found: dict[int, str] = {}
    for name, tensor in tensors_by_name(model).items():
        found.setdefault(id(tensor), name)
    return found
