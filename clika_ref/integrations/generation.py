"""Generation by transformers, with a compiled module, or its artifact in a runtime, in place of the model."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportIncompatibleMethodOverride=false
# Methods of the mixin have no complete annotations.

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch

from clika_ref.compiled.weights import device_of_weights
from clika_ref.core.artifacts import Artifact
from clika_ref.core.errors import ModelError
from clika_ref.integrations.kept_caches import CACHE_NAME, CachedArtifact
from clika_ref.module.clika_module import ClikaModule

try:
    from transformers import GenerationConfig, GenerationMixin, PretrainedConfig
except ImportError as error:
    raise ImportError("generation needs transformers. Run: pip install 'clika-ref[generation]'") from error

TOKENS_NAMES, STATES_NAME = ("input_ids", "decoder_input_ids"), "encoder_outputs"

ASSISTED_OPTIONS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
"""Options of assisted decoding, which takes tokens back from a cache."""


class GenerationAdapter(GenerationMixin):
    """Generates tokens as a model of transformers does, by its compiled module.

    Greedy search, sampling, beams, padded batches, streamers and stopping criteria are those of transformers.

    Args:
        module: compiled with a cache of transformers in its tracing inputs, or with None and one with positions.
        config: the configuration of the original model.
        generation_config: by default that of the configuration.
        artifact: what `ClikaModule.clika_export` returned; its target's runtime then computes and keeps the cache, not
            the module.
        encoder: for models with an encoder, the module that returns its states, such as ``model.get_encoder()``.

    Raises:
        ModelError: the module takes no cache.
    """

    main_input_name = "input_ids"
    base_model_prefix = ""
    _is_stateful = False
    _supports_cache_class = True

    def __init__(
        self,
        module: ClikaModule,
        config: PretrainedConfig,
        *,
        generation_config: GenerationConfig | None = None,
        artifact: Artifact | None = None,
        encoder: torch.nn.Module | None = None,
    ) -> None:
        signature = module.clika_state.signature
        if CACHE_NAME not in signature.arguments:
            raise ModelError(
                f"cannot generate with {module.clika_state.graph.name}: it was compiled without {CACHE_NAME}. Give "
                "tracing inputs of two calls: the first one with None, the other one with a cache that has positions."
            )
        self.module, self.config, self._encoder = module, config, encoder
        self.generation_config = generation_config or GenerationConfig.from_model_config(config)
        specs = dict(zip(signature.arguments, signature.specs, strict=True))
        self._states_are_tuple = STATES_NAME in specs and specs[STATES_NAME].type is tuple
        self.forward: Any = functools.partial(self._run)
        self.forward.__signature__ = signature.call_signature  # transformers reads the names of the arguments
        self._artifact = None if artifact is None else CachedArtifact(module, _target_of(module, artifact), artifact)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._artifact is None:
            return self.module(*args, **kwargs)
        given = self.forward.__signature__.bind(*args, **kwargs).arguments
        return self._artifact(given, next(given[name].shape[1] for name in TOKENS_NAMES if name in given))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or the artifact, without the arguments that it was not compiled with."""
        known = self.module.clika_state.signature.arguments
        given = {name: value for name, value in kwargs.items() if name in known}
        if STATES_NAME in given and self._states_are_tuple:
            given[STATES_NAME] = (given[STATES_NAME][0],)
        with torch.no_grad():
            return self.forward(*args, **self._fill_mask(given, known))

    def _fill_mask(self, given: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
        """Return the arguments with a mask and positions, which transformers omits without padding."""
        tokens, cache = given.get("input_ids"), given.get(CACHE_NAME)
        if tokens is None or self.config.is_encoder_decoder:
            return given
        kept = self._artifact.find_kept(cache) if self._artifact is not None else None
        cache = cache if kept is None else kept
        seen = 0 if cache is None else int(cache.get_seq_length())
        batch, length = tokens.shape
        if "attention_mask" in known and given.get("attention_mask") is None:
            given["attention_mask"] = tokens.new_ones(batch, seen + length)
        if "position_ids" in known and given.get("position_ids") is None:
            given["position_ids"] = torch.arange(seen, seen + length, device=tokens.device).expand(batch, -1)
        return given

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate tokens as `transformers.GenerationMixin.generate` does; return ``int64[batch, tokens]``.

        Args:
            inputs: the prompts, ``int64[batch, length]``, padded on the left.
            args: passed on.
            kwargs: passed on, such as ``max_new_tokens``, ``num_beams`` and ``attention_mask``.

        Raises:
            ModelError: assisted decoding is requested, or a batch is padded and the module was compiled without a mask.
        """
        configured = kwargs.get("generation_config") or self.generation_config
        for name in ASSISTED_OPTIONS:
            if kwargs.get(name) is not None or getattr(configured, name, None) is not None:
                raise ModelError(f"{name}: assisted decoding is not supported. Generate without it.")
        if not self.config.is_encoder_decoder:
            self._check_padding(kwargs.get("attention_mask"))
        mixin: Any = super()
        return mixin.generate(inputs, *args, **kwargs)

    def _check_padding(self, mask: torch.Tensor | None) -> None:
        known = self.module.clika_state.signature.arguments
        lacking = [name for name in ("attention_mask", "position_ids") if name not in known]
        if lacking and mask is not None and not bool(mask.all()):
            raise ModelError(
                f"attention_mask: the batch is padded, but the module was compiled without {' and '.join(lacking)}. "
                "Include them in the tracing inputs."
            )

    def get_encoder(self, modality: str | None = None) -> torch.nn.Module:  # noqa: ARG002 - transformers passes it
        """Return the encoder.

        Raises:
            ModelError: none was given.
        """
        if self._encoder is None:
            raise ModelError("the encoder is missing. Pass GenerationAdapter(encoder=model.get_encoder()).")
        return self._encoder

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return device_of_weights(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    def can_generate(self) -> bool:
        """Return True."""
        return True

    def get_experts_implementation(self) -> str:
        """Return a name that transformers does not change: the experts are part of the graph."""
        return "compiled"

    def is_remote_code(self) -> bool:
        """Return False: the code of the model does not run."""
        return False


def _target_of(module: ClikaModule, artifact: Artifact) -> Any:
    targets = module.clika_state.registry.targets
    if artifact.target not in targets:
        raise ModelError(f"no plugin provides the target {artifact.target!r} of {artifact.path}. Install it.")
    return targets[artifact.target]
