"""The check of terms and the figures of style that ``make lint`` runs."""

import ast
from dataclasses import replace

import pytest

from releasing.style.check import check_style
from releasing.style.figures import is_participle, measure_figures, measure_participles
from releasing.style.terms import find_term_faults, find_term_uses, read_term_table, snake_case

TABLE = read_term_table()
NO_EXCEPTIONS = replace(TABLE, exempt_texts=(), exempt_names=())
"""The terms alone: in a few files, most exceptions cover nothing."""

LONG_TEXT = "The target writes a file. " * 20


def find_faults(path, source):
    uses = find_term_uses({path: source}, TABLE)
    return [use.message for use in uses if use.exempt is None]


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("clika_ref/a.py", '\nraise ValueError("conv: no side is dynamic")\n', "2: message"),
        ("clika_ref/a.py", "x = 1\nf(help='Run in integers.')\n", "2: help"),
        ("clika_ref/settings/a.py", '"""Settings."""\n\nx: int\n"""Bits beside it."""\n', "4: help"),
        (
            "plugins/a/b.py",
            'm = f"{x} layers "\nn = (\n    "first "\n    "spared one"\n)\n',
            "4: message",
        ),
        ("plugins/a/b.py", '\n@rule("int8-beside-float8")\ndef _(file): ...\n', "2: rule name"),
        ("clika_ref/a.py", "\n\ndef weigh(x): ...\n", "3: function"),
        ("clika_ref/a.py", "def f(x, held): ...\n", "1: parameter"),
        ("clika_ref/a.py", "class Road:\n    y = 1\n", "1: class"),
        ("clika_ref/a.py", "class A:\n    wanted: int\n", "2: field"),
        ("clika_ref/a.py", "x = 1\nMOST = 4\n", "2: constant"),
        ("clika_ref/road.py", "", "1: file name"),
        ("docs/a.md", "# Title\n\nThe layers run\nin integers.\n", "4: document"),
        ("README.md", "| side | 3 |\n", "1: document"),
        ("plugins/a/b/page.js", 'x = 1;\ny = "In integers: " + x;\n', "2: label"),
        ("plugins/a/b/page.html", "<p>\n<b>Targets anew</b>\n", "2: label"),
        ("plugins/a/b/page.html", '<p title="it tells why">x</p>\n', "1: label"),
        ("clika_ref/a.py", '"""No fault."""\n\n\ndef f():\n    """Weigh a layer."""\n', "5: docstring"),
        ("clika_ref/a.py", "x = 1\n# the layers run\n# in integers\n", "3: comment"),
        ("tests/test_a.py", 'f("no side is dynamic")\n', "1: message"),
        ("tests/test_a.py", "p(1, id='anew')\nq(ids=['x',\n 'anew'])\n", "1: test id"),
        ("tests/test_a.py", "p(1, id='x')\nq(ids=['x',\n 'anew'])\n", "3: test id"),
        ("tests/test_a.py", "def test_f(held): ...\n", "1: parameter"),
        ("benchmarks/a.py", 'f("no side is dynamic")\n', "1: message"),
        ("examples/a.py", 'f("no side is dynamic")\n', "1: message"),
        ("releasing/a.py", '"""The side."""\n', "1: docstring"),
        ("docs/building/a.py", '"""The side."""\n', "1: docstring"),
        ("conformance/a/mutants/b.py", '"""The side."""\n', "1: docstring"),
        ("Makefile", "x = 1\n\t@echo 'make x  run it beside y'\n", "2: configuration"),
        ("mkdocs.yml", "a: 1\nsite_description: and be told why\n", "2: configuration"),
        ("pyproject.toml", "a = 1  # held\n       # against b\n", "1: configuration"),
        ("examples/a/deviations.toml", 'reason = "it refuses them"\n', "1: configuration"),
        (".ci/run", "# run it anew\n", "1: configuration"),
    ],
)
def test_terms_seeded_fault_reported_with_file_and_line(path, source, fault):
    """A seeded term is reported with its file, line and kind."""
    found = find_faults(path, source)
    assert any(line.startswith(f'{path}:{fault} "') for line in found), found
    assert all(" write " in line for line in found)


def test_terms_fault_names_better_word():
    """A fault ends with the better term."""
    assert find_faults("clika_ref/a.py", 'f("no side is dynamic")\n') == [
        'clika_ref/a.py:1: message "no side is dynamic": for "side" write dim, dimension or axis'
    ]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("clika_ref/a.py", '"""The ``side`` of `x.side`."""\n'),
        ("clika_ref/a.py", "x = 1  # held\n\ny = 2  # against\n"),
        ("clika_ref/a.py", "def _weigh(held): ...\n"),
        ("clika_ref/a.py", 'raise ValueError("a label smoothing of 0.1")\n'),
        ("clika_ref/a.py", 'x = {"side": 1}\n'),
        ("docs/a.md", "A `side` of\n\n```python\nweigh(side)\n```\n"),
        ("plugins/a/page.js", "// the sides\ny = a['road'];\n"),
        ("releasing/style/terms.toml", '"sides?" = "dim"\n'),
        ("tests/test_a.py", "p(1, mode='anew')\n"),
        ("plugins/aten/a.py", "def smooth_l1_loss(x): ...\n"),
    ],
)
def test_terms_exempt_text_not_reported(path, source):
    """Private names, keys, code and listed exceptions are not reported."""
    assert find_faults(path, source) == []


def test_terms_match_across_lines_is_one_line():
    """A match that spans a line break is shown on one line."""
    assert find_faults("docs/a.md", "The layers run in\nintegers.\n") == [
        'docs/a.md:1: document "The layers run in integers.": for "in integers" write quantized, or INT8'
    ]


def test_find_term_faults_stale_exception_reported():
    """An exception that covers no use is reported; one that covers a use is not."""
    (near_miss,) = (use for use in TABLE.exempt_texts if use.use.startswith("near miss"))
    table = replace(NO_EXCEPTIONS, exempt_texts=(near_miss,))
    assert list(find_term_faults({"docs/a.md": "A near miss, or near misses.\n"}, table)) == []
    assert list(find_term_faults({"docs/a.md": "No use.\n"}, table)) == [
        f'releasing/style/exceptions.toml: exception "{near_miss.use}": no use of a term needs it. Remove it.'
    ]


def test_find_term_faults_covered_twice_second_exception_reported():
    """An exception is stale if an earlier one covers all of its uses."""
    (near_miss,) = (use for use in TABLE.exempt_texts if use.use.startswith("near miss"))
    table = replace(NO_EXCEPTIONS, exempt_texts=(near_miss, replace(near_miss, use="misses")))
    (fault,) = find_term_faults({"docs/a.md": "Some near misses.\n"}, table)
    assert 'exception "misses"' in fault


def test_exceptions_have_reasons():
    """Each exception states its reason."""
    table = read_term_table()
    assert [use.pattern.pattern for use in (*table.exempt_texts, *table.exempt_names) if not use.reason.strip()] == []


def test_snake_case_splits_words():
    assert [snake_case(name) for name in ("HalfRange", "GPTQ", "_find_x", "MAX_ROWS")] == [
        *("half_range", "gptq", "_find_x", "max_rows")
    ]


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("It is a table of which one row is empty.", 'docs/a.md:2: "of which": write two sentences, or a list'),
        ("This is what it does.", "docs/a.md:2: \"what it\": name the thing that 'what' stands for"),
        ("The layer is spared.", 'docs/a.md:2: "spared": take the term of releasing/style/terms.toml'),
    ],
)
def test_figures_seeded_sentence_exceeds_limit(sentence, fault):
    """A sentence in a short document exceeds its limit, and is shown with file, line and advice."""
    exceeded = [figure for figure in measure_figures({"docs/a.md": f"{LONG_TEXT}\n{sentence}\n"}) if figure.is_exceeded]
    assert len(exceeded) == 1
    assert exceeded[0].lines()[0] == fault


def test_figures_docstring_exceeds_limit():
    """Docstrings count as documents do, each with its line."""
    source = f'"""{LONG_TEXT}"""\n\n\ndef f():\n    """Return x.\n\n    A list, of which all is used.\n    """\n'
    exceeded = [figure for figure in measure_figures({"clika_ref/a.py": source}) if figure.is_exceeded]
    assert [figure.lines()[0] for figure in exceeded] == [
        'clika_ref/a.py:7: "of which": write two sentences, or a list'
    ]


@pytest.mark.parametrize(
    ("path", "source", "line"),
    [
        ("examples/a.py", f'"""{LONG_TEXT}"""\nx = 1  # a list of which\n', 2),
        ("releasing/a.py", f'"""{LONG_TEXT}\n\nA list of which.\n"""\n', 3),
        ("docs/building/a.py", f'"""{LONG_TEXT}"""\n\n# a list of which\n', 3),
        ("Makefile", f"# {LONG_TEXT}\nhelp:\n# a list of which\n", 3),
        ("a/deviations.toml", f'# {LONG_TEXT}\nreason = "a list of which"\n', 2),
    ],
)
def test_figures_script_exceeds_limit(path, source, line):
    """Comments and docstrings of scripts, and configuration files, have figures of their own."""
    (figure,) = [figure for figure in measure_figures({path: source}) if figure.is_exceeded]
    assert figure.text.startswith("scripts: ")
    assert figure.lines()[0] == f'{path}:{line}: "of which": write two sentences, or a list'


def test_participles_exceed_limit_with_advice():
    """A function that a participle names is shown with advice; properties and special methods do not count."""
    source = "def spared(x): ...\n\n\n@property\ndef told(x): ...\n\n\ndef __reduced__(x): ...\n"
    figure = measure_participles({"clika_ref/a.py": ast.parse(source)})
    assert figure.is_exceeded
    assert figure.lines()[0] == "clika_ref/a.py:1: function spared: begin its name with a verb"
    assert "1 of 1, 100.0 %" in figure.text


def test_participle_is_not_a_verb_in_ed():
    assert is_participle("_held_value")
    assert is_participle("ranged")
    assert not is_participle("embed_tokens")
    assert not is_participle("find_used")


def test_check_style_fault_returns_one(capsys):
    """The command prints the fault and returns 1."""
    assert check_style({"clika_ref/a.py": 'f("no side is dynamic")\n'}, NO_EXCEPTIONS) == 1
    assert 'clika_ref/a.py:1: message "no side is dynamic": for "side" write dim' in capsys.readouterr().out


def test_check_style_stale_exception_returns_one(capsys):
    """Files without a use of the exceptions of the table return 1."""
    assert check_style({"docs/a.md": LONG_TEXT}, TABLE) == 1
    assert 'exception "near miss(?:es)?": no use of a term needs it. Remove it.' in capsys.readouterr().out


def test_check_style_exceeded_figure_returns_one(capsys):
    """A figure above its limit returns 1."""
    assert check_style({"docs/a.md": f"{LONG_TEXT}\nThis is what it does.\n"}, NO_EXCEPTIONS) == 1
    assert 'docs/a.md:2: "what it"' in capsys.readouterr().out


def test_check_style_clean_files_return_zero(capsys):
    """Files without faults return 0 and print the figures."""
    assert check_style({"docs/a.md": LONG_TEXT, "clika_ref/a.py": f'"""{LONG_TEXT}"""\n'}, NO_EXCEPTIONS) == 0
    assert "terms to replace: 0" in capsys.readouterr().out
