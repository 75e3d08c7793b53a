"""Training speed at the Llama-3.2-1B shape, sequence 4096, against transformers + torch.compile in one run.

    python -m benchmarks.llama_1b          one GPU, about 4 minutes; prints tokens/s of both and their ratio

Both: float32 master weights, bf16 compute, AdamW, clipping by global norm, random tokens, one document a row.
Each runs in a process of its own, so that neither finds the other's memory taken."""

import argparse

from benchmarks import steps

LENGTH = 4096


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", choices=["torch", "millrace"], help="run one of the two, in this process")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--steps", type=int, default=15)
    options.add_argument("overrides", nargs="*", metavar="key=value", help="for Millrace's recipe")
    args = options.parse_args()
    settings = {"batch.sequences": args.batch, "data.sequence_length": LENGTH}
    cfg = steps.load("recipes/llama3.2-1b.yaml", settings, args.overrides)
    if args.only == "millrace":
        return steps.tell(lambda: steps.millrace_steps(cfg, args.steps))
    if args.only == "torch":
        model = steps.transformers_model(cfg)
        return steps.tell(lambda: steps.torch_steps(model, steps.random_tokens(cfg), args.steps))
    rows = {}
    for name in ("torch", "millrace"):
        same = ["--batch", str(args.batch), "--steps", str(args.steps), *args.overrides]
        rows[name] = steps.alone("llama_1b", "--only", name, *same)
        print(steps.line(name, rows[name], steps.flops(cfg)), flush=True)
    print(f"millrace / transformers + torch.compile: {steps.spoken(rows['millrace'], rows['torch'])}")


if __name__ == "__main__":
    main()
