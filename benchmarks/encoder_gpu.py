"""Masked language modeling at the shapes of EuroBERT-210m and ModernBERT-base with rows of 1,024 and 8,192
tokens, and of DeBERTa-V3-base with 512 and 1,024, against the same models of transformers + torch.compile in
one run.

    python -m benchmarks.encoder_gpu       one GPU, about 7 minutes; prints tokens/s of both and their ratio

Both: float32 master weights, bf16 compute, AdamW, clipping by global norm, one document per row, and the same
weights and masked tokens in the first step, whose losses must be equal. Headrace samples masks within each
step; torch gets its batch masked beforehand. Where all layers are global, torch's attention gets no mask and
is the faster of its fused ones; for two-sided windows, those that transformers has are measured."""

import argparse
import functools
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import steps

GOAL = 1.2
APART = 0.02  # nats that the two first losses may differ by in bf16
MODELS = {"eurobert-210m": [steps.UNMASKED], "modernbert-base": ["sdpa", "flex_attention"]}
MODELS |= {"deberta-v3-base": ["eager"]}  # transformers has no other for this model
LENGTHS = {"deberta-v3-base": [512, 1024]}
# Without the generator of its training: transformers has the encoder, not the training.
CHANGES = {
    "deberta-v3-base": {
        "model.generator_layers": 0,
        "model.mask_decoder": "false",
        "objective": "null",
        "objective.use": "masked",
        "objective.mask_rate": 0.15,
    }
}


def main() -> int:
    args = parse()
    if args.only:
        cfg = load(args, args.models[0], args.lengths[0])
        steps.report_row(
            functools.partial(headrace_steps if args.only == "headrace" else torch_steps, cfg, args)
        )
        return 0
    lengths = {model: args.lengths or LENGTHS.get(model, [1024, 8192]) for model in args.models}
    return max(compare(args, model, length) for model in args.models for length in lengths[model])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="run only one, in this process: headrace, or torch's attention")
    parser.add_argument("--models", choices=list(MODELS), nargs="+", default=list(MODELS))
    parser.add_argument("--lengths", type=int, nargs="+", help="1,024 and 8,192 for most")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens per batch")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="folder through which weights and masked tokens pass")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="changes to the recipe of both"
    )
    return parser.parse_args()


def load(args: argparse.Namespace, model: str, length: int) -> Any:
    settings = {"batch.sequences": args.tokens // length, "data.sequence_length": length}
    settings |= {"compute.remat": "none", "optimizer.use": "adamw", "optimizer.max_grad_norm": 1.0}
    return steps.load(f"recipes/{model}.yaml", settings | CHANGES.get(model, {}), args.set)


def compare(args: argparse.Namespace, model: str, length: int) -> int:
    """Print all, Headrace first, because it saves its weights for the others. Returns 1 if one failed, the
    goal is missed, or the two do not compute the same."""
    cfg, rows = load(args, model, length), {}
    share = f"{cfg.objective.mask_rate:.0%} are masked"
    print(f"{model}, {cfg.batch.sequences} rows of {length} tokens, of which {share}")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        for name in ("headrace", *MODELS[model]):
            same = ["--models", model, "--lengths", str(length), "--tokens", str(args.tokens)]
            same += ["--steps", str(args.steps), "--folder", folder, "--set", *args.set]
            rows[name] = steps.run_script("encoder_gpu", "--only", name, *same)
            who = "headrace" if name == "headrace" else "torch"
            print("  " + steps.format_row(who, rows[name], steps.flops_per_token(cfg)), flush=True)
    ours = rows.pop("headrace")
    theirs = max(rows.values(), key=lambda row: row.get("tokens_per_second", 0.0))
    print(f"  headrace / transformers + torch.compile: {steps.format_ratio(ours, theirs, GOAL)}")
    found = steps.speed_ratio(ours, theirs)
    if found is None:
        return 1
    apart = abs(ours["first_loss"] - theirs["first_loss"])
    verdict, chance = "agree" if apart < APART else "DIFFER", math.log(cfg.model.vocab)
    print(
        f"  first losses on the same weights {verdict}, {apart:.1e} apart; ln(vocabulary) is {chance:.4f}\n"
    )
    return int(apart >= APART or found < GOAL)


def headrace_steps(cfg: Any, args: argparse.Namespace) -> steps.Row:
    return steps.headrace_steps(cfg, args.steps, mask=cfg.model.vocab - 1, folder=args.folder)


def torch_steps(cfg: Any, args: argparse.Namespace) -> steps.Row:
    """Repeat the same batch: which tokens it contains does not change the time."""
    attention = args.only
    model = steps.transformers_model(cfg, attention)
    if attention == steps.UNMASKED:
        attention = steps.fastest_attention(cfg)
    if args.folder is not None and (args.folder / "examples.npz").is_file():
        steps.load_weights(model, args.folder)
        batch = steps.load_examples(args.folder)
    else:  # by itself, or Headrace has failed
        batch = masked(steps.random_tokens(cfg)[0]["input_ids"], cfg)
    return steps.torch_steps(model, [batch], args.steps) | {"attention": attention}


def masked(tokens: Any, cfg: Any) -> dict[str, Any]:
    import torch

    chosen = torch.rand(tokens.shape, device=tokens.device) < cfg.objective.mask_rate
    labels = tokens.masked_fill(~chosen, -100)
    return {"input_ids": tokens.masked_fill(chosen, cfg.model.vocab - 1), "labels": labels}


if __name__ == "__main__":
    sys.exit(main())
