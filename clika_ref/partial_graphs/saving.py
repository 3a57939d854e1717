"""Save a partial module in one file, and load it into an instance of the original class."""

from __future__ import annotations

from collections import Counter
from os import PathLike
from typing import Any

import torch

from clika_ref.core.errors import ModelError
from clika_ref.module.checkpoint import read_saved_file
from clika_ref.module.clika_module import ClikaModule
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.piece_format import runner_from_json, runner_to_json
from clika_ref.serialization.atomic_files import require_path, write_atomically
from clika_ref.serialization.container import pack_file, strip_prefix, unpack_file
from clika_ref.serialization.vocabulary import ModuleKey, PartialKey, PartialTensorPrefix
from clika_ref.settings.compile_options import ClikaCompileOptions
from clika_ref.settings.json_format import (
    deployment_from_json,
    deployment_to_json,
    settings_from_json,
    settings_to_json,
)

EXAMPLE_PATH = "saved/model"


def save_pieces(state: PartialState, path: str | PathLike[str], *, keep_float_weights: bool) -> None:
    """Save the pieces of a module, and the weights that no piece has, in one file, which is replaced atomically.

    Raises:
        ModelError: no file can be written there.
    """
    file = require_path(path, EXAMPLE_PATH)
    document = runner_to_json(state) | {
        ModuleKey.OPTIONS: settings_to_json(state.options),
        ModuleKey.DEPLOYMENT: state.deployment and deployment_to_json(state.deployment),
    }
    tensors: dict[str, torch.Tensor] = {}
    held: set[str] = set()
    readers = Counter(name for piece in state.pieces if piece.module is not None for name in piece.key.weights)
    for piece in state.pieces:
        if piece.module is not None:
            is_shared = any(readers[name] > 1 for name in piece.key.weights)  # another piece may read it in float
            contents = bytearray(piece.module.clika_serialize(keep_float_weights=keep_float_weights or is_shared))
            tensors[f"{PartialTensorPrefix.PIECES}{piece.number}"] = torch.frombuffer(contents, dtype=torch.uint8)
            held |= set(piece.key.weights)
    others = {name: x for name, x in _weights(state.callee.module).items() if name not in held}
    tensors |= {f"{PartialTensorPrefix.WEIGHTS}{name}": x.detach() for name, x in others.items()}
    with write_atomically(file) as opened:
        for part in pack_file(document, tensors):
            opened.write(part)


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model, those that its state dict holds, by name."""
    saved = model.state_dict(keep_vars=True)
    return {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if n in saved}


def load_pieces(path: str | PathLike[str], model: Any) -> PartialState:
    """Load a file of `save_pieces` into a model: its weights are overwritten, and its code runs between the pieces.

    Raises:
        ModelError: the file cannot be read, is damaged, or holds no pieces; or the model is not of the saved class.
    """
    file = require_path(path, EXAMPLE_PATH)
    blob = read_saved_file(file)
    try:
        document, tensors = unpack_file(blob)
    except ModelError as error:
        raise ModelError(f"cannot load {str(file)!r}: {error}") from error
    if PartialKey.PIECES not in document:
        raise ModelError(
            f"cannot load {str(file)!r} as pieces: it holds one graph. Load it with ClikaModule.clika_load"
        )
    state = runner_from_json(document, model)
    state.options = settings_from_json(ClikaCompileOptions, document[ModuleKey.OPTIONS])
    state.deployment = document[ModuleKey.DEPLOYMENT] and deployment_from_json(document[ModuleKey.DEPLOYMENT])
    weights = strip_prefix(tensors, PartialTensorPrefix.WEIGHTS)
    for piece in state.pieces:
        contents = tensors.get(f"{PartialTensorPrefix.PIECES}{piece.number}")
        if contents is not None:
            piece.module = ClikaModule.clika_from_serialized(contents.numpy().tobytes())
            own = dict([*piece.module.named_parameters(), *piece.module.named_buffers()])
            weights |= {name: own[name] for name in piece.key.weights if name in own}
    with torch.no_grad():
        for name, tensor in [*state.callee.module.named_parameters(), *state.callee.module.named_buffers()]:
            if name in weights:
                tensor.copy_(weights[name])
    return state
