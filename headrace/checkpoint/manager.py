"""Saving and restoring of the training state through Orbax, behind the training loop.

A save becomes a checkpoint in four stages. A kill during the first three loses this save, and nothing else:

1. `save` returns when the arrays are copied to host memory.
2. All hosts write them in the background, on a disk into a folder with a temporary name.
3. The first host seals the step: once all files are on the disk, it writes manifest.txt (manifest.py). Only
   now does the step count. After a kill before this, the run resumes from the step before (inventory.py).
4. Only then are older steps removed.

Each weight is stored as one array under its dotted path, all layers together, so that the layout depends
neither on the mesh nor on how the layers are compiled."""

import contextlib
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint._src.metadata import array_metadata_store

from headrace.checkpoint import disk_space, inventory, manifest
from headrace.checkpoint.manifest import Tier
from headrace.checkpoint.state import State
from headrace.errors import UserError
from headrace.nn.module import Array, PyTree, named_leaves
from headrace.storage import files

Metadata = dict[str, Any]  # JSON: step, seed, data, recipe, tokenizer
Leaves = dict[str, Array]  # arrays, or their shapes and shardings, by dotted path


class ArrayMetadata(Protocol):
    """Shape and dtype of a stored array, as Orbax describes it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


ITEMS = ("params", "ema", "rest")  # what Orbax stores as arrays; `meta` is JSON
REFUSED, NO_STEP = -2, -1  # broadcast in place of a step
MIN_REPLICA_SLICE_BYTES = 2**20


class Checkpoints:
    """The checkpoints of one run. Weights (`params`), their moving average (`ema`) and the rest of the state
    are separate Orbax items, so that an export reads only what it needs."""

    def __init__(
        self, run_dir: str, *, keep: int | None = None, before_seal: Callable[[], object] = lambda: None
    ) -> None:
        """`keep` is how many temporary steps stay. Only the trainer, which holds the lock of the run, may set
        it: with None, nothing is ever removed. `before_seal` is called, in a thread, before a step counts."""
        self.run_dir = run_dir
        self.keep = keep
        self.before_seal = before_seal
        self.directory = inventory.checkpoints_dir(run_dir)
        self.resume_point = inventory.ResumePoint(None, {})
        self.last_durable_step = 0  # the newest step that was sealed here
        self.last_save_ok = True  # the last save is sealed, or on its way
        self.abandoned = False
        self.problems: list[str] = []  # warnings that were not printed yet
        self.seal_thread: threading.Thread | None = None

        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs a traceback for what we report
        if files.is_bucket(run_dir):
            files.prepare_gcsfs()
        write_small_arrays_from_one_replica()
        handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler() for item in ITEMS}
        handlers["meta"] = ocp.JsonCheckpointHandler()
        self.orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))

    def latest_step(self) -> int | None:
        """Find the newest intact step to read weights from (`inventory.find_readable_step`).

        Prints a warning about each newer step that is damaged or unsealed, and moves none."""
        if not inventory.step_numbers(self.run_dir):
            return None
        step, warnings = inventory.find_readable_step(self.run_dir)
        for warning in warnings:
            print(f"headrace: {warning}", file=sys.stderr)
        return step

    def find_resume_step(self, last_saved: int = 0) -> int | None:
        """Choose the step to resume from, the same on all hosts. Moves nothing.

        `last_saved` is the newest step that goodput.jsonl records as saved. If it is not 0 and there is no
        checkpoint at all, the run is refused: restarting from scratch must be the user's decision."""
        return self._choose_on_first_host(lambda: self._choose_resume_step(last_saved))

    def _choose_resume_step(self, last_saved: int) -> int | None:
        """Find the resume point, keep it, and refuse to restart from scratch if a step was saved once."""
        self.resume_point = inventory.find_resume_point(self.run_dir)
        if last_saved and self.resume_point.step is None:
            raise UserError(
                f"{self.directory}: found no checkpoint, but step {last_saved} was saved (goodput.jsonl says "
                f"so); put the folder back; {inventory.restart_hint(self.run_dir)}"
            )
        return self.resume_point.step

    def rewind_before(self, step: int) -> int | None:
        """Choose the newest intact step before `step`, the same on all hosts, to discard the training since.
        Later steps are quarantined."""
        self.wait()
        return self._choose_on_first_host(lambda: self._choose_rewind_step(step))

    def _choose_rewind_step(self, step: int) -> int | None:
        target = inventory.find_intact_before(self.run_dir, step)
        discarded = [n for n in inventory.step_numbers(self.run_dir) if n > (target or 0)]
        reason = f"the run went back to step {target}"
        self.problems += inventory.quarantine(self.run_dir, dict.fromkeys(discarded, reason))
        return target

    def _choose_on_first_host(self, choose: Callable[[], int | None]) -> int | None:
        """Call `choose` on the first host, and return its step on all. If it raises UserError there, raise on
        all: a host that went on alone would wait for the others forever."""
        step: int | None = None
        refusal: UserError | None = None
        if jax.process_index() == 0:
            try:
                step = choose()
            except UserError as error:
                refusal = error
        answer = _broadcast(REFUSED if refusal is not None else NO_STEP if step is None else step)
        if answer == REFUSED:
            raise refusal or UserError(
                f"{self.directory}: no checkpoint here is intact; see the log of the first host"
            )
        return None if answer == NO_STEP else answer

    def quarantine_damaged(self) -> None:
        """Quarantine the steps that `find_resume_step` rejected, and remove what interrupted saves left.

        Called when the run is certain to continue: a run that is refused must change nothing."""
        if jax.process_index() != 0:
            return
        reasons = {step: problem.text for step, problem in self.resume_point.rejected.items()}
        self.problems += inventory.remove_unfinished(self.run_dir)
        self.problems += inventory.quarantine(self.run_dir, reasons)
        self.problems += self._unsealed_warning()

    def resume_warnings(self) -> list[str]:
        """Warnings about damaged and unsealed steps, for a run that is complete already. Moves nothing."""
        rejected = self.resume_point.rejected.items()
        warnings = [f"step {step}: this checkpoint is not used: {problem.text}" for step, problem in rejected]
        return warnings + self._unsealed_warning()

    def _unsealed_warning(self) -> list[str]:
        if self.resume_point.is_sealed:
            return []
        reason = f"no other step is intact, but {inventory.UNSEALED.text}"
        return [f"step {self.resume_point.step}: this checkpoint is used because {reason}"]

    def remove_old(self) -> None:
        """Remove steps beyond `keep`, after each save; and on resuming, in case a kill came between."""
        if jax.process_index() != 0 or self.keep is None:
            return
        try:
            errors = inventory.apply_retention(self.run_dir, self.keep)
        except (OSError, UserError) as error:  # the save before it has succeeded all the same
            errors = [f"older checkpoints could not be removed ({inventory.short_error(error)})"]
        self.problems += [f"{error}; the next save tries again" for error in errors]

    def drain_problems(self) -> list[str]:
        """Return the warnings since the last call."""
        problems, self.problems = self.problems, []
        return problems

    def save(self, step: int, state: State, meta: Metadata, *, tier: Tier = "temporary") -> bool:
        """Start to save the state. Returns when the arrays are copied off the device; writing continues in
        the background. False if the disk has no room for it."""
        items = {"params": dict(named_leaves(state.params)), "rest": _non_param_leaves(state)}
        if state.ema is not None:
            items["ema"] = dict(named_leaves(state.ema))
        return self._start_save(step, items, meta, tier)

    def save_params(self, params: PyTree, meta: Metadata) -> None:
        """Save weights alone, as step 0, and wait: an imported model, for training to start from."""
        items = {"params": dict(named_leaves(params))}
        if not (self._start_save(0, items, meta, "temporary") and self.wait()):
            raise UserError("; ".join(self.drain_problems()))

    def _start_save(self, step: int, items: dict[str, Leaves], meta: Metadata, tier: Tier) -> bool:
        """Copy the arrays of all items to host memory, and start to write them. False if there is no room or
        the save fails at once."""
        self.wait()  # one save at a time: two would need two copies of the state in host memory
        self.last_save_ok = self._make_room(step, checkpoint_bytes(items))
        if not self.last_save_ok:
            return False
        args = {item: ocp.args.StandardSave(leaves) for item, leaves in items.items()}
        try:
            self.orbax.save(
                self.directory / str(step), args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta))
            )
        except (OSError, ValueError) as error:
            self._record_failure(step, error)
            return False
        self.seal_thread = threading.Thread(
            target=self._seal_when_written, args=(step, tier), name=f"checkpoint-{step}", daemon=True
        )
        self.seal_thread.start()
        return self.last_save_ok

    def _seal_when_written(self, step: int, tier: Tier) -> None:
        """Wait until all hosts have written their arrays, seal the step, and only then remove older ones.

        Runs in a thread of its own. A step that is abandoned or fails is not sealed, so it does not count."""
        try:
            self.orbax.wait_until_finished()
            if jax.process_index() == 0 and not self.abandoned:
                self.before_seal()
                manifest.seal(self.directory / str(step), step=step, tier=tier)
                self.last_durable_step = step
                self.remove_old()
        except Exception as error:  # any error at all: training continues, and reports it
            self._record_failure(step, error)

    def _record_failure(self, step: int, error: Exception) -> None:
        """Add a warning about a save that failed, and remove what it has written."""
        self.last_save_ok = False
        self.problems.append(
            f"step {step}: the checkpoint could not be written ({inventory.short_error(error)}); "
            "training continues"
        )
        if jax.process_index() == 0 and self.keep is not None:
            with contextlib.suppress(OSError, UserError):
                self.problems += inventory.remove_unfinished(self.run_dir)

    def wait(self) -> bool:
        """Wait for the save in progress. Returns whether the last save succeeded."""
        if self.seal_thread is not None:
            self.seal_thread.join()
            self.seal_thread = None
        return self.last_save_ok

    def abandon(self) -> None:
        """Let `close` return without waiting for the save in progress, which is never sealed."""
        self.abandoned = True

    def close(self) -> None:
        if not self.abandoned:
            self.wait()
            self.orbax.close()

    def check_room(self, state: State) -> None:
        """Check, before a run begins, that its disk holds one more checkpoint besides the newest one.

        The first host checks for all, since it alone removes older steps."""
        problem: str | None = None
        if jax.process_index() == 0:
            needed = checkpoint_bytes(state)
            problem = disk_space.find_shortage(self.run_dir, needed, may_remove=self.keep is not None)
        if _broadcast(problem is not None):
            raise UserError(
                problem
                or f"run_dir: no room for a checkpoint in {self.run_dir}; see the log of the first host"
            )

    def _make_room(self, step: int, needed: int) -> bool:
        """Whether the disk has `needed` bytes free, the same on all hosts, if need be after removing some."""
        has_room = True
        if jax.process_index() == 0:
            may_remove = self.keep is not None
            has_room, warnings = disk_space.make_room(self.run_dir, step, needed, may_remove=may_remove)
            self.problems += warnings
        return bool(_broadcast(has_room))

    def read_meta(self, step: int) -> Metadata:
        """Read the JSON that was saved with a step."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        with self._explain_read_errors(step):
            return self.orbax.restore(self.directory / str(step), args=args)["meta"]

    def has_item(self, step: int, item: str) -> bool:
        return bool(files.list_names(self.directory / str(step) / item))

    def array_metadata(self, step: int, item: str) -> dict[str, ArrayMetadata]:
        """Read the shape and dtype of the arrays of an item, by path."""
        with self._explain_read_errors(step):
            stored = self.orbax.metadata(self.directory / str(step)).item_metadata[item]
            if stored is None:
                raise FileNotFoundError(f"no {item}/_METADATA")
            return dict(stored)

    def restore(self, step: int, abstract: State) -> State:
        """Restore a state. `abstract` has the shapes and shardings to restore to, on any mesh.

        If no average was saved, because `optimizer.ema_decay` is new, it starts at the weights."""
        leaves = self._restore_item(step, "rest", _non_param_leaves(abstract), "optimizer")
        params = self.restore_params(step, abstract.params)
        leaves |= {f"params.{path}": leaf for path, leaf in named_leaves(params)}
        if abstract.ema is not None:
            ema = self.restore_params(step, abstract.ema, "ema" if self.has_item(step, "ema") else "params")
            leaves |= {f"ema.{path}": leaf for path, leaf in named_leaves(ema)}
        return _fill(abstract, leaves)

    def restore_params(self, step: int, abstract: PyTree, item: str = "params") -> PyTree:
        """Restore weights, or with `item="ema"` their average, to the shapes and shardings of `abstract`."""
        return _fill(abstract, self._restore_item(step, item, dict(named_leaves(abstract)), "model"))

    def iter_params(self, step: int, abstract: PyTree) -> Iterator[tuple[str, Array]]:
        """Restore one weight at a time, so that a caller which shrinks each never holds the dense model."""
        expected = dict(named_leaves(abstract))
        with self._explain_read_errors(step):
            check_arrays(expected, self.array_metadata(step, "params"), "model")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            for path, leaf in expected.items():
                item = {path: leaf}
                restore_args = ocp.checkpoint_utils.construct_restore_args(item)
                args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
                with self._explain_read_errors(step):
                    restored = orbax.restore(self.directory / str(step) / "params", args=args)
                yield path, restored.pop(path)

    def _restore_item(self, step: int, item: str, expected: Leaves, section: str) -> Leaves:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(expected)})
        with self._explain_read_errors(step):
            check_arrays(expected, self.array_metadata(step, item), section)
            return self.orbax.restore(self.directory / str(step), args=args)[item]

    @contextlib.contextmanager
    def _explain_read_errors(self, step: int) -> Iterator[None]:
        """Turn errors about missing or unreadable files into a UserError that names the checkpoint.

        Orbax raises any kind of exception for them, plain `Exception` included."""
        try:
            yield
        except (UserError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise  # no permission, no network: no reason to remove a checkpoint
            raise UserError(
                f"{self.run_dir}/checkpoints/{step}: this checkpoint cannot be read "
                f"({' '.join(str(error).split())[:100]}); if it is damaged, move that folder elsewhere"
            ) from error


def check_arrays(expected: Leaves, stored: Mapping[str, ArrayMetadata], section: str) -> None:
    """Raise UserError if a checkpoint has other arrays than this recipe. Orbax's message would be pages."""
    for path, leaf in expected.items():
        shape = tuple(stored[path].shape) if path in stored else None
        if shape != tuple(leaf.shape):
            found = "missing" if shape is None else f"of shape {shape}"
            raise UserError(
                f"{section}: the checkpoint was made with other settings: {path} is {found} in it and of "
                f"shape {tuple(leaf.shape)} in this recipe; use the recipe of the run folder, or another "
                "`run_dir`"
            )
    extra = sorted(set(stored) - set(expected))
    if extra:
        raise UserError(f"{section}: the checkpoint holds {extra[0]}, which this recipe has no place for")


def write_small_arrays_from_one_replica() -> None:
    """Divide a replicated array between replicas only if each of them then writes a megabyte or more.

    Orbax divides all of them by default, and compiles a program for each slice: 80 programs for the 19 arrays
    of a tiny model on 8 CPU devices, a quarter of the CPU time of a run of 12 steps (20 November 2026)."""
    handler = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=MIN_REPLICA_SLICE_BYTES,
        array_metadata_store=array_metadata_store.Store(),
    )
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)


def checkpoint_bytes(tree: PyTree) -> int:
    """Upper bound on the size of a checkpoint. Orbax compresses, weights by less than a tenth."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return size + size // 50 + (1 << 20)  # with the metadata of the arrays


def _non_param_leaves(state: State) -> Leaves:
    return {path: leaf for path, leaf in named_leaves(state) if not path.startswith(("params.", "ema."))}


def _fill(abstract: PyTree, leaves: Leaves) -> PyTree:
    """Build a tree like `abstract` from arrays by path."""
    return jax.tree.unflatten(
        jax.tree.structure(abstract), [leaves[path] for path, _ in named_leaves(abstract)]
    )


def _broadcast(value: int) -> int:
    """Send the first host's value to all. Every host must call this, or the others wait."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))
