"""Language models of transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.breadth.architecture import SEQUENCE_PAIRS, TEXT_LENGTHS, Architecture, make_text, make_tokens
from benchmarks.breadth.tiny_configurations import build_tiny

Options = Mapping[str, Mapping[str, Any]]

ENCODERS: Options = {
    **{key: {} for key in ("Albert", "Bert", "Camembert", "ConvBert", "DebertaV2", "DistilBert", "Electra", "Ernie")},
    **{key: {} for key in ("FNet", "LayoutLM", "MegatronBert", "MPNet", "RemBert", "Roberta", "RoFormer", "Splinter")},
    **{key: {} for key in ("XLM", "XLMRoberta", "XLMRobertaXL", "XLNet")},
    "BigBird": {"attention_type": "original_full"},
    "CLIPText": {"max_position_embeddings": 32},
    "Deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "Funnel": {"block_sizes": [1, 1]},
    "Longformer": {"attention_window": 4},
    "MobileBert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "ModernBert": {"local_attention": 8},
    "Nystromformer": {"num_landmarks": 4, "segment_means_seq_len": 4},
    "SqueezeBert": {"embedding_size": 32},
    "T5Encoder": {},
}
"""Encoders (``...Model``), with attributes of their configuration."""

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DECODERS: Options = {
    **{key: {} for key in ("BitNet", "Bloom", "CodeGen", "Cohere", "Exaone4", "Falcon", "Gemma", "Gemma2", "Gemma3")},
    **{key: {} for key in ("Glm", "GPTBigCode", "GPTJ", "GPTNeoX", "Granite", "Helium", "Llama", "Mistral", "Mpt")},
    **{key: {} for key in ("Nemotron", "Olmo", "Olmo2", "OPT", "Persimmon", "Phi", "Phi3", "Qwen2", "Qwen3")},
    **{key: {} for key in ("SmolLM3", "StableLm", "Starcoder2")},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "Mamba": {"state_size": 4, "time_step_rank": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "Mixtral": {"num_local_experts": 4},
    **dict.fromkeys(("Olmoe", "Qwen2Moe", "Qwen3Moe"), EXPERTS),
    "Rwkv": {"attention_hidden_size": 32},
}
"""Decoders (``...ForCausalLM``)."""

SEQUENCE_TO_SEQUENCE: Options = {
    **{key: {} for key in ("Bart", "Blenderbot", "M2M100", "MBart", "MT5", "Pegasus", "ProphetNet", "T5")},
    "LED": {"attention_window": 4},
}
"""Encoders with decoders (``...ForConditionalGeneration``)."""


CHUNK_MULTIPLES = ((1, 8), (2, 16)), (3, 12)
"""Reformer pads a text whose length is no multiple of its chunk length, which needs another graph."""


def _make_text_pair(batch: int, length: int, decoder_length: int) -> dict[str, Tensor]:
    return {**make_text(batch, length), "decoder_input_ids": make_tokens(batch, decoder_length)}


def list_architectures() -> Mapping[str, Architecture]:
    """Return the entries, by name."""

    def make(name: str, head: str, **options: Any) -> Architecture:
        return Architecture(
            functools.partial(build_tiny, name + head, **options), make_text, TEXT_LENGTHS, "batch, length"
        )

    reformer = {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "axial_pos_embds": False,
        "attention_head_size": 8,
        "feed_forward_size": 64,
    }
    return {
        **{name: make(name, "Model", **options) for name, options in ENCODERS.items()},
        **{name: make(name, "ForCausalLM", **options) for name, options in DECODERS.items()},
        "CTRL": make("CTRL", "LMHeadModel"),
        "GPT2": make("GPT2", "LMHeadModel"),
        "Reformer": replace(make("Reformer", "ModelWithLMHead", **reformer), sizes=CHUNK_MULTIPLES),
        **{
            name: Architecture(
                functools.partial(build_tiny, f"{name}ForConditionalGeneration", **options),
                _make_text_pair,
                SEQUENCE_PAIRS,
                "batch, both lengths",
            )
            for name, options in SEQUENCE_TO_SEQUENCE.items()
        },
        "Marian": Architecture(
            functools.partial(build_tiny, "MarianMTModel", decoder_vocab_size=100),
            _make_text_pair,
            SEQUENCE_PAIRS,
            "batch, both lengths",
        ),
    }
