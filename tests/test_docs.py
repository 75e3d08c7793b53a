"""The documents say what is there: links lead somewhere, the recipe shown is the demo's, files are listed."""

import ast
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_every_file_is_listed_with_the_first_sentence_of_its_docstring():
    rows = []
    for path in sorted((ROOT / "millrace").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if path.read_text().strip():
            assert docstring, f"{path} has no docstring"
            first = re.split(r"(?<=[.])\s", " ".join(docstring.split()))[0]
            rows.append(f"| `{path.relative_to(ROOT)}` | {first} |")
    listed = [line for line in (ROOT / "docs/files.md").read_text().splitlines() if line.startswith("| `")]
    assert listed == rows


def test_links_lead_to_files_that_are_there():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_recipe_explained_in_the_readme_is_the_demos():
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == yaml.safe_load((ROOT / "recipes/demo.yaml").read_text())


def test_paths_of_recipes_in_the_documents_are_there():
    for page in [*PAGES, ROOT / "Makefile"]:
        for path in re.findall(r"recipes/[\w./-]+\.yaml", page.read_text()):
            assert (ROOT / path).is_file(), f"{page.name} names {path}"


def test_every_benchmark_is_listed():
    page = (ROOT / "docs/performance/benchmarks.md").read_text()
    listed = re.findall(r"^\| `python -m benchmarks\.(\w+)", page, re.M)
    commands = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert sorted(listed) == sorted(commands)
