"""Inputs from DATA arguments: shapes to draw random tensors for, tensor files, and functions that yield batches."""

from __future__ import annotations

import difflib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from clika_ref.serialization.graph_format import DTYPES_BY_NAME
from clika_ref.torch_internals.trees import pytree
from clika_ref_cli.arguments import call_factory
from clika_ref_cli.exit_status import DEBUG_HINT, MisuseError, print_note
from clika_ref_cli.import_path import describe_raised, find_object
from clika_ref_cli.output_paths import is_existing_path

INPUT_SYNTAX = (
    "Write dims joined by x (1x3x224x224), `scalar` for a 0-d tensor, or a file x.npy; a dtype before a colon "
    "(int64:1x128); a keyword before an equals sign (input_ids=int64:1x128); commas between the inputs of one call. Or "
    "give calls.npz, calls.safetensors, or package.module:function, which yields batches."
)

INPUT_PATTERN = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?:(?P<dtype>\w+):)?(?:(?P<shape>\d+(?:x\d+)*|scalar)|(?P<file>.+\.npy))"
)

FUNCTION_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

ARCHIVE_SUFFIXES = (".npz", ".safetensors")
"""Suffixes of files with all tensors of a call."""

PICKLE_MESSAGE = "it is no NumPy array, or contains a pickle, which could run code"

POSITION_PATTERN = re.compile(r"arr_(\d+)")
"""Name that ``numpy.savez(file, x, y)`` gives to positional tensors."""


def read_calls(texts: Sequence[str], option: str = "--input", *, batch_size: int | None = None) -> Iterable[Any]:
    """Return tracing or calibration inputs: a list, or an iterable that reads the batches of a function.

    Args:
        texts: the arguments.
        option: the option that they belong to, for messages.
        batch_size: split shapes and files into batches of this many samples; None keeps them whole.

    Raises:
        MisuseError: an argument is malformed, a file cannot be read, or there is no such function.
    """
    sources = [_read_argument(text, option, batch_size) for text in texts]
    if len(sources) == 1:
        return sources[0]
    if all(isinstance(calls, list) for calls in sources):
        return [call for calls in sources for call in calls]
    return chain.from_iterable(sources)


def note_random_calibration(texts: Sequence[str], option: str) -> None:
    """Print a note that random numbers have other ranges than the data, if an argument is only a shape."""
    drawn = [text for text in texts if _is_random_draw(text)]
    if drawn:
        print_note(f"{option} {drawn[0]} draws random numbers. Their ranges differ from those of your data.")


def _is_random_draw(text: str) -> bool:
    parts = [INPUT_PATTERN.fullmatch(part.strip()) for part in text.split(",")]
    return any(part is not None and part["shape"] is not None for part in parts)


def _read_argument(text: str, option: str, batch_size: int | None) -> Iterable[Any]:
    if Path(text).suffix in ARCHIVE_SUFFIXES:
        tensors = _read_file(Path(text), option)
        if any(tensor.dtype is torch.float64 for tensor in tensors.values()):
            print_note(f"{option} {text}: it contains float64, NumPy's default. Most models expect float32.")
        call = tensors_to_call(tensors)
    elif FUNCTION_PATTERN.fullmatch(text) and INPUT_PATTERN.fullmatch(text) is None:
        source = _load_batches(text, option)
        return iterate_named(text, source) if isinstance(source, Iterator) else NamedBatches(text, source)
    else:
        call = parse_example_input(text, option)
    return [call] if batch_size is None else split_into_batches(call, batch_size, f"{option} {text!r}")


def parse_example_input(text: str, option: str = "--input") -> Any:
    """Return one call: ``1x3x8x8``, ``int64:1x128``, ``1x3,int64:1``, ``x=1x3,mask=bool:1``, ``float32:x.npy``.

    For shapes, floats are drawn from the normal distribution and integers from {0, 1}, which are valid as indices
    almost everywhere.

    Raises:
        MisuseError: the argument is malformed, or names an unknown dtype or an unreadable file.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for part in text.split(","):
        match = INPUT_PATTERN.fullmatch(part.strip())
        if match is None:
            raise MisuseError(
                f"{option} {text!r}: cannot parse {part!r}{_explain_unreadable(part.strip())}. {INPUT_SYNTAX}"
            )
        name, tensor = match["name"], _make_tensor(match, f"{option} {text!r}")
        if name in kwargs or (name is None and kwargs):
            problem = f"{name!r} is given twice" if name else f"{part!r} has no keyword, but follows one"
            raise MisuseError(f"{option} {text!r}: {problem}. Give keywords last, each once.")
        if name is None:
            args.append(tensor)
        else:
            kwargs[name] = tensor
    return _pack_call(args, kwargs)


def _explain_unreadable(word: str) -> str:
    """Return the reason, after a colon, why an existing path cannot be read as data."""
    if not is_existing_path(word):
        return ""
    return (
        ": it is a folder"
        if Path(word).is_dir()
        else f": files with the suffix {Path(word).suffix!r} are not supported"
    )


def _pack_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Pack args and kwargs into one element of tracing inputs."""
    if args and kwargs:
        return (*args, dict(kwargs))
    return dict(kwargs) or (args[0] if len(args) == 1 else tuple(args))


def _make_tensor(part: re.Match[str], where: str) -> torch.Tensor:
    dtype, shape, file = part["dtype"], part["shape"], part["file"]
    if dtype is not None and dtype not in DTYPES_BY_NAME:
        near = difflib.get_close_matches(dtype, DTYPES_BY_NAME, n=1) or ["float32"]
        raise MisuseError(f"{where}: PyTorch has no dtype {dtype!r}. Did you mean {near[0]}?")
    if file is not None:
        (tensor,) = _read_file(Path(file), where).values()
        if dtype is None and tensor.dtype is torch.float64:
            print_note(f"{where}: it contains float64, NumPy's default. Most models expect float32:{file}.")
        return tensor if dtype is None else tensor.to(DTYPES_BY_NAME[dtype])
    return draw_tensor(
        DTYPES_BY_NAME[dtype or "float32"], [] if shape == "scalar" else [int(dim) for dim in shape.split("x")]
    )


def draw_tensor(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return random numbers: normal floats, or integers from {0, 1}."""
    if dtype.is_floating_point or dtype.is_complex:
        drawn = torch.complex64 if dtype.is_complex else torch.float32  # float8 and others cannot be drawn directly
        return torch.randn([*shape], dtype=drawn).to(dtype)
    return torch.randint(2, [*shape]).to(dtype)


def randomize_floats(call: Any) -> Any:
    """Return a call with random numbers in place of its floats."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: draw_tensor(t.dtype, t.shape) if t.is_floating_point() else t, call
    )


def _read_file(path: Path, where: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name; the tensor of a ``.npy`` file has an empty name."""
    try:
        return READERS[path.suffix](path)
    except OSError as error:
        msg = f"{where}: cannot read {path}: {error.strerror or error}. Give an existing file."
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, safetensors.SafetensorError) as error:
        reason = PICKLE_MESSAGE if "pickle" in str(error) else str(error).rstrip(".")
        msg = f"{where}: cannot read tensors from {path}: {reason}. Give a valid .npy, .npz or .safetensors file."
    raise MisuseError(msg)


def _read_npy(path: Path) -> dict[str, torch.Tensor]:
    return {"": _from_numpy(np.load(path, allow_pickle=False))}


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: _from_numpy(archive[name]) for name in archive.files}


def _from_numpy(array: Any) -> torch.Tensor:
    return torch.from_numpy(
        np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    )  # torch supports no other byte order


READERS: Mapping[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".safetensors": safetensors.torch.load_file,
}
"""Readers by suffix. None executes code: arrays of Python objects, which are pickles, are rejected."""


def tensors_to_call(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the tensors of a file as one call: ``arr_0``, ``arr_1``, ... by position, others by keyword."""
    numbered = {int(match[1]): t for name, t in tensors.items() if (match := POSITION_PATTERN.fullmatch(name))}
    args = [numbered[number] for number in sorted(numbered)]
    if "" in tensors:
        return tensors[""]
    return _pack_call(args, {name: t for name, t in tensors.items() if POSITION_PATTERN.fullmatch(name) is None})


def split_into_batches(call: Any, size: int, where: str) -> list[Any]:
    """Split a call into batches along dim 0 of its tensors; the last batch may be smaller.

    Raises:
        MisuseError: the tensors differ in the size of dim 0.
    """
    leaves, spec = pytree.tree_flatten(call)
    counts = sorted({len(leaf) for leaf in leaves if leaf.ndim})
    if len(counts) != 1:
        sizes = ", ".join(map(str, counts)) or "missing"
        raise MisuseError(
            f"{where}: cannot split it into batches: the sizes of dim 0 are {sizes}. Give tensors with equal sizes."
        )
    return [
        pytree.tree_unflatten([leaf[start : start + size] if leaf.ndim else leaf for leaf in leaves], spec)
        for start in range(0, counts[0], size)
    ]


@dataclass(frozen=True)
class NamedBatches:
    """Batches of the user that can be iterated several times. Errors name their source."""

    name: str
    source: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iterate_named(self.name, self.source)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type] - raises TypeError if it has no length, as len() does


def iterate_named(name: str, source: Iterable[Any]) -> Iterator[Any]:
    """Yield batches; errors name their source.

    Raises:
        MisuseError: the source raises.
    """
    try:
        yield from source
    except (Exception, SystemExit) as error:
        raise MisuseError(f"cannot read batches of {name}: {describe_raised(error)}. {DEBUG_HINT}") from error


def _load_batches(text: str, option: str) -> Iterable[Any]:
    module, _, path = text.partition(":")
    source: Any = find_object(module, path, MisuseError, remedy=DEBUG_HINT)
    if callable(source) and (isinstance(source, type) or not hasattr(source, "__iter__")):
        source = call_factory(text, source)
    if isinstance(source, Iterable) and not isinstance(source, torch.Tensor | Mapping | str):
        return source
    kind = type(source).__name__
    raise MisuseError(f"{option} {text}: it is of type {kind}. Name a list of batches, or a function that yields them.")


def read_single_call(texts: Sequence[str]) -> Any:
    """Return the single call of the arguments, or None if there are none.

    Raises:
        MisuseError: the arguments describe several calls, or cannot be read.
    """
    calls = [*read_calls(texts)] if texts else []
    if len(calls) > 1:
        raise MisuseError(
            f"cannot use {len(calls)} calls of --input: the comparison needs one. Give --input for one call."
        )
    return calls[0] if calls else None
