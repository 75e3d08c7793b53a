"""lm-evaluation-harness gets the same numbers from a run as from transformers with the exported folder."""

import json

import pytest
import transformers

from headrace.checkpoint.open_run import open_run
from headrace.cli import main as cli_main
from headrace.config import recipe
from headrace.convert import to_huggingface
from headrace.errors import UserError
from headrace.training import run as training_run

pytest.importorskip("lm_eval", reason="needs headrace[eval]: make test-all installs it")
from headrace.inference import lm_eval

CHOICE = """
task: pick
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLL = """
task: roll
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITE = """
task: write
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def exported(packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    path = folder / "recipe.yaml"
    path.write_text(f"""
run_dir: {folder}/run
model: {{use: llama, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, rope_theta: 10000.0}}
data: {{path: {packed}, sequence_length: 64}}
optimizer: {{use: adamw, learning_rate: 1e-2}}
schedule: {{use: cosine, steps: 20, warmup: 2}}
batch: {{sequences: 16}}
compute: {{dtype: float32}}
eval: {{every: 0}}
log: {{every: 20, tensorboard: false}}
""")
    assert training_run.run(recipe.load(path)) == 0
    run = open_run(recipe.load_run(f"{folder}/run"))
    to_huggingface.export(run, f"{folder}/out", "float32")
    rows = [
        dict(
            question=f"the number {n} and",
            choices=[" one", " some more text", " x"],
            answer=n % 3,
            text=f"some words, {n} of them. " * (1 + 9 * n),
        )
        for n in range(7)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("pick", CHOICE), ("roll", ROLL), ("write", WRITE)):
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "rows.jsonl"))
    return folder, run


def test_the_harness_gets_the_same_numbers_as_from_transformers(exported):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    folder, run = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    options = dict(pretrained=model, tokenizer=tokenizer, max_length=64, device="cpu", batch_size=2)
    hf_model = HFLM(**options, add_bos_token=True)
    run_model = lm_eval.HarnessModel(run, 3)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    pairs = [(row["question"], choice) for row in rows for choice in row["choices"]] + [("", " one")]
    make_requests = lambda kind, args: [Instance(kind, {}, one, n) for n, one in enumerate(args)]
    requests = make_requests("loglikelihood", pairs)
    scores = zip(run_model.loglikelihood(requests), hf_model.loglikelihood(requests), strict=True)
    for (score, is_greedy), (hf_score, hf_is_greedy) in scores:
        assert score == pytest.approx(hf_score, abs=1e-4) and is_greedy == hf_is_greedy
    requests = make_requests("loglikelihood_rolling", [(row["text"],) for row in rows])
    without_bos = HFLM(**options, add_bos_token=False)  # it puts a prefix token before the text in any case
    expected = without_bos.loglikelihood_rolling(requests)
    assert run_model.loglikelihood_rolling(requests) == pytest.approx(expected, abs=1e-3)
    until = {"until": ["e"], "max_gen_toks": 12, "do_sample": False}
    requests = make_requests("generate_until", [(row["question"], dict(until)) for row in rows])
    texts = run_model.generate_until(requests)
    assert texts == hf_model.generate_until(requests) and any(texts)


def test_the_command_evaluates_tasks_defined_in_files(exported, capsys):
    folder, _ = exported
    tasks = ",".join(f"{folder}/{name}.yaml" for name in ("pick", "roll", "write"))
    assert cli_main.main(["eval", f"{folder}/run", "--tasks", tasks, "--limit", "5"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("pick", "acc_norm", "bits_per_byte", "exact_match"))
    assert cli_main.main(["eval", f"{folder}/run", "--tasks", "no_such_task"]) == 2
    assert "found no_such_task" in capsys.readouterr().err
    assert cli_main.main(["eval", f"{folder}/run", "--limit", "5"]) == 2
    with pytest.raises(UserError, match="no such file"):
        lm_eval.evaluate_tasks(exported[1], ["x.yaml"], max_examples=None, batch_size=2)
