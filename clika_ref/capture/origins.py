"""Where a traced call comes from: its modules and the user's own source line, read from the trace."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from clika_ref.core.types import Origin

TORCH = str(Path(torch.__file__).parent) + os.sep
"""Where PyTorch lies; with the separator, as torchvision lies beside it."""

HOUSE = str(Path(__file__).parents[1]) + os.sep
"""Where this package lies."""

INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages."""

GENERATED = "<eval_with_key>"
"""How the files of code are called that torch.fx writes; other such names are those of code that the user typed."""

MODULE_CALL = str(Path(TORCH, "nn", "modules", "module.py"))
"""Where ``nn.Module`` calls its ``forward``: torch skips frames of the file ``<string>``, and then names this one."""

OPERATOR_INSIDES = frozenset(
    {"_ops.py", "_subclasses", "_refs", "_prims", "_prims_common", "_meta_registrations.py", "_decomp", "_export"}
)
"""Parts of PyTorch that implement operators; an ``if`` on a size elsewhere is a branch of the model's own Python."""

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_STRICT_PATH = re.compile(r"^L\['self'\]\.?|^L__self___?|^self\.?")
_STRICT_INDEX = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")


def is_operator_inside(filename: str) -> bool:
    """Whether a file implements operators, as opposed to modules, functionals or the user's code."""
    if filename.startswith(HOUSE):  # what stands in for PyTorch's own code (`composites`)
        return True
    return filename.startswith(TORCH) and Path(filename).relative_to(TORCH).parts[0] in OPERATOR_INSIDES


def is_users(filename: str) -> bool:
    """Whether a file is the user's own, or of a library that the user builds on, rather than PyTorch's or ours."""
    return not filename.startswith((TORCH, HOUSE, GENERATED))


def is_packaged(filename: str) -> bool:
    """Whether a file belongs to an installed package, such as PyTorch, or torch.fx wrote it; others are the user's."""
    return filename.startswith((TORCH, GENERATED)) or not INSTALLED.isdisjoint(Path(filename).parts)


def short_line(filename: str, line: int) -> str:
    """Return ``package/file.py:line`` without the machine's own folders."""
    if filename.startswith(TORCH):  # which may lie elsewhere
        return f"torch/{Path(filename).relative_to(TORCH).as_posix()}:{line}"
    parts = Path(filename).parts
    for marker in INSTALLED:
        if marker in parts:
            return f"{'/'.join(parts[parts.index(marker) + 1 :])}:{line}"
    return f"{Path(filename).name}:{line}"


def origin_of(meta: dict[str, Any]) -> Origin:
    """Return the origin of a traced call from what the tracer noted of it."""
    stack = meta.get("nn_module_stack") or {}
    scopes = tuple(dict.fromkeys(p for p in (_path(str(path)) for path, _ in stack.values()) if p))
    return Origin(scopes, _lines(meta.get("stack_trace") or ""))


@lru_cache(maxsize=65536)
def _path(path: str) -> str:
    return _STRICT_INDEX.sub(r".\1", _STRICT_PATH.sub("", path)).lstrip(".")


@lru_cache(maxsize=65536)
def _lines(stack_trace: str) -> tuple[str, ...]:
    frames = [(name, int(line)) for name, line in _FRAME.findall(stack_trace)]
    own = [f for f in frames if is_users(f[0])]
    return tuple(short_line(*f) for f in own or [f for f in frames if not f[0].startswith(HOUSE)][-1:])
