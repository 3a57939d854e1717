"""Reports in a browser: what is drawn is there, a layer opens, a column sorts, and nothing of the network is asked."""

import re

import pytest
from browser import colours
from clika_ref_visualize.report.page import render_report
from reported_nets import in_float, in_four_bits, in_integers, large, made_up, node

from clika_ref import LayerQuantizationSettings as Layer

GREEN, AMBER, BLUE, RED = (26, 122, 72), (154, 91, 0), (29, 95, 191), (179, 38, 30)
"""Of integers, of layers that are kept float, of bars, and of thresholds and extremes."""

LIGHT, DARK = (255, 255, 255), (20, 24, 29)
"""Grounds of the page."""


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    module = in_integers(layers={"blocks.0.second": Layer(skip_quantization=True)})
    return module.clika_report(tmp_path_factory.mktemp("reports") / "report.html")


@pytest.fixture
def page(report, open_page):
    return open_page(report)


def write(contents, folder):
    place = folder / "report.html"
    place.write_bytes(render_report(contents))
    return place


def column(page, table, title):
    """What stands below a title, by row."""
    titles = page.locator(f"{table} th").all_inner_texts()
    place = next(i for i, text in enumerate(titles) if re.sub(r"[▲▼\s]+$", "", text) == title)
    return [row.locator("td").nth(place).inner_text() for row in page.locator(f"{table} tbody tr").all()]


@pytest.mark.slow
def test_each_section_has_its_title_in_the_navigation_and_something_to_show(page):
    titles = page.locator("nav a").all_inner_texts()
    parts = "Overview Modules Layers Sensitivity Thresholds Values Placement Latency Targets Warnings"
    assert titles == [*parts.split(), "To repeat"]
    for section in page.locator("main section").all():
        assert section.bounding_box()["height"] > 60
    assert page.locator("h1").inner_text().startswith("Small")
    assert "5 of 6" in page.locator("#tiles").inner_text()


def test_what_is_drawn_is_there_in_its_colours(page):
    assert colours(page, "#split .stacked")[GREEN] > 500
    assert colours(page, "#split .stacked")[AMBER] > 100
    plot = colours(page, "#sensitivity-plot .plot")
    assert plot[GREEN] > 100
    assert plot[RED] > 50
    curves = colours(page, "#thresholds-plot .plot")
    assert curves[BLUE] > 200
    assert curves[RED] > 50
    assert colours(page, "#placement-bars .stacked")[GREEN] > 500
    assert colours(page, "#latency-bars")[BLUE] > 500
    assert colours(page, "#values-table svg.spark")[BLUE] > 10
    assert page.locator("#sensitivity-plot circle").count() == 5
    assert page.locator("#thresholds-plot circle.chosen").count() == 2


def test_a_layer_that_is_clicked_shows_what_is_known_of_it_and_the_histograms_of_its_values(page):
    assert page.locator("#details").is_hidden()
    page.locator("#layers-table tbody tr", has_text="blocks.1.second").click()
    details = page.locator("#details")
    assert details.is_visible()
    assert details.locator("h2").inner_text() == "blocks.1.second · conv2d"
    text = details.inner_text()
    for word in ("QS", "runs in", "int8", "integers cover", "zero point", "chosen by"):
        assert word in text
    assert details.locator("svg.histogram").count() == 2
    drawn = colours(page, "#details svg.histogram")
    assert drawn[BLUE] > 100
    assert drawn[RED] > 5
    page.keyboard.press("Escape")
    assert details.is_hidden()


def test_a_layer_that_is_kept_float_says_why(page):
    page.locator("#layers-table tbody tr", has_text="blocks.0.second").click()
    assert "skip_quantization" in page.locator("#details").inner_text()
    assert "kept float" in page.locator("#details").inner_text()


def test_a_column_sorts_by_a_click_on_its_title_and_back_by_another(page):
    def sensitivities():
        return [float(text) for text in column(page, "#layers-table", "QS") if text]

    before = sensitivities()
    button = page.locator("#layers-table th button", has_text="QS")
    button.click()
    assert sensitivities() == sorted(before, reverse=True)
    assert page.locator("#layers-table th[aria-sort=descending]").inner_text().startswith("QS")
    button.click()
    assert sensitivities() == sorted(before)
    assert column(page, "#layers-table", "QS")[-1] == ""  # what was not weighed comes last either way
    page.locator("#layers-table th button", has_text="Module").click()
    paths = column(page, "#layers-table", "Module")
    assert paths == sorted(paths)


def test_rows_are_filtered_by_words_and_by_what_became_of_them(page):
    page.get_by_label("Filter by module, operator or reason").fill("blocks.1 conv")
    assert column(page, "#layers-table", "Module") == ["blocks.1.first", "blocks.1.second"]
    assert page.locator("#layers-tools output").inner_text().startswith("2 of ")
    page.get_by_label("Filter by module, operator or reason").fill("")
    page.locator("#layers-tools select").select_option(label="Only kept float")
    assert column(page, "#layers-table", "Module") == ["blocks.0.second"]


def test_modules_fold_and_unfold_by_pointer_and_by_keys(page):
    rows, modules = (page.locator(f"#hierarchy-table tbody tr{kind}") for kind in ("", ".module-row"))
    page.get_by_role("button", name="Fold all", exact=True).click()
    assert modules.all_inner_texts()[1].startswith("▸blocks")  # in the model, beside modules of one node
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


def test_rows_open_by_the_keyboard_and_focus_comes_back(page):
    row = page.locator("#layers-table tbody tr").first
    row.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.locator("#details").is_visible()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.parentElement.children[1] === document.activeElement")


def test_the_curve_of_thresholds_tells_what_is_below_the_pointer(page):
    plot = page.locator("#thresholds-plot svg")
    assert page.locator("#thresholds-plot .readout").inner_text().startswith("Chosen: threshold 0.005, 5 of 6 layers")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 30, box["y"] + 60)
    assert page.locator("#thresholds-plot .readout").inner_text().startswith("At ")


def test_settings_are_copied(page):
    page.locator("#repeat figure", has_text="settings.yaml").first.get_by_role("button").click()
    assert page.locator("#repeat figure button").first.inner_text() in ("Copied", "Selected")


def test_it_is_dark_where_the_reader_wants_that(report, open_page):
    light, dark = (colours(open_page(report, dark=is_dark)) for is_dark in (False, True))
    assert light.most_common(1)[0][0] == LIGHT
    assert dark.most_common(1)[0][0] == DARK


def test_on_a_narrow_screen_nothing_is_wider_than_the_screen(report, open_page):
    page = open_page(report, width=420, height=800)
    assert page.evaluate("document.documentElement.scrollWidth") <= 420


def test_printed_all_rows_are_there_and_tools_are_not(tmp_path, open_page):
    page = open_page(write(large(250), tmp_path))
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#layers-table tbody tr").count() == 250
    assert page.locator("nav").is_hidden()


@pytest.mark.parametrize("make", [in_float, in_four_bits])
def test_a_float_module_and_one_with_few_bits_open_without_errors(make, tmp_path, open_page):
    page = open_page(make().clika_report(tmp_path / "report.html"))
    assert page.locator("#layers-table tbody tr").count() >= 6
    notes = page.locator("#sensitivity .note").all_inner_texts()
    assert [note.startswith("The module is float") for note in notes] == ([True] if make is in_float else [])
    page.locator("#layers-table tbody tr").first.click()
    assert page.locator("#details").is_visible()


def test_names_that_look_like_html_are_shown_as_they_are_and_run_nothing(tmp_path, open_page):
    name = '</script><img src=x onerror="document.title=1"><b>bold</b>'
    nodes = [node(name, name, operator=name, reason=name, bits=(8, 8), state="kept", sensitivity=0.1)]
    page = open_page(write(made_up(nodes, model=name, warnings=[name], target=name), tmp_path))
    assert page.title() == f"{name} for {name}"
    assert page.locator("main img, main td b").count() == 0
    assert name in page.locator("#layers-table").inner_text()
    assert name in page.locator("#warnings-list").inner_text()
    page.locator("#layers-table tbody tr").click()
    assert name in page.locator("#details").inner_text()


def test_two_thousand_nodes_are_shown_sorted_and_scrolled_a_part_at_a_time(tmp_path, open_page):
    page = open_page(write(large(2000), tmp_path))
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
