"""Pieces and their runner as JSON, shared by saved modules and exported folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from clika_ref.capture.callables import TracedCallable, make_callable
from clika_ref.compiled.weights import tensors_by_name
from clika_ref.core.errors import ModelError
from clika_ref.partial_graphs.breaks import Break
from clika_ref.partial_graphs.dynamic_sizes import CodePosition, DynamicSizes
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.pieces import Piece, PieceKey, PieceTable
from clika_ref.partial_graphs.recording import PieceRunner
from clika_ref.serialization.vocabulary import PartialKey


def runner_to_json(state: PartialState) -> dict[str, Any]:
    """Return what runs the pieces of a module again: a document for `runner_from_json`."""
    sizes = state.runner.sizes
    return {
        PartialKey.FUNCTION: "forward" if state.callee.is_forward else state.callee.function.__name__,
        PartialKey.SOURCES: [[asdict(p), sorted(names)] for p, names in sizes.sources.items()],
        PartialKey.IS_ONE_SPECIAL: sizes.is_one_special,
        PartialKey.LIBRARY_MODULES: [*state.runner.library_modules],
        PartialKey.IS_TRAINING: state.callee.module.training,
        PartialKey.BREAKS: [asdict(found) for found in state.breaks],
        PartialKey.PIECES: [
            {PartialKey.KEY: asdict(piece.key), PartialKey.EAGER_REASON: piece.eager_reason} for piece in state.pieces
        ],
    }


def runner_from_json(saved: Mapping[str, Any], model: Any) -> PartialState:
    """Return the state of a module that runs ``model`` with the saved pieces, which have no compiled form yet.

    Raises:
        ModelError: the model is no module, or lacks a weight or a method that the pieces need.
    """
    callee = _find_callee(model, saved[PartialKey.FUNCTION])
    if not saved[PartialKey.IS_TRAINING]:
        callee.module.eval()
    pieces = [
        Piece(_key_from_json(part[PartialKey.KEY]), number, eager_reason=part[PartialKey.EAGER_REASON])
        for number, part in enumerate(saved[PartialKey.PIECES])
    ]
    _check_weights(callee.module, pieces)
    table = PieceTable(callee.module, pieces)
    sources = {CodePosition(**position): {*names} for position, names in saved[PartialKey.SOURCES]}
    sizes = DynamicSizes(sources, saved[PartialKey.IS_ONE_SPECIAL])
    runner = PieceRunner(callee, table, sizes, saved[PartialKey.LIBRARY_MODULES])
    return PartialState(runner, callee, [Break(**found) for found in saved[PartialKey.BREAKS]])


def _key_from_json(saved: Mapping[str, Any]) -> PieceKey:
    key = PieceKey(**saved)
    return replace(
        key,
        position=CodePosition(**saved["position"]),
        weights=tuple(key.weights),
    )


def _find_callee(model: Any, function: str) -> TracedCallable:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(
            f"cannot load the pieces: model is a {type(model).__name__}. Pass an instance of the class that was "
            "compiled, whose code runs between the pieces."
        )
    if not hasattr(model, function):
        raise ModelError(
            f"cannot load the pieces: {type(model).__name__} has no method {function!r}, which was compiled. Pass an "
            "instance of the class that was compiled."
        )
    return make_callable(model if function == "forward" else getattr(model, function))


def _check_weights(model: torch.nn.Module, pieces: Iterable[Piece]) -> None:
    known = tensors_by_name(model)
    for piece in pieces:
        missing = [name for name in piece.key.weights if name not in known]
        if missing:
            raise ModelError(
                f"cannot load the pieces: {type(model).__name__} has no weight {missing[0]!r}, which a piece uses. "
                "Pass an instance of the class that was compiled, with the same arguments."
            )
