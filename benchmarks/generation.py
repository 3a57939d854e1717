"""Greedy generation with the caches of transformers: equal tokens in eager, in the module and in each runtime."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - first, so that transformers imports with a torch without CUDA

# isort: split
import torch
import transformers
import typer
from transformers import DynamicCache, EncoderDecoderCache

from benchmarks.measuring import Names
from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    DeploymentSettings_OpenVINO_ONNX,
    clika_compile,
)
from clika_ref.core.artifacts import Artifact
from clika_ref.core.registry import load_registry

TOKENS, PROMPT, VOCABULARY, WIDTH, STATES = 64, 5, 256, 32, 6
SEED = 0
WEIGHT_FACTOR = 6.0

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}

WINDOW = 16
"""Length of the sliding window of Gemma3, which the tokens pass."""

RUNTIMES = {
    "onnxruntime": DeploymentSettings_ONNXRuntime_ONNX,
    "openvino": DeploymentSettings_OpenVINO_ONNX,
}

Step = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]
"""A function of new tokens and of a cache, or None; returns logits and the next cache."""


def _make_t5() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def _make_whisper() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "max_source_positions": STATES, "num_mel_bins": 8}
    parts = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_target_positions": 128}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**sizes, **parts, **heads, **tokens, tie_word_embeddings=False)
    return transformers.WhisperForConditionalGeneration(config)


def _make_gpt2() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    )


def _make_gemma() -> torch.nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    config = transformers.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=WINDOW, layer_types=kinds)
    return transformers.Gemma3ForCausalLM(config)


def _make_mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


MODELS: Mapping[str, Callable[[], torch.nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8)),
    "GPT-2": _make_gpt2,
    "Gemma3": _make_gemma,
    "Phi-3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES)),
    "Mixtral": _make_mixtral,
    "T5": _make_t5,
    "Whisper": _make_whisper,
}
"""Small models with random weights, by name."""


@dataclass(frozen=True)
class GeneratedModel:
    """A model, with the arguments of its calls."""

    model: torch.nn.Module

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the calls pass the states of an encoder."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False))

    @property
    def tokens_name(self) -> str:
        """Name of the tokens."""
        return "decoder_input_ids" if self.is_encoder_decoder else "input_ids"

    def constants(self, batch: int) -> dict[str, Any]:
        """Return the arguments that are the same in each call."""
        if not self.is_encoder_decoder:
            return {}
        return {"encoder_outputs": (torch.randn(batch, STATES, WIDTH, generator=_seeded(batch)),)}

    def make_cache(self) -> Any:
        """Return an empty cache of the class that transformers itself makes."""
        caches = [DynamicCache(config=self.model.config) for _ in range(2)]
        return EncoderDecoderCache(*caches) if self.is_encoder_decoder else caches[0]

    def tracing_inputs(self) -> list[dict[str, Any]]:
        """Return a first call without a cache, and a later one with a cache of seven positions."""
        cache, later = self.make_cache(), self.constants(1)
        with torch.no_grad():
            self.model(**later, **{self.tokens_name: _draw_tokens(1, 7)}, past_key_values=cache)
        return [
            {**self.constants(2), self.tokens_name: _draw_tokens(2, 1), "past_key_values": None},
            {**later, self.tokens_name: _draw_tokens(1, 4), "past_key_values": cache},
        ]

    def make_step(self, run: Callable[..., Any]) -> Step:
        """Return a step of the model, or of its compiled module."""

        def step(tokens: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
            with torch.no_grad():
                found = run(**self.constants(1), **{self.tokens_name: tokens}, past_key_values=past)
            return found.logits, found.past_key_values

        return step


def vary(model: torch.nn.Module) -> torch.nn.Module:
    """Return a model with larger random weights: with small ones, each token is the one before."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(WEIGHT_FACTOR)
    return model


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw_tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=_seeded(batch + length))


def generate(step: Step) -> list[int]:
    """Return the most probable tokens after a prompt, one after the other."""
    tokens, past = _draw_tokens(1, PROMPT), None
    found: list[int] = []
    for _ in range(TOKENS):
        logits, past = step(tokens, past)
        tokens = logits[:, -1:].argmax(-1)
        found.append(int(tokens))
    return found


def make_file_step(module: Any, artifact: Artifact, subject: GeneratedModel) -> Step:
    """Return a step of the artifact, which passes each ``present`` value on as that of ``past_key_values``."""
    run = load_registry().targets[artifact.target].load(artifact)
    types = {value.name: value.type for value in module.clika_state.graph.inputs}
    fixed = _names_without_cache(artifact.input_names)
    constants = [x for value in subject.constants(1).values() for x in value]

    def step(tokens: torch.Tensor, past: Any) -> tuple[torch.Tensor, Any]:
        given = dict(zip(fixed, [tokens, *constants], strict=True))
        given |= past or {name: _make_empty(types[name]) for name in artifact.input_names if name not in given}
        results = dict(zip(artifact.output_names, run([given[name] for name in artifact.input_names]), strict=True))
        following = {name.replace("present", "past_key_values"): x for name, x in results.items()}
        cache = {name: following.get(name, given[name]) for name in artifact.input_names if name not in fixed}
        return results["logits"], cache

    return step


def _names_without_cache(names: Sequence[str]) -> list[str]:
    """Return the names of the other inputs: the tokens first."""
    others = [name for name in names if not name.startswith("past_key_values")]
    return sorted(others, key=lambda name: "input_ids" not in name)


def _make_empty(kind: Any) -> torch.Tensor:
    """Return the part of an empty cache: no positions, for one sample."""
    if not kind.shape:
        return torch.zeros((), dtype=kind.dtype)
    return torch.zeros([1, *(size if isinstance(size, int) else 0 for size in kind.shape[1:])], dtype=kind.dtype)


def run(names: Names = None) -> None:
    """Generate tokens with each model; fails if any differ from eager's."""
    wrong: list[str] = []
    print(f"{TOKENS} greedy tokens after a prompt of {PROMPT}, equal to eager; one graph for all calls")
    for name, make in MODELS.items():
        if names and not any(part in name for part in names):
            continue
        torch.manual_seed(SEED)
        subject = GeneratedModel(vary(make().eval()))
        expected = generate(subject.make_step(subject.model))
        start = time.perf_counter()
        module = clika_compile(copy.deepcopy(subject.model), tracing_inputs=subject.tracing_inputs())
        seconds = time.perf_counter() - start
        found = {"module": generate(subject.make_step(module)) == expected}
        with tempfile.TemporaryDirectory() as folder:
            for runtime, settings in RUNTIMES.items():
                artifact = module.clika_export(Path(folder) / f"{runtime}.onnx", deployment_settings=settings())
                found[runtime] = generate(make_file_step(module, artifact, subject)) == expected
        shown = "  ".join(f"{place}: {'equal' if equal else 'DIFFERENT'}" for place, equal in found.items())
        print(f"{name:8} {shown}  ({len(set(expected))} different tokens; compiled in {seconds:.1f} s)", flush=True)
        wrong += [f"{name} in {place}" for place, equal in found.items() if not equal]
    if wrong:
        print(f"different tokens: {', '.join(wrong)}")
        raise typer.Exit(1)
