"""A run's weights and execution options for inference."""

import jax

from headrace.checkpoint.open_run import LoadedRun
from headrace.low_precision.cast import cast
from headrace.model_wrappers import load_family
from headrace.models import Model, fixed_matmul
from headrace.nn.module import axes
from headrace.nn.stack import Execution


def make_execution(run: LoadedRun) -> Execution:
    """Make the execution options of a forward pass: the recipe's attention and dtype. Products are in 8 bits
    only if that is part of the model, and not because training was."""
    recipe = run.recipe
    return Execution(recipe.attention, recipe.compute.dtype, matmul=fixed_matmul(recipe.model))


def cast_weights(run: LoadedRun, exec_opts: Execution) -> Model:
    """Cast the weights to the compute dtype.

    Done once, not in every step, which would read all weights in float32 for each token."""
    weight_axes = axes(load_family(run.recipe.model).Model, run.recipe.model)
    return jax.jit(lambda params: cast(params, weight_axes, exec_opts))(run.params)
