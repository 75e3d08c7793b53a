"""`headrace plan`: what a recipe takes on slices that nobody has rented yet."""

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.config import reader as config, sections
from headrace.errors import UserError
from headrace.plan import (
    recommend as advise,
    estimate as arithmetic,
    aot as compiler,
    buffers as memory,
    outcome,
    search,
    show,
)
from headrace.hardware import chips
from headrace.plan.outcome import Outcome
from headrace.hardware.slices import Slice, parse

DOES_NOT_FIT = 3


def sized(cfg: sections.Run) -> sections.Run:
    """The recipe with the vocabulary of its data, where that is there."""
    if getattr(cfg.model, "heads", None) is None:
        raise UserError(
            f"model.use: found {cfg.model.use}, whose sizes are not in the recipe, as plan needs them"
        )
    vocab = "model.vocab: expected the size of the vocabulary"
    lacks = "model.labels: expected how many there are" if cfg.model.vocab else vocab
    if cfg.model.vocab and (cfg.model.labels or cfg.objective.use != "classify"):
        return cfg
    if not (Path(cfg.data.path) / "index.json").is_file():
        raise UserError(f"{lacks}, since the data, {cfg.data.path}, is not there")
    # Most recipes name it, and need not wait for these.
    from headrace.data.dataset import Dataset
    from headrace.training.evaluate import with_vocabulary

    return with_vocabulary(cfg, Dataset.open(cfg.data.path, sequence_length=cfg.data.sequence_length))


def run(
    cfg: sections.Run,
    names: Sequence[str],
    *,
    fast: bool = False,
    out: Path | None = None,
    prices: Path | None = None,
    save: Path | None = None,
    days: float | None = None,
) -> int:
    """Plans for each slice, one after the other. Returns the exit code."""
    slices, table = [parse(name) for name in names], chips.prices(prices)
    for where in slices:
        arithmetic.estimate(cfg, where)  # a mistake is told before the first is compiled
    found = []
    for where in slices:
        one = plan(cfg, where, table[where.chip.name], fast=fast, save=save)
        found.append(one)
        show.outcome(one, cfg, days, own_prices=prices is not None)
    if out is not None:
        out.write_text(json.dumps([one.as_json() for one in found], indent=2) + "\n")
    return 0 if all(one.fits for one in found) else DOES_NOT_FIT


def tune(
    cfg: sections.Run,
    name: str,
    *,
    fast: bool,
    write: Path | None,
    out: Path | None,
    prices: Path | None,
    save: Path | None,
) -> int:
    """Looks for the settings that make a step shortest on a slice, and writes the recipe with them."""
    where = parse(name)
    price = chips.prices(prices)[where.chip.name]
    outcomes: dict[sections.Run, Outcome] = {}

    def judge(tried: sections.Run, folder: Path) -> float | None:
        settings = " ".join(search.overrides(cfg, tried)) or "as it is"
        try:
            outcomes[tried] = plan(tried, where, price, fast=fast, save=folder)
            seconds = outcomes[tried].step_seconds
            verdict = f"{seconds:.3g} s a step" if seconds else "does not fit"
        except UserError as error:
            if tried.attention == cfg.attention:
                raise
            seconds, verdict = None, str(error)
        show.say(f"  {settings}: {verdict}")
        return seconds

    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        try:
            best, _ = search.search(cfg, where, judge, save or Path(scratch), exact=fast)
        except search.NoneFits as error:
            show.say(str(error))
            return DOES_NOT_FIT
    show.outcome(outcomes[best], best, None, own_prices=prices is not None)
    if out is not None:
        out.write_text(json.dumps([outcomes[best].as_json()], indent=2) + "\n")
    show.say("the best settings: " + (" ".join(search.overrides(cfg, best)) or "those of the recipe"))
    if write is not None:
        write.write_text(config.to_yaml(best))
        show.say(f"{write} is the recipe with them: `headrace train {write}`")
    return 0


def recommend(
    cfg: sections.Run,
    names: Sequence[str],
    *,
    tokens: str | None,
    days: float | None,
    budget: float | None,
    prices: Path | None = None,
) -> int:
    """Which slice for this model; for given slices, which model and tokens they train best."""
    for name in names:
        show.optimal(parse(name), days or show.MONTH)
    if not names:
        if tokens is not None:
            cfg = dataclasses.replace(
                cfg, schedule=dataclasses.replace(cfg.schedule, steps=f"{tokens} tokens")
            )
        limits = [] if days is None else [f"in {days:g} days"]
        limits += [] if budget is None else [f"for ${budget:,.0f}"]
        table = chips.prices(prices)
        found = advise.offers(cfg, table, days=days, budget=budget)
        every = found or advise.offers(cfg, table, days=None, budget=None)
        show.offers(found, every, cfg, "".join(f" {limit}" for limit in limits))
        return 0 if found else DOES_NOT_FIT
    return 0


def plan(cfg: sections.Run, where: Slice, price: chips.Price, *, fast: bool, save: Path | None) -> Outcome:
    """By the compiler if there is one for the chip and the state alone does not fill it."""
    hopeless = arithmetic.state_needs(cfg, where) * where.chip.devices > where.chip.usable
    if fast or hopeless or not where.chip.is_tpu:
        return by_arithmetic(cfg, where, price)
    with tempfile.TemporaryDirectory(prefix="headrace-plan-") as scratch:
        folder = save / where.name if save else Path(scratch)
        return by_compiler(cfg, where, price, folder)


def by_arithmetic(cfg: sections.Run, where: Slice, price: chips.Price) -> Outcome:
    guess = arithmetic.estimate(cfg, where)
    fits = guess.hbm_bytes * where.chip.devices <= where.chip.usable
    parts = {
        "matrix units": guess.matrix_seconds,
        "attention": guess.attention_seconds,
        "memory": guess.memory_seconds,
        "between chips, not hidden": guess.exposed_seconds,
        "to the host and back, not hidden": guess.host_seconds,
    }
    parts = {what: seconds for what, seconds in parts.items() if seconds}
    return Outcome(
        where=where,
        fits=fits,
        **of_both(guess, cfg, where),
        step_seconds=guess.step_seconds if fits else None,
        by="arithmetic",
        parts=parts if fits else {},
        price=price,
    )


def by_compiler(cfg: sections.Run, where: Slice, price: chips.Price, folder: Path) -> Outcome:
    made = compiler.compile(cfg, where, folder)
    return Outcome(
        where=where,
        fits=made.fits,
        **of_both(made, cfg, where),
        step_seconds=made.step_seconds,
        by="compiler",
        parts=made.parts,
        hidden=made.hidden,
        doubts=made.doubts,
        cycle_seconds=made.cycle_seconds,
        buffers=tuple(memory.largest(folder / "dump", cfg, made.mesh)),
        price=price,
        compile_seconds=made.seconds,
    )


def of_both(
    found: arithmetic.Estimate | compiler.Compiled, cfg: sections.Run, where: Slice
) -> dict[str, Any]:
    """What arithmetic and the compiler both tell, of a chip rather than a device."""
    tokens, tokens_per_step = outcome.tokens_of(cfg)
    known = {name: getattr(found, name) for name in ("mesh", "parameters", "flops_per_token")}
    kinds = ("weight", "frozen", "optimizer", "argument", "temp", "hbm", "host")
    sizes = {f"{kind}_bytes": getattr(found, f"{kind}_bytes") * where.chip.devices for kind in kinds}
    return known | sizes | {"tokens": tokens, "tokens_per_step": tokens_per_step}
