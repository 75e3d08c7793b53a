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

from headrace.checkpoint import manifest, inventory as saved
from headrace.storage import files as store
from headrace.errors import UserError
from headrace.checkpoint.manifest import Tier
from headrace.nn.module import named
from headrace.checkpoint.state import State

ITEMS = ("params", "ema", "rest")


class Checkpoints:
    """The checkpoints folder of a run. Weights (`params`), their average (`ema`) and the rest are items of
    their own: who exports reads only the one it needs."""

    def __init__(
        self, run: str, *, keep: int | None = None, before: Callable[[], object] = lambda: None
    ) -> None:
        """With `keep`, for the trainer, who alone may clear away old and half-written checkpoints. `before`
        is called, in a thread, before a step counts."""
        self.run, self.keep, self.folder, self.before = run, keep, saved.folder(run), before
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs with a traceback what we tell
        if store.is_bucket(run):
            store.prepare_gcsfs()
        handlers: dict[str, Any] = {item: ocp.StandardCheckpointHandler() for item in ITEMS}
        handlers["meta"] = ocp.JsonCheckpointHandler()
        self.orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        self.writer: threading.Thread | None = None  # of the manifest, behind Orbax's own
        self.sealed = 0  # the last step that is whole and was saved here
        self.whole = True  # the last step that was to be saved is, or is on its way
        self.left = False
        self.chosen = saved.Chosen(None, {})
        self.problems: list[str] = []

    def latest(self) -> int | None:
        """The newest step that is whole; those passed over are told and left where they are."""
        say = lambda line: print(f"headrace: {line}", file=sys.stderr)
        return saved.newest(self.run, say) if saved.numbers(self.run) else None

    def resume(self, known: int = 0) -> int | None:
        """For the trainer: the newest step that is whole, on all hosts. Nothing is moved yet. `known` is a
        step that was saved, as far as the run's account says: it does not begin anew without a word."""
        error: UserError | None = None
        if jax.process_index() == 0:
            try:
                self.chosen = saved.choose(self.run)
                if known and self.chosen.step is None:
                    raise UserError(
                        f"{self.folder}: found no checkpoint, and step {known} was saved (goodput.jsonl says "
                        f"so); put the folder back; {saved.begin_anew(self.run)}"
                    )
            except UserError as refusal:
                error = refusal
        step = self.chosen.step
        found = _agreed(-2 if error is not None else -1 if step is None else step)
        if found == -2:
            raise error or UserError(f"{self.folder}: no checkpoint in it can be trusted; see the first host")
        return None if found < 0 else found

    def clear_away(self) -> None:
        """Once the run is to go on: puts damaged steps aside, and removes what was left half-written."""
        if jax.process_index():
            return
        self.problems += saved.clear_unfinished(self.run)
        self.problems += saved.set_aside(self.run, self.chosen.passed)
        self.problems += self._unsealed()

    def doubts(self) -> list[str]:
        """What is to be said of a run that has nothing left to do, and of which nothing is moved."""
        passed = self.chosen.passed.items()
        told = [f"step {number}: this checkpoint is not used: {said}" for number, said in passed]
        return told + self._unsealed()

    def _unsealed(self) -> list[str]:
        if self.chosen.sealed:
            return []
        return [f"step {self.chosen.step}: {saved.UNSEALED}; it is used since no other is whole"]

    def remove_old(self) -> None:
        """What there are enough newer ones of. A kill may have come before the last save could do it."""
        if jax.process_index() or self.keep is None:
            return
        try:
            told = saved.clear_old(self.run, self.keep)
        except (OSError, UserError) as error:  # what is saved is saved
            told = [f"older checkpoints could not be removed ({saved.short(error)})"]
        self.problems += [f"{said}; the next save tries again" for said in told]

    def back(self, before: int) -> int | None:
        """For the trainer, who gives up what it learnt from a step on: the checkpoint to go back to, on all
        hosts. Later ones are put aside."""
        self.settle()
        error: UserError | None = None
        found: int | None = None
        if jax.process_index() == 0:
            try:
                found = saved.newest_before(self.run, before)
                given_up = [number for number in saved.numbers(self.run) if number > (found or 0)]
                why = f"the run went back to step {found}"
                self.problems += saved.set_aside(self.run, dict.fromkeys(given_up, why))
            except UserError as refusal:
                error = refusal
        step = _agreed(-2 if error is not None else -1 if found is None else found)
        if step == -2:
            raise error or UserError(f"{self.folder}: no checkpoint in it can be trusted; see the first host")
        return None if step < 0 else step

    def told(self) -> list[str]:
        """What went wrong since this was last asked."""
        told, self.problems = self.problems, []
        return told

    def save(self, step: int, state: State, meta: dict[str, Any], *, tier: Tier = "temporary") -> bool:
        """Returns once the weights are copied off the device; writing goes on behind. False if the disk has
        no room for it."""
        items = {"params": dict(named(state.params)), "rest": _rest(state)}
        if state.ema is not None:
            items["ema"] = dict(named(state.ema))
        return self._save(step, items, meta, tier)

    def save_params(self, params: Any, meta: dict[str, Any]) -> None:
        """Weights alone, at step 0: what an import leaves for training to start from."""
        if not (self._save(0, {"params": dict(named(params))}, meta, "temporary") and self.settle()):
            raise UserError("; ".join(self.told()))

    def check_room(self, state: Any) -> None:
        """Before a run begins: whether its disk holds a checkpoint beside the newest one. The first host
        looks for all, since it alone clears away."""
        refusal = self._no_room(_need(state)) if jax.process_index() == 0 else ""
        if _agreed(bool(refusal)):
            raise UserError(refusal or f"run: no room for a checkpoint in {self.run}; see the first host")

    def _no_room(self, need: int) -> str:
        free = saved.free(self.run)
        if free is None:
            return ""
        older = 0
        if self.keep is not None:
            older = sum(step.size for step in saved.spare(self.run, 0))
            older += sum(file.size for file in store.entries(self.folder / saved.QUARANTINE).values())
        if need <= free + older:
            return ""
        gains = f", and {_gb(older)} with older checkpoints removed" if older else ""
        return (
            f"run: a checkpoint takes {_gb(need)}, and the disk of {self.run} has {_gb(free)} free"
            f"{gains}; make room, or put `run` on a larger disk"
        )

    def settle(self) -> bool:
        """Waits for the save that is on its way. Whether the last one asked for is whole."""
        if self.writer is not None:
            self.writer.join()
            self.writer = None
        return self.whole

    def meta(self, step: int) -> dict[str, Any]:
        with self._whole(step):
            return self.orbax.restore(
                self.folder / str(step), args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            )["meta"]

    def has(self, step: int, item: str) -> bool:
        return bool(store.names(self.folder / str(step) / item))

    def layout(self, step: int, item: str) -> dict[str, Any]:
        """What is stored of each array, by its path: shape, dtype."""
        with self._whole(step):
            stored = self.orbax.metadata(self.folder / str(step)).item_metadata[item]
            if stored is None:
                raise FileNotFoundError(f"no {item}/_METADATA")
            return dict(stored)

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

    def each_param(self, step: int, target: Any) -> Iterator[tuple[str, Any]]:
        """The weights one after the other: who makes something smaller of each never holds all of them."""
        wanted, folder = dict(named(target)), self.folder / str(step) / "params"
        with self._whole(step):
            _compare(wanted, self.layout(step, "params"), "model")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
            for path, leaf in wanted.items():
                one = {path: leaf}
                how = ocp.checkpoint_utils.construct_restore_args(one)
                args = ocp.args.PyTreeRestore(item=one, restore_args=how, partial_restore=True)
                with self._whole(step):
                    found = orbax.restore(folder, args=args)
                yield path, found.pop(path)

    def close(self) -> None:
        if not self.left:
            self.settle()
            self.orbax.close()

    def leave(self) -> None:
        """What is on its way is not waited for; without a manifest it does not count."""
        self.left = True

    def _save(self, step: int, items: dict[str, Any], meta: dict[str, Any], tier: Tier) -> bool:
        self.settle()  # one at a time: two would hold two copies of the state in this host's memory
        self.whole = self._make_room(step, _need(items))
        if self.whole:
            args = {item: ocp.args.StandardSave(tree) for item, tree in items.items()}
            path = self.folder / str(step)
            try:
                self.orbax.save(path, args=ocp.args.Composite(**args, meta=ocp.args.JsonSave(meta)))
            except (OSError, ValueError) as error:
                self._failed(step, error)
                return False
            self.writer = threading.Thread(
                target=self._finish, args=(step, tier), name=f"checkpoint-{step}", daemon=True
            )
            self.writer.start()
        return self.whole

    def _finish(self, step: int, tier: Tier) -> None:
        """In a thread of its own: waits for Orbax, on all hosts, and makes the step one that counts. Older
        ones go only then."""
        try:
            self.orbax.wait_until_finished()
            if jax.process_index() == 0 and not self.left:
                self.before()
                manifest.seal(self.folder / str(step), step=step, tier=tier)
                self.sealed = step
                self.remove_old()
        except Exception as error:  # whatever it is, the loop goes on and tells it
            self._failed(step, error)

    def _failed(self, step: int, error: Exception) -> None:
        self.whole = False
        said = f"step {step}: the checkpoint could not be written ({saved.short(error)}); the run goes on"
        self.problems.append(said)
        if jax.process_index() == 0 and self.keep is not None:
            with contextlib.suppress(OSError, UserError):
                self.problems += saved.clear_unfinished(self.run)

    def _make_room(self, step: int, need: int) -> bool:
        """Whether the disk holds so many bytes more, after what is not needed has gone if it must."""
        enough = True
        if jax.process_index() == 0 and (free := saved.free(self.run)) is not None and free < need:
            if self.keep is not None:
                self.problems += saved.clear_unfinished(self.run)
                goes = saved.let_go(self.run)
                while (saved.free(self.run) or 0) < need and (gone := next(goes, None)):
                    self.problems.append(f"{gone} removed, since the disk is full")
            free = saved.free(self.run) or 0
            enough = free >= need
            if not enough:
                self.problems.append(
                    f"step {step}: no checkpoint, which takes {_gb(need)}: the disk of {self.run} has "
                    f"{_gb(free)} free; make room, the next save tries again"
                )
        return bool(_agreed(enough))

    def _read(self, step: int, item: str, wanted: dict[str, Any], section: str) -> dict[str, Any]:
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
        with self._whole(step):
            _compare(wanted, self.layout(step, item), section)
            return self.orbax.restore(self.folder / str(step), args=args)[item]

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
            raise UserError(
                f"{self.run}/checkpoints/{step}: this checkpoint cannot be read "
                f"({' '.join(str(error).split())[:100]}); if it is damaged, move that folder elsewhere"
            ) from error


def _rest(state: State) -> dict[str, Any]:
    return {path: leaf for path, leaf in named(state) if not path.startswith(("params.", "ema."))}


def _agreed(value: int) -> int:
    """What the first host says, on all of them. They must all come here."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def _need(tree: Any) -> int:
    """Bytes that a checkpoint takes at most. Orbax compresses, by less than a tenth for weights."""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return size + size // 50 + (1 << 20)  # what describes the arrays


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"


def _compare(wanted: dict[str, Any], stored: dict[str, Any], section: str) -> None:
    """Says in plain words what differs, before Orbax does at length."""
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
