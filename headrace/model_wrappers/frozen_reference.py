"""A trained model next to a frozen copy of its initial weights, for objectives that compare the two while all
weights are trained (objectives/dpo.py). With LoRA no copy is needed: the base is frozen anyway."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from headrace.model_wrappers import lora
from headrace.models import Family, ModelConfig
from headrace.nn import module
from headrace.nn.module import Array, Axes, Initializer, MakeLeaf, ModelClass, PyTree
from headrace.nn.stack import Execution


@module.module
class PolicyAndReference:
    """The trained model and its frozen copy. Runs like the trained model."""

    policy: Any
    reference: Any

    @property
    def unembed(self) -> Array:
        return self.policy.unembed

    def __call__(
        self,
        cfg: ModelConfig,
        tokens: Array,
        *,
        exec_opts: Execution,
        segments: Array | None = None,
        positions: Array | None = None,
    ) -> Array:
        return self.policy(cfg, tokens, exec_opts=exec_opts, segments=segments, positions=positions)

    def init_cache(self, cfg: ModelConfig, batch_size: int, max_length: int, dtype: DTypeLike) -> PyTree:
        return self.policy.init_cache(cfg, batch_size, max_length, dtype)

    def decode(
        self, cfg: ModelConfig, tokens: Array, cache: PyTree, *, exec_opts: Execution
    ) -> tuple[Array, PyTree]:
        return self.policy.decode(cfg, tokens, cache, exec_opts=exec_opts)


def has_reference(cfg: ModelConfig) -> bool:
    """Whether the config asks for a frozen copy."""
    return cfg.frozen_copy


def unwrapped(cfg: ModelConfig) -> ModelConfig:
    """The config without a frozen copy."""
    return replace(cfg, frozen_copy=False)


def reference_model(model: PyTree) -> PyTree:
    """The frozen model inside a wrapped one: its copy, or the base of its LoRA weights."""
    return model.reference if isinstance(model, PolicyAndReference) else lora.frozen_base(model)


@dataclass(frozen=True, eq=False)
class PairedModel:
    """The `Family.Model` of a model with a frozen copy: `nn.module` declares and initializes by it."""

    plain: ModelClass

    def build(self, cfg: ModelConfig, leaf: MakeLeaf) -> PolicyAndReference:
        """Make both models with `leaf(...)` in place of every weight (`nn.module.build`)."""

        def policy_leaf(path: str, axes: Axes, shape: tuple[int, ...], init: Initializer) -> PyTree:
            return leaf(f"policy.{path}", axes, shape, init)

        def reference_leaf(path: str, axes: Axes, shape: tuple[int, ...], init: Initializer) -> PyTree:
            return leaf(f"reference.{path}", replace(axes, frozen=True), shape, init)

        return PolicyAndReference(
            module.build(self.plain, cfg, policy_leaf), module.build(self.plain, cfg, reference_leaf)
        )

    def init(self, cfg: ModelConfig, key: Array) -> PolicyAndReference:
        """Initialize the weights, the same for both models (`nn.module.init`)."""
        return wrap_params(module.init(self.plain, cfg, key))


@functools.cache
def wrap(family: Family) -> Family:
    """The family with a frozen copy of each model."""
    return replace(
        family,
        Model=PairedModel(family.Model),
        flops_per_token=_with_reference_forward(family.flops_per_token),
        init_on_host=None,
    )


def _with_reference_forward(
    flops_per_token: Callable[[ModelConfig, int], float],
) -> Callable[[ModelConfig, int], float]:
    """Add a forward pass, which is a third of forward and backward."""
    return lambda cfg, sequence_length: flops_per_token(cfg, sequence_length) * 4 / 3


def wrap_params(params: PyTree) -> PolicyAndReference:
    """Pair a model's weights with a copy of them."""
    return PolicyAndReference(params, jax.tree.map(jnp.copy, params))
