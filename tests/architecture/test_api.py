"""The Python API: its names, its documentation, and an import without JAX."""

import inspect
import operator
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import headrace
from headrace.plan import outcome  # a subpackage of the same name as a function of the API
from headrace.training.evaluate import Evaluation

ROOT = Path(__file__).parents[2]
NAMES = {
    *("load_recipe", "prepare_data", "train", "open_run", "import_model", "evaluate", "generate", "logits"),
    *("export", "quantize", "plan", "Dataset", "UserError", "DoesNotFit", "__version__"),
}
FUNCTIONS = sorted(NAMES - {"Dataset", "UserError", "DoesNotFit", "__version__"})

IMPORT = """\
import sys, time
started = time.process_time()
import headrace
seconds = time.process_time() - started
assert set(headrace.__all__) <= set(dir(headrace))
assert callable(headrace.plan) and callable(headrace.load_recipe)
headrace.UserError, headrace.Dataset
assert "jax" not in sys.modules, "imports JAX"
assert seconds < 0.07, f"takes {seconds:.3f} s"
"""


def test_the_names_of_the_api():
    assert set(headrace.__all__) == NAMES and len(headrace.__all__) == len(NAMES) == 15
    assert set(dir(headrace)) >= NAMES
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        headrace.trian  # noqa: B018


def test_importing_headrace_imports_no_jax_and_is_fast():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_functions_are_not_replaced_by_subpackages_of_their_names():
    assert outcome.__name__ == "headrace.plan.outcome"
    assert inspect.isfunction(headrace.plan) and inspect.isfunction(headrace.quantize)


@pytest.mark.parametrize("function", [*FUNCTIONS, "Dataset.open"])
def test_every_function_documents_arguments_result_and_errors(function: str):
    function = operator.attrgetter(function)(headrace)
    parts = inspect.getdoc(function).split("\n\n")
    headings = [part.partition("\n")[0] for part in parts]
    assert headings[-4:] == ["Args:", "Returns:", "Raises:", "Example:"], headings
    documented = [line.partition(":")[0].strip() for line in parts[-4].splitlines()[1:] if line[4:5].strip()]
    assert documented == list(inspect.signature(function).parameters)
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    assert all(p.annotation is not p.empty for p in parameters)
    assert signature.return_annotation is not signature.empty
    assert sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) <= 2


@pytest.mark.parametrize("name", ["Dataset", "UserError", "DoesNotFit"])
def test_every_class_has_an_example(name: str):
    assert "Example:\n    >>> " in inspect.getdoc(getattr(headrace, name))


def test_type_checkers_find_the_annotations_of_the_installed_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (ROOT / "headrace/py.typed").is_file()
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["headrace"]


@pytest.mark.parametrize("name", ["evaluate", "generate", "logits", "export", "quantize"])
def test_a_path_in_place_of_a_run_is_answered_with_how_to_open_it(name: str):
    required = {"export": ["exported"], "logits": [[1]]}.get(name, [])
    with pytest.raises(headrace.UserError, match=r"run: found a path, expected hr\.open_run\('runs/demo'\)"):
        getattr(headrace, name)("runs/demo", *required)


def test_a_path_in_place_of_a_recipe_is_answered_with_how_to_load_it():
    message = r"recipe: found a path, expected hr\.load_recipe\('demo.yaml'\)"
    with pytest.raises(headrace.UserError, match=message):
        headrace.train("demo.yaml")  # type: ignore[arg-type]
    with pytest.raises(headrace.UserError, match=message):
        headrace.plan(Path("demo.yaml"), "v5p-32")  # type: ignore[arg-type]
    with pytest.raises(headrace.UserError, match=r"expected a list of settings: \['seed=1'\]"):
        headrace.load_recipe("demo.yaml", "seed=1")


def test_results_of_evaluation_are_a_table_in_notebooks():
    result = Evaluation({"loss": 0.25, "macro_f1": 0.5}, ["<b>: 3 of 4 right, predicted 5 times"])
    assert result == {"loss": 0.25, "macro_f1": 0.5} and dict(result) == result
    html = result._repr_html_()
    assert "macro f1" in html and "0.2500" in html
    assert "&lt;b&gt;" in html and "3 of 4 right, predicted 5 times" in html
