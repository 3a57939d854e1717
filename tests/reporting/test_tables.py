"""Tables: whole cells in a pipe, numbers to the right, nothing read as markup."""

import io

from rich.console import Console

from clika_ref.reporting.tables import print_table


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
