"""Dynamo as this project uses it: the only module with its private names. Compile with breaks, and read what it did."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.compiler.config
import torch.fx.experimental._config as fx_config
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo import utils as dynamo_utils
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.output_graph import GraphCompileReason
from torch._dynamo.source import TensorPropertySource
from torch._guards import TracingContext

from clika_ref.capture.origins import format_line
from clika_ref.core.errors import ModelError
from clika_ref.partial_graphs.breaks import Break, summarize_reason

RECOMPILE_LIMIT = 64
"""Maximum number of graphs of one function or resume function; PyTorch's own limit is 8, and it falls back to eager."""

TOTAL_RECOMPILE_LIMIT = 4096
"""Maximum number of graphs of one function in all compiled callables of the process."""

MAX_METRICS = 10_000
"""Number of compilations that Dynamo remembers while breaks are recorded."""

_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_(\d+)$")

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class CodePosition:
    """Where the code of a graph begins: a function, or the line where it resumes after a break."""

    function: str
    """The name of the function."""
    file: str
    """The path of its file."""
    line: int
    """The line where the function begins or resumes."""
    is_resumed: bool
    """Whether the graph begins after a break."""

    def is_same_function(self, other: CodePosition) -> bool:
        """Return whether both are in functions of one name in files of one name."""
        names = [(p.function, p.is_resumed, Path(p.file).name) for p in (self, other)]
        return names[0] == names[1]

    def __str__(self) -> str:
        if self.file == __file__:
            return self.function
        return f"{self.function} {'resumed ' * self.is_resumed}at {format_line(self.file, self.line)}"

    @classmethod
    def of(cls, code: CodeType) -> CodePosition:
        """Return the position of a code object, such as Dynamo's resume functions."""
        resumed = _RESUMED.match(code.co_name)
        name, line = resumed.groups() if resumed else (code.co_name, code.co_firstlineno)
        return cls(name, code.co_filename, int(line), resumed is not None)


@dataclass
class DynamicSizes:
    """The sizes and numbers that Dynamo treats as dynamic, for each function and resume function."""

    sources: dict[CodePosition, set[str]] = field(default_factory=dict[CodePosition, set[str]])
    """Entries of ``torch.compiler.config.dynamic_sources``, as `list_dynamic_sources` returns them."""
    is_one_special: bool = False
    """Whether dynamic sizes of 1 have graphs of their own: without, some broadcasts fail to trace."""
    is_complete: bool = True
    """Whether all is listed; otherwise Dynamo adds what differs between two calls."""

    def add(self, position: CodePosition, names: Iterable[str]) -> None:
        """Add entries for a function."""
        self.sources.setdefault(position, set()).update(names)

    def find(self, position: CodePosition) -> set[str]:
        """Return the entries of a function, whose file and lines may have moved since they were recorded."""
        if position in self.sources:
            return self.sources[position]
        alike = [known for known in self.sources if known.is_same_function(position)]
        return self.sources[min(alike, key=lambda known: abs(known.line - position.line))] if alike else set()


def compile_with_breaks(function: Callable[..., Any], backend: Backend, sizes: DynamicSizes) -> Callable[..., Any]:
    """Return a callable that runs a function with each of its graphs compiled by a backend, and Python between them.

    Its graphs are its own: other callables of ``torch.compile`` on the same code neither use them nor count.

    Args:
        function: a module or a function.
        backend: called with each graph that Dynamo finds.
        sizes: what is dynamic.
    """
    # The module is private, the function is documented.
    context = torch._dynamo.optimize(backend, recompile_limit=RECOMPILE_LIMIT, isolate_recompiles=True)  # noqa: SLF001
    assert isinstance(context, OptimizeContext)
    context.callback = _make_callback(context.callback, sizes)
    return context(function)


def _make_callback(callback: Any, sizes: DynamicSizes) -> Callable[..., Any]:
    """Return Dynamo's callback for code to compile, with our settings while it runs: per call they would cost more.

    Args:
        callback: Dynamo's own.
        sizes: what is dynamic.
    """

    def compile_code(frame: Any, *args: Any, **kwargs: Any) -> Any:
        named = ",".join(sorted(sizes.find(CodePosition.of(frame.f_code))))
        with (
            # Equal sizes of different inputs are different symbols.
            fx_config.patch(  # type: ignore[attr-defined] - config modules get it when they are installed
                use_duck_shape=False, backed_size_oblivious=not sizes.is_one_special
            ),
            torch.compiler.config.patch(dynamic_sources=named),  # type: ignore[attr-defined]
            dynamo_config.patch(
                automatic_dynamic_shapes=not sizes.is_complete,
                fail_on_recompile_limit_hit=True,
                suppress_errors=False,
                accumulated_recompile_limit=TOTAL_RECOMPILE_LIMIT,
            ),
        ):
            try:
                return callback(frame, *args, **kwargs)
            except FailOnRecompileLimitHit as error:
                raise ModelError(
                    f"a function of the model needs more than {RECOMPILE_LIMIT} graphs: "
                    f"{summarize_reason(str(error))}. Pass numbers that differ between calls as tensors, and do not "
                    "create modules in forward."
                ) from error

    compile_code._torchdynamo_orig_backend = callback  # type: ignore[attr-defined]  # noqa: SLF001 - it finds its own here
    return compile_code


def read_position() -> CodePosition:
    """Return the position of the code that is being compiled; for calls from a backend."""
    codes = TracingContext.get().traced_code
    return CodePosition.of(codes[0])


def read_break(program: fx.GraphModule) -> Break | None:
    """Return the break that ends a graph, if any."""
    reason = getattr(program, "compile_subgraph_reason", None)
    return _to_break(reason) if reason is not None and reason.graph_break else None


def _to_break(reason: GraphCompileReason) -> Break:
    frame = reason.user_stack[-1] if reason.user_stack else None
    text = summarize_reason(str(reason.reason))
    if frame is None:
        return Break("forward", "an unknown file", 0, text)
    return Break(_name_of(frame.name), frame.filename, frame.lineno or 0, text)


@contextlib.contextmanager
def record_breaks() -> Iterator[list[Break]]:
    """Yield a list that holds, at the end of the context, the breaks of all functions compiled in it, each once."""
    found: list[Break] = []
    known_reasons, known_metrics = (
        len(dynamo_utils.graph_break_reasons),
        set(map(id, dynamo_utils.get_compilation_metrics())),
    )
    dynamo_utils.set_compilation_metrics_limit(MAX_METRICS)
    try:
        yield found
    finally:
        compiled = [m for m in dynamo_utils.get_compilation_metrics() if id(m) not in known_metrics]
        dynamo_utils.set_compilation_metrics_limit(dynamo_utils.DEFAULT_COMPILATION_METRICS_LIMIT)
        skipped = [
            Break(
                _name_of(m.co_name or ""),
                m.fail_user_frame_filename or m.co_filename or "",
                m.fail_user_frame_lineno or m.co_firstlineno or 0,
                summarize_reason(m.fail_reason or ""),
                is_skipped=True,
            )
            for m in compiled
            if m.fail_type is not None
        ]
        breaks = [*map(_to_break, dynamo_utils.graph_break_reasons[known_reasons:]), *skipped]
        found += {(b.file, b.line, b.is_skipped): b for b in reversed(breaks)}.values()
        found.reverse()


def _name_of(code_name: str) -> str:
    """Return the name of the function that a code object belongs to."""
    resumed = _RESUMED.match(code_name)
    return resumed[1] if resumed else code_name


def read_size_source(source: Any) -> tuple[str, int] | None:
    """Return the source of the tensor and the dim whose size an input of a graph is; None for other inputs."""
    return (str(source.base.name), source.idx or 0) if isinstance(source, TensorPropertySource) else None


def list_dynamic_sources(program: fx.GraphModule) -> set[str]:
    """Return patterns of the sources of a graph that are dynamic, for numbers, and for dims with their index."""
    found: set[str] = set()
    for node in program.graph.find_nodes(op="placeholder"):
        name = str(getattr(getattr(node.meta.get("grapharg"), "source", None), "name", ""))
        if isinstance(node.meta.get("example_value"), torch.SymInt) and ".size()" not in name:
            found.add(_to_pattern(name))
        found |= {f"{_to_pattern(name)}:{dim}" for dim in list_dynamic_dims(node)}
    return found


def _to_pattern(source: str) -> str:
    r"""Return the pattern that matches a source in ``torch.compiler.config.dynamic_sources``, a list with commas.

    >>> _to_pattern("L['f(a, b)']")
    "L\\['f\\(a..b\\)'\\]$"
    """
    return re.sub(r"\\? |,", ".", re.escape(source)) + "$"


def list_dynamic_dims(placeholder: fx.Node) -> list[int]:
    """Return the dims of an input of a graph that are dynamic; none if it is no tensor."""
    value = placeholder.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return []
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]


def copy_with_dynamic_dims(x: torch.Tensor, dims: Iterable[int]) -> torch.Tensor:
    """Return a copy of a tensor with these dims marked as dynamic."""
    copy = x.detach().clone().requires_grad_(x.requires_grad)
    for dim in dims:
        torch._dynamo.mark_dynamic(copy, dim)  # noqa: SLF001 - the module is private, the function is documented
    return copy


def trace_library_forward(module: torch.nn.Module, path: str) -> Callable[..., Any]:
    """Return the ``forward`` of a library module as a function that Dynamo compiles, even if Python calls it.

    Dynamo skips code of libraries that Python calls, and compiles it as a part of other code. The function has code of
    its own, so that its graphs are its own too.

    Args:
        module: the module, of ``torch.nn``.
        path: its path in the model.
    """
    forward = module.forward

    def call_forward(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    code = call_forward.__code__.replace(co_name=f"forward of {path}")
    return FunctionType(code, globals(), code.co_name, None, call_forward.__closure__)
