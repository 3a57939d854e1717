"""Reports in a browser: plots, details, sorting and filters work, and nothing is loaded from the network."""

import re

import pytest
from browser import count_colours
from clika_ref_visualize.report.page import render_report
from reported_nets import compile_float, compile_int4, compile_int8, make_contents, make_large_contents, make_node

from clika_ref import LayerQuantizationSettings as Layer

pytestmark = pytest.mark.slow

GREEN, AMBER, BLUE, RED = (26, 122, 72), (154, 91, 0), (29, 95, 191), (179, 38, 30)
"""Colors of INT8 nodes, of layers kept in float, of bars, and of thresholds, min and max."""

LIGHT, DARK = (255, 255, 255), (20, 24, 29)
"""Backgrounds of the page."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    module = compile_int8(layers={"blocks.0.second": Layer(skip_quantization=True)})
    return module.clika_report(tmp_path_factory.mktemp("reports") / "report.html")


@pytest.fixture
def page(report, open_page):
    return open_page(report)


def write(contents, folder):
    path = folder / "report.html"
    path.write_bytes(render_report(contents))
    return path


def read_column(page, table, title):
    """Return the texts of a column, by row."""
    titles = page.locator(f"{table} th").all_inner_texts()
    index = next(i for i, text in enumerate(titles) if re.sub(r"[▲▼\s]+$", "", text) == title)
    return [row.locator("td").nth(index).inner_text() for row in page.locator(f"{table} tbody tr").all()]


def test_report_browser_sections_have_titles_and_content(page):
    """Each section has a title in the navigation, and content."""
    titles = page.locator("nav a").all_inner_texts()
    parts = "Overview Modules Layers Sensitivity Thresholds Activations Precision Latency Targets Warnings"
    assert titles == [*parts.split(), "Reproduction"]
    for section in page.locator("main section").all():
        assert section.bounding_box()["height"] > 60
    assert page.locator("h1").inner_text().startswith("Small")
    assert "5 of 6" in page.locator("#tiles").inner_text()


def test_report_browser_plots_have_expected_colors(page):
    """The plots are drawn in their colors."""
    assert count_colours(page, "#split .stacked")[GREEN] > 500
    assert count_colours(page, "#split .stacked")[AMBER] > 100
    plot = count_colours(page, "#sensitivity-plot .plot")
    assert plot[GREEN] > 100
    assert plot[RED] > 50
    curves = count_colours(page, "#thresholds-plot .plot")
    assert curves[BLUE] > 200
    assert curves[RED] > 50
    assert count_colours(page, "#precision-bars .stacked")[GREEN] > 500
    assert count_colours(page, "#latency-bars")[BLUE] > 500
    assert count_colours(page, "#activations-table svg.spark")[BLUE] > 10
    assert page.locator("#sensitivity-plot circle").count() == 5
    assert page.locator("#thresholds-plot circle.chosen").count() == 2


def test_report_browser_layer_click_shows_details(page):
    """A click on a layer shows its facts and histograms."""
    assert page.locator("#details").is_hidden()
    page.locator("#layers-table tbody tr", has_text="blocks.1.second").click()
    details = page.locator("#details")
    assert details.is_visible()
    assert details.locator("h2").inner_text() == "blocks.1.second · conv2d"
    text = details.inner_text()
    for word in ("QS", "runs in", "int8", "quantized range", "zero point", "observer"):
        assert word in text
    assert details.locator("svg.histogram").count() == 2
    drawn = count_colours(page, "#details svg.histogram")
    assert drawn[BLUE] > 100
    assert drawn[RED] > 5
    page.keyboard.press("Escape")
    assert details.is_hidden()


def test_report_browser_float_layer_shows_reason(page):
    """A layer that is kept in float shows the reason."""
    page.locator("#layers-table tbody tr", has_text="blocks.0.second").click()
    assert "skip_quantization" in page.locator("#details").inner_text()
    assert "kept in float" in page.locator("#details").inner_text()


def test_report_browser_column_sorts_both_directions(page):
    """A click on a title sorts the column, another click reverses it."""

    def read_sensitivities():
        return [float(text) for text in read_column(page, "#layers-table", "QS") if text]

    before = read_sensitivities()
    button = page.locator("#layers-table th button", has_text="QS")
    button.click()
    assert read_sensitivities() == sorted(before, reverse=True)
    assert page.locator("#layers-table th[aria-sort=descending]").inner_text().startswith("QS")
    button.click()
    assert read_sensitivities() == sorted(before)
    assert read_column(page, "#layers-table", "QS")[-1] == ""  # unknown sensitivities come last in both directions
    page.locator("#layers-table th button", has_text="Module").click()
    paths = read_column(page, "#layers-table", "Module")
    assert paths == sorted(paths)


def test_report_browser_rows_filtered_by_text_and_state(page):
    """Rows are filtered by text and by state."""
    page.get_by_label("Filter by module, operator or reason").fill("blocks.1 conv")
    assert read_column(page, "#layers-table", "Module") == ["blocks.1.first", "blocks.1.second"]
    assert page.locator("#layers-tools output").inner_text().startswith("2 of ")
    page.get_by_label("Filter by module, operator or reason").fill("")
    page.locator("#layers-tools select").select_option(label="Only kept in float")
    assert read_column(page, "#layers-table", "Module") == ["blocks.0.second"]


def test_report_browser_modules_fold_by_pointer_and_keys(page):
    """Modules fold and unfold by pointer and by keys."""
    rows, modules = (page.locator(f"#hierarchy-table tbody tr{kind}") for kind in ("", ".module-row"))
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert modules.all_inner_texts()[1].startswith("▸blocks")  # next to modules of one node
    assert modules.count() == 2
    modules.nth(1).click()
    assert modules.count() == 4
    page.get_by_role("button", name="Unfold all").click()
    everything = rows.count()
    assert everything > 14
    rows.first.focus()
    page.keyboard.press("ArrowLeft")
    assert rows.count() == 1
    page.keyboard.press("ArrowRight")
    assert 1 < rows.count() < everything


def test_report_browser_rows_open_by_keyboard(page):
    """Rows open by the keyboard, and the focus returns."""
    row = page.locator("#layers-table tbody tr").first
    row.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.parentElement.children[1] === document.activeElement")


def test_report_browser_threshold_curve_follows_pointer(page):
    """The threshold plot shows the values at the pointer."""
    plot = page.locator("#thresholds-plot svg")
    assert page.locator("#thresholds-plot .readout").inner_text().startswith("Chosen: threshold 0.005, 5 of 6 layers")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 60)
    assert page.locator("#thresholds-plot .readout").inner_text().startswith("At ")


def test_report_browser_settings_copied(page):
    """The button copies the settings."""
    page.locator("#reproduction figure", has_text="settings.yaml").first.get_by_role("button").click()
    assert page.locator("#reproduction figure button").first.inner_text() in ("Copied", "Selected")


def test_report_browser_follows_dark_preference(report, open_page):
    """The page is dark if the reader prefers it."""
    light, dark = (count_colours(open_page(report, dark=is_dark)) for is_dark in (False, True))
    assert light.most_common(1)[0][0] == LIGHT
    assert dark.most_common(1)[0][0] == DARK


def test_report_browser_narrow_screen_fits(report, open_page):
    """On a narrow screen, no element is wider than the screen."""
    page = open_page(report, width=420, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_report_browser_print_shows_all_rows(tmp_path, open_page):
    """In print, all rows are shown and the navigation is hidden."""
    page = open_page(write(make_large_contents(250), tmp_path))
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#layers-table tbody tr").count() == 250
    assert page.locator("nav").is_hidden()


@pytest.mark.parametrize("make", [compile_float, compile_int4])
def test_report_browser_float_and_int4_modules_open(make, tmp_path, open_page):
    """The reports of a float module and of an INT4 module open."""
    page = open_page(make().clika_report(tmp_path / "report.html"))
    assert page.locator("#layers-table tbody tr").count() >= 6
    notes = page.locator("#sensitivity .note").all_inner_texts()
    assert [note.startswith("The module is float") for note in notes] == ([True] if make is compile_float else [])
    page.locator("#layers-table tbody tr").first.click()
    assert page.locator("#details").is_visible()


def test_report_browser_html_in_names_shown_as_text(tmp_path, open_page):
    """HTML in names is shown as text and never executed."""
    name = '</script><img src=x onerror="document.title=1"><b>bold</b>'
    nodes = [make_node(name, name, operator=name, reason=name, bits=(8, 8), state="kept_in_float", sensitivity=0.1)]
    page = open_page(write(make_contents(nodes, model=name, warnings=[name], target=name), tmp_path))
    assert page.title() == f"{name} for {name}"
    assert page.locator("main img, main td b").count() == 0
    assert name in page.locator("#layers-table").inner_text()
    assert name in page.locator("#warnings-list").inner_text()
    page.locator("#layers-table tbody tr").click()
    assert name in page.locator("#details").inner_text()


def test_report_browser_large_report_rendered_in_parts(tmp_path, open_page):
    """A report of 2,000 nodes is sorted and scrolled in parts."""
    page = open_page(write(make_large_contents(2000), tmp_path))
    rows = page.locator("#layers-table tbody tr")
    assert rows.count() == 100
    page.locator("#layers-table th button", has_text="QS").click()
    assert rows.count() == 100
    page.evaluate("document.getElementById('layers-table').scrollTop = 1e6")
    page.wait_for_selector("#layers-table tbody tr:nth-child(101)", state="attached")  # the page's policy forbids eval
    page.get_by_role("button", name="Unfold all").click()
    assert page.locator("#hierarchy-table tbody tr").count() > 2200
    page.locator("#sensitivity-plot circle").last.click()
    assert page.locator("#details svg.histogram").count() == 2
