"""The documents match the code: links lead somewhere, names exist, the recipe shown is the demo's, every
package is listed, and commands parse."""

import argparse
import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from headrace.cli import main as cli_main
from headrace.cli.parser import make_parser
from headrace.config import recipe, sections
from headrace.config.reader import all_keys
from headrace.errors import UserError
from tests.architecture.test_layers import LAYERS
from tests.support.faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGES = [
    *map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(ROOT / "docs").rglob("*.md"),
]
RECIPE_KEYS = {
    key
    for cls in (sections.TrainRecipe, sections.DataRecipe, sections.QuantizeRecipe)
    for key in all_keys(cls)
}
FILE_SUFFIXES = ("json", "jsonl", "txt", "py", "yaml", "html", "svg", "conf")
FOREIGN_NAMES = {"tpu.nodes.delete", "attention.sliding_window_pattern"}  # of Google Cloud and llama.cpp
FOREIGN_OPTIONS = {"--gres", "--valid-until-duration"}  # of Slurm and gcloud


def test_every_module_has_a_docstring():
    for path in sorted((ROOT / "headrace").rglob("*.py")):
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


def test_architecture_lists_every_package_once_from_the_top_layer_down():
    page = (ROOT / "docs/architecture.md").read_text()
    picture = (ROOT / "docs/architecture.svg").read_text()
    packages = [name for names in reversed(LAYERS) for name in names if name != "__main__"]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == packages
    assert re.findall(r'class="name"[^>]*>(\w+)<', picture) == packages


def test_links_lead_to_existing_files_and_headings():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if "://" not in target:
                path = page.parent / target if target else page
                assert path.exists(), f"{page.name} links to {target}"
                assert not anchor or anchor in heading_anchors(path), (
                    f"{page.name} links to {target}#{anchor}"
                )


def heading_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_recipe_explained_in_the_readme_is_the_demos():
    shown = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == yaml.safe_load((ROOT / "recipes/demo.yaml").read_text())


def test_paths_in_the_documents_exist():
    for page in [*PAGES, ROOT / "Makefile"]:
        paths = re.findall(
            r"\b(?:headrace|tests|recipes|benchmarks|examples)/[\w./-]+\.\w+", page.read_text()
        )
        for path in paths:
            if not re.search(r"\b(NAME|FOLDER)\b", path):
                assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_dotted_names_in_the_documents_exist():
    folders = {name for names in LAYERS for name in names} | {key.partition(".")[0] for key in RECIPE_KEYS}
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for name in re.findall(r"`(\w+(?:\.\w+)+)(?:[(=:][^`]*)?`", prose):
            first, *_, last = name.split(".")
            if first in folders and last not in FILE_SUFFIXES and name not in FOREIGN_NAMES:
                assert name in RECIPE_KEYS or is_defined(name), f"{page.name} names {name}"


def is_defined(name: str) -> bool:
    """Whether a dotted name, without `headrace.`, is a module or is defined in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath("headrace", *parts[:count])
        for module in (path.with_suffix(".py"), path / "__init__.py"):
            if module.is_file():
                scope: ast.AST | None = ast.parse(module.read_text())
                for part in parts[count:]:
                    scope = find_definition(scope, part) if scope else None
                if scope:
                    return True
    return False


def find_definition(scope: ast.AST, name: str) -> ast.AST | None:
    for node in getattr(scope, "body", []):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or name in {getattr(target, "id", None) for target in targets}:
            return node
    return None


def iter_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of its commands."""
    for action in parser._actions:
        yield from action.option_strings
        for command in action.choices.values() if isinstance(action.choices, dict) else ():
            yield from iter_options(command)


def test_options_in_the_documents_exist():
    options = {*iter_options(make_parser()), *FOREIGN_OPTIONS}
    for path in (ROOT / "benchmarks").glob("*.py"):
        options |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for option in re.findall(r"`(?:headrace [^`]*)?(--[a-z][a-z-]*)", prose):
            assert option in options, f"{page.name} names {option}"


def iter_commands() -> Iterator[tuple[str, str, str]]:
    """Yield every command of Headrace in a block of code: its page, the command, and the line below it."""
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.S):
            lines = block.replace("\\\n", " ").splitlines()
            for line, below in zip(lines, [*lines[1:], ""], strict=True):
                for command in re.split(r"; |\|\| ", line.removeprefix("$ ")):
                    if command.startswith("headrace "):
                        yield page.name, command, below


@cache
def find_recipe(run_dir: str) -> Path | None:
    """The recipe that has this run folder."""
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        if yaml.safe_load(path.read_text()).get("run_dir") == run_dir:
            return path
    return None


def error_of(command: str) -> str:
    """The message of a command that fails before it does anything, else an empty string.

    As in a shell, a `#` begins a comment. Overrides are checked with the recipe that the command names, or
    with that of its run folder."""
    try:
        args = cli_main.parse(shlex.split(command, comments=True)[1:])
        path = getattr(args, "recipe", None)
        if path is None and command.startswith("headrace eval "):
            path = find_recipe(args.run)
        if path is not None and Path(path).exists():
            recipe.load_any(path, args.overrides)
    except UserError as error:
        return f"headrace: {error}"
    return ""


def test_every_command_in_the_documents_parses(demo_run, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree("runs/demo", "runs/lora-demo")
    errors = [(page, command, below, error_of(command)) for page, command, below in iter_commands()]
    assert len(errors) > 100
    for page, command, below, error in errors:
        expected = below if below.startswith("headrace: ") else ""
        assert error == expected, f"{page}: {command}"
    assert error_of("headrace train recipes/modernbert-base.yaml model.use=modernbert_decoder objective=null")


def test_every_benchmark_is_listed():
    page = (ROOT / "docs/performance/benchmarks.md").read_text()
    listed = re.findall(r"^\| `python -m benchmarks\.(\w+)", page, re.M)
    commands = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert sorted(listed) == sorted(commands)


def test_the_table_of_faults_is_that_of_the_tests():
    page = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", page.partition("## Faults")[2], re.M)
    assert {int(number): (fault, outcome) for number, fault, outcome in rows} == FAULTS
