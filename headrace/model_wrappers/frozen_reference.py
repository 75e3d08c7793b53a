"""A model beside a frozen copy of what it was, for objectives that measure against it (objectives/dpo.py) and
train all weights. With adapters the frozen model is there already."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from headrace.model_wrappers import lora as adapters
from headrace.nn import module
from headrace.nn.module import Array, Axes

PLAIN = dict(reference=False)


@module.module
class Referred:
    """Used like the model that learns."""

    policy: Any
    reference: Any

    def __call__(self, *arguments: Any, **settings: Any) -> Array:
        return self.policy(*arguments, **settings)

    @property
    def unembed(self) -> Any:
        return self.policy.unembed

    def cache(self, *arguments: Any, **settings: Any) -> Any:
        return self.policy.cache(*arguments, **settings)

    def decode(self, *arguments: Any, **settings: Any) -> Any:
        return self.policy.decode(*arguments, **settings)


def has_reference(cfg: Any) -> bool:
    return getattr(cfg, "reference", False)


def before(model: Any) -> Any:
    """The frozen model, of one that has a copy of it or adapters beside it."""
    return model.reference if isinstance(model, Referred) else adapters.without(model)


def family(found: Any) -> Any:
    """A model file whose model has a frozen copy."""

    def built(cfg: Any, leaf: Any) -> Referred:
        def still(path: str, axes: Axes, *rest: Any) -> Any:
            return leaf(f"reference.{path}", replace(axes, still=True), *rest)

        learns = lambda path, *rest: leaf(f"policy.{path}", *rest)
        return Referred(module.build(found.Model, cfg, learns), module.build(found.Model, cfg, still))

    class Model:
        build = staticmethod(built)
        init = staticmethod(lambda cfg, key: of_plain(module.init(found.Model, cfg, key)))

    flops = lambda cfg, sequence: found.flops(cfg, sequence) * 4 / 3  # the copy is run forward alone
    return SimpleNamespace(**vars(found) | dict(Model=Model, flops=flops))


def of_plain(params: Any) -> Referred:
    return Referred(params, jax.tree.map(jnp.copy, params))
