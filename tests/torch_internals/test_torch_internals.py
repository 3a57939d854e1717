"""Each private name of PyTorch exists in the installed version, and only `clika_ref.torch_internals` uses one."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clika_ref import torch_internals
from clika_ref.torch_internals import flex_attention

ROOT = Path(__file__).parents[2]
LIBRARIES = {"torch", "torchvision", "transformers"}
ADAPTERS = {
    "clika_ref/torch_internals": "the private names of torch",
    "plugins/torchvision/clika_ref_torchvision/tracing.py": "the private names of torchvision",
}
"""Where private names may stand, by path."""

FOLDERS = ("clika_ref", "plugins", "conformance/clika_ref_conformance")
SUBJECTS = [module.name for module in pkgutil.iter_modules(torch_internals.__path__)]
ATEN = re.compile(r"(torch\.ops\.\w+|aten|ops|prims|higher_order)\._")
"""Names of overloads: they are part of PyTorch's operator set."""

TORCH_ATTRIBUTES = {"_schema", "_buffers", "_parameters", "_modules", "_version", "_cdata", "_expr", "_overloadname"}
"""Attributes of torch's objects, which no name of a library precedes."""


def list_names() -> Iterator[tuple[str, str]]:
    """Yield the file and each dotted name that an adapter imports from torch, or reads from it."""
    for path in sorted((ROOT / "clika_ref/torch_internals").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch._"):
                yield path.name, ast.unparse(node)


def exists(name: str) -> bool:
    """Return whether a dotted name is a module, or can be read from one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            holder = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return all((holder := getattr(holder, part, None)) is not None for part in parts[count:])
    return False


def is_private(name: str) -> bool:
    """Return whether a part of a dotted name starts with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def find_private_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each private name of a library that a file imports or reads."""
    for node in ast.walk(ast.parse(source)):
        text = ""
        if isinstance(node, ast.ImportFrom) and node.module:
            text = next((f"{node.module}.{a.name}" for a in node.names if is_private(f"{node.module}.{a.name}")), "")
        elif isinstance(node, ast.Import):
            text = next((alias.name for alias in node.names if is_private(alias.name)), "")
        elif isinstance(node, ast.Attribute) and not ATEN.match(ast.unparse(node)):
            text = ast.unparse(node) if is_private(node.attr) else ""
            is_own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
            if node.attr in TORCH_ATTRIBUTES and not is_own:
                text = f"torch: {text}"
        if text.split(".")[0].split(":")[0] in LIBRARIES:
            yield node.lineno, text


@pytest.mark.parametrize(("file", "name"), sorted(set(list_names())))
def test_private_name_exists(file, name):
    assert exists(name), f"torch {torch.__version__} moved {name}: change clika_ref/torch_internals/{file}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_adapter_module_imports(subject):
    module = importlib.import_module(f"clika_ref.torch_internals.{subject}")
    assert module.__doc__


@pytest.mark.parametrize("name", flex_attention.NAMES)
def test_name_of_flex_attention_exists(name):
    module = importlib.import_module("torch.nn.attention.flex_attention")
    assert hasattr(module, name), f"torch {torch.__version__} moved {name} of {module.__name__}"
    assert flex_attention.find_module() is module


def test_missing_name_found():
    assert not exists("torch._ops.NoSuchClass")
    assert not exists("torch._no_such_module.name")
    assert exists("torch._C._set_grad_enabled")


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import OpOverload",
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "torch._C._get_schema",
        "overload._schema",
        "from transformers.models.bert.modeling_bert import _private",
    ],
)
def test_private_name_found_in_source(source):
    assert list(find_private_names(source))


@pytest.mark.parametrize(
    "source", ["torch.ops.aten._to_copy.default", "self._schema", "from torch import fx", "a._own"]
)
def test_public_name_passes(source):
    assert not list(find_private_names(source))


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_adapters_use_private_names(folder):
    paths = (path for path in (ROOT / folder).rglob("*.py") if "tests" not in path.parts)
    found = [
        f"{name}:{line}: {text}"
        for path in paths
        for name in [path.relative_to(ROOT).as_posix()]
        if not name.startswith(tuple(ADAPTERS))
        for line, text in find_private_names(path.read_text("utf-8"))
    ]
    assert not found
