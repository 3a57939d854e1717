"""Train a small language model on the sources of the standard library, store it in 4 bits, and generate code with it.

Alone: `python examples/train_and_generate.py [path/to/write.onnx]`. It takes about two minutes on two cores, and needs
`pip install 'clika-ref[generation]'`.
"""

import math
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clika_ref_torchvision.kernels import use_python_kernels
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

use_python_kernels()  # transformers imports torchvision, whose own library may be of another PyTorch

# isort: split
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from clika_ref import (
    DeploymentSettings_ONNXRuntime_ONNX,
    QuantizationSettings,
    SimpleProgressBar,
    clika_compile,
)
from clika_ref.integrations.generation import GenerationAdapter
from clika_ref.reporting.tables import print_table

EVALUATION_INTERVAL = 20
"""One of this many files is not trained on."""

EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "lib2to3", "encodings", "__pycache__"}
"""Folders of tests, of tables, and of packages that are not part of the standard library."""

LENGTH, BATCH = 128, 16
"""Tokens of a sequence, and sequences of a training step."""

LEARNING_RATE, WARM_UP_SHARE = 4e-3, 0.1

END_OF_FILE = "<|end|>"

PROMPT = "def __init__(self, name):\n"

Logits = Callable[[Tensor], Tensor]
"""Logits ``[batch, length, vocabulary]`` of tokens ``[batch, length]``."""


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder whose last layer shares the weights of its table of tokens."""

    vocabulary: int
    width: int
    layers: int
    steps: int
    """Number of training steps."""

    def build(self) -> nn.Module:
        """Return the untrained decoder."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3 // 32 * 32,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // 32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config)


SIZE = ModelSize(vocabulary=4096, width=128, layers=3, steps=350)


def main(path: Path) -> None:
    """Train, store in 4 bits, export, compare and generate."""
    torch.manual_seed(0)
    training, held_out = read_sources()
    tokenizer = train_tokenizer(training, SIZE.vocabulary)
    tokens, test_tokens = encode(tokenizer, training), encode(tokenizer, held_out[:8])
    model = train(SIZE, tokens)

    calls = make_tracing_inputs(model, tokens)
    data = [
        {**calls[1], "input_ids": part[None], "past_key_values": None} for part in tokens[: 8 * LENGTH].split(LENGTH)
    ]
    float_module = clika_compile(model, tracing_inputs=calls, discard_input_model=False)
    module = clika_compile(
        model,
        tracing_inputs=calls,
        calibration_inputs=data,
        quantization_settings=QuantizationSettings(prefer_weights_only_quantization=True, weights_num_bits=[4, 8]),
        deployment_settings=DeploymentSettings_ONNXRuntime_ONNX(),
        discard_input_model=False,
    )

    path.parent.mkdir(parents=True, exist_ok=True)
    count = sum(len(text.encode()) for text in held_out[:8])
    rows: list[tuple[str, str, str]] = []
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    for name, compiled in (("float", float_module), ("4 bits", module)):
        artifact = compiled.clika_export(path.with_stem(f"{path.stem}-{name.replace(' ', '-')}"))
        adapter: Any = GenerationAdapter(compiled, model.config, artifact=artifact)  # computes in ONNX Runtime
        bits = bits_per_byte(lambda ids, run=adapter: run(input_ids=ids).logits, test_tokens, count)
        rows.append((name, f"{bits:.3f}", f"{artifact.path.stat().st_size / 1000:,.0f} KB"))
    print_table(["", "bits per byte, held out", "size"], rows, title="\n  Eight files that were not trained on")
    written = adapter.generate(prompt, max_new_tokens=64, do_sample=True, top_k=16)
    print(f"\n  After {PROMPT!r}, the file in 4 bits writes:\n")
    print(tokenizer.decode(written[0].tolist()))


def read_sources() -> tuple[list[str], list[str]]:
    """Return the sources of the standard library to train on, and those held out, split by file."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(folder).parts))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    training = [text for at, text in enumerate(texts) if text and at % EVALUATION_INTERVAL]
    return training, [text for text in texts[::EVALUATION_INTERVAL] if text]


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Return a tokenizer of byte pairs, trained on texts."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=[END_OF_FILE], show_progress=False)
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Return the tokens ``int64[n]`` of texts, each with an end."""
    return torch.tensor([token for text in texts for token in (*tokenizer.encode(text).ids, 0)])


def train(size: ModelSize, tokens: Tensor) -> Any:
    """Return a model trained on random parts of a text, in eval mode."""
    model = size.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=size.steps, pct_start=WARM_UP_SHARE, cycle_momentum=False
    )
    for _ in SimpleProgressBar(range(size.steps), desc="Training", unit="step"):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        part = tokens[starts + torch.arange(LENGTH + 1)]
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def make_tracing_inputs(model: Any, tokens: Tensor) -> list[dict[str, Any]]:
    """Return a first call without a cache, and a later one with a cache of seven positions."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[None, :7], past_key_values=cache)
    first = {"input_ids": tokens[:6].reshape(2, 3), "past_key_values": None}
    return [first, {"input_ids": tokens[None, 7:11], "past_key_values": cache}]


def bits_per_byte(compute: Logits, tokens: Tensor, count: int) -> float:
    """Return the mean information of a text of ``count`` bytes, in bits: what a compression by this model needs."""
    nats = 0.0
    for start in range(0, len(tokens) - 1, LENGTH):
        part = tokens[start : start + LENGTH + 1]
        logits = compute(part[None, :-1])
        nats += nn.functional.cross_entropy(logits[0], part[1:], reduction="sum").item()
    return nats / math.log(2) / count


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/decoder.onnx"))
