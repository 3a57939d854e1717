"""Find terms of terms.toml in texts that people read and in public names; exceptions.toml lists the uses that stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from releasing.style.texts import Text, find_texts

NAME_KINDS = frozenset({"function", "class", "parameter", "field", "constant", "file name"})

SKIPPED_PATHS = (
    "releasing/style/*.toml",  # the terms themselves, and the uses that stay
    "releasing/style/figures.py",  # its patterns contain the words that it counts
    "tests/repository/test_style.py",  # its seeded faults
    "*.png",
    "*.svg",  # drawn from texts of docs/building, which are checked
)

CONTEXT_LENGTH = 30


@dataclass(frozen=True)
class Term:
    """A term to replace: a pattern for texts or for names, and the better term."""

    pattern: re.Pattern[str]
    better: str


@dataclass(frozen=True)
class Exempt:
    """A use of a term that stays: a pattern that covers the use, the files, and the reason."""

    use: str
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
        tuple(_read_exempt(exceptions.get("texts", []), _compile_text)),
        tuple(_read_exempt(exceptions.get("names", []), _compile_name)),
    )


def _compile_text(pattern: str) -> re.Pattern[str]:
    """Return the pattern of whole words, in upper and lower case, with any white space for a space."""
    return re.compile(rf"\b(?:{pattern})\b".replace(" ", r"\s+"), re.IGNORECASE)


def _compile_name(pattern: str) -> re.Pattern[str]:
    """Return the pattern of whole words of a name in snake case."""
    return re.compile(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])")


def _read_exempt(
    rows: Iterable[Mapping[str, Any]], compile_pattern: Callable[[str], re.Pattern[str]]
) -> Iterator[Exempt]:
    """Yield an exception for each pattern of each row."""
    for row in rows:
        for use in row["uses"]:
            yield Exempt(use, compile_pattern(use), row.get("files", "*"), row["reason"])


def snake_case(name: str) -> str:
    """Return a name in snake case: ``HalfRange`` becomes ``half_range``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@dataclass(frozen=True)
class TermUse:
    """A use of a term in a file: its message, and the first exception that covers it, if there is one."""

    message: str
    exempt: Exempt | None


def find_term_faults(files: Mapping[str, str], table: TermTable) -> Iterator[str]:
    """Yield a message for each use of a term without an exception, then for each exception without a use.

    Args:
        files: the text of each file, by its path from the root.
        table: the terms, and the exceptions, each of which must cover a use in these files.
    """
    uses = list(find_term_uses(files, table))
    yield from (use.message for use in uses if use.exempt is None)
    needed = {id(use.exempt) for use in uses}
    for exempt in (*table.exempt_texts, *table.exempt_names):
        if id(exempt) not in needed:
            yield f'releasing/style/exceptions.toml: exception "{exempt.use}": no use of a term needs it. Remove it.'


def find_term_uses(files: Mapping[str, str], table: TermTable) -> Iterator[TermUse]:
    """Yield each use of a term, with ``path:line: kind "text": for "term" write "better"`` as its message."""
    for path, source in files.items():
        if not any(fnmatchcase(path, pattern) for pattern in SKIPPED_PATHS):
            for text in find_texts(path, source):
                yield from _find_text_uses(path, text, table)


def _find_text_uses(path: str, text: Text, table: TermTable) -> Iterator[TermUse]:
    """Yield the uses in one text or name."""
    is_name = text.kind in NAME_KINDS
    terms, exempt = (table.names, table.exempt_names) if is_name else (table.texts, table.exempt_texts)
    shown = snake_case(text.text) if is_name else text.text
    for term in terms:
        for match in term.pattern.finditer(shown):
            covering = (use for use in exempt if use.covers(path, shown, match.start(), match.end()))
            line = text.line if is_name else text.line_of(match)
            context = text.text if is_name else _show_context(shown, match)
            found = " ".join(match[0].split())
            message = f'{path}:{line}: {text.kind} "{context}": for "{found}" write {term.better}'
            yield TermUse(message, next(covering, None))


def _show_context(text: str, match: re.Match[str]) -> str:
    first, last = max(match.start() - CONTEXT_LENGTH, 0), match.end() + CONTEXT_LENGTH
    return " ".join(text[first:last].split())
