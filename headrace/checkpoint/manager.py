"""Checkpoints through Orbax: asynchronous and atomic, each with a manifest of its bytes. A weight is stored
whole under its dotted path, all layers in one array, so that the layout depends on neither the mesh nor how
the layers are compiled."""

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from headrace.checkpoint import inventory, manifest
from headrace.checkpoint.manifest import Tier
from headrace.checkpoint.state import State
from headrace.errors import UserError
from headrace.nn.module import named_leaves
from headrace.storage import files

ITEMS = ("params", "ema", "rest")


class Checkpoints:
    """The checkpoints folder of a run. Weights (`params`), their average (`ema`) and the rest are items of
    their own: who exports reads only the one it needs."""

    def __init__(
        self, run_dir: str, *, keep: int | None = None, before_seal: Callable[[], object] = lambda: None
    ) -> None:
        """With `keep`, for the trainer, who alone may clear away old and half-written checkpoints.
        `before_seal` is called, in a thread, before a step counts."""
        self.run_dir, self.keep, self.directory, self.before_seal = (
            run_dir,
            keep,
            inventory.checkpoints_dir(run_dir),
            before_seal,
        )
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs with a traceback what we tell
        if files.is_bucket(run_dir):
            files.prepare_gcsfs()
        handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler() for item in ITEMS}
        handlers["meta"] = ocp.JsonCheckpointHandler()
        self.orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        self.seal_thread: threading.Thread | None = None  # of the manifest, behind Orbax's own
        self.last_durable_step = 0  # the last step that is whole and was saved here
        self.last_save_ok = True  # the last step that was to be saved is, or is on its way
        self.abandoned = False
        self.resume_point = inventory.ResumePoint(None, {})
        self.problems: list[str] = []

    def latest_step(self) -> int | None:
        """The newest step that is whole; those passed over are told and left where they are."""
        say = lambda line: print(f"headrace: {line}", file=sys.stderr)
        return (
            inventory.find_readable_step(self.run_dir, say) if inventory.step_numbers(self.run_dir) else None
        )

    def find_resume_step(self, last_saved: int = 0) -> int | None:
        """For the trainer: the newest step that is whole, on all hosts. Nothing is moved yet. `known` is a
        step that was saved, as far as the run's account says: it does not begin anew without a word."""
        error: UserError | None = None
        if jax.process_index() == 0:
            try:
                self.resume_point = inventory.find_resume_point(self.run_dir)
                if last_saved and self.resume_point.step is None:
                    raise UserError(
                        f"{self.directory}: found no checkpoint, and step {last_saved} was saved "
                        "(goodput.jsonl says "
                        f"so); put the folder back; {inventory.restart_hint(self.run_dir)}"
                    )
            except UserError as refusal:
                error = refusal
        step = self.resume_point.step
        found = _broadcast(-2 if error is not None else -1 if step is None else step)
        if found == -2:
            raise error or UserError(
                f"{self.directory}: no checkpoint in it can be trusted; see the first host"
            )
        return None if found < 0 else found

    def quarantine_damaged(self) -> None:
        """Once the run is to go on: puts damaged steps aside, and removes what was left half-written."""
        if jax.process_index():
            return
        self.problems += inventory.remove_unfinished(self.run_dir)
        self.problems += inventory.quarantine(self.run_dir, self.resume_point.rejected)
        self.problems += self._unsealed_warning()

    def resume_warnings(self) -> list[str]:
        """What is to be said of a run that has nothing left to do, and of which nothing is moved."""
        passed = self.resume_point.rejected.items()
        told = [f"step {number}: this checkpoint is not used: {said}" for number, said in passed]
        return told + self._unsealed_warning()

    def _unsealed_warning(self) -> list[str]:
        if self.resume_point.is_sealed:
            return []
        return [f"step {self.resume_point.step}: {inventory.UNSEALED}; it is used since no other is whole"]

    def remove_old(self) -> None:
        """What there are enough newer ones of. A kill may have come before the last save could do it."""
        if jax.process_index() or self.keep is None:
            return
        try:
            told = inventory.apply_retention(self.run_dir, self.keep)
        except (OSError, UserError) as error:  # what is saved is saved
            told = [f"older checkpoints could not be removed ({inventory.short_error(error)})"]
        self.problems += [f"{said}; the next save tries again" for said in told]

    def rewind_before(self, step: int) -> int | None:
        """For the trainer, who gives up what it learnt from a step on: the checkpoint to go back to, on all
        hosts. Later ones are put aside."""
        self.wait()
        error: UserError | None = None
        found: int | None = None
        if jax.process_index() == 0:
            try:
                found = inventory.find_intact_before(self.run_dir, step)
                given_up = [
                    number for number in inventory.step_numbers(self.run_dir) if number > (found or 0)
                ]
                why = f"the run went back to step {found}"
                self.problems += inventory.quarantine(self.run_dir, dict.fromkeys(given_up, why))
            except UserError as refusal:
                error = refusal
        target = _broadcast(-2 if error is not None else -1 if found is None else found)
        if target == -2:
            raise error or UserError(
                f"{self.directory}: no checkpoint in it can be trusted; see the first host"
            )
        return None if target < 0 else target

    def drain_problems(self) -> list[str]:
        """What went wrong since this was last asked."""
        told, self.problems = self.problems, []
        return told

    def save(self, step: int, state: State, meta: dict[str, Any], *, tier: Tier = "temporary") -> bool:
        """Returns once the weights are copied off the device; writing goes on behind. False if the disk has
        no room for it."""
        items = {"params": dict(named_leaves(state.params)), "rest": _non_param_leaves(state)}
        if state.ema is not None:
            items["ema"] = dict(named_leaves(state.ema))
        return self._start_save(step, items, meta, tier)

    def save_params(self, params: Any, meta: dict[str, Any]) -> None:
        """Weights alone, at step 0: what an import leaves for training to start from."""
        if not (
            self._start_save(0, {"params": dict(named_leaves(params))}, meta, "temporary") and self.wait()
        ):
            raise UserError("; ".join(self.drain_problems()))

    def check_room(self, state: Any) -> None:
        """Before a run begins: whether its disk holds a checkpoint beside the newest one. The first host
        looks for all, since it alone clears away."""
        refusal = self._room_problem(checkpoint_bytes(state)) if jax.process_index() == 0 else ""
        if _broadcast(bool(refusal)):
            raise UserError(
                refusal or f"run_dir: no room for a checkpoint in {self.run_dir}; see the first host"
            )

    def _room_problem(self, need: int) -> str:
        free = inventory.available_bytes(self.run_dir)
        if free is None:
            return ""
        older = 0
        if self.keep is not None:
            older = sum(step.size for step in inventory.find_removable(self.run_dir, 0))
            older += sum(
                file.size for file in files.list_files(self.directory / inventory.QUARANTINE).values()
            )
        if need <= free + older:
            return ""
        gains = f", and {_gb(older)} with older checkpoints removed" if older else ""
        return (
            f"run_dir: a checkpoint takes {_gb(need)}, and the disk of {self.run_dir} has {_gb(free)} free"
            f"{gains}; make room, or put `run_dir` on a larger disk"
        )

    def wait(self) -> bool:
        """Waits for the save that is on its way. Whether the last one asked for is whole."""
        if self.seal_thread is not None:
            self.seal_thread.join()
            self.seal_thread = None
        return self.last_save_ok

    def read_meta(self, step: int) -> dict[str, Any]:
        with self._explain_read_errors(step):
            return self.orbax.restore(
                self.directory / str(step), args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )["meta"]

    def has_item(self, step: int, item: str) -> bool:
        return bool(files.list_names(self.directory / str(step) / item))

    def array_metadata(self, step: int, item: str) -> dict[str, Any]:
        """What is stored of each array, by its path: shape, dtype."""
        with self._explain_read_errors(step):
            stored = self.orbax.metadata(self.directory / str(step)).item_metadata[item]
            if stored is None:
                raise FileNotFoundError(f"no {item}/_METADATA")
            return dict(stored)

    def restore(self, step: int, abstract: State) -> State:
        """`target` is a state of shapes with shardings, on any mesh. An average that was not kept before
        begins at the weights."""
        wanted = _non_param_leaves(abstract)
        rest = self._restore_item(step, "rest", wanted, "optimizer")
        whole = {
            f"params.{path}": leaf for path, leaf in named_leaves(self.restore_params(step, abstract.params))
        }
        if abstract.ema is not None:
            ema = self.restore_params(step, abstract.ema, "ema" if self.has_item(step, "ema") else "params")
            whole |= {f"ema.{path}": leaf for path, leaf in named_leaves(ema)}
        return jax.tree.unflatten(
            jax.tree.structure(abstract), [(rest | whole)[path] for path, _ in named_leaves(abstract)]
        )

    def restore_params(self, step: int, abstract: Any, item: str = "params") -> Any:
        flat = self._restore_item(step, item, dict(named_leaves(abstract)), "model")
        return jax.tree.unflatten(
            jax.tree.structure(abstract), [flat[path] for path, _ in named_leaves(abstract)]
        )

    def iter_params(self, step: int, abstract: Any) -> Iterator[tuple[str, Any]]:
        """The weights one after the other: who makes something smaller of each never holds all of them."""
        wanted, folder = dict(named_leaves(abstract)), self.directory / str(step) / "params"
        with self._explain_read_errors(step):
            check_arrays(wanted, self.array_metadata(step, "params"), "model")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            for path, leaf in wanted.items():
                one = {path: leaf}
                how = ocp.checkpoint_utils.construct_restore_args(one)
                args = ocp.args.PyTreeRestore(item=one, restore_args=how, partial_restore=True)
                with self._explain_read_errors(step):
                    found = orbax.restore(folder, args=args)
                yield path, found.pop(path)

    def close(self) -> None:
        if not self.abandoned:
            self.wait()
            self.orbax.close()

    def abandon(self) -> None:
        """What is on its way is not waited for; without a manifest it does not count."""
        self.abandoned = True

    def _start_save(self, step: int, items: dict[str, Any], meta: dict[str, Any], tier: Tier) -> bool:
        self.wait()  # one at a time: two would hold two copies of the state in this host's memory
        self.last_save_ok = self._make_room(step, checkpoint_bytes(items))
        if self.last_save_ok:
            args = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
            path = self.directory / str(step)
            try:
                self.orbax.save(path, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta)))
            except (OSError, ValueError) as error:
                self._record_failure(step, error)
                return False
            self.seal_thread = threading.Thread(
                target=self._seal_when_written, args=(step, tier), name=f"checkpoint-{step}", daemon=True
            )
            self.seal_thread.start()
        return self.last_save_ok

    def _seal_when_written(self, step: int, tier: Tier) -> None:
        """In a thread of its own: waits for Orbax, on all hosts, and makes the step one that counts. Older
        ones go only then."""
        try:
            self.orbax.wait_until_finished()
            if jax.process_index() == 0 and not self.abandoned:
                self.before_seal()
                manifest.seal(self.directory / str(step), step=step, tier=tier)
                self.last_durable_step = step
                self.remove_old()
        except Exception as error:  # whatever it is, the loop goes on and tells it
            self._record_failure(step, error)

    def _record_failure(self, step: int, error: Exception) -> None:
        self.last_save_ok = False
        said = (
            f"step {step}: the checkpoint could not be written ({inventory.short_error(error)}); the run "
            "goes on"
        )
        self.problems.append(said)
        if jax.process_index() == 0 and self.keep is not None:
            with contextlib.suppress(OSError, UserError):
                self.problems += inventory.remove_unfinished(self.run_dir)

    def _make_room(self, step: int, need: int) -> bool:
        """Whether the disk holds so many bytes more, after what is not needed has gone if it must."""
        enough = True
        if (
            jax.process_index() == 0
            and (free := inventory.available_bytes(self.run_dir)) is not None
            and free < need
        ):
            if self.keep is not None:
                self.problems += inventory.remove_unfinished(self.run_dir)
                goes = inventory.free_space(self.run_dir)
                while (inventory.available_bytes(self.run_dir) or 0) < need and (gone := next(goes, None)):
                    self.problems.append(f"{gone} removed, since the disk is full")
            free = inventory.available_bytes(self.run_dir) or 0
            enough = free >= need
            if not enough:
                self.problems.append(
                    f"step {step}: no checkpoint, which takes {_gb(need)}: the disk of {self.run_dir} has "
                    f"{_gb(free)} free; make room, the next save tries again"
                )
        return bool(_broadcast(enough))

    def _restore_item(self, step: int, item: str, wanted: dict[str, Any], section: str) -> dict[str, Any]:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
        with self._explain_read_errors(step):
            check_arrays(wanted, self.array_metadata(step, item), section)
            return self.orbax.restore(self.directory / str(step), args=args)[item]

    @contextlib.contextmanager
    def _explain_read_errors(self, step: int) -> Iterator[None]:
        """Tells of a checkpoint of which something is missing. Orbax says it by any exception there is, the
        plain Exception included."""
        try:
            yield
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # no permission, no network: nothing to remove a checkpoint for
            raise UserError(
                f"{self.run_dir}/checkpoints/{step}: this checkpoint cannot be read "
                f"({' '.join(str(error).split())[:100]}); if it is damaged, move that folder elsewhere"
            ) from error


def _non_param_leaves(state: State) -> dict[str, Any]:
    return {path: leaf for path, leaf in named_leaves(state) if not path.startswith(("params.", "ema."))}


def _broadcast(value: int) -> int:
    """What the first host says, on all of them. They must all come here."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def checkpoint_bytes(tree: Any) -> int:
    """Bytes that a checkpoint takes at most. Orbax compresses, by less than a tenth for weights."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return size + size // 50 + (1 << 20)  # what describes the arrays


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def check_arrays(wanted: dict[str, Any], stored: dict[str, Any], section: str) -> None:
    """Says in plain words what differs, before Orbax does at length."""
    for path, leaf in wanted.items():
        found = tuple(stored[path].shape) if path in stored else None
        if found != tuple(leaf.shape):
            was = f"of shape {found}" if found is not None else "not there"
            raise UserError(
                f"{section}: the checkpoint was made with other settings: {path} is {was} in it and of shape "
                f"{tuple(leaf.shape)} in this recipe; use the recipe of the run folder or another `run_dir`"
            )
    extra = sorted(set(stored) - set(wanted))
    if extra:
        raise UserError(f"{section}: the checkpoint holds {extra[0]}, which this recipe has no place for")
