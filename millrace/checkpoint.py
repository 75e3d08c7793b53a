"""Checkpoints through Orbax: asynchronous and atomic. A weight is stored whole under its dotted path, all
layers in one array, so that the layout depends on neither the mesh nor how the layers are compiled."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from millrace.errors import UserError
from millrace.module import named
from millrace.state import State


class Checkpoints:
    """The checkpoints folder of a run. Weights (`params`), their average (`ema`) and the rest are items of
    their own: who exports reads only the one it needs."""

    def __init__(self, run: str, *, keep: int | None = None):
        """With `keep`, for the trainer, who alone may clear away old and half-written checkpoints."""
        self.run = run
        folder = run if "://" in run else str(Path(run).absolute())
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, enable_async_checkpointing=True, cleanup_tmp_directories=keep is not None
        )
        handlers: dict[str, Any] = {
            item: ocp.StandardCheckpointHandler() for item in ("params", "ema", "rest")
        }
        handlers["meta"] = ocp.JsonCheckpointHandler()
        self.manager = ocp.CheckpointManager(f"{folder}/checkpoints", options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        return self.manager.latest_step()

    def save(self, step: int, state: State, meta: dict[str, Any]) -> None:
        """Returns once the weights are copied off the device; writing goes on behind."""
        items = {"params": dict(named(state.params)), "rest": _rest(state)}
        if state.ema is not None:
            items["ema"] = dict(named(state.ema))
        self._save(step, items, meta)

    def save_params(self, params: Any, meta: dict[str, Any]) -> None:
        """Weights alone, at step 0: what an import leaves for training to start from."""
        self._save(0, {"params": dict(named(params))}, meta)

    def meta(self, step: int) -> dict[str, Any]:
        with self._whole(step):
            return self.manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def has(self, step: int, item: str) -> bool:
        with self._whole(step):
            return item in self.manager.item_metadata(step).keys()  # noqa: SIM118  (not a mapping)

    def restore(self, step: int, target: State) -> State:
        """`target` is a state of shapes with shardings, on any mesh. An average that was not kept before
        begins at the weights."""
        wanted = _rest(target)
        rest = self._read(step, "rest", wanted, "optimizer")
        whole = {f"params.{path}": leaf for path, leaf in named(self.restore_params(step, target.params))}
        if target.ema is not None:
            ema = self.restore_params(step, target.ema, "ema" if self.has(step, "ema") else "params")
            whole |= {f"ema.{path}": leaf for path, leaf in named(ema)}
        return jax.tree.unflatten(
            jax.tree.structure(target), [(rest | whole)[path] for path, _ in named(target)]
        )

    def restore_params(self, step: int, target: Any, item: str = "params") -> Any:
        flat = self._read(step, item, dict(named(target)), "model")
        return jax.tree.unflatten(jax.tree.structure(target), [flat[path] for path, _ in named(target)])

    def close(self) -> None:
        self.manager.close()

    def _save(self, step: int, items: dict[str, Any], meta: dict[str, Any]) -> None:
        args = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
        self.manager.save(step, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta)), force=True)

    def _read(self, step: int, item: str, wanted: dict[str, Any], section: str) -> dict[str, Any]:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
        with self._whole(step):
            stored = self.manager.item_metadata(step)[item]
            if stored is None:
                raise FileNotFoundError(f"no {item}/_METADATA")
            _compare(wanted, stored, section)
            return self.manager.restore(step, args=args)[item]

    @contextlib.contextmanager
    def _whole(self, step: int) -> Iterator[None]:
        """Tells of a checkpoint of which something is missing. Orbax says it by any exception there is, the
        plain Exception included."""
        try:
            yield
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # no permission, no network: nothing to remove a checkpoint for
            earlier = [other for other in self.manager.all_steps() if other < step]
            then = f"go on from step {max(earlier)}, the one before" if earlier else "begin anew"
            raise UserError(
                f"{self.run}/checkpoints/{step}: this checkpoint cannot be read "
                f"({' '.join(str(error).split())[:100]}); if it is damaged, remove that folder to {then}"
            ) from error


def _rest(state: State) -> dict[str, Any]:
    return {path: leaf for path, leaf in named(state) if not path.startswith(("params.", "ema."))}


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
