"""Tables: whole cells in a pipe, right-aligned numbers, no markup; as sequences, records and HTML."""

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


def test_print_table_aligns_numbers_right_text_left(capsys):
    """Numbers are aligned to the right, text to the left."""
    print_table(["name", "nodes", "time"], [["a", 7, "34 ms"], ["bcd", 1234567, "2.4 s"], ["e", None, "x"]])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "  name       nodes   time"
    assert lines[2:] == ["  a              7   34 ms", "  bcd    1,234,567   2.4 s", "  e                  x"]


def test_print_table_pipe_keeps_long_cells_and_brackets(capsys):
    """A pipe gets whole cells, and brackets are not markup."""
    cell = "float32[b, 3] [bold] " * 20
    print_table(["type"], [[cell]], title="Types [red]")
    out = capsys.readouterr().out
    assert cell.strip() in out
    assert "Types [red]" in out


def test_print_table_without_rows_shows_columns():
    """A table without rows shows its columns."""
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


def test_table_behaves_as_sequence_of_facts(table):
    """A table is a sequence of its facts."""
    assert len(table) == 3
    assert table[1] is FACTS[1]
    assert [*table] == FACTS
    assert FACTS[2] in table
    assert table[1:] == FACTS[1:]


def test_table_str_shows_selected_facts(table):
    """The text of a table shows the selected facts only."""
    assert str(table) == repr(table) == "name  bytes\na     1,500\n<d>      20"


def test_table_to_dict_lists_all_facts_with_properties(table):
    """Records contain all facts with their properties, without nested facts."""
    records = table.to_dict()
    assert records[0] == {"name": "a", "bytes": 1500, "inner": None, "kilobytes": 1.5}
    assert records[1] == {"name": "b", "bytes": 7, "kilobytes": 0.007}
    assert len(records) == 3


def test_table_repr_html_has_headings_and_aligned_numbers(table):
    """HTML has headings, escaped cells, and numbers aligned to the right."""
    shown = table._repr_html_()
    document = ET.fromstring(shown)  # noqa: S314 - written by ourselves
    assert [cell.text for cell in document.iter("th")] == ["name", "bytes"]
    assert [cell.text for cell in document.iter("td")] == ["a", "1,500", "<d>", "20"]
    assert ["right" in cell.get("style") for cell in document.iter("td")] == [False, True, False, True]


def test_has_tables_joins_tables_and_lines(table):
    """Tables and lines are joined in text, at a prompt and in HTML."""

    class Found(HasTables):
        def parts(self):
            return "a < b", table, "", table

    assert str(Found()) == repr(Found()) == f"a < b\n{table}\n\n{table}"
    assert Found()._repr_html_() == f"<p>a &lt; b</p>{table._repr_html_() * 2}"


@pytest.mark.parametrize(
    "kind", [AdapterReport, Explanation, AccuracySearch, PruningReport, Quantization, TargetComparison]
)
def test_has_tables_subclasses_share_repr(kind):
    """Every result class with tables uses the repr of HasTables."""
    assert kind.__repr__ is HasTables.__repr__


def test_graph_repr_html_shows_first_lines(monkeypatch):
    """A notebook shows the first lines of a graph."""
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
