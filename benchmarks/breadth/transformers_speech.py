"""Speech and audio models of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.breadth.architecture import BATCHES, SOUNDS, TEXT_LENGTHS, Architecture, make_tokens
from benchmarks.breadth.tiny_configurations import build_tiny

FRONT_END = {
    "conv_dim": [16, 16],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

WAVEFORM_MODELS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("HubertModel", "UniSpeechModel", "Wav2Vec2Model", "WavLMModel"), FRONT_END),
    "Data2VecAudioModel": {**FRONT_END, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "SEWModel": {**FRONT_END, "squeeze_factor": 2},
    "Wav2Vec2ConformerModel": {**FRONT_END, "position_embeddings_type": "rotary"},
}


def _make_waveforms(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, length)}


def _make_mono(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 1, length)}


def _make_spectrograms(batch: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 32, 16)}


def _make_features(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 32)}


def _make_dictation(batch: int, length: int) -> dict[str, Tensor]:
    return {**_make_features(batch), "decoder_input_ids": make_tokens(batch, length)}


def _make_decoder_inputs(batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": make_tokens(batch, length), "encoder_hidden_states": torch.randn(batch, 6, 32)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""
    make = functools.partial
    small = {"num_filters": 4, "codebook_size": 8, "codebook_dim": 16, "hidden_size": 16, "num_lstm_layers": 1}
    return {
        **{
            name: Architecture(make(build_tiny, name, **options), _make_waveforms, SOUNDS, "batch, length")
            for name, options in WAVEFORM_MODELS.items()
        },
        "ASTModel": Architecture(
            make(build_tiny, "ASTModel", max_length=32, num_mel_bins=16), _make_spectrograms, BATCHES, "batch"
        ),
        "EncodecModel": Architecture(make(build_tiny, "EncodecModel", **small), _make_mono, SOUNDS, "batch, length"),
        "WhisperEncoder": Architecture(make(_build_whisper_part, "encoder"), _make_features, BATCHES, "batch"),
        "WhisperForConditionalGeneration": Architecture(
            make(build_tiny, "WhisperForConditionalGeneration"), _make_dictation, TEXT_LENGTHS, "batch, length"
        ),
        "WhisperDecoder": Architecture(
            make(_build_whisper_part, "decoder"), _make_decoder_inputs, TEXT_LENGTHS, "batch, length"
        ),
    }


def _build_whisper_part(name: str) -> torch.nn.Module:
    return build_tiny("WhisperModel").get_submodule(name)
