"""Checkpoints through Orbax: asynchronous and atomic. A weight is stored whole under its dotted path, all
layers in one array, so that the layout depends on neither the mesh nor how the layers are compiled."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from millrace.errors import UserError
from millrace.module import named
from millrace.state import State


class Checkpoints:
    """The checkpoints folder of a run. `params` is an item of its own: export reads nothing else."""

    def __init__(self, run: str, keep: int = 3):
        folder = run if "://" in run else str(Path(run).absolute())
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        arrays = ocp.StandardCheckpointHandler
        handlers = {"params": arrays(), "rest": arrays(), "meta": ocp.JsonCheckpointHandler()}
        self.manager = ocp.CheckpointManager(f"{folder}/checkpoints", options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: State, meta: dict[str, Any]) -> None:
        """Returns once the weights are copied off the device; writing goes on behind."""
        rest = {path: leaf for path, leaf in named(state) if not path.startswith("params.")}
        self.manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(dict(named(state.params))),
                rest=ocp.args.StandardSave(rest),
                meta=ocp.args.JsonSave(meta),
            ),
            force=True,
        )

    def save_params(self, params: Any, meta: dict[str, Any]) -> None:
        """Weights alone, at step 0: what an import leaves for training to start from."""
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(dict(named(params))), meta=ocp.args.JsonSave(meta)
        )
        self.manager.save(0, args=args, force=True)

    def meta(self, step: int) -> dict[str, Any]:
        return self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def is_complete(self, step: int) -> bool:
        """False for the weights alone that an import leaves."""
        return self.manager.item_metadata(step)["rest"] is not None

    def restore(self, step: int, target: State) -> State:
        """`target` is a state of shapes with shardings, on any mesh."""
        params = dict(named(self.restore_params(step, target.params)))
        wanted = {path: leaf for path, leaf in named(target) if not path.startswith("params.")}
        _compare(wanted, self.manager.item_metadata(step)["rest"], "optimizer")
        found = self._read(step, "rest", wanted) | {f"params.{path}": leaf for path, leaf in params.items()}
        return jax.tree.unflatten(jax.tree.structure(target), [found[path] for path, _ in named(target)])

    def restore_params(self, step: int, target: Any) -> Any:
        wanted = dict(named(target))
        _compare(wanted, self.manager.item_metadata(step)["params"], "model")
        flat = self._read(step, "params", wanted)
        return jax.tree.unflatten(jax.tree.structure(target), [flat[path] for path, _ in named(target)])

    def wait(self) -> None:
        self.manager.wait_until_finished()

    def close(self) -> None:
        self.manager.close()

    def _read(self, step: int, item: str, wanted: dict[str, Any]) -> dict[str, Any]:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
        return self.manager.restore(step, args=args)[item]


def _compare(wanted: dict[str, Any], stored: Any, section: str) -> None:
    """Says in plain words what differs, before Orbax does at length."""
    stored = dict(stored)
    for path, leaf in wanted.items():
        found = tuple(stored[path].shape) if path in stored else None
        if found != tuple(leaf.shape):
            was = f"of shape {found}" if found is not None else "not there"
            raise UserError(
                f"{section}: the checkpoint was made with other settings: {path} is {was} in it and of shape "
                f"{tuple(leaf.shape)} in this recipe; use the recipe of the run folder or another `run`"
            )
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UserError(f"{section}: the checkpoint holds {extra[0]}, which this recipe has no place for")
