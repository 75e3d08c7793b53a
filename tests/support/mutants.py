"""Change operators, comparisons and constants in the code, run the tests that import it, and list the changes
that no test caught.

    python -m tests.support.mutants headrace/optim/muon.py   (make mutants MODULE=...)
    python -m tests.support.mutants --count 200 --seed 7     (make mutants COUNT=200)

Works in a copy of the checkout. tests/support/mutate.py damages input files; this damages code."""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.reach import Graph

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutant:
    """One changed expression of a file."""

    path: Path  # relative to the checkout
    line: int
    start: int  # offsets in the source, as bytes
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def find_mutants(path: Path, root: Path) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    source = (root / path).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in _expressions(ast.parse(source)):
        for changed in _variants(node):
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source.encode()[start:end].decode()
            mutants.append(Mutant(path, node.lineno, start, end, before, f"({ast.unparse(changed)})"))
    return mutants


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions outside of annotations, decorators and what is raised: a message is no behavior."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        return
    if isinstance(node, ast.expr):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _expressions(child)


def _variants(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp | ast.BoolOp):
        if type(node.op) in OPERATORS and not _is_text(node):
            fields = dict(ast.iter_fields(node)) | {"op": OPERATORS[type(node.op)]()}
            yield type(node)(**fields)
    elif isinstance(node, ast.Compare):
        for n, op in enumerate(node.ops):
            if type(op) in OPERATORS:
                ops = [OPERATORS[type(op)]() if n == m else other for m, other in enumerate(node.ops)]
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)


def _is_text(node: ast.expr) -> bool:
    """Whether a sum or product joins strings, or types (`int | None`)."""
    return any(
        isinstance(inner, ast.JoinedStr | ast.List | ast.Tuple)
        or (isinstance(inner, ast.Constant) and isinstance(inner.value, str | None))
        for inner in ast.iter_child_nodes(node)
    )


def nearest_tests(graph: Graph, path: Path) -> list[Path]:
    """Test files that import a module, or else the three that reach it by the fewest steps."""
    module = next(m for m in graph.modules.values() if m.path == graph.root / path)
    nodes = {module.name, *(f"{module.name}:{name}" for name in module.definitions)}
    tests = {m.path: m for m in graph.modules.values() if m.path.name.startswith("test_")}
    direct = [
        test
        for test, m in tests.items()
        if any(
            graph.edges[node] & nodes for node in [m.name, *(f"{m.name}:{name}" for name in m.definitions)]
        )
    ]
    return [test.relative_to(graph.root) for test in direct or graph.test_files(nodes)[:3]]


def sample_mutants(root: Path, count: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, drawn with a fixed seed."""
    packages: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((root / "headrace").rglob("*.py")):
        relative = path.relative_to(root)
        packages[relative.parts[1]] += find_mutants(relative, root)
    random = Random(seed)
    order = {name: random.sample(found, len(found)) for name, found in packages.items() if found}
    chosen: list[Mutant] = []
    while len(chosen) < count and any(order.values()):
        for found in order.values():
            if found and len(chosen) < count:
                chosen.append(found.pop())
    return chosen


def copy_checkout(root: Path, target: Path) -> None:
    """Copy the files that git tracks or would track."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target / name)
    if (root / ".venv").exists():
        (target / ".venv").symlink_to((root / ".venv").resolve())


def run_tests(checkout: Path, tests: list[Path], seconds: float | None) -> tuple[bool, float]:
    """Whether these test files pass in a checkout within a time limit, and how long they took."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *map(str, tests)]
    environment = os.environ | {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    started = time.monotonic()
    try:
        code = subprocess.run(
            command, cwd=checkout, env=environment, timeout=seconds, capture_output=True
        ).returncode
    except subprocess.TimeoutExpired:
        return False, time.monotonic() - started
    return code in (0, 5), time.monotonic() - started  # 5: all of them are slow tests


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("modules", nargs="*", type=Path, help="files, e.g. headrace/optim/muon.py")
    parser.add_argument(
        "--count", type=int, default=0, help="mutants drawn over all packages; with modules, of these"
    )
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    root = Path(__file__).resolve().parents[2]
    if options.modules:
        mutants = [
            m for path in options.modules for m in find_mutants(path.resolve().relative_to(root), root)
        ]
        if options.count:
            mutants = Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    elif options.count:
        mutants = sample_mutants(root, options.count, options.seed)
    else:
        parser.error("name a module, or give --count")
    graph, survivors, times = Graph(root), [], dict[tuple[Path, ...], float]()
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder)
        copy_checkout(root, checkout)
        for number, mutant in enumerate(mutants, 1):
            tests = nearest_tests(graph, mutant.path)
            key = tuple(tests)
            if key not in times:
                passed, times[key] = run_tests(checkout, tests, None)
                if not passed:
                    print(f"{mutant.path}: its tests fail without a change: {' '.join(map(str, tests))}")
                    return 1
            source = (root / mutant.path).read_bytes()
            (checkout / mutant.path).write_bytes(mutant.apply(source))
            survived, seconds = run_tests(checkout, tests, 3 * times[key] + 30)
            (checkout / mutant.path).write_bytes(source)
            survivors += [mutant] if survived else []
            print(
                f"{number}/{len(mutants)} {'SURVIVED' if survived else 'caught'} {seconds:.0f} s  {mutant}",
                flush=True,
            )
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants were caught. Survivors:")
    for mutant in survivors:
        print(f"  {mutant}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
