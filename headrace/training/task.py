"""The task of a training recipe: what its step computes, resolved for the devices."""

import jax

from headrace.config.sections import TrainRecipe
from headrace.low_precision.support import has_fast_matmul
from headrace.model_wrappers import load_family
from headrace.models import fixed_matmul
from headrace.nn.stack import Execution, default_unroll
from headrace.objectives import SpecialTokens, TrainTask, load_objective


def make_task(
    recipe: TrainRecipe, special_tokens: SpecialTokens, device: jax.Device | None = None
) -> TrainTask:
    """Make the task of a training recipe, for devices like `device`, by default those of this process."""
    keys, matmul = recipe.compute, matmul_format(recipe)
    native = matmul != "compute" and has_fast_matmul(device or jax.local_devices()[0], matmul)
    unroll = default_unroll() if isinstance(keys.unroll, str) else keys.unroll
    return TrainTask(
        model=recipe.model,
        objective=recipe.objective,
        loss=recipe.loss,
        exec_opts=Execution(recipe.attention, keys.dtype, keys.remat, unroll, matmul, native),
        special_tokens=special_tokens,
        isolate_documents=recipe.data.isolate_documents,
        family=load_family(recipe.model),
    )


def matmul_format(recipe: TrainRecipe) -> str:
    """The format in which the layers multiply: the model's own, if it has one, or the recipe's."""
    model_format = fixed_matmul(recipe.model)
    return recipe.compute.matmul if model_format == "compute" else model_format


def recipe_flops_per_token(recipe: TrainRecipe) -> float:
    """Count the FLOPs of forward and backward pass per token. The head multiplies only positions that have a
    target."""
    model, length = recipe.model, recipe.data.sequence_length
    target_share = load_objective(recipe.objective).max_targets(recipe.objective, length) / length
    skipped = 6 * (1 - target_share) * model.vocab * model.embed
    return load_family(model).flops_per_token(model, length) - skipped
