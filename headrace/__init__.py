"""Headrace trains language models on TPUs, GPUs and CPUs, from raw text to an exported model.

    import headrace as hr

    recipe = hr.load_recipe("recipes/demo.yaml")
    hr.prepare_data("recipes/data/demo.yaml")
    hr.train(recipe)
    run = hr.open_run(recipe.run_dir)
    print("".join(hr.generate(run, "def ")))

The names in `__all__` are the public API. Importing this package imports no JAX: names are imported when they
are first used."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.api import (
        evaluate,
        export,
        generate,
        import_model,
        load_recipe,
        logits,
        open_run,
        plan,
        prepare_data,
        quantize,
        train,
    )
    from headrace.data.dataset import Dataset
    from headrace.errors import DoesNotFit, UserError

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "DoesNotFit",
    "UserError",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "import_model",
    "load_recipe",
    "logits",
    "open_run",
    "plan",
    "prepare_data",
    "quantize",
    "train",
]

_MODULES = {"Dataset": "data.dataset", "DoesNotFit": "errors", "UserError": "errors"}  # the others are in api


class _Package(ModuleType):
    """This package. `plan` and `quantize` are functions of the API, and subpackages too: importing such a
    subpackage sets no attribute, so that it does not replace the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Import a name of the API when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    value: object = getattr(importlib.import_module(f"headrace.{_MODULES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
