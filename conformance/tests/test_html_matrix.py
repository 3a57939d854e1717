"""The HTML matrix: one cell for each task with its cases as data, safe for any name and message."""

import html
import json
import re
from pathlib import Path

import pytest
from clika_ref_conformance.cases import Task
from clika_ref_conformance.record import CheckResult, RunRecord
from clika_ref_conformance.reporting.html_matrix import render_html, write_html
from clika_ref_conformance.reporting.matrix import LETTER_BY_VERDICT, make_tabs, style_of
from clika_ref_conformance.reporting.report_builder import make_report
from clika_ref_conformance.verdicts import Comparison, Verdict

EVIL = "<script>alert(1)</script>"


def make_result(task, verdict=Verdict.PASS, message="", quality=1.0, reproducer=""):
    """Return the result of one check."""
    comparison = Comparison(verdict, message, 1e-7, 2e-7, 0.5, quality, elements=6)
    return CheckResult(task, "row-1", comparison, "typical", {"dim": "-1"}, reproducer=reproducer)


def make_report_of(*results, target="onnxruntime", **changes):
    """Return the report of a run with these results."""
    plan = {}
    for one in results:
        plan.setdefault(one.task, []).append(one.name)
    return make_report(RunRecord(target, "quick", 0, {"torch": "2.13"}, plan, results, 1.0, **changes))


def cell_letters(tab, subject):
    """Return the letters of the cells of one subject, with a dot for a missing half."""
    (row,) = (row for row in tab.rows if row.subject == subject)
    return ["".join(half.letter if half else "." for half in cell) for cell in row.cells]


def read_cases(page):
    """Return the cases that are embedded in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_make_tabs_static_and_dynamic_share_cell():
    """Static and dynamic runs of an operator share one cell."""
    (tab,), _ = make_tabs(
        [
            make_report_of(
                make_result(Task("operators", "relu", "float32"), quality=4.0),
                make_result(Task("operators", "relu", "int64"), Verdict.UNSUPPORTED, "no kernel"),
                make_result(Task("operators", "sum", "float32"), Verdict.VALUE),
                make_result(Task("dynamic", "relu", "float32", dynamic=True), Verdict.CRASH),
            )
        ],
        ["."],
    )
    assert (tab.title, tab.groups[0].columns, tab.failures) == ("operators", ["float32", "int64"], 2)
    assert cell_letters(tab, "relu") == ["B!", "-."]
    assert cell_letters(tab, "sum") == ["✕.", ".."]


def test_make_tabs_dynamic_alone_has_own_table():
    """Dynamic runs alone have a table of their own."""
    (tab,), _ = make_tabs([make_report_of(make_result(Task("dynamic", "relu", "float32", dynamic=True)))], ["."])
    assert (tab.title, cell_letters(tab, "relu")) == ("dynamic", ["A"])


def test_make_tabs_dtypes_follow_profile_order():
    """Dtypes have the order of the profiles, and a pass has one column."""
    tasks = [Task("operators", "relu", dtype) for dtype in ("bool", "int64", "float16", "float32", "int8")]
    operators, passes = make_tabs(
        [make_report_of(*map(make_result, tasks), make_result(Task("passes", "fold")))], ["."]
    )[0]
    assert operators.groups[0].columns == ["float32", "float16", "int8", "int64", "bool"]
    assert passes.groups[0].columns == [""]


def test_make_tabs_two_targets_link_own_folders():
    """Each of two targets has its columns, and each case links to its own folder."""
    task = Task("operators", "relu", "float32")
    one = make_report_of(make_result(task, Verdict.VALUE, reproducer="cases/a.zip"))
    two = make_report_of(
        make_result(task), make_result(Task("operators", "abs", "float32")), target="acme.targets:TARGET"
    )
    (tab,), cases = make_tabs([one, two], ["../one run", "."])
    assert [group.target for group in tab.groups] == ["onnxruntime", "acme.targets:TARGET"]
    assert (cell_letters(tab, "relu"), cell_letters(tab, "abs")) == (["✕", "A"], [".", "A"])
    assert cases[0]["href"] == "../one%20run/cases/a.zip"
    page = render_html([one, two], ["one", "two"])
    assert '<th colspan="1" class="target">acme.targets:TARGET</th>' in page


def test_make_tabs_commands_set_pythonpath_of_user_target():
    """The commands find the user's code from any folder."""
    found = make_result(Task("operators", "relu", "float32"), Verdict.VALUE, reproducer="cases/a.zip")
    (case,) = make_tabs([make_report_of(found, target="acme:make it", target_folder="/home/a user")], ["."])[1]
    first, _, last = case["commands"].splitlines()
    where = "PYTHONPATH='/home/a user'${PYTHONPATH:+:$PYTHONPATH}"
    assert first == f"{where} clika-ref conformance replay cases/a.zip --target 'acme:make it'"
    assert last == f"python -m zipfile -e cases/a.zip cases/a && {where} python cases/a/repro.py"


def test_make_tabs_commands_repeat_user_target():
    """The commands repeat a target that is the user's code."""
    found = make_result(Task("operators", "relu", "float32"), Verdict.VALUE, reproducer="cases/a.zip")
    for target, option in (("onnxruntime", ""), ("acme.targets:TARGET", " --target acme.targets:TARGET")):
        (case,) = make_tabs([make_report_of(found, target=target)], ["."])[1]
        assert case["commands"].splitlines()[0] == f"clika-ref conformance replay cases/a.zip{option}"
        assert case["commands"].endswith("python -m zipfile -e cases/a.zip cases/a && python cases/a/repro.py")
    (case,) = make_tabs([make_report_of(found)], ["../one run"])[1]
    assert case["commands"].splitlines()[0] == "clika-ref conformance replay '../one run/cases/a.zip'"


def test_render_html_cell_opens_worst_case_per_verdict():
    """A cell opens the worst case of each of its verdicts."""
    task = Task("operators", "relu", "float32")
    first, second = make_result(task, Verdict.VALUE, "off by one"), make_result(task)
    page = render_html([make_report_of(first, CheckResult(task, "row-2", second.comparison))], ["."])
    (indices,) = re.findall(r'data-d="([\d ]+)"', page)
    cases = [read_cases(page)[int(i)] for i in indices.split()]
    assert [case["verdict"] for case in cases] == ["fail:value", "pass"]
    assert (cases[0]["message"], cases[0]["facts"]) == ("off by one", [["dim", "-1"]])
    assert cases[0]["place"] == "row-1, on the inputs typical"
    assert cases[0]["href"] == ""  # nothing was written that could be replayed


def test_render_html_escapes_names_and_messages():
    """Names and messages are text in all parts of the page."""
    task = Task(f"level{EVIL}", f"a{EVIL}\"'", f"float{EVIL}")
    evil = CheckResult(task, EVIL, Comparison(Verdict.VALUE, f"</script>{EVIL}"), EVIL, {EVIL: EVIL})
    page = render_html(
        [
            make_report_of(
                evil,
                target=EVIL,
                problems=[EVIL],
                deviations=[{"id": EVIL, "reason": EVIL, "link": EVIL, "occurred": 1, "applicable": 1}],
            )
        ],
        ["."],
    )
    assert page.count("<script") == 2  # the data and the program
    assert page.count("</script>") == 2
    assert "alert(1)" in html.unescape(page)
    assert read_cases(page)[0]["message"] == f"</script>{EVIL}"


def test_write_html_single_file_without_network(tmp_path):
    """The page is one file that loads nothing from the network."""
    write_html([make_report_of(make_result(Task("operators", "relu", "float32")))], tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", page)
    assert list(tmp_path.iterdir()) == [tmp_path / "index.html"]


def test_matrix_script_sets_text_only():
    """The script of the page never sets HTML."""
    script = (Path(render_html.__code__.co_filename).parent / "pages/matrix.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval", script)


def test_render_html_lists_deviations_reasons_environment():
    """Deviations, reasons for checks that were not run, and versions are listed."""
    entry = {
        "id": "one-sided-clip",
        "reason": "no NaN",
        "link": "https://example.org/1",
        "occurred": 4,
        "applicable": 9,
    }
    task = Task("graphs", "seven")
    page = render_html(
        [make_report_of(make_result(task, Verdict.NOT_RUN, "no time left"), deviations=[entry], problems=["gone"])],
        ["."],
    )
    for text in (
        "one-sided-clip",
        "https://example.org/1",
        "no reason given",
        "no time left",
        "2.13",
        '<p class="problem">gone</p>',
    ):
        assert text in page


@pytest.mark.parametrize("verdict", Verdict)
def test_style_of_each_verdict_has_colour(verdict):
    """Each verdict has a colour, and failures have marks."""
    styles = (Path(render_html.__code__.co_filename).parent / "pages/matrix.css").read_text(encoding="utf-8")
    assert f".{style_of(verdict)} {{" in styles
    if verdict.is_failure:
        assert LETTER_BY_VERDICT.get(verdict, "✕") in "✕!"


def test_write_html_lone_surrogate_escaped(tmp_path):
    """Half of a surrogate pair in a message is written as an escape."""
    write_html(
        [make_report_of(make_result(Task("operators", "relu", "float32"), Verdict.VALUE, "broken \ud800 text"))],
        tmp_path / "m.html",
    )
    assert "\\ud800 text" in (tmp_path / "m.html").read_text(encoding="utf-8")
