"""`make check` runs every test that a change can reach."""

import subprocess
from pathlib import Path

import pytest

from tests.support.mutants import find_mutants
from tests.support.reach import Graph, changed_lines, select

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "headrace/__init__.py": "",
    "headrace/__main__.py": "from headrace.cli import main\nmain.main()\n",
    "headrace/cli/__init__.py": "",
    "headrace/cli/main.py": "def main():\n    from headrace.tools import one\n    one.run()\n",
    "headrace/tools/__init__.py": "",
    "headrace/tools/one.py": "from headrace.tools.two import helper\n\n"
    "def run():\n    helper()\n\ndef other():\n    pass\n",
    "headrace/tools/two.py": "LIMIT = 1\n\ndef helper():\n    return LIMIT\n\ndef unused():\n    pass\n",
    "headrace/models/__init__.py": "import importlib\n\ndef load(name):\n"
    "    return importlib.import_module(f'headrace.models.{name}')\n",
    "headrace/models/tiny.py": "def build():\n    pass\n",
    "tests/__init__.py": "",
    "tests/conftest.py": "import pytest\n\n@pytest.fixture\ndef built():\n"
    "    from headrace.tools import two\n    return two.helper()\n",
    "tests/test_direct.py": "from headrace.tools import one\n\ndef test_run():\n    one.run()\n",
    "tests/test_process.py": "COMMAND = ['python', '-m', 'headrace', 'x']\n\ndef test_it():\n    COMMAND\n",
    "tests/test_text.py": 'PROGRAM = """\nfrom headrace.tools import two\ntwo.helper()\n"""\n\n'
    "def test_it():\n    PROGRAM\n",
    "tests/test_fixture.py": "def test_it(built):\n    pass\n",
    "tests/test_plugin.py": "from headrace import models\n\ndef test_it():\n    models.load('tiny')\n",
    "tests/test_other.py": "from headrace.tools import one\n\ndef test_it():\n    one.other()\n",
}


@pytest.fixture
def graph(tmp_path: Path) -> Graph:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Graph(tmp_path)


@pytest.mark.parametrize(
    ("node", "tests"),
    [
        ("headrace.tools.two:helper", {"test_direct", "test_process", "test_text", "test_fixture"}),
        ("headrace.tools.two:unused", {"test_text"}),  # a program in a string may use all of a module
        ("headrace.tools.one:other", {"test_other"}),
        ("headrace.models.tiny:build", {"test_plugin"}),
        ("headrace.cli.main:main", {"test_process"}),
    ],
)
def test_a_change_reaches_imports_strings_processes_fixtures_and_plugins(
    graph: Graph, node: str, tests: set[str]
):
    assert {path.stem for path in graph.test_files([node])} == tests


def test_the_body_of_a_module_reaches_all_that_import_it(graph: Graph):
    reached = {
        path.stem
        for path in graph.test_files(graph.nodes_at(graph.root / "headrace/tools/two.py", range(1, 2)))
    }
    assert reached == {"test_direct", "test_process", "test_text", "test_fixture", "test_other"}


def test_the_nearest_test_comes_first(graph: Graph):
    assert graph.test_files(["headrace.tools.one:run"])[0].stem == "test_direct"


def test_what_cannot_be_placed_reaches_everything(graph: Graph):
    tests = {path for path in graph.root.rglob("test_*.py")}
    for name in ("pyproject.toml", "recipes/demo.yaml", "tests/conftest.py", "headrace/removed.py"):
        assert set(select(graph.root, {graph.root / name: [range(1, 2)]})) == tests, name


def test_a_change_of_this_checkout_reaches_the_tests_of_its_file():
    lines = range(1, len((ROOT / "headrace/nn/rope.py").read_text().splitlines()))
    found = select(ROOT, {ROOT / "headrace/nn/rope.py": [lines]})
    assert any("rope" in path.name for path in found[:5])


def test_git_names_the_lines_that_changed(tmp_path: Path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    (tmp_path / "code.py").write_text("a = 1\nb = 2\nc = 3\n")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "code.py").write_text("a = 1\nb = 4\nc = 3\n")
    (tmp_path / "new.py").write_text("d = 1\n")
    changes = changed_lines(tmp_path, "HEAD")
    assert changes == {tmp_path / "code.py": [range(2, 3)], tmp_path / "new.py": [range(1, 3)]}


def test_mutants_change_operators_comparisons_and_constants_but_no_messages(tmp_path: Path):
    (tmp_path / "code.py").write_text(
        "def clip(x: int | None, limit: int = 3) -> int:\n"
        "    if x is None or not x < limit:\n"
        "        raise ValueError(f'{x + 1} is not below {limit}')\n"
        "    return x * 2\n"
    )
    changes = {(m.before, m.after) for m in find_mutants(Path("code.py"), tmp_path)}
    assert changes == {
        ("3", "(4)"),
        ("x is None or not x < limit", "(x is None and (not x < limit))"),
        ("x is None", "(x is not None)"),
        ("not x < limit", "(x < limit)"),
        ("x < limit", "(x <= limit)"),
        ("x * 2", "(x + 2)"),
        ("2", "(3)"),
    }
    source = (tmp_path / "code.py").read_bytes()
    for mutant in find_mutants(Path("code.py"), tmp_path):
        compile(mutant.apply(source), "code.py", "exec")
        assert mutant.apply(source) != source
