"""The check of terms and the figures of style that ``make lint`` runs."""

import ast

import pytest

from releasing.style.check import check_style
from releasing.style.figures import is_participle, measure_figures, measure_participles
from releasing.style.terms import find_term_faults, read_term_table, snake_case

LONG_TEXT = "The target writes a file. " * 20


def find_faults(path, source):
    return list(find_term_faults({path: source}))


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
        ("clika_ref/a.py", '"""No side."""\n\n\ndef f():\n    """Weigh a layer anew."""\n'),
        ("clika_ref/a.py", "def _weigh(held): ...\n"),
        ("clika_ref/a.py", 'raise ValueError("a label smoothing of 0.1")\n'),
        ("clika_ref/a.py", 'x = {"side": 1}\n'),
        ("docs/a.md", "A `side` of\n\n```python\nweigh(side)\n```\n"),
        ("plugins/a/page.js", "// the sides\ny = a['road'];\n"),
        ("plugins/a/tests/test_a.py", 'f("no side is dynamic")\n'),
        ("plugins/aten/a.py", "def smooth_l1_loss(x): ...\n"),
    ],
)
def test_terms_exempt_text_not_reported(path, source):
    """Docstrings, private names, keys, code, tests and listed exceptions are not reported."""
    assert find_faults(path, source) == []


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
    assert check_style({"clika_ref/a.py": 'f("no side is dynamic")\n'}) == 1
    assert 'clika_ref/a.py:1: message "no side is dynamic": for "side" write dim' in capsys.readouterr().out


def test_check_style_exceeded_figure_returns_one(capsys):
    """A figure above its limit returns 1."""
    assert check_style({"docs/a.md": f"{LONG_TEXT}\nThis is what it does.\n"}) == 1
    assert 'docs/a.md:2: "what it"' in capsys.readouterr().out


def test_check_style_clean_files_return_zero(capsys):
    """Files without faults return 0 and print the figures."""
    assert check_style({"docs/a.md": LONG_TEXT, "clika_ref/a.py": f'"""{LONG_TEXT}"""\n'}) == 0
    assert "terms to replace: 0" in capsys.readouterr().out
