"""What does not fit is told, with sizes and a way out, before memory runs out and when it has."""

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
    """More bytes than an address has room for."""
    return int(jnp.zeros((2**31 - 1, 2**31 - 1), jnp.int8)[0, 0])


def state(size: int, split: P) -> State:
    """`size` weights of 4 bytes without an optimizer, as shapes."""
    devices = sharding.make_mesh({"data": 1, "fsdp": 8, "tensor": 1, "context": 1})
    params = jax.ShapeDtypeStruct((size // 8 * 8,), jnp.float32, sharding=NamedSharding(devices, split))
    return State(*[None, params, None, None, None, None, None])


def test_a_copy_on_each_simulated_device_counts_eight_times():
    memory = metrics.memory_limit(jax.local_devices())
    assert memory is not None
    # Weights and gradients: a quarter of the memory once, twice the memory eight times.
    memory_check.check_memory(state(memory // 32, P("fsdp")))
    with pytest.raises(DoesNotFit, match=r"take [\d.,]+ GiB on the 8 devices .* [\d.,]+ GiB; .*mesh.fsdp"):
        memory_check.check_memory(state(memory // 32, P()))


def test_weights_that_stay_have_no_gradients():
    memory = metrics.memory_limit(jax.local_devices())
    assert memory is not None
    whole = state(memory // 6, P("fsdp"))  # two thirds of the memory, without gradients
    (name,) = (name for name, _ in named_leaves(whole.params))
    memory_check.check_memory(whole, frozenset([name]))
    with pytest.raises(DoesNotFit):
        memory_check.check_memory(whole)


@pytest.mark.fault(26)
def test_a_model_larger_than_the_memory_is_told_before_it_is_made(tiny, tmp_path, capsys):
    (tmp_path / "large.yaml").write_text(
        reader.to_yaml(tiny("model.layers=64", "model.embed=32768", "model.mlp=131072"))
    )
    assert main(["train", str(tmp_path / "large.yaml")]) == 3
    said = capsys.readouterr().err
    assert said.startswith("headrace: model: weights, gradients and optimizer state take ")
    assert said.count("\n") == 1


@pytest.mark.fault(26)
def test_memory_that_runs_out_in_the_loop_is_told_with_advice(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop, "run_steps", exhaust)
    (tmp_path / "recipe.yaml").write_text(reader.to_yaml(tiny()))
    assert main(["train", str(tmp_path / "recipe.yaml")]) == 3
    said = capsys.readouterr().err
    assert said.startswith("headrace: batch: the step takes more memory than there is (")
    assert "batch.microbatches" in said and "compute.remat" in said and said.count("\n") == 1


def test_other_errors_of_the_runtime_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), memory_check.translate_oom():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
