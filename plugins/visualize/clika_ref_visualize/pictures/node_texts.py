"""Text about a node: types, operands and attributes, shortened for its box and complete for its tooltip."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from clika_ref.core.ir import Node, Value

MAX_LINE_LENGTH = 46
"""Maximum characters of a line in a box: fits a type with five named dims."""

NO_BREAK_SPACE = "\u00a0"
"""A no-break space, which keeps an attribute next to its value."""

MAX_ATTRIBUTE_LINES = 4
"""Maximum attribute lines in a box."""

MAX_INPUT_LINES = 4
"""Maximum input lines in a box, for nodes that join dozens of tensors."""


def shorten(text: str, longest: int = MAX_LINE_LENGTH) -> str:
    """Return a text, with its middle elided if it is too long.

    >>> shorten("encoder.layers.encoder_layer_0.self_attention", 25)
    'encoder.laye…lf_attention'
    """
    half = (longest - 1) // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def iterate_operands(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the operands of a node that are not None, each with its parameter name in the operator."""
    names = [parameter.name for parameter in node.op.operands]
    for position, operand in enumerate(node.inputs):
        if operand is not None:
            yield names[min(position, len(names) - 1)] if names else "x", operand


def format_attributes(node: Node) -> Iterator[str]:
    """Yield the attributes of a node that are not None: ``stride (2, 2)``."""
    for name, value in node.attrs.items():
        if value is not None:
            yield f"{name} {format_value(value)}"


def wrap_attributes(node: Node) -> list[str]:
    """Return the attributes of a node in lines, truncated to `MAX_ATTRIBUTE_LINES`."""
    texts = [text.replace(" ", NO_BREAK_SPACE) for text in format_attributes(node)]
    lines = [line.replace(NO_BREAK_SPACE, " ") for line in textwrap.wrap(", ".join(texts), MAX_LINE_LENGTH - 8)]
    if len(lines) > MAX_ATTRIBUTE_LINES:
        lines = [*lines[: MAX_ATTRIBUTE_LINES - 1], f"{lines[MAX_ATTRIBUTE_LINES - 1].rstrip(',')}, …"]
    return lines


def format_value(value: Any) -> str:
    """Return an attribute or operand that is no tensor, in readable form.

    >>> [format_value(v) for v in ((2, 2), torch.float32, "none", 1e-05)]
    ['(2, 2)', 'float32', 'none', '1e-05']
    """
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe_constant(value: Value, node: Node) -> str:
    """Return the type of a constant, with its name unless it is a parameter of the node's own module."""
    scope = node.origin.scope
    is_own = node.op.trait.weight is not None or (scope and value.name.startswith(f"{scope}."))
    return str(value.type) if is_own else f"{value.type} {value.name}"
