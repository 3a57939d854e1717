"""Count how far the English and the names of the repository are from those of comparable projects.

The documentation of pluggy, attrs, Hypothesis, torchao, onnxscript and NNCF has 0.2 to 1.1 relative chains and 0 to 0.8
times "what" as a noun, per 1,000 words. They name 0.7 to 3.3 % of their functions by a participle.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from releasing.style.comments import is_configuration, read_comments, strip_code

RELATIVE_CHAIN = r"\b(of|by|in|to|from|with|for|at|behind|along|on) (which|whom|what)\b|\bwhose\b"
NOMINAL_WHAT = r"\bwhat (is|was|it|they|the|a|an|of|are|were|that|this|you|others?|each|both)\b"
DIALECT_WORD = (
    r"\b(spared?|sparing|spoil(s|ed)?|mend(ed)?|anew|weighed|held against|in integers|road|kept apart|told)\b"
)

PROSE_LIMITS = {
    "relative chains": (RELATIVE_CHAIN, 1.2, "write two sentences, or a list"),
    "nominal 'what'": (NOMINAL_WHAT, 1.2, "name the thing that 'what' stands for"),
    "dialect words": (DIALECT_WORD, 0.3, "take the term of releasing/style/terms.toml"),
}
"""Pattern, limit per 1,000 words, and advice."""

MAX_PARTICIPLE_PERCENT = 3.0

IRREGULAR_PARTICIPLES = frozenset(
    {
        *("begun", "broken", "brought", "built", "chosen", "driven", "drawn", "found", "frozen", "given", "held"),
        *("hidden", "kept", "known", "lost", "made", "meant", "said", "seen", "sent", "shown", "spelled", "taken"),
        *("told", "torn", "understood", "worn", "written"),
    }
)
VERBS_IN_ED = frozenset({"need", "embed", "seed", "feed", "speed", "red", "bed", "shed", "exceed", "proceed"})

MAX_LINES_SHOWN = 20

CODE_FOLDERS = ("clika_ref/", "plugins/", "conformance/clika_ref_conformance/")

SCRIPT_FOLDERS = ("benchmarks/", "examples/", "releasing/", "docs/building/")

SKIPPED_PATHS = ("releasing/style/",)
"""The sources that quote the words counted here."""


@dataclass(frozen=True)
class Figure:
    """One figure: its text, whether it exceeds its limit, and the lines that count."""

    text: str
    is_exceeded: bool
    faults: list[str]

    def lines(self) -> list[str]:
        """Return the lines to print: with faults only if the figure exceeds its limit."""
        if not self.is_exceeded:
            return [self.text]
        rest = len(self.faults) - MAX_LINES_SHOWN
        return [*self.faults[:MAX_LINES_SHOWN], *([f"and {rest} more"] if rest > 0 else []), self.text]


@dataclass(frozen=True)
class Prose:
    """A piece of text, with the file and the line that it starts at."""

    path: str
    line: int
    text: str


def measure_figures(files: Mapping[str, str]) -> list[Figure]:
    """Return the figures of documents, docstrings and scripts, and the share of functions that a participle names.

    Scripts are the docstrings and comments of examples and tools, and the text of configuration files.
    """
    files = {path: text for path, text in files.items() if not path.startswith(SKIPPED_PATHS)}
    documents = [
        Prose(path, 1, strip_markdown(text))
        for path, text in files.items()
        if path.endswith(".md") and not path.startswith(("CHANGELOG", "tests/"))
    ]
    trees = _parse_folders(files, CODE_FOLDERS)
    scripts = _parse_folders(files, SCRIPT_FOLDERS)
    prose = {
        "documents": documents,
        "docstrings": [prose for path, tree in trees.items() for prose in find_docstrings(path, tree)],
        "scripts": [
            *(prose for path, tree in scripts.items() for prose in find_docstrings(path, tree)),
            *(Prose(path, line, text) for path in scripts for line, text in read_comments(files[path])),
            *(Prose(path, 1, strip_code(text)) for path, text in files.items() if is_configuration(path)),
        ],
    }
    figures = [_measure_prose(label, pieces, name) for label, pieces in prose.items() for name in PROSE_LIMITS]
    return [*figures, measure_participles({**trees, **scripts})]


def _parse_folders(files: Mapping[str, str], folders: tuple[str, ...]) -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in files.items() if path.endswith(".py") and path.startswith(folders)}


def strip_markdown(text: str) -> str:
    """Return a document without fenced blocks and addresses of links; lines keep their numbers."""
    text = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def find_docstrings(path: str, tree: ast.Module) -> Iterator[Prose]:
    """Yield the docstrings of modules, classes and functions."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            continue
        if docstring := ast.get_docstring(node, clean=False):
            yield Prose(path, node.body[0].lineno, docstring)


def _measure_prose(label: str, pieces: list[Prose], name: str) -> Figure:
    pattern, limit, advice = PROSE_LIMITS[name]
    words = sum(len(re.findall(r"[A-Za-z']+", piece.text)) for piece in pieces)
    faults = [
        f'{piece.path}:{piece.line + piece.text.count(chr(10), 0, match.start())}: "{match[0]}": {advice}'
        for piece in pieces
        for match in re.finditer(pattern, piece.text, flags=re.IGNORECASE)
    ]
    rate = 1000 * len(faults) / max(words, 1)
    return Figure(f"{label}: {rate:.2f} {name} per 1,000 words (limit {limit})", rate > limit, faults)


def measure_participles(trees: Mapping[str, ast.Module]) -> Figure:
    """Return the share of functions that a participle names, properties and special methods excluded."""
    functions = [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("__")
        and node.name != "_"
        and not any(word in ast.unparse(d) for d in node.decorator_list for word in ("property", "setter"))
    ]
    faults = [
        f"{path}:{node.lineno}: function {node.name}: begin its name with a verb"
        for path, node in functions
        if is_participle(node.name)
    ]
    percent = 100 * len(faults) / max(len(functions), 1)
    text = f"functions named by a participle: {len(faults)} of {len(functions)}, {percent:.1f} % "
    return Figure(f"{text}(limit {MAX_PARTICIPLE_PERCENT:.0f})", percent > MAX_PARTICIPLE_PERCENT, faults)


def is_participle(name: str) -> bool:
    """Return whether the first word of a name is a past participle."""
    word = name.strip("_").split("_")[0]
    return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and word not in VERBS_IN_ED)
