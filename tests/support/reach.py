"""Test files that a change can reach: `python -m tests.support.reach [BASE]` prints them, the nearest first.

The graph is static. Its nodes are module bodies and top-level functions and classes; its edges are the names
that they use, also in programs held as strings, in `-m` command lines and in plugin loaders. Where a change
cannot be placed (a recipe, a lock file, conftest.py), every test file is printed."""

import ast
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("headrace", "tests", "benchmarks")
PLUGINS = (
    "attention",
    "losses",
    "models",
    "objectives",
    "optim",
    "schedules",
    "quantize.methods",
    "data.sources",
)
COMMAND = re.compile(r"(?:^|[\s/])headrace(?:\s|$)")  # a command line, or the path of the installed command
MODULE = re.compile(r"\bheadrace(?:\.\w+)+\.?")
EVERYTHING = "*"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Module:
    """A parsed file: its top-level definitions, and what its imported names stand for."""

    name: str
    path: Path
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)


class Graph:
    """Which nodes (`module` for a body, `module:name` for a definition) each node uses."""

    def __init__(self, root: Path):
        self.root = root
        self.modules: dict[str, Module] = {}
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                self.modules[name] = Module(name, path, ast.parse(path.read_text()))
        for module in self.modules.values():
            module.definitions = {n.name: n for n in module.tree.body if isinstance(n, Definition)}
            module.imports = self._imports(module, _outer_statements(module.tree))
        self.edges: dict[str, set[str]] = {
            f"{m.name}:{name}": set() for m in self.modules.values() for name in m.definitions
        }
        for module in self.modules.values():
            self.edges[module.name] = self._uses(module, _outer_statements(module.tree)) | self._parents(
                module.name
            )
            for name, node in module.definitions.items():
                self.edges[f"{module.name}:{name}"] = self._uses(module, [node]) | {module.name}

    def reached(self, nodes: Iterable[str]) -> dict[str, int]:
        """Every node that uses one of `nodes`, directly or not, with its distance."""
        users: dict[str, set[str]] = {}
        for user, targets in self.edges.items():
            for target in targets:
                users.setdefault(target, set()).add(user)
        distance = dict.fromkeys(nodes, 0)
        queue = deque(distance)
        while queue:
            node = queue.popleft()
            for user in users.get(node, ()):
                if user not in distance:
                    distance[user] = distance[node] + 1
                    queue.append(user)
        return distance

    def test_files(self, nodes: Iterable[str]) -> list[Path]:
        """Test files that reach one of `nodes`, the nearest first."""
        distance = self.reached(nodes)
        found: dict[Path, int] = {}
        for module in self.modules.values():
            if not module.path.name.startswith("test_"):
                continue
            roots = [
                module.name,
                *(f"{module.name}:{name}" for name in module.definitions),
                *self._fixtures(module),
            ]
            if steps := [distance[root] for root in roots if root in distance]:
                found[module.path] = min(steps)
        return sorted(found, key=lambda path: (found[path], str(path)))

    def nodes_at(self, path: Path, lines: range) -> set[str]:
        """The nodes that these lines of a file belong to."""
        module = next(m for m in self.modules.values() if m.path == path)
        nodes = set()
        for line in lines:
            inside = [
                name
                for name, node in module.definitions.items()
                if min([node.lineno, *(d.lineno for d in node.decorator_list)])
                <= line
                <= (node.end_lineno or 0)
            ]
            nodes |= {f"{module.name}:{name}" for name in inside} or {module.name}
            # Decorators, defaults and the statements of a class run when the module is imported.
            nodes |= {
                module.name
                for name in inside
                for statement in _run_at_import(module.definitions[name])
                if statement.lineno <= line <= (statement.end_lineno or 0)
            }
        return nodes

    def _parents(self, name: str) -> set[str]:
        parts = name.split(".")
        return {".".join(parts[:n]) for n in range(1, len(parts))} & set(self.modules)

    def _imports(self, module: Module, nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str]]:
        """Map local names to (module, name), with an empty name for a module itself."""
        names: dict[str, tuple[str, str]] = {}
        for node in (inner for outer in nodes for inner in ast.walk(outer)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in PACKAGES:
                        local = alias.asname or alias.name.split(".")[0]
                        names[local] = (alias.name if alias.asname else local, "")
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                for alias in node.names:
                    inner_module = f"{node.module}.{alias.name}"
                    target = (
                        (inner_module, "")
                        if inner_module in self.modules
                        else (node.module or "", alias.name)
                    )
                    names[alias.asname or alias.name] = target
        return names

    def _uses(self, module: Module, nodes: list[ast.AST]) -> set[str]:
        imports = module.imports | self._imports(module, nodes)
        targets = {name for name, _ in self._imports(module, nodes).values()}
        free = {id(name) for node in nodes for name in _free_names(node, frozenset())}
        bases: set[int] = set()  # names whose attribute is what is used
        walked = [inner for node in nodes for inner in _walk_without_annotations(node)]
        imports_plugins = any(
            isinstance(n, ast.Attribute | ast.Name) and "import_module" in ast.unparse(n) for n in walked
        )
        for node in walked:
            if isinstance(node, ast.Attribute):
                chain, base = [node.attr], node.value
                while isinstance(base, ast.Attribute):
                    chain, base = [base.attr, *chain], base.value
                if isinstance(base, ast.Name) and base.id in imports and id(base) in free:
                    bases.add(id(base))
                    targets |= self._resolve(*imports[base.id], chain)
            elif isinstance(node, ast.List | ast.Tuple):
                targets |= self._command_line(node.elts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                targets |= self._string(module, node.value, imports_plugins)
        for node in walked:
            if isinstance(node, ast.Name) and id(node) not in bases and id(node) in free:
                if node.id in imports:
                    targets |= self._resolve(*imports[node.id], [])
                elif node.id in module.definitions:
                    targets.add(f"{module.name}:{node.id}")
        return {target for target in targets if target.partition(":")[0] in self.modules}

    def _resolve(self, module: str, name: str, chain: list[str]) -> set[str]:
        """Nodes that `module`, or `name` in it, followed by these attributes stands for."""
        chain = [name, *chain] if name else chain
        while chain and f"{module}.{chain[0]}" in self.modules:
            module, chain = f"{module}.{chain[0]}", chain[1:]
        if module not in self.modules:
            return set()
        found = self.modules[module]
        if not chain:
            return self._all_of(module)  # passed on as an object: any of its names may be used
        if chain[0] in found.definitions:
            return {f"{module}:{chain[0]}"}
        if chain[0] in found.imports:
            return self._resolve(*found.imports[chain[0]], chain[1:])
        return self._all_of(module) if "__getattr__" in found.definitions else {module}

    def _all_of(self, module: str) -> set[str]:
        return {module, *(f"{module}:{name}" for name in self.modules[module].definitions)}

    def _command_line(self, elements: list[ast.expr]) -> set[str]:
        words = [element.value if isinstance(element, ast.Constant) else None for element in elements]
        runs = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "-m"]
        return {node for name in runs if name == "headrace" for node in self._all_of("headrace.__main__")}

    def _string(self, module: Module, text: str, imports_plugins: bool) -> set[str]:
        targets: set[str] = set()
        if module.name.partition(".")[0] != "headrace" and COMMAND.search(text):
            targets |= self._all_of("headrace.__main__")
        if text == "headrace.":  # import_module(f"headrace.{folder}.{name}")
            text = " ".join(f"headrace.{folder}." for folder in PLUGINS)
        if "import" in text and "\n" in text:
            text = re.sub(r"from (headrace[\w.]*) import (\w+)", r"\1 \1.\2", text)
        for match in MODULE.findall(text):
            if match.endswith("."):
                for name in self.modules:
                    if name.startswith(match):  # config.reader takes `Config` out of the source of a plugin
                        targets |= (
                            self._all_of(name) if imports_plugins else {f"{name}:Config"} & set(self.edges)
                        )
                continue
            parts = match.split(".")
            while ".".join(parts) not in self.modules:
                parts.pop()
            if len(parts) > 1:
                targets |= self._resolve(".".join(parts), "", match.split(".")[len(parts) :])
        return targets

    def _fixtures(self, module: Module) -> Iterator[str]:
        """Hooks, automatic fixtures and the fixtures that a test file names, of each conftest.py above it."""
        words = {node.arg for node in ast.walk(module.tree) if isinstance(node, ast.arg)}
        words |= {
            node.value
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        parts = module.name.split(".")
        for depth in range(1, len(parts)):
            conftest = self.modules.get(".".join([*parts[:depth], "conftest"]))
            if conftest is None:
                continue
            yield conftest.name
            queue = [
                name for name, node in conftest.definitions.items() if name in words or _is_automatic(node)
            ]
            visited: set[str] = set()
            while queue:
                name = queue.pop()
                if name not in visited:
                    visited.add(name)
                    yield f"{conftest.name}:{name}"
                    node = conftest.definitions[name]
                    if isinstance(node, ast.FunctionDef):
                        queue += [arg.arg for arg in node.args.args if arg.arg in conftest.definitions]


def _is_automatic(node: Definition) -> bool:
    return node.name.startswith("pytest_") or any("autouse" in ast.unparse(d) for d in node.decorator_list)


def _run_at_import(node: Definition) -> list[ast.AST]:
    """Parts of a definition that run when its module is imported."""
    parts: list[ast.AST] = [*node.decorator_list]
    if isinstance(node, ast.ClassDef):
        return [*parts, *node.bases, *(n for n in node.body if not isinstance(n, Definition))]
    return [*parts, *node.args.defaults, *(default for default in node.args.kw_defaults if default)]


def _outer_statements(tree: ast.Module) -> list[ast.AST]:
    """What runs when a module is imported."""
    return [
        inner
        for node in tree.body
        for inner in (_run_at_import(node) if isinstance(node, Definition) else [node])
    ]


def _walk_without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    """Everything inside a node except annotations of functions, which run nothing."""
    yield node
    for name, value in ast.iter_fields(node):
        if name == "returns" or (name == "annotation" and isinstance(node, ast.arg)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk_without_annotations(child)


def _free_names(node: ast.AST, bound: frozenset[str]) -> Iterator[ast.Name]:
    """Names inside a node that are no local variables of a function around them."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inner = [n for child in ast.iter_child_nodes(node) for n in _same_scope(child)]
        bound |= {n.arg for n in inner if isinstance(n, ast.arg)}
        bound |= {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(node, ast.Name) and node.id not in bound:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _free_names(child, bound)


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            yield from _same_scope(child)


def changed_lines(root: Path, base: str) -> dict[Path, list[range]]:
    """Lines of each file that differ from `base`, and those of files that git does not track yet."""
    diff = _git(root, "diff", "--unified=0", "--no-renames", base)
    changes: dict[Path, list[range]] = {}
    path = root
    for line in diff.splitlines():
        if line.startswith("--- ") or line.startswith("+++ "):
            name = line[4:].removeprefix("a/").removeprefix("b/")
            if name != "/dev/null":
                path = root / name
                changes.setdefault(path, [])
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            changes[path].append(range(max(first, 1), max(first, 1) + max(count, 1)))
    for name in _git(root, "ls-files", "--others", "--exclude-standard").splitlines():
        changes[root / name] = [range(1, (root / name).read_bytes().count(b"\n") + 2)]
    return changes


def select(root: Path, changes: dict[Path, list[range]]) -> list[Path]:
    """Test files that these changed lines can reach; all of them where a change cannot be placed."""
    graph = Graph(root)
    tests = [m.path for m in graph.modules.values() if m.path.name.startswith("test_")]
    python = {module.path for module in graph.modules.values()}
    nodes: set[str] = set()
    mentioned: list[Path] = []
    for path, lines in changes.items():
        if path in python and path.name != "conftest.py":
            for part in lines:
                nodes |= graph.nodes_at(path, part)
            if path in tests:
                mentioned.append(path)
        elif path.suffix in (".md", ".svg", ".png"):
            mentioned += [test for test in tests if re.search(r"docs|\.md\b", test.read_text())]
        else:
            return sorted(tests)
    return list(dict.fromkeys([*mentioned, *graph.test_files(nodes)]))


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[2]
    for path in select(here, changed_lines(here, sys.argv[1] if len(sys.argv) > 1 else "HEAD")):
        print(path.relative_to(here))
