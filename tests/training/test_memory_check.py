"""Runs that do not fit are refused with sizes and advice, before memory runs out and when it does."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from headrace.checkpoint.state import State
from headrace.cli.main import main
from headrace.config import reader
from headrace.errors import DoesNotFit
from headrace.nn import sharding
from headrace.nn.module import named_leaves
from headrace.training import loop, memory_check, metrics


def exhaust(*_: object) -> int:
    """Allocate more bytes than an address can count."""
    return int(jnp.zeros((2**31 - 1, 2**31 - 1), jnp.int8)[0, 0])


def state(size: int, split: P) -> State:
    """Make a state with `size` weights of 4 bytes and no optimizer, as shapes."""
    mesh = sharding.make_mesh({"data": 1, "fsdp": 8, "tensor": 1, "context": 1})
    params = jax.ShapeDtypeStruct((size // 8 * 8,), jnp.float32, sharding=NamedSharding(mesh, split))
    return State(*[None, params, None, None, None, None, None])


def test_a_copy_on_each_simulated_device_counts_eight_times():
    memory = metrics.memory_limit(jax.local_devices())
    assert memory is not None
    # Weights and gradients: a quarter of the memory once, twice the memory eight times.
    memory_check.check_memory(state(memory // 32, P("fsdp")))
    with pytest.raises(DoesNotFit, match=r"take [\d.,]+ GiB on the 8 devices .* [\d.,]+ GiB; .*mesh.fsdp"):
        memory_check.check_memory(state(memory // 32, P()))


def test_frozen_weights_have_no_gradients():
    memory = metrics.memory_limit(jax.local_devices())
    assert memory is not None
    abstract = state(memory // 6, P("fsdp"))  # two thirds of the memory, without gradients
    (name,) = (name for name, _ in named_leaves(abstract.params))
    memory_check.check_memory(abstract, frozenset([name]))
    with pytest.raises(DoesNotFit):
        memory_check.check_memory(abstract)


@pytest.mark.fault(26)
def test_a_model_larger_than_the_memory_is_refused_before_it_is_allocated(tiny, tmp_path, capsys):
    (tmp_path / "large.yaml").write_text(
        reader.to_yaml(tiny("model.layers=64", "model.embed=32768", "model.mlp=131072"))
    )
    assert main(["train", str(tmp_path / "large.yaml")]) == 3
    error = capsys.readouterr().err
    assert error.startswith("headrace: model: weights, gradients and optimizer state take ")
    assert error.count("\n") == 1


@pytest.mark.fault(26)
def test_running_out_of_memory_in_the_loop_ends_with_advice(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "run_steps", exhaust)
    (tmp_path / "recipe.yaml").write_text(reader.to_yaml(tiny()))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 3
    error = capsys.readouterr().err
    assert error.startswith("headrace: batch: the step takes more memory than there is (")
    assert "batch.microbatches" in error and "compute.remat" in error and error.count("\n") == 1


def test_other_errors_of_xla_are_not_translated():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_check.translate_oom():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
