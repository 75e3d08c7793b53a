"""The documents match the code: links lead somewhere, the recipe shown is the demo's, every package is
listed, and commands parse."""

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from headrace.cli import main as cli_main
from headrace.config import recipe
from headrace.errors import UserError
from tests.architecture.test_layers import LAYERS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def commands() -> Iterator[tuple[str, str, str]]:
    """Every command of Headrace in a block of code: its page, what is typed, and what is said of it below."""
    for page in PAGES:
        for block in re.findall(r"```\w*\n(.*?)```", page.read_text(), re.S):
            lines = block.replace("\\\n", " ").splitlines()
            for line, below in zip(lines, [*lines[1:], ""], strict=True):
                for command in re.split(r"; |\|\| ", line.removeprefix("$ ")):
                    if command.startswith("headrace "):
                        yield page.name, command, below


@cache
def recipe_of(run: str) -> Path | None:
    """The recipe whose run folder that is."""
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        if yaml.safe_load(path.read_text()).get("run_dir") == run:
            return path
    return None


def mistake(command: str) -> str:
    """What would be said of a command before anything is done: nothing if it is understood. What follows a
    `#` is a comment, as in a shell. Settings are read with the recipe that it names, or of its run folder."""
    try:
        args = cli_main.parse(shlex.split(command, comments=True)[1:])
        path = getattr(args, "recipe", None)
        if path is None and command.startswith("headrace eval "):
            path = recipe_of(args.run)
        if path is not None and Path(path).exists():
            recipe.load_any(path, args.overrides)
    except UserError as error:
        return f"headrace: {error}"
    return ""


def test_every_command_in_the_documents_would_be_understood(demo_run, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    shutil.copytree("runs/demo", "runs/lora-demo")
    found = [(page, command, below, mistake(command)) for page, command, below in commands()]
    assert len(found) > 100
    for page, command, below, said in found:
        wanted = below if below.startswith("headrace: ") else ""
        assert said == wanted, f"{page}: {command}"
    assert mistake("headrace train recipes/modernbert-base.yaml model.use=modernbert_decoder objective=null")


def test_every_benchmark_is_listed():
    page = (ROOT / "docs/performance/benchmarks.md").read_text()
    listed = re.findall(r"^\| `python -m benchmarks\.(\w+)", page, re.M)
    commands = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert sorted(listed) == sorted(commands)
