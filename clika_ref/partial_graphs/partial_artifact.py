"""A folder with an artifact for each piece of a model: written, checked, and run with the model's code between."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from clika_ref.compiled.runners import load_runner
from clika_ref.compiled.state import CompiledState
from clika_ref.core.artifacts import Artifact, Runner
from clika_ref.core.errors import ModelError, format_count
from clika_ref.core.execution import read_sizes
from clika_ref.core.guards import check_inputs
from clika_ref.core.registry import load_registry
from clika_ref.core.targets import Target
from clika_ref.export.module_export import ExportArguments, export_module
from clika_ref.partial_graphs.breaks import BreakReport
from clika_ref.partial_graphs.partial_state import PartialState
from clika_ref.partial_graphs.piece_format import runner_from_json, runner_to_json
from clika_ref.partial_graphs.pieces import DynamoGraph, Piece
from clika_ref.reporting.log import CompilationLog
from clika_ref.serialization.atomic_files import require_path, stage_file
from clika_ref.serialization.container import check_format
from clika_ref.serialization.vocabulary import PartialKey
from clika_ref.settings.compile_options import BaseDeploymentSettings

MANIFEST = "manifest.json"
"""The name of the file that lists the pieces."""

MANIFEST_FORMAT = 2
"""Version of the manifest."""

EXAMPLE_FOLDER = "exported/model"


@dataclass(frozen=True)
class PartialArtifact:
    """An exported folder: `bind` runs its pieces in the target's runtime."""

    path: Path
    """The folder."""
    manifest: Mapping[str, Any]
    """Its pieces, their files and digests."""

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> PartialArtifact:
        """Open a folder that ``PartialClikaModule.clika_export`` wrote, and check all its files.

        Raises:
            ModelError: it is no such folder, or a file is missing or was changed.
        """
        path = require_path(folder, EXAMPLE_FOLDER, name="folder")
        try:
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            check_format("it", manifest[PartialKey.FORMAT], MANIFEST_FORMAT)
            digests = {
                name: digest
                for part in manifest[PartialKey.PIECES]
                for name, digest in part[PartialKey.DIGESTS].items()
            }
        except OSError as error:
            raise ModelError(
                f"cannot load {str(path)!r}: {MANIFEST}: {error.strerror}. Pass a folder that clika_export wrote."
            ) from error
        except (ValueError, LookupError, TypeError, AttributeError, ModelError) as error:
            raise ModelError(f"cannot load {str(path)!r}: {MANIFEST} is damaged: {error}") from error
        for name, digest in digests.items():
            if not (path / name).is_file():
                raise ModelError(f"cannot load {str(path)!r}: the piece {name} is missing. Copy the whole folder.")
            if _digest(path / name) != digest:
                raise ModelError(f"cannot load {str(path)!r}: the piece {name} was changed. Export again.")
        return cls(path, manifest)

    def bind(self, model: torch.nn.Module) -> PartialRunner:
        """Return a runner that executes the pieces in the target's runtime, and the code of the model between them.

        Args:
            model: an instance of the class that was compiled.

        Raises:
            ModelError: the model is not of that class.
            TargetError: no plugin provides the target, or its runtime is not installed.
        """
        return PartialRunner(self, model)


class PartialRunner:
    """Runs an exported folder.

    Args:
        artifact: the folder.
        model: an instance of the class that was compiled.
    """

    def __init__(self, artifact: PartialArtifact, model: torch.nn.Module) -> None:
        registry = load_registry()
        target = registry.targets.get(artifact.manifest[PartialKey.TARGET])
        if target is None:
            raise ModelError(
                f"cannot run {str(artifact.path)!r}: no plugin provides the target "
                f"{artifact.manifest[PartialKey.TARGET]!r}. Install it."
            )
        self._state = runner_from_json(artifact.manifest, model)
        parts = artifact.manifest[PartialKey.PIECES]
        self._loaded = {
            piece: _LoadedPiece.open(artifact.path, part, target)
            for piece, part in zip(self._state.pieces, parts, strict=True)
            if part[PartialKey.FILE]
        }
        self._state.runner.table.run = self._run_piece

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the arguments of the original; no gradients are computed.

        Raises:
            ModelError: the code of the model differs from the exported one, or a tensor does not fit a piece.
        """
        with torch.no_grad():
            return self._state.runner(*args, **kwargs)

    @property
    def clika_breaks(self) -> BreakReport:
        """Each graph break, where Python runs."""
        return BreakReport(self._state.breaks)

    def _run_piece(self, piece: Piece, graph: DynamoGraph, values: Sequence[Any]) -> Any:
        loaded = self._loaded.get(piece)
        return graph.program(*values) if loaded is None else loaded(graph.inputs_of(values))


@dataclass(frozen=True)
class _LoadedPiece:
    """A piece in the target's runtime, with its interface."""

    runner: Runner
    state: CompiledState

    @classmethod
    def open(cls, folder: Path, part: Mapping[str, Any], target: Target) -> _LoadedPiece:
        names = tuple(part[PartialKey.INPUT_NAMES]), tuple(part[PartialKey.OUTPUT_NAMES])
        runner = load_runner(target, Artifact(folder / part[PartialKey.FILE], target.name, *names))
        state = CompiledState()
        state.install(*state.read_graph(part))
        return cls(runner, state)

    def __call__(self, inputs: tuple[Any, ...]) -> Any:
        signature, graph = self.state.signature, self.state.graph
        tensors = signature.graph_inputs(inputs)
        check_inputs(graph, tensors)
        sizes = read_sizes(graph, tensors) if signature.needs_sizes else {}
        return signature.unflatten(self.runner(tensors) if graph.outputs else [], sizes)


def export_pieces(
    state: PartialState, folder: str | PathLike[str], deployment: BaseDeploymentSettings | None
) -> PartialArtifact:
    """Write an artifact for each piece, and a manifest with their digests; old files stay until all are written."""
    path = require_path(folder, EXAMPLE_FOLDER, name="folder")
    if path.exists() and not path.is_dir():
        raise ModelError(f"cannot write {str(path)!r}: it is a file. Pass the path of a folder.")
    if not path.parent.is_dir():
        raise ModelError(f"cannot write {str(path)!r}: {str(path.parent)!r} does not exist. Create it.")
    path.mkdir(exist_ok=True)
    chosen = state.choose_deployment(deployment)
    manifest = runner_to_json(state) | {PartialKey.FORMAT: MANIFEST_FORMAT, PartialKey.TARGET: chosen.target}
    with (
        stage_file(path / MANIFEST) as staged,
        CompilationLog.open(state.logs_dir) as log,
        log.stage("Exporting pieces") as stage,
    ):
        for piece, part in zip(state.pieces, manifest[PartialKey.PIECES], strict=True):
            stage.update(f"{piece.number + 1}/{len(state.pieces)} {piece.label}")
            part.update(_export_piece(piece, staged.parent, chosen, log))
        written = sum(bool(part[PartialKey.FILE]) for part in manifest[PartialKey.PIECES])
        staged.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        stage.done(f"{format_count(written, 'file')} in {path.name}")
    return PartialArtifact(path, manifest)


def _export_piece(
    piece: Piece, folder: Path, deployment: BaseDeploymentSettings, log: CompilationLog
) -> dict[str, Any]:
    """Export one piece into a folder; return its part of the manifest."""
    module = piece.module
    if module is None or not module.clika_state.graph.outputs:
        return {PartialKey.FILE: "", PartialKey.DIGESTS: {}}
    before = set(folder.iterdir())
    name = re.sub(r"\W+", "_", piece.scope or piece.key.position.function)
    suffix = next(iter(module.clika_state.registry.targets[deployment.target].suffixes), "")
    file = folder / f"{piece.number:03}_{name}{suffix}"
    quiet = CompilationLog()
    artifact = export_module(module, ExportArguments(file, deployment_settings=deployment), quiet, is_guarded=True)
    for warning in quiet.warnings:
        log.warning(warning)
    written = sorted(set(folder.iterdir()) - before)
    return {
        PartialKey.FILE: artifact.path.name,
        PartialKey.INPUT_NAMES: [*artifact.input_names],
        PartialKey.OUTPUT_NAMES: [*artifact.output_names],
        PartialKey.DIGESTS: {file.name: _digest(file) for file in written},
        **module.clika_state.describe_graph(),
    }


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
