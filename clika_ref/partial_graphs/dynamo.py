"""Dynamo as this project uses it: the only module with its private names. Compile with breaks, and read what it did."""

from __future__ import annotations

import contextlib
import functools
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.compiler.config
from torch import fx

from clika_ref.capture.origins import format_line
from clika_ref.core.errors import ModelError
from clika_ref.partial_graphs.breaks import Break, is_in_function, summarize_reason
from clika_ref.partial_graphs.dynamic_sizes import (
    RECOMPILE_LIMIT,
    SIZE_ADVICE,
    CodePosition,
    DynamicSizes,
    read_function_name,
    to_source_pattern,
)
from clika_ref.torch_internals.dynamo import (
    FailOnRecompileLimitHit,
    GraphCompileReason,
    OptimizeContext,
    TensorPropertySource,
    TorchRuntimeError,
    TracingContext,
    dynamo_config,
    dynamo_utils,
    is_float_symbol,
    list_recompile_reasons,
    mark_dynamic,
    optimize,
    set_original_backend,
    silence_dynamo,
    track_sizes_with,
)
from clika_ref.torch_internals.symbols import symbol_config

TOTAL_RECOMPILE_LIMIT = 4096
"""Maximum number of graphs of one function in all compiled callables of the process."""

MAX_METRICS = 10_000
"""Number of compilations that Dynamo remembers while breaks are recorded."""

_FAILED_GUARD = re.compile(r"^[\d/]+: (?P<guard>[^#\n]*[^#\n ])")
"""Matches Dynamo's reason to compile a function again, such as ``0/1: L['text'] == '1'  # ...``."""

_FAKE_CALL_ERROR = re.compile(r"got \w+\(['\"](?P<text>.*?)\.?['\"]\)", re.DOTALL)
"""Matches the error of a call in Dynamo's message about it."""

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def compile_with_breaks(function: Callable[..., Any], backend: Backend, sizes: DynamicSizes) -> Callable[..., Any]:
    """Return a callable that runs a function with each of its graphs compiled by a backend, and Python between them.

    Its graphs are its own: other callables of ``torch.compile`` on the same code neither use them nor count.

    Args:
        function: a module or a function.
        backend: called with each graph that Dynamo finds.
        sizes: what is dynamic.
    """
    context = optimize(backend, recompile_limit=RECOMPILE_LIMIT, isolate_recompiles=True)
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
        position = CodePosition.of(frame.f_code)
        named = ",".join(sorted(sizes.find(position)))
        sizes.mismatches.pop(position, None)
        with (
            # Equal sizes of different inputs are different symbols.
            symbol_config.patch(  # type: ignore[attr-defined] - config modules get it when they are installed
                use_duck_shape=False, backed_size_oblivious=not sizes.is_one_special
            ),
            torch.compiler.config.patch(dynamic_sources=named),  # type: ignore[attr-defined]
            dynamo_config.patch(
                automatic_dynamic_shapes=True,
                fail_on_recompile_limit_hit=True,
                suppress_errors=False,
                accumulated_recompile_limit=TOTAL_RECOMPILE_LIMIT,
            ),
            track_sizes_with(functools.partial(sizes.choose, position)),
            silence_dynamo(),
        ):
            try:
                return callback(frame, *args, **kwargs)
            except FailOnRecompileLimitHit as error:
                reasons = list_recompile_reasons(frame, callback)
                raise ModelError(_explain_limit(position, reasons, frame.f_locals)) from error
            except TorchRuntimeError as error:
                if sizes.is_closed:
                    raise ModelError(_explain_failure(position, error, sizes.mismatches.get(position))) from None
                raise

    set_original_backend(compile_code, callback)
    return compile_code


def _explain_limit(position: CodePosition, reasons: Sequence[str], variables: Mapping[str, Any]) -> str:
    """Return the message for a function that needs too many graphs.

    Args:
        position: the function.
        reasons: why each of its graphs does not fit the call.
        variables: the local variables of the call.
    """
    matches = [found for reason in reasons if (found := _FAILED_GUARD.match(reason))]
    guard = matches[0]["guard"] if matches else "unknown"
    guard = re.sub(r"[LG]\['(\w+)'\]", r"\1", guard)
    name = next((word for word in re.findall(r"\w+", guard) if word in variables), None)
    value = "" if name is None else f"{name} is {reprlib.repr(variables[name])}, and "
    return (
        f"{position} needs more than {RECOMPILE_LIMIT} graphs: {value}the condition of a graph is {guard}. Pass "
        "numbers that differ between calls as tensors, and do not create modules in forward."
    )


def _explain_failure(position: CodePosition, error: TorchRuntimeError, mismatch: str | None) -> str:
    """Return the message for a call that does not fit the model.

    Args:
        position: the function that is compiled for the call.
        error: of an operation in it.
        mismatch: a size that differs from those of the tracing inputs.
    """
    lines = [(f.filename, f.lineno) for f in error.real_stack or () if _is_code_of_user(f.filename)]
    where = f" (at {format_line(lines[-1][0], lines[-1][1] or 0)})" if lines else ""
    found = _FAKE_CALL_ERROR.search(error.msg)
    text = re.sub(r"\bs\d+\b", "any", found["text"] if found else error.msg.partition("\n")[0])
    return (
        f"{position}: {text}{where}." if mismatch is None else f"{position}: {mismatch}: {text}{where}. {SIZE_ADVICE}"
    )


def _is_code_of_user(file: str) -> bool:
    return file != __file__ and not Path(file).is_relative_to(Path(torch.__file__).parent)


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
    return Break(read_function_name(frame.name), frame.filename, frame.lineno or 0, text)


def _to_skipped_break(metrics: Any) -> Break:
    """Return the break of a function that runs in Python; its line is that of the function if it calls the line."""
    function, reason = read_function_name(metrics.co_name or ""), summarize_reason(metrics.fail_reason or "")
    own = metrics.co_filename or "", metrics.co_firstlineno or 0
    at = metrics.fail_user_frame_filename or own[0], metrics.fail_user_frame_lineno or own[1]
    if is_in_function(*at, *own):
        return Break(function, *at, reason, is_skipped=True, first_line=own[1])
    return Break(function, *own, f"{reason}, in a call at {format_line(*at)}", is_skipped=True, first_line=own[1])


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
        skipped = [_to_skipped_break(m) for m in compiled if m.fail_type is not None]
        breaks = [*map(_to_break, dynamo_utils.graph_break_reasons[known_reasons:]), *skipped]
        found += {(b.file, b.line, b.is_skipped): b for b in reversed(breaks)}.values()
        found.reverse()


def read_size_source(source: Any) -> tuple[str, int] | None:
    """Return the source of the tensor and the dim whose size an input of a graph is; None for other inputs."""
    return (str(source.base.name), source.idx or 0) if isinstance(source, TensorPropertySource) else None


def list_dynamic_sources(program: fx.GraphModule) -> set[str]:
    """Return patterns of the sources of a graph that are dynamic, for numbers, and for dims with their index."""
    found: set[str] = set()
    for node in program.graph.find_nodes(op="placeholder"):
        name = str(getattr(getattr(node.meta.get("grapharg"), "source", None), "name", ""))
        if isinstance(node.meta.get("example_value"), torch.SymInt) and ".size()" not in name:
            found.add(to_source_pattern(name))
        found |= {f"{to_source_pattern(name)}:{dim}" for dim in list_dynamic_dims(node)}
    return found


def list_number_outputs(program: fx.GraphModule) -> dict[int, type[int | float]]:
    """Return the type of each output of a graph that is a number, by its position; sizes are none of them."""
    found: dict[int, type[int | float]] = {}
    for index, node in enumerate(program.graph.output_node().args[0]):  # type: ignore[arg-type] - a tuple
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.SymFloat):
            found[index] = float
        elif isinstance(value, torch.SymInt) and any(map(is_float_symbol, value.node.expr.free_symbols)):
            found[index] = int
    return found


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
        mark_dynamic(copy, dim)
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
