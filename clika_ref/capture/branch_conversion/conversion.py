"""Convert the branches of a model: find the functions to rewrite, replace their code in traces, check the results."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

from torch.overrides import TorchFunctionMode

from clika_ref.capture.branch_conversion.expressions import SiteDescription
from clika_ref.capture.branch_conversion.functions import (
    MARKER,
    FunctionSource,
    UnconvertibleError,
    find_functions,
    map_methods,
)
from clika_ref.capture.branch_conversion.rewriting import rewrite_function
from clika_ref.capture.branch_conversion.sites import BranchSite
from clika_ref.capture.branch_conversion.traced_branches import BranchTracer
from clika_ref.capture.branch_conversion.traced_values import NumberScope
from clika_ref.capture.callables import TracedCallable
from clika_ref.capture.caught_errors import ErrorRecorder
from clika_ref.capture.eager import EagerRun, run_eager
from clika_ref.capture.messages import BranchConversionError
from clika_ref.capture.origins import PACKAGE_DIR, format_line, is_installed_file, is_model_file
from clika_ref.capture.patching import patch_attributes
from clika_ref.capture.source_lines import STRING_FILE_NAME
from clika_ref.capture.traced_calls import TracedCalls
from clika_ref.core.comparison import describe_differences

NUMBER_READS = frozenset({"__bool__", "item", "__int__", "__float__", "__index__", "tolist"})
"""Methods of a tensor that read its elements as Python values."""


@dataclass(frozen=True)
class _RewrittenFunction:
    function: Any
    original: CodeType
    rewritten: CodeType

    @property
    def label(self) -> str:
        code = self.original
        return f"{code.co_qualname} at {format_line(code.co_filename, code.co_firstlineno)}"


class _NumberReadRecorder(TorchFunctionMode):
    """Records the functions that run while the model reads an element of a tensor as a Python value."""

    def __init__(self, is_convertible: Callable[[FrameType], bool]) -> None:
        super().__init__()
        self._is_convertible = is_convertible
        self.codes: dict[CodeType, Mapping[str, Any]] = {}
        """The code of each function, and its global names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in NUMBER_READS:
            frames = (frame for frame in _iter_callers(sys._getframe(1)) if self._is_convertible(frame))
            self.codes.update((frame.f_code, frame.f_globals) for frame in frames)
        return func(*args, **(kwargs or {}))


def _iter_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame that calls PyTorch, and its callers inside of the model."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_DIR):  # other function modes
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE_DIR):
        yield frame
        frame = frame.f_back


@dataclass
class BranchConversion:
    """The rewritten functions of a model, whose code replaces the original code during traces."""

    callee: TracedCallable
    sites: list[BranchSite] = field(default_factory=list[BranchSite])
    failures: dict[CodeType, str] = field(default_factory=dict[CodeType, str])
    """Why functions could not be rewritten."""

    def __post_init__(self) -> None:
        self._tracer = BranchTracer(self.callee.module)
        self._functions: dict[FunctionType, _RewrittenFunction] = {}
        self._known: set[CodeType] = set()
        parts = [*self.callee.module.modules()]
        self._methods = map_methods(map(type, parts))
        self._forwards = {code for part in parts if (code := getattr(type(part).forward, "__code__", None))}
        owner = self.callee.function if self.callee.is_function else type(self.callee.module)
        self._package = (getattr(owner, "__module__", None) or "").partition(".")[0]

    @contextlib.contextmanager
    def record_branches(self) -> Iterator[None]:
        """Find the functions that branch on elements of tensors, while eager runs."""
        recorder = _NumberReadRecorder(self._is_convertible)
        with recorder:
            yield
        self._rewrite(recorder.codes)

    def add_failing_functions(self, errors: Iterable[Exception]) -> bool:
        """Rewrite the functions in the tracebacks of failed traces; return whether there are new ones."""
        frames = (f for error in errors for f in _iter_frames(error) if self._is_convertible(f))
        return self._rewrite({frame.f_code: frame.f_globals for frame in frames})

    def _is_convertible(self, frame: FrameType) -> bool:
        """Whether to rewrite the function of a frame: code of the user, of a module, or of the model's package."""
        code = frame.f_code
        if code in self._forwards:
            return True
        if not is_model_file(code.co_filename) or code.co_filename == STRING_FILE_NAME:
            return False
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        return not is_installed_file(code.co_filename) or package == self._package

    def _rewrite(self, codes: Mapping[CodeType, Mapping[str, Any]]) -> bool:
        found = False
        for code, names in codes.items():
            if code in self._known:
                continue
            self._known.add(code)
            for function in self._methods.get(code) or find_functions(code, names):
                if function not in self._functions:
                    found |= self._rewrite_function(function)
        return found

    def _rewrite_function(self, function: FunctionType) -> bool:
        code, made = function.__code__, dict[str, BranchSite]()

        def make_site(description: SiteDescription) -> ast.expr:
            name = f"{MARKER}{len(self.sites) + len(made)}"
            made[name] = BranchSite(code.co_filename, code.co_qualname, description, self._tracer)
            return ast.Constant(name)

        try:
            source = FunctionSource.of(function)
            rewrite_function(source.node, make_site)
            rewritten = source.compile(code, made)
        except UnconvertibleError as error:
            self.failures[code] = str(error)
            return False
        self.sites += made.values()
        self._functions[function] = _RewrittenFunction(function, code, rewritten)
        self._known |= {rewritten, *_list_codes(rewritten)}
        return True

    @property
    def is_empty(self) -> bool:
        """Whether no function is rewritten."""
        return not self._functions

    @contextlib.contextmanager
    def install(self, functions: Iterable[_RewrittenFunction] | None = None) -> Iterator[None]:
        """Replace the code of the rewritten functions, or of some of them, while the context lasts."""
        self._tracer.unrolled = 0
        with contextlib.ExitStack() as stack:
            for found in self._functions.values() if functions is None else functions:
                stack.callback(setattr, found.function, "__code__", found.function.__code__)
                found.function.__code__ = found.rewritten
            stack.enter_context(NumberScope())
            yield

    def watch_rejections(self, raised: ErrorRecorder) -> contextlib.AbstractContextManager[None]:
        """Record rejected branches in a trace, in case the model catches the error."""
        methods = ((BranchTracer, "trace_condition"), (BranchSite, "run_while"), (BranchSite, "check"))
        return patch_attributes({(owner, name): raised.watch(getattr(owner, name)) for owner, name in methods})

    def check(self, traced: TracedCalls) -> None:
        """Run the rewritten functions on the tracing calls, and compare them with the original ones.

        Raises:
            BranchConversionError: the results differ.
        """
        for site in self.sites:
            site.taken = {True: 0, False: 0}
        difference = self._find_difference(traced, self._functions.values())
        if difference:
            alone = (f for f in self._functions.values() if self._find_difference(traced, [f]))
            culprit = next(alone, None)
            raise BranchConversionError(
                f"the rewritten {culprit.label if culprit else 'model'} differs from the original on {difference}. "
                "Please report this, and compile without convert_branches."
            )

    def _find_difference(self, traced: TracedCalls, functions: Iterable[_RewrittenFunction]) -> str:
        calls = zip(traced.comparison.calls, traced.expected, strict=True)
        for number, (leaves, expected) in enumerate(calls, 1):
            with self.install(functions):
                try:
                    run = run_eager(self.callee, traced.rebuild(leaves))
                except Exception as error:  # noqa: BLE001 - the original raises none
                    return f"input {number}: it raises {type(error).__name__}: {error}"
            problem = _compare_runs(expected, run)
            if problem:
                return f"input {number}: {problem}"
        return ""

    def describe(self) -> list[str]:
        """Return a line for each converted branch, for the log."""
        return [f"Converted {site}" for site in self._converted()]

    def list_unreached(self) -> list[str]:
        """Return a message for each branch of a converted site that no tracing input reached."""
        found = []
        for site in self._converted():
            missing = [name for taken, name in ((True, "true"), (False, "false")) if not site.taken[taken]]
            if missing:
                found.append(
                    f"{site.location}: no tracing input reaches the branch where the condition of "
                    f"'{site.description.kind}' is {' or '.join(missing)}, so it was not compared with eager"
                )
        return list(dict.fromkeys(found))

    def _converted(self) -> list[BranchSite]:
        return [site for site in self.sites if site.is_converted and site.description.kind in ("if", "while")]

    def explain_failures(self, errors: Iterable[Exception]) -> list[str]:
        """Return why functions in the tracebacks of failed traces were not rewritten."""
        frames = [frame.f_code for error in errors for frame in _iter_frames(error)]
        return [
            f"{code.co_qualname} at {format_line(code.co_filename, code.co_firstlineno)} was not converted: "
            f"{self.failures[code]}."
            for code in dict.fromkeys(frames)
            if code in self.failures
        ]


def find_conversion_error(error: BaseException) -> BranchConversionError | None:
    """Return the rejection of a branch among an error and its causes."""
    return next((e for e in _iter_causes(error) if isinstance(e, BranchConversionError)), None)


def _iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _iter_frames(error: BaseException) -> Iterator[FrameType]:
    for cause in _iter_causes(error):
        trace = cause.__traceback__
        while trace is not None:
            yield trace.tb_frame
            trace = trace.tb_next


def _list_codes(code: CodeType) -> list[CodeType]:
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return [*inner, *(nested for part in inner for nested in _list_codes(part))]


def _compare_runs(expected: EagerRun, run: EagerRun) -> str:
    names = sorted(expected.state.keys() | run.state.keys())
    if len(expected.leaves) != len(run.leaves) or expected.state.keys() != run.state.keys():
        return f"it returns {len(run.leaves)} values instead of {len(expected.leaves)}, or changes other buffers"
    labels = [*(f"output {i}" for i in range(1, len(run.leaves) + 1)), *names]
    one, other = ([*r.leaves, *(r.state[n] for n in names)] for r in (expected, run))
    return "; ".join(f"{labels[i]} is {text}" for i, text in describe_differences(one, other).items())
