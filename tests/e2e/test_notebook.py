"""The notebook on the Python API runs from its first cell to its last, in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import xla_flags

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs/notebooks/api.md"

# Runs the cells of a notebook as Jupyter does: the value of a last expression is rendered.
RUNNER = """
import ast, os, re, sys

path, namespace = sys.argv[1], {"__name__": "__main__"}
text = open(path).read()
for cell in re.finditer(r"^```python\\n(.*?)^```$", text, re.M | re.S):
    first_line = text.count("\\n", 0, cell.start(1))
    tree = ast.parse("\\n" * first_line + cell[1], path)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, path, "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), path, "eval"), namespace)
        print(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
exec(os.environ["CHECKS"], namespace)
"""

CHECKS = """
assert result.exit_code == 0 and (result.step, result.run_dir) == (120, "runs/small")
assert run.step == 120 and metrics["perplexity"] < math.exp(metrics["unigram_entropy"])
assert next_token.shape == (512,) and abs(hr.evaluate(quantized)["loss"] - metrics["loss"]) < 0.1
assert outcome.fits and outcome.step_seconds > 0
"""


def test_every_cell_of_the_notebook_runs(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags.flags(1)}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, str(NOTEBOOK)],
        cwd=tmp_path, env=env | {"CHECKS": CHECKS}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "did you mean optimizer.learning_rate?" in done.stdout
    tables = re.findall(r"<table>.*</table>", done.stdout)
    assert "perplexity" in tables[0] and "v5p-32" in tables[1]
    assert "color" not in "".join(tables)  # readable in light and dark notebooks
