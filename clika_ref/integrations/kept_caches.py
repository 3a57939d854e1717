"""Caches that a runtime keeps between the calls of an artifact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from clika_ref.compiled.runners import to_cpu
from clika_ref.compiled.state import CompiledModule
from clika_ref.compiled.stateful_runners import CACHE_PREFIX, find_state, load_stateful_runner
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError
from clika_ref.core.targets import Target

CACHE_NAME = "past_key_values"
"""The argument of a model, and its result."""


class KeptCache:
    """A cache in a runtime, as transformers handles it: it knows the number of positions and reorders samples."""

    is_compileable = False

    def __init__(self, given: Any, positions: int) -> None:
        self.given, self._positions, self._rows = given, positions, None

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers passes it
        """Return the number of positions seen."""
        return self._positions

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let each sample of the next call continue another one, ``int64[batch]``, of the last call."""
        self._rows = beam_idx if self._rows is None else self._rows.index_select(0, beam_idx)

    def advance(self, positions: int) -> torch.Tensor | None:
        """Count the positions of the next call; return the samples that it continues, or None if they are the same."""
        rows, self._rows = self._rows, None
        self._positions += positions
        return rows


class CachedArtifact:
    """Calls of an artifact as the module is called; its runtime keeps the cache.

    A call with the cache that the last call got or returned continues it, as a model updates its cache. Any other
    cache, or None, replaces it.
    """

    def __init__(self, module: CompiledModule, target: Target, artifact: Artifact) -> None:
        self._module, self._names, self._outputs = module, artifact.input_names, artifact.output_names
        self._state, self._runner = find_state(artifact), load_stateful_runner(target, artifact)
        self._other_outputs = [name for name in self._outputs if name not in self._state.values()]
        self._first: dict[str, torch.Tensor] = {}
        self._kept: KeptCache | None = None

    def find_kept(self, cache: Any) -> KeptCache | None:
        """Return the cache in the runtime if a call with this one continues it."""
        kept = self._kept
        return kept if kept is not None and cache is not None and cache in (kept, kept.given) else None

    def __call__(self, given: Mapping[str, Any], positions: int) -> Any:
        """Return the result of a call; its cache is a `KeptCache`.

        Args:
            given: the arguments by name.
            positions: the number of positions that the call adds to the cache.

        Raises:
            ModelError: the arguments do not match the graph, or a later call replaced the cache.
            TargetError: the runtime fails.
        """
        cache = given.get(CACHE_NAME)
        kept = self.find_kept(cache)
        if kept is None and isinstance(cache, KeptCache):
            raise ModelError(f"{CACHE_NAME}: a later prompt replaced this cache. Start again from the whole text.")
        signature = self._module.clika_state.signature
        empty = {**given, CACHE_NAME: None} if kept is not None else given
        inputs = signature.graph_inputs(signature.flatten((), empty))
        named = dict(zip(self._names, inputs, strict=True))
        if kept is None:
            self._runner.start(to_cpu([named[name] for name in self._state]))
            self._first = {name: x for name, x in named.items() if name.startswith(CACHE_PREFIX)}
            kept = self._kept = KeptCache(cache, 0 if cache is None else int(cache.get_seq_length()))
        others = [x for name, x in {**named, **self._first}.items() if name not in self._state]
        results = self._runner(to_cpu(others), kept.advance(positions))
        return self._unflatten([x.to(others[0].device) for x in results], kept)

    def _unflatten(self, results: Sequence[torch.Tensor], kept: KeptCache) -> Any:
        """Return the result of the model, with the first cache in place of the next one, and then the kept one."""
        following = {output: self._first[name] for name, output in self._state.items()}
        named = {**following, **dict(zip(self._other_outputs, results, strict=True))}
        found = self._module.clika_state.signature.unflatten([named[name] for name in self._outputs], {})
        found[CACHE_NAME] = kept
        return found
