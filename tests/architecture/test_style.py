"""Rules of CONTRIBUTING.md that a script can check: names, docstrings, sizes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import headrace

PACKAGE = Path(headrace.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# Everyday words in the place of terms: pronouns, participles and the like, which say nothing about a value.
# fmt: off
WORDLESS = {
    "its", "tell", "told", "said", "say", "heard", "spoken", "whisper", "complain", "mine",
    "theirs", "ours", "held", "still", "alone", "apart", "together", "own", "begun", "ended",
    "wanted", "asked", "doubt", "doubts", "whole", "made", "gone", "once", "twice", "few", "much",
    "beside", "anew", "lie", "lies", "stay", "stays", "homes", "home", "how", "rest", "judged",
    "drawn", "missed", "known", "given", "passed", "seen", "kept", "taken", "in_vain", "forgiven",
    "one", "some", "others", "brought",
}
# Keys of JSON files: fields of these names are data.
DATA_NAMES = {("data/pipeline/stages.py", "brought"), ("tpu/job_ledger.py", "seen")}
FRAGMENTS = {
    "of", "by", "for", "with", "without", "to", "from", "in", "on", "at", "as", "where", "what",
    "which", "who", "whose", "how", "when", "while", "if", "that", "those", "these", "all", "each",
    "it", "its", "they", "them", "he", "she", "nobody", "somebody",
}
# fmt: on
MAX_LINES, MAX_FUNCTION_LINES, MAX_LONG_KERNEL_FILES = 400, 80, 4


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are bound, with their lines: definitions, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def functions(tree: ast.AST, depth: int = 0) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Functions with the number of functions around each."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function:
            yield node, depth
        yield from functions(node, depth + is_function)


def test_names_are_terms_of_the_field():
    found = [
        f"{relative(path)}:{line} {name}"
        for path, tree in TREES.items()
        for name, line in bindings(tree)
        if name in WORDLESS and (relative(path), name) not in DATA_NAMES
    ]
    assert not found


def test_class_names_are_unique():
    allowed = {"Config", "Model", "Block", "Cache"}
    names = [n.name for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert len({name for name in names if names.count(name) > 1} - allowed) <= 5


def test_docstrings_begin_with_what_a_thing_does_or_is():
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    texts = {
        f"{relative(path)}: {text.splitlines()[0]}": text
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    }
    fragments = [name for name, text in texts.items() if re.split(r"\W+", text.lower())[0] in FRAGMENTS]
    assert len(fragments) <= 0.01 * len(texts), "\n".join(fragments)


def test_public_functions_of_more_than_five_lines_have_a_docstring():
    missing = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path, tree in TREES.items()
        for outer in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef)))
        for node in outer.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        if (node.end_lineno or 0) - node.lineno > 5 and not ast.get_docstring(node)
    ]
    assert not missing


def test_files_and_functions_stay_small():
    long_files = [p for p in FILES if p.read_text().count("\n") > MAX_LINES]
    assert all("kernels" in path.parts for path in long_files), long_files
    assert len(long_files) <= MAX_LONG_KERNEL_FILES
    for path, tree in TREES.items():
        if "kernels" not in path.parts:  # a kernel is one function with its phases inside
            for node, depth in functions(tree):
                where = f"{relative(path)}:{node.lineno} {node.name}"
                assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, where
                assert depth <= 1, f"{where} is nested in two functions"
