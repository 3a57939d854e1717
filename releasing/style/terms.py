"""Find terms of terms.toml in texts that a user reads and in public names; exceptions.toml lists what may stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from releasing.style.texts import Text, find_texts

NAME_KINDS = frozenset({"function", "class", "parameter", "field", "constant", "file name"})

CHECKED_PATHS = ("clika_ref/*", "plugins/*", "conformance/*", "docs/*", "*.md")

SKIPPED_PATHS = ("*/tests/*", "tests/*", "*/mutants/*", "*.svg", "*.png")
"""Tests have names and sentences of their own, and mutants describe faults."""

CONTEXT_LENGTH = 30


@dataclass(frozen=True)
class Term:
    """A term to replace: a pattern for texts or for names, and the better term."""

    pattern: re.Pattern[str]
    better: str


@dataclass(frozen=True)
class Exempt:
    """A use of a term that stays: a pattern that covers the use, the files, and the reason."""

    pattern: re.Pattern[str]
    files: str
    reason: str

    def covers(self, path: str, text: str, start: int, end: int) -> bool:
        """Return whether a match in a text is this use."""
        return fnmatchcase(path, self.files) and any(
            match.start() <= start and end <= match.end() for match in self.pattern.finditer(text)
        )


@dataclass(frozen=True)
class TermTable:
    """The terms of texts and of names, and their exceptions."""

    texts: tuple[Term, ...]
    names: tuple[Term, ...]
    exempt_texts: tuple[Exempt, ...]
    exempt_names: tuple[Exempt, ...]


@cache
def read_term_table() -> TermTable:
    """Return the terms and the exceptions, from the two tables next to this file."""
    folder = Path(__file__).parent
    terms = tomllib.loads((folder / "terms.toml").read_text(encoding="utf-8"))
    exceptions = tomllib.loads((folder / "exceptions.toml").read_text(encoding="utf-8"))
    return TermTable(
        tuple(Term(_compile_text(key), better) for key, better in terms["texts"].items()),
        tuple(Term(_compile_name(key), better) for key, better in terms["names"].items()),
        tuple(_exempt(row, _compile_text(row["use"])) for row in exceptions.get("texts", [])),
        tuple(_exempt(row, _compile_name(row["use"])) for row in exceptions.get("names", [])),
    )


def _compile_text(pattern: str) -> re.Pattern[str]:
    """Return the pattern of whole words, in upper and lower case, with any white space for a space."""
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE)


def _compile_name(pattern: str) -> re.Pattern[str]:
    """Return the pattern of whole words of a name in snake case."""
    return re.compile(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])")


def _exempt(row: Mapping[str, Any], pattern: re.Pattern[str]) -> Exempt:
    return Exempt(pattern, row.get("files", "*"), row["reason"])


def snake_case(name: str) -> str:
    """Return a name in snake case: ``HalfRange`` becomes ``half_range``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def find_term_faults(files: Mapping[str, str]) -> Iterator[str]:
    """Yield ``path:line: kind "text": write "better"`` for each use of a term that has no exception."""
    for path, source in files.items():
        is_checked = any(fnmatchcase(path, pattern) for pattern in CHECKED_PATHS)
        if not is_checked or any(fnmatchcase(path, pattern) for pattern in SKIPPED_PATHS):
            continue
        for text in find_texts(path, source):
            yield from find_text_faults(path, text)


def find_text_faults(path: str, text: Text) -> Iterator[str]:
    """Yield the faults of one text or name."""
    table = read_term_table()
    is_name = text.kind in NAME_KINDS
    terms, exempt = (table.names, table.exempt_names) if is_name else (table.texts, table.exempt_texts)
    shown = snake_case(text.text) if is_name else text.text
    for term in terms:
        for match in term.pattern.finditer(shown):
            if any(use.covers(path, shown, match.start(), match.end()) for use in exempt):
                continue
            line = text.line if is_name else text.line_of(match)
            context = text.text if is_name else _context(shown, match)
            yield f'{path}:{line}: {text.kind} "{context}": for "{match[0]}" write {term.better}'


def _context(text: str, match: re.Match[str]) -> str:
    first, last = max(match.start() - CONTEXT_LENGTH, 0), match.end() + CONTEXT_LENGTH
    return " ".join(text[first:last].split())
