"""Find the texts and names that people read: messages, help, labels, docstrings, comments, public names and files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from releasing.style.comments import is_configuration, read_comments, strip_code
from releasing.style.figures import strip_markdown

HELP_MODULES = re.compile(r"plugins/cli/clika_ref_cli/\w*commands\.py|clika_ref/settings/\w+\.py")
"""Docstrings there are shown by the command line: commands, and the options of settings files."""

ASSET_SUFFIXES = (".html", ".js", ".css", ".j2", ".template")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Text:
    """A text or a name, with the line that it starts at and its kind: ``message``, ``help``, ``label``, ..."""

    line: int
    kind: str
    text: str
    source_lines: tuple[str, ...] = ()
    """The lines of a literal, of which several may be joined to one line of text."""

    def line_of(self, match: re.Match[str]) -> int:
        """Return the line of a match."""
        if not self.source_lines:
            return self.line + self.text.count("\n", 0, match.start())
        word = match[0].split()[0]
        return self.line + next((n for n, line in enumerate(self.source_lines) if word in line), 0)


def find_texts(path: str, source: str) -> Iterator[Text]:
    """Yield the texts of a file that people read, and its public names."""
    yield from (Text(1, "file name", part) for part in PurePosixPath(path).parts)
    if path.endswith(".py"):
        tree = ast.parse(source, path)
        yield from _find_literals(tree, source.splitlines())
        yield from _find_rule_names(tree)
        yield from _find_help(path, source, tree)
        yield from (Text(line, "comment", text) for line, text in read_comments(source))
        yield from _find_names(tree.body)
    elif is_configuration(path):
        yield Text(1, "configuration", strip_code(source))
    elif path.endswith(".md"):
        yield Text(1, "document", _blank(r"`[^`\n]*`", strip_markdown(source)))
    elif path.endswith(ASSET_SUFFIXES):
        yield from _find_labels(path, source)


def _blank(pattern: str, text: str) -> str:
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL)


# ---------------------------------------------------------------- messages and help


def _find_literals(tree: ast.Module, lines: list[str]) -> Iterator[Text]:
    """Yield the string literals of two words and more, and ids of tests; docstrings are excluded."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    kinds: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
        elif isinstance(node, ast.keyword) and node.arg == "help":
            kinds[id(node.value)] = "help"
        elif isinstance(node, ast.keyword) and node.arg in {"id", "ids"}:
            kinds |= dict.fromkeys(map(id, ast.walk(node.value)), "test id")
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        text, kind = _literal_text(node), kinds.get(id(node), "message")
        if text is None or not isinstance(node, ast.expr):
            continue
        if kind == "test id" or re.search(r"[A-Za-z]\W*\s+\W*[A-Za-z]", text):
            first, last = node.lineno, node.end_lineno or node.lineno
            yield Text(first, kind, text, tuple(lines[first - 1 : last]))


def _literal_text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def _find_rule_names(tree: ast.Module) -> Iterator[Text]:
    """Yield the names in ``@rule("name")``: reports show them, and they are single words with hyphens."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rule":
            yield from (Text(name.lineno, "rule name", text) for name in node.args if (text := _literal_text(name)))


def _find_help(path: str, source: str, tree: ast.Module) -> Iterator[Text]:
    """Yield the docstrings: the command line shows some of them as its help."""
    shown = {id(tree.body[0])} if "help=__doc__" in source and tree.body else set()
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(_is_command(d) for d in node.decorator_list):
            shown.add(id(node.body[0]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (text := _literal_text(node.value)) is not None:
            is_help = id(node) in shown or HELP_MODULES.fullmatch(path)
            yield Text(node.lineno, "help", text) if is_help else Text(node.lineno, "docstring", strip_code(text))


def _is_command(decorator: ast.expr) -> bool:
    call = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(call, ast.Attribute) and call.attr in {"command", "callback"}


# ---------------------------------------------------------------- public names


def _find_names(body: list[ast.stmt]) -> Iterator[Text]:
    """Yield public functions, classes, methods, parameters, fields and constants."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield Text(node.lineno, "class", node.name)
            yield from _find_names(node.body)
        elif isinstance(node, Function):
            yield from _find_function_names(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for name in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(name, ast.Name) and not name.id.startswith("_"):
                    yield Text(node.lineno, "constant" if name.id.isupper() else "field", name.id)


def _find_function_names(node: Function) -> Iterator[Text]:
    is_special = node.name.startswith("__") and node.name.endswith("__")
    if node.name.startswith("_") and not is_special:
        return
    yield Text(node.lineno, "function", node.name)
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if not argument.arg.startswith("_"):
            yield Text(argument.lineno, "parameter", argument.arg)


# ---------------------------------------------------------------- labels of pages


def _find_labels(path: str, source: str) -> Iterator[Text]:
    """Yield the texts that pages and templates show, without comments, styles and tags."""
    text = _blank(r"<!--.*?-->|/\*.*?\*/|\{#.*?#\}", source)
    if path.endswith((".js", ".css")):
        text = _blank(r"(?m)(?<!:)//[^\n]*", text) if path.endswith(".js") else text
        for match in re.finditer(r"\"((?:[^\"\\\n]|\\.)*)\"|'((?:[^'\\\n]|\\.)*)'|`([^`]*)`", text):
            label = next(group for group in match.groups() if group is not None)
            if " " not in label and label[:1].islower():
                continue  # a key, or a class of CSS
            yield Text(1 + text.count("\n", 0, match.start()), "label", label)
        return
    shown = re.finditer(r"\b(?:title|alt|placeholder|aria-label)=\"([^\"]*)\"", text)
    yield from (Text(1 + text.count("\n", 0, match.start()), "label", match[1]) for match in shown)
    yield Text(1, "label", _blank(r"<(style|script)\b.*?</\1>|<[^>]*>|\{%.*?%\}|\{\{.*?\}\}", text))
