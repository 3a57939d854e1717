"""Tables: whole cells in a pipe, numbers to the right, nothing read as markup; sequences, records and HTML as well."""

import io
from dataclasses import dataclass
from html import escape
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console

from clika_ref.core.ir import Graph, Node
from clika_ref.core.registry import load_registry
from clika_ref.core.types import Origin, TensorType
from clika_ref.export.explanation import Explanation
from clika_ref.export.target_comparison import TargetComparison
from clika_ref.lora.report import AdapterReport
from clika_ref.pruning.report import PruningReport
from clika_ref.quantization.algorithms.accuracy_search import AccuracySearch
from clika_ref.quantization.decision import Quantization
from clika_ref.reporting.tables import HasTables, Table, print_table


def test_numbers_stand_to_the_right_and_text_to_the_left(capsys):
    print_table(["name", "nodes", "time"], [["a", 7, "34 ms"], ["bcd", 1234567, "2.4 s"], ["e", None, "x"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "  name       nodes   time"
    assert lines[2:] == ["  a              7   34 ms", "  bcd    1,234,567   2.4 s", "  e                  x"]


def test_a_pipe_gets_cells_of_any_length_whole_and_brackets_as_they_are(capsys):
    cell = "float32[b, 3] [bold] " * 20
    print_table(["type"], [[cell]], title="Types [red]")
    out = capsys.readouterr().out
    assert cell.strip() in out
    assert "Types [red]" in out


def test_a_table_without_rows_shows_its_columns():
    stream = io.StringIO()
    print_table(["a", "b"], [], console=Console(file=stream))
    assert "a" in stream.getvalue()


@dataclass(frozen=True)
class Fact:
    name: str
    bytes: int
    inner: "Fact | None" = None

    @property
    def kilobytes(self):
        return self.bytes / 1000

    def grown(self):
        return self.bytes + 1


FACTS = [Fact("a", 1500), Fact("b", 7, Fact("c", 1)), Fact("<d>", 20)]


@pytest.fixture
def table():
    columns = {"name": lambda fact: fact.name, "bytes": lambda fact: fact.bytes}
    return Table(FACTS, columns, lambda fact: fact.bytes > 7)


def test_a_table_is_a_sequence_of_its_facts(table):
    assert len(table) == 3
    assert table[1] is FACTS[1]
    assert [*table] == FACTS
    assert FACTS[2] in table
    assert table[1:] == FACTS[1:]


def test_a_table_prints_what_is_to_be_shown(table):
    assert str(table) == repr(table) == "name  bytes\na     1,500\n<d>      20"


def test_records_are_of_all_facts_with_what_follows_from_them_and_without_facts_of_their_own(table):
    records = table.to_dict()
    assert records[0] == {"name": "a", "bytes": 1500, "inner": None, "kilobytes": 1.5}
    assert records[1] == {"name": "b", "bytes": 7, "kilobytes": 0.007}
    assert len(records) == 3


def test_a_notebook_gets_headings_cells_and_numbers_to_the_right(table):
    shown = table._repr_html_()
    document = ET.fromstring(shown)  # noqa: S314 - written by ourselves
    assert [cell.text for cell in document.iter("th")] == ["name", "bytes"]
    assert [cell.text for cell in document.iter("td")] == ["a", "1,500", "<d>", "20"]
    assert ["right" in cell.get("style") for cell in document.iter("td")] == [False, True, False, True]


def test_tables_and_lines_stand_below_each_other_in_print_at_a_prompt_and_in_a_notebook(table):
    class Found(HasTables):
        def parts(self):
            return "a < b", table, "", table

    assert str(Found()) == repr(Found()) == f"a < b\n{table}\n\n{table}"
    assert Found()._repr_html_() == f"<p>a &lt; b</p>{table._repr_html_() * 2}"


@pytest.mark.parametrize(
    "kind", [AdapterReport, Explanation, AccuracySearch, PruningReport, Quantization, TargetComparison]
)
def test_whatever_is_told_in_tables_is_so_at_a_prompt_too(kind):
    assert kind.__repr__ is HasTables.__repr__


def test_a_notebook_shows_the_first_lines_of_a_graph(monkeypatch):
    graph = Graph("Small")
    value = graph.add_input(TensorType(torch.float32, (2,)), "x")
    relu = load_registry().operators["relu"]
    for _ in range(3):
        value = graph.insert(Node(relu, [value], {}, Origin(("a.b",))), [value.type]).output
    graph.add_output(value)
    assert graph._repr_html_() == f"<pre>{escape(str(graph))}</pre>"
    monkeypatch.setattr("clika_ref.core.ir.MAX_NOTEBOOK_LINES", 2)
    first, second, *others = str(graph).splitlines()
    assert graph._repr_html_() == f"<pre>{escape(first)}\n{escape(second)}\nand {len(others)} more lines</pre>"
