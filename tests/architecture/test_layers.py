"""Packages only import from lower layers, and those that must start fast reach no JAX."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "headrace"

# Packages and root modules from the bottom up. Those on one line do not import each other.
LAYERS = (
    ("errors", "html_page"),
    ("storage", "hardware"),
    ("config", "runtime", "trackers"),
    ("data", "tpu"),
    ("nn",),
    ("low_precision",),
    ("model_formats", "kernels"),
    ("attention",),
    ("models", "losses", "optim", "schedules"),
    ("model_wrappers",),
    ("objectives",),
    ("checkpoint",),
    ("training", "inference", "report"),
    ("convert", "plan"),
    ("quantize", "doctor"),
    ("api",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

WITHOUT_JAX = [
    "errors",
    "html_page",
    "storage",
    "hardware",
    "config",
    "trackers",
    "data",
    "tpu",
    "report",
    "doctor",
]
PLUGIN_FOLDERS = (
    "models objectives losses optim schedules attention quantize/methods data/sources tpu/schedulers"
)

FILES = sorted(ROOT.rglob("*.py"))


def package_of(module: str) -> str | None:
    """The package or root module of a dotted name; None if it is not in headrace, or headrace itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == "headrace" and len(parts) > 1 else None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the modules that one statement or call imports, as dotted names that may be too long by one part.

    Of an f-string such as f"headrace.models.{name}" it yields the constant beginning."""
    match node:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=str(module), names=names, level=0):
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Call(func=function, args=[argument, *_]) if ast.unparse(function).endswith("import_module"):
            match argument:
                case ast.Constant(value=str(name)):
                    yield name
                case ast.JoinedStr(values=[ast.Constant(value=str(name)), *_]):
                    yield name


def package_imports() -> Iterator[tuple[str, str, str]]:
    """Yield (importing package, imported package, place) of every import, lazy ones included."""
    for path in FILES:
        importing = package_of(module_name(path))
        for node in ast.walk(ast.parse(path.read_text())):
            for module in imported_modules(node):
                imported = package_of(module)
                if importing and imported and imported in LEVEL and imported != importing:
                    yield importing, imported, f"{path.relative_to(ROOT.parent)}:{node.lineno}"  # type: ignore[attr-defined]


def test_every_package_has_a_layer():
    packages = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert packages <= LEVEL.keys()


def test_packages_import_only_from_lower_layers():
    upwards = [
        f"{place}: {importing} imports {imported}"
        for importing, imported, place in package_imports()
        if LEVEL[importing] <= LEVEL[imported]
    ]
    assert not upwards, "\n".join(upwards)


def top_level_imports(path: Path) -> Iterator[str]:
    """Yield the modules that importing a file imports: statements in functions do not count."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield from imported_modules(node)
            pending.append(node)


@pytest.mark.parametrize("package", WITHOUT_JAX)
def test_importing_the_package_imports_no_jax(package):
    by_name = {module_name(path): path for path in FILES}
    start = {name for name in by_name if package_of(name) == package}
    reached, pending = dict.fromkeys(start, package), list(start)
    while pending:
        module = pending.pop()
        for name in top_level_imports(by_name[module]):
            assert not re.match(r"(jax|jaxlib|optax|orbax)\b", name), (
                f"{reached[module]}: {module} imports {name}"
            )
            # `from package import name` imports the module `package.name` or an object of `package`.
            parts = name.split(".")
            for found in (".".join(parts[:count]) for count in range(1, len(parts) + 1)):
                if found in by_name and found not in reached:
                    reached[found] = f"{reached[module]} > {found}"
                    pending.append(found)


def test_folders_stay_small():
    root_modules = [path for path in ROOT.glob("*.py")]
    packages = [path for path in ROOT.iterdir() if (path / "__init__.py").is_file()]
    assert len(root_modules) <= 5
    assert len(packages) <= 30
    exempt = {ROOT / name for name in [*PLUGIN_FOLDERS.split(), "tpu"]}
    for folder in {path.parent for path in FILES} - exempt:
        assert len(list(folder.glob("*.py"))) <= 20, folder
