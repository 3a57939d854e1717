"""The documents: existing commands, valid links, true quotations, and every page in the site.

What their code does is in `test_fenced_blocks.py`.
"""

import ast
import dataclasses
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import fenced_blocks
import numpy as np
import pytest
import torch
from clika_ref_cli import cli
from clika_ref_cli.exit_status import STATUS_MEANINGS
from clika_ref_visualize.pictures.drawing import Role
from fenced_blocks import PAGES as DOCUMENTS
from fenced_blocks import ROOT, read_blocks
from test_code_rules import CORE_LINES
from typer.testing import CliRunner

import clika_ref
from clika_ref import (
    ClikaModule,
    LayerQuantizationSettings,
    LoraSettings,
    PartialClikaModule,
    PruningSettings,
    QuantizationSettings,
    Settings,
)
from clika_ref.core.quantization_scheme import FusedSums, QuantizationScheme, QuantizedType, WeightOnlyScheme
from clika_ref.core.targets import Target

EXAMPLES = [ROOT / "plugins/example/clika_ref_example" / name for name in ("plugin.py", "reference.py")]
EXAMPLE_PAGE = ROOT / "docs/example-plugin.md"
TARGET_PAGE = ROOT / "docs/bring-up-a-target.md"
PLACEHOLDER = "…"

PATHS_OF_USERS = {
    ("docs/command-line.md", "my_model.py"): "the reader's model",
    ("docs/conformance.md", "package/module.py"): "stands for a module of the reader's plugin",
    ("docs/conformance.md", "repro.py"): "the suite writes it into each zip",
    ("docs/new-plugin.md", "tests/test_conformance.py"): "`clika-ref new-plugin` writes it",
}
"""By page and path: paths that are not in the repository, and why."""


def find_blocks(document: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language in a document."""
    return [block.text for block in read_blocks(document) if block.language == language]


def find_fenced(text: str, language: str) -> list[str]:
    """Return the fenced blocks of one language in a text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def read_section(document: Path, heading: str) -> str:
    """Return the text below a heading, up to the next one."""
    _, _, text = document.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    return re.split(r"^#+ ", text, maxsplit=1, flags=re.MULTILINE)[0]


def test_readme_quickstart_at_most_ten_lines():
    """The quickstart has at most ten lines."""
    code, *_ = find_blocks(ROOT / "README.md", "python")
    assert len([line for line in code.splitlines() if line]) <= 10


@pytest.mark.parametrize(("name", "limit"), [("README.md", 900), ("ARCHITECTURE.md", 1200)])
def test_document_has_fewer_words_than_its_limit(name, limit):
    assert len((ROOT / name).read_text(encoding="utf-8").split()) < limit


def test_changelog_at_most_60_short_lines():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert [line for line in lines if len(line) >= 120] == []


def test_documents_make_commands_exist():
    """The make commands in the blocks and sentences of the documents exist in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        word
        for d in DOCUMENTS
        for text in find_blocks(d, "console")
        for word in re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    }
    inline = {word for d in DOCUMENTS for word in re.findall(r"`make ([\w-]+)", d.read_text(encoding="utf-8"))}
    assert named == {"demo", "test", "test-all", "lint", "conformance", "mutants", "alarms", "docs", "package"}
    assert {"help", "bench-efficientnet", "bench-ptq"} <= inline
    assert named | inline <= targets, "these documented commands are not in the Makefile"


def test_reading_guide_lists_core_files_and_budget():
    """The reading guide lists every core file, their number and the line budget."""
    text = (ROOT / "docs/reading-guide.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "clika_ref/core").glob("*.py") if path.name != "__init__.py"]
    assert f"The core is {len(files)} files with at most {CORE_LINES:,} lines of code." in text
    assert all(f"core/{path.name})" in text for path in files), "a file of the core is in none of the hours"


def test_makefile_help_lists_every_target():
    """`make help` lists every target."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: help (.*)$", text, re.MULTILINE)
    assert re.findall(r'echo "make ([\w-]+) ', text) == phony.split()


def find_links(document: Path) -> list[str]:
    """Return the targets of a document's links, without links to other sites."""
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [re.sub(r"\s+", " ", link) for link in re.findall(r"\]\(([^)]+)\)", prose)]
    return [link for link in found if "://" not in link]


def find_anchors(document: Path) -> set[str]:
    """Return the anchors of a document: its headings, and the documented objects."""
    text = document.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    shown = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings} | {*shown}


def find_broken_links(document: Path) -> list[str]:
    """Return the links of a document without a target."""
    broken = []
    for link in find_links(document):
        path, _, anchor = link.partition("#")
        place = document.parent / path if path else document
        anchors = find_anchors(place) if place.suffix == ".md" and place.exists() else set()
        is_inside = any(anchor.startswith(f"{shown}.") for shown in anchors if shown.startswith("clika_ref."))
        if not place.exists() or (anchor and anchor not in anchors and not is_inside):
            broken.append(f"{document.relative_to(ROOT)}: {link}")
    return broken


def test_documents_links_resolve(capsys):
    """Every link of the documents resolves."""
    count = sum(len(find_links(document)) for document in DOCUMENTS)
    broken = [link for document in DOCUMENTS for link in find_broken_links(document)]
    with capsys.disabled():
        print(f"\n{count} links in {len(DOCUMENTS)} documents, {len(broken)} broken")
    assert broken == []


def test_links_to_code_show_the_name_of_the_file():
    wrong = [
        f"{document.relative_to(ROOT)}: {text} leads to {place}"
        for document in DOCUMENTS
        for text, place in re.findall(r"\[`?([\w/]+\.py)`?\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
        if not f"/{place}".endswith(f"/{text}")
    ]
    assert wrong == []


def test_papers_are_linked_and_cited_in_a_file_of_their_row():
    """Each row links an arXiv number or a DOI, and files of clika_ref; one of these names the first author."""
    text = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| \[(\w+)[^]]*\]\((https://\S+)\)[^|]* \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    assert len(rows) == text.count("https://") > 15
    for author, link, files in rows:
        assert re.fullmatch(r"https://(arxiv\.org/abs/\d{4}\.\d{4,5}|doi\.org/10\.\d{4,}/\w+)", link), author
        places = [(ROOT / "docs" / place).resolve() for place in re.findall(r"\]\(([^)]+)\)", files)]
        assert places, author
        assert all(place.is_relative_to(ROOT / "clika_ref") for place in places), author
        assert any(author in place.read_text(encoding="utf-8") for place in places), f"no file cites {author}"


def test_mkdocs_navigation_lists_every_page():
    """Every page is in the navigation of the site."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- ([\w/-]+\.md)$", text.partition("\nnav:\n")[2], re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
    told = ["architecture.md", "changelog.md", "contributing.md"]  # of the root
    assert sorted(named) == sorted([*pages, *told]), "a page that is in no menu is found by nobody"


def test_documents_methods_exist():
    """Every method that the documents name exists."""
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS if document.parent != ROOT)
    named = set(re.findall(r"`(?:module\.|ClikaModule\.)?(clika_(?!ref)\w+)", text))
    known = {*dir(ClikaModule), *dir(PartialClikaModule), *clika_ref.__all__}
    of_the_past = {"clika_ace", "clika_compression", "clika_compress", "clika_resume", "clika_deploy"}
    of_others = {"clika_compile_options", "clika_digest", "clika_state"}  # an argument, entry, attribute
    assert len(named) > 20
    assert named <= known | of_the_past | of_others, "correct the names in the documents"


def list_repository_files() -> frozenset[str]:
    """Return the path of every tracked or new file, from the root."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
    return frozenset(name for name in listed if name and (ROOT / name).exists())


def find_code_spans(document: Path) -> list[str]:
    """Return the texts between backticks in the prose of a document."""
    prose = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


def is_known_path(name: str, folders: set[str], files: frozenset[str]) -> bool:
    """Return whether a path leads to one file: from the root, as a suffix, or in a folder that the page is about."""
    matches = [file for file in files if f"/{file}".endswith(f"/{name}")]
    return name in files or len(matches) == 1 or any(file.removesuffix(name) in folders for file in matches)


def find_unknown_paths(document: Path, files: frozenset[str]) -> list[str]:
    """Return the paths in backticks without a file; a page is about the folders that it names, or has paths in."""
    spans = find_code_spans(document)
    words = [word for span in spans for word in span.split()]
    paths = {word for word in words if re.fullmatch(r"[\w./-]*\w\.(?:py|md)", word)}
    folders = {word for word in words if re.fullmatch(r"[\w./-]+/", word)}
    for path in paths:
        matches = [file for file in files if f"/{file}".endswith(f"/{path}")]
        folders |= {matches[0].removesuffix(path), f"{Path(matches[0]).parent}/"} if len(matches) == 1 else set()
    written = {block.title for block in read_blocks(document) if block.title}
    page = document.relative_to(ROOT).as_posix()
    return [
        f"{page}: {path}"
        for path in sorted(paths)
        if not is_known_path(path, folders, files)
        and not any(f"/{title}".endswith(f"/{path}") for title in written)
        and (page, path) not in PATHS_OF_USERS
    ]


def test_documents_paths_in_backticks_exist():
    files = list_repository_files()
    assert len(files) > 500
    assert [path for document in DOCUMENTS for path in find_unknown_paths(document, files)] == []


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("`core/ir.py`, `docs/tutorial.md`, `clika_ref/api.py`, `python tests/warm_process.py`", []),
        ("`gone.py`", ["gone.py"]),
        ("`report.py`", ["report.py"]),  # of six folders
        ("`report.py` of `clika_ref/lora/`", []),
        ("`report.py` and `clika_ref/lora/attaching.py`", []),
        ("`lowering.py` of `clika_ref/pruning/`", ["lowering.py"]),
    ],
)
def test_unknown_path_is_found(text, unknown, tmp_path, monkeypatch):
    files = list_repository_files()
    monkeypatch.setattr(fenced_blocks, "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert find_unknown_paths(tmp_path / "page.md", files) == [f"page.md: {path}" for path in unknown]


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_documents_dotted_names_exist():
    """Every dotted name of our packages in backticks, or of a documented object, is a module or an attribute."""
    named = {
        (document.relative_to(ROOT).as_posix(), name)
        for document in DOCUMENTS
        for span in (*find_code_spans(document), *re.findall(r"^::: (.+)$", document.read_text("utf-8"), re.MULTILINE))
        for name in re.findall(r"(?<![\w.-])clika_ref\w*(?:\.\w+)+", span)
    }
    assert len(named) > 100
    groups = {"clika_ref.commands"}  # of entry points
    assert {(page, name) for page, name in named if name not in groups and not is_importable(name)} == set()
    assert not is_importable("clika_ref.core.targets.Goal")


def find_words(name: str) -> set[str]:
    """Return the words of a page."""
    return set(re.findall(r"\w+", (ROOT / "docs" / name).read_text(encoding="utf-8")))


def test_torch_onnx_export_page_names_every_argument():
    """The page for users of `torch.onnx.export` names each of its arguments."""
    assert inspect.signature(torch.onnx.export).parameters.keys() - find_words("from-torch-onnx-export.md") == set()


def test_clika_ace_page_names_every_public_name():
    """The page for users of clika-ace names each public name."""
    words = find_words("from-clika-ace.md")
    stages = {"clika_quantization"}  # of the pipeline
    names = {*clika_ref.__all__, *inspect.signature(clika_ref.clika_compile).parameters}
    names |= {name for name in dir(ClikaModule) if name.startswith("clika_")} - stages
    for settings in (QuantizationSettings, LayerQuantizationSettings, PruningSettings, LoraSettings, Settings):
        names |= {field.name for field in dataclasses.fields(settings)}
    assert names - words == set()


def test_example_plugin_page_quotes_code_of_its_files():
    """Each Python block of the page is in a file of the example, and the entry point in its pyproject.toml."""
    source = "".join(path.read_text(encoding="utf-8") for path in EXAMPLES)
    shown = find_blocks(EXAMPLE_PAGE, "python")
    assert len(shown) >= 5
    for code in shown:
        assert code in source, f"in neither of them:\n{code}"
    (entry,) = find_blocks(EXAMPLE_PAGE, "toml")
    assert entry in (ROOT / "plugins/example/pyproject.toml").read_text(encoding="utf-8")


def test_example_plugin_page_quotes_onnx_target_whole():
    """The blocks of that section are the file of the target, from its first line to its last."""
    shown = find_fenced(read_section(EXAMPLE_PAGE, "## A target that reads ONNX, line by line"), "python")
    written = EXAMPLES[1].read_text(encoding="utf-8")
    assert [line for code in shown for line in code.splitlines() if line] == [x for x in written.splitlines() if x]


@pytest.mark.parametrize("kind", [QuantizationScheme, QuantizedType, FusedSums, WeightOnlyScheme])
def test_target_page_explains_every_scheme_field(kind):
    """The page for authors of targets explains every field of a scheme."""
    assert "(bring-up-a-target.md#the-scheme-field-by-field)" in EXAMPLE_PAGE.read_text(encoding="utf-8")
    table = read_section(TARGET_PAGE, "## The scheme, field by field")
    (rows,) = re.findall(rf"^\| field of `{kind.__name__}` \|.*\n\|[-|]+\n((?:\|.*\n)+)", table, re.MULTILINE)
    told = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", rows, re.MULTILINE)
    assert [name for name, _ in told] == [field.name for field in dataclasses.fields(kind)]


def test_target_page_lists_every_member_of_target():
    """The tables list the attributes and methods that a target may define, each once."""
    queries = {"has_file_rules", "has_node_times", "has_own_format", "describe_runtime"}  # which callers use
    members = {name for name in {**vars(Target), **Target.__annotations__} if not name.startswith("_")}
    listed = re.findall(r"^\| `(\w+)` \|", read_section(TARGET_PAGE, "## The interface"), re.MULTILINE)
    assert sorted(listed) == sorted(members - queries - {"name"})


def test_reading_guide_core_layers_match_import_linter():
    """The table lists each file of the core with the number of its layer in ``pyproject.toml``, from the lowest up."""
    text = (ROOT / "docs/reading-guide.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| \[(\w+)\.py\]\(\.\./clika_ref/core/\2\.py\) \|", text, re.MULTILINE)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["clika_ref.core"]]
    checked = {(str(n), name) for n, layer in enumerate(reversed(layers)) for name in layer.split(" | ")}
    assert len(listed) == len(checked)
    assert {*listed} == checked
    assert [int(number) for number, _ in listed] == sorted(int(number) for number, _ in listed)


def test_glossary_sorted_and_unique():
    """The glossary is sorted and has one entry for each term."""
    words = re.findall(r"^\| \*\*(.+?)\*\* \|", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(set(words))
    assert len(words) > 30


def find_strings() -> list[str]:
    """Return every string of the package, with a placeholder for each inserted value."""
    found = []
    for path in sorted((ROOT / "clika_ref").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(v.value) if isinstance(v, ast.Constant) else PLACEHOLDER for v in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


@pytest.mark.slow
def test_dynamic_shapes_page_quotes_existing_errors():
    """The errors that the page on dynamic shapes quotes are in the code."""
    text = (ROOT / "docs/dynamic-shapes.md").read_text(encoding="utf-8")
    quotations = re.findall(r"^> (.+)$", text, re.MULTILINE)
    assert len(quotations) > 15
    known = find_strings()
    for quotation in quotations:
        parts = [part.strip() for part in quotation.split(PLACEHOLDER) if len(part.strip()) > 1]
        assert parts, quotation
        assert any(all(part in sentence for part in parts) for sentence in known), quotation


def test_numerics_page_bounds_match_code():
    """The bounds of the page on numerics equal those of the code."""
    text = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
    places = re.findall(r"`((?:clika_ref|plugins)/[\w/]+\.py)`", text)
    assert all((ROOT / place).exists() for place in places)
    assert "1,024 roundings" in text
    assert "MAX_ROUNDINGS = 1024" in (ROOT / "clika_ref/core/comparison.py").read_text(encoding="utf-8")
    check = (ROOT / "clika_ref/export/artifact_check.py").read_text(encoding="utf-8")
    assert "ROUNDING_TOLERANCE = 1024.0" in check
    assert "MAX_EAGER_ERROR_RATIO = 20.0" in check
    assert "20 * float(" in (ROOT / "plugins/aten/tests/one_operator.py").read_text(encoding="utf-8")
    assert "MAX_REASSOCIATION_ROUNDINGS = 256" in (ROOT / "clika_ref/core/passes.py").read_text(encoding="utf-8")


def test_pictures_page_explains_every_color():
    """The page on pictures explains every color."""
    shown = read_section(ROOT / "docs/pictures.md", "## Pictures")
    assert len(re.findall(r"^\| (?:green|grey|violet|brown|red|teal|blue) \|", shown, re.MULTILINE)) == len(Role)


def test_settings_page_example_loads(tmp_path):
    """The settings file of the document loads."""
    _, text = find_blocks(ROOT / "docs/settings.md", "yaml")
    (tmp_path / "clika.yaml").write_text(text, encoding="utf-8")
    settings = Settings.load_from_path(tmp_path / "clika.yaml")
    assert settings.global_quantization_settings.weights_utilize_full_int_range is True
    assert settings.global_pruning_settings.mask_type == "2:4"
    assert settings.clika_compile_options.smooth_quant == "on"
    assert settings.layer_settings["encoder.layers.0.*"].pruning_settings.skip_pruning


def test_distributed_page_loop_uses_existing_methods():
    """The training loop of the page on several processes calls existing methods."""
    (code,) = find_blocks(ROOT / "docs/distributed.md", "python")
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {name for name in calls if name.startswith("clika_")} == {"clika_gather", "clika_export"}
    assert all(hasattr(ClikaModule, name) for name in calls if name.startswith("clika_"))


@pytest.mark.slow
def test_command_line_page_commands_run(tmp_path, monkeypatch):
    """The command lines of the manual run and exit with the stated status."""
    document = ROOT / "docs/command-line.md"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    (model,) = find_blocks(document, "python")
    (tmp_path / "my_model.py").write_text(model, encoding="utf-8")
    np.save("x.npy", np.random.default_rng(0).standard_normal((40, 64), dtype=np.float32))
    lines = [line for text in find_blocks(document, "console") for line in text.splitlines()]
    assert {shlex.split(line)[1] for line in lines} == {*cli.COMMANDS}
    for line in lines:
        command, _, status = line.partition("  # exit status ")
        result = CliRunner().invoke(cli.app, shlex.split(command)[1:])
        assert result.exit_code == int(status or 0), f"{command}\n{result.output}"


def test_command_line_page_lists_commands_and_statuses():
    """The manual lists every command and exit status."""
    text = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")
    table = re.findall(
        r"^\| (\d+) \| (.+) \|$", read_section(ROOT / "docs/command-line.md", "## Exit status"), re.MULTILINE
    )
    assert table == [(str(int(status)), meaning) for status, meaning in STATUS_MEANINGS.items()]
    named = {
        word for cell in re.findall(r"^\| \[?(`.+?`)", text, re.MULTILINE) for word in re.findall(r"`([\w-]+)", cell)
    }
    assert {*cli.COMMANDS} <= named


PUBLIC_PACKAGES = (
    r"clika_ref|clika_ref\.(stages|core\.\w+|settings\.\w+|onnx_export\.artifact|integrations\.generation)"
)
"""Modules that pages may import from: the public names, the stages, and for plugin authors those of the API pages."""


def test_documents_import_from_public_packages_only():
    """Pages import from packages that keep their names; `clika_ref.stages` offers those that research needs."""
    imported = {
        (document.relative_to(ROOT).as_posix(), name)
        for document in DOCUMENTS
        for block in read_blocks(document)
        if block.language in ("python", "console")
        for name in re.findall(r"\b(?:from|import) (clika_ref(?:\.\w+)*)(?![\w.])", block.text)
    }
    assert len(imported) > 20
    assert {(page, name) for page, name in imported if not re.fullmatch(PUBLIC_PACKAGES, name)} == set()
