"""Find the functions of a model by their code, and compile them again after a rewrite."""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from clika_ref.capture.branch_conversion.rewriting import find_reason_against
from clika_ref.capture.branch_conversion.syntax import PREFIX, FunctionNode

MARKER = "\0clika_ref site "
"""The beginning of the constants that stand for sites until the code is compiled."""

FUTURE_FLAGS = 0x1FF0000
"""The flags of code objects for ``from __future__`` imports."""


class UnconvertibleError(Exception):
    """A function cannot be rewritten, for the reason in the message."""


@dataclass(frozen=True)
class FunctionSource:
    """The syntax tree of a function, and the class around it."""

    node: FunctionNode
    class_name: str | None

    @classmethod
    def of(cls, function: FunctionType) -> FunctionSource:
        """Parse the source of a function.

        Raises:
            UnconvertibleError: it has no source, or is a lambda or coroutine.
        """
        code = function.__code__
        tree = _parse_source(function)
        for node, class_name in _iter_functions(tree, _find_class_name(code.co_qualname)):
            if _is_source_of(node, code):
                if not isinstance(node, ast.FunctionDef):
                    raise UnconvertibleError(find_reason_against(node))
                return cls(node, class_name)
        raise UnconvertibleError("its source is not available, or has changed")

    def compile(self, original: CodeType, sites: Mapping[str, Any]) -> CodeType:
        """Compile the rewritten function with the same arguments and free variables as the original.

        Args:
            original: the code of the function.
            sites: the value of each constant that stands for a site.

        Raises:
            UnconvertibleError: the code does not fit the function.
        """
        tree = self._wrap(original)
        flags = original.co_flags & FUTURE_FLAGS
        try:
            outer = compile(tree, original.co_filename, "exec", flags=flags, dont_inherit=True)
        except SyntaxError as error:
            raise UnconvertibleError(f"Python does not compile it after the rewrite: {error.msg}") from error
        found = next(code for code in _iter_codes(outer) if code.co_name == original.co_name)
        if (
            found.co_freevars != original.co_freevars
            or found.co_varnames[: _count_arguments(found)] != (original.co_varnames[: _count_arguments(original)])
        ):
            raise UnconvertibleError("its source is not available, or has changed")
        return _replace_constants(found, original, sites, found.co_qualname)

    def _wrap(self, original: CodeType) -> ast.Module:
        """Return a module with the function in a class and a function that have its name and free variables."""
        node = self.node
        node.decorator_list, node.returns = [], None
        for argument in (a for a in ast.walk(node.args) if isinstance(a, ast.arg)):
            argument.annotation = None
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [default and ast.Constant(None) for default in node.args.kw_defaults]
        body: list[ast.stmt] = [node]
        if self.class_name is not None:  # for private names, and for __class__
            body = [ast.ClassDef(self.class_name, [], [], body, [])]
        arguments = [ast.arg(name) for name in original.co_freevars]
        factory = ast.FunctionDef(f"{PREFIX}factory", ast.arguments([], arguments, None, [], [], None, []), body, [])
        return ast.fix_missing_locations(ast.Module([factory], []))


def _parse_source(function: FunctionType) -> ast.AST:
    """Return the syntax tree of the file of a function, or of the function alone if the file is not Python."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    try:
        return ast.parse("".join(lines))
    except SyntaxError:
        start = code.co_firstlineno - 1
    try:
        block = inspect.getblock(lines[start:])
        is_indented = block[0][:1].isspace()
        tree = ast.parse("".join(["if True:\n", *block] if is_indented else block))
    except (SyntaxError, IndexError) as error:
        raise UnconvertibleError("its source is not available") from error
    return ast.increment_lineno(tree, start - is_indented)


def _find_class_name(qualified: str) -> str | None:
    """Return the name of the innermost class around a function, from its qualified name.

    >>> _find_class_name("build.<locals>.Net.forward.<locals>.scale")
    'Net'
    """
    scopes = [scope.split(".") for scope in qualified.split(".<locals>.")]
    return next((scope[-2] for scope in reversed(scopes) if len(scope) > 1), None)


def _iter_functions(tree: ast.AST, class_name: str | None) -> Iterator[tuple[FunctionNode | ast.Lambda, str | None]]:
    """Yield all functions below a node, with the name of the class around each."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node, class_name
        yield from _iter_functions(node, node.name if isinstance(node, ast.ClassDef) else class_name)


def _is_source_of(node: FunctionNode | ast.Lambda, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return node.name == code.co_name and first == code.co_firstlineno


def _iter_codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _iter_codes(constant)


def _count_arguments(code: CodeType) -> int:
    return code.co_argcount + code.co_kwonlyargcount


def _replace_constants(code: CodeType, original: CodeType, sites: Mapping[str, Any], scope: str) -> CodeType:
    """Insert the sites, and give generated functions the name of the original, for tracebacks."""
    constants: list[Any] = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            constants.append(_replace_constants(constant, original, sites, scope))
        else:
            constants.append(sites.get(constant, constant) if isinstance(constant, str) else constant)
    is_generated = code.co_name.startswith(PREFIX)
    name = original.co_name if is_generated else code.co_name
    qualified = original.co_qualname if is_generated else original.co_qualname + code.co_qualname.removeprefix(scope)
    return code.replace(co_consts=tuple(constants), co_name=name, co_qualname=qualified)


def map_methods(classes: Iterable[type]) -> dict[CodeType, list[FunctionType]]:
    """Return the methods that classes define, by their code; a class statement that runs twice makes two of each."""
    methods: dict[CodeType, list[FunctionType]] = {}
    for cls in dict.fromkeys(base for derived in classes for base in derived.__mro__):
        for value in vars(cls).values():
            if type(value) is FunctionType:
                methods.setdefault(value.__code__, []).append(value)
    return methods


def find_functions(code: CodeType, names: Mapping[str, Any]) -> list[FunctionType]:
    """Return the functions that run a code object, and those that define such functions.

    The functions that run at the moment are not among the latter: they called the compilation.

    Args:
        code: the code of the functions.
        names: their global names.
    """
    return _find_by_name(code, names) or _find_in_memory(code)


def _find_by_name(code: CodeType, names: Mapping[str, Any]) -> list[FunctionType]:
    """Return the function or method that has a qualified name in a module, if it runs the code."""
    first, *attributes = code.co_qualname.split(".")
    found = names.get(first)
    for attribute in attributes:
        found = vars(found).get(attribute) if isinstance(found, type) else None
    return [found] if type(found) is FunctionType and found.__code__ is code else []


def _find_in_memory(code: CodeType) -> list[FunctionType]:
    """Search all objects of the process for functions that run a code object, or define such functions."""
    if gc.get_freeze_count():  # frozen objects cannot be found
        gc.unfreeze()
        try:
            return _find_in_memory(code)
        finally:
            gc.freeze()
    found = [f for f in gc.get_referrers(code) if type(f) is FunctionType and f.__code__ is code]
    if "<locals>" not in code.co_qualname:
        return found
    running = set()
    frame = sys._getframe()
    while frame is not None:
        running.add(frame.f_code)
        frame = frame.f_back
    functions = (f for f in gc.get_objects() if type(f) is FunctionType)  # isinstance would run code of objects
    near = (f for f in functions if f.__code__.co_filename == code.co_filename and f.__code__ not in running)
    return [*found, *(f for f in near if code in _iter_codes(f.__code__))]
