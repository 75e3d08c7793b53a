"""The server over real HTTP, called by OpenAI's client: texts are those that `headrace generate` returns."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import openai
import pytest
import transformers

from headrace.checkpoint.manager import Checkpoints
from headrace.checkpoint.open_run import LoadedRun, open_run
from headrace.cli.main import main
from headrace.config import reader, recipe
from headrace.data.chat import encode
from headrace.data.tokenizer import tokenizer as tokenizer_io
from headrace.data.tokenizer import train as tokenizer_train
from headrace.inference import generate
from headrace.inference.sampling import Sampling
from headrace.inference.serve import http as serve_http
from headrace.inference.serve import openai_request
from headrace.inference.serve.engine import BatchEngine, split_prompt
from headrace.model_wrappers import load_family
from headrace.nn import module, sharding

TEXT = "the mill turns, the water falls, the wheel, the stone"


def make(folder, recurrence: dict[str, int] | None = None, **model: Any) -> LoadedRun:
    """A run with random weights, large enough that its texts differ."""
    tokenizer = tokenizer_train.train_tokenizer([TEXT] * 3, kind="bpe", vocab=280)
    tokenizer = tokenizer_io.Tokenizer(
        tokenizer.inner, tokenizer.special, chat_template=encode.PLAIN_TEMPLATE.read_text()
    )
    sizes = dict(use="llama", layers=2, embed=64, heads=4, kv_heads=2, mlp=96, rope_theta=1e4)
    tree = {
        "run_dir": str(folder),
        "model": sizes | model | {"vocab": tokenizer.vocab_size},
        "data": {"path": "data/none", "sequence_length": 64},
        "optimizer": {"learning_rate": 1e-3},
        "schedule": {"steps": 10},
        "compute": {"dtype": "float32"},
    }
    if recurrence:
        tree["recurrence"] = recurrence
    folder.mkdir()
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    tokenizer_io.save(tokenizer, folder)
    cfg = recipe.load_run(folder)
    rng = np.random.default_rng(0)

    def init(path: Any, shape: Any) -> np.ndarray:
        mean = 1.0 if module.path_name(path).endswith("_norm") else 0.0
        return rng.normal(mean, 0.12, shape.shape).astype(np.float32)

    shapes = module.shapes(load_family(cfg.model).Model, cfg.model)
    checkpoints = Checkpoints(str(folder))
    params = jax.tree_util.tree_map_with_path(init, shapes)
    checkpoints.save_params(params, {"step": 0, "recipe": reader.to_dict(cfg), "tokenizer_sha256": None})
    checkpoints.close()
    return on_one_device(open_run(cfg))


def on_one_device(run: LoadedRun) -> LoadedRun:
    """Programs for eight devices take three times as long to compile."""
    devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    return dataclasses.replace(run, params=jax.device_get(run.params), mesh=devices)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> LoadedRun:
    return make(tmp_path_factory.mktemp("serve") / "tiny")


@contextlib.contextmanager
def serving(run: LoadedRun, slots: int = 3, length: int = 64):
    failures: list[BaseException] = []
    engine = BatchEngine(run, slots=slots, length=length, on_failure=failures.append)
    server = serve_http.Server(engine, "tiny", ("127.0.0.1", 0))
    engine.start()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        engine.close()
        assert failures == ([engine.error] if engine.error else [])


@pytest.fixture(scope="module")
def server(run):
    with serving(run) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="any", max_retries=0, timeout=600
    ) as client:
        yield client


def generate_text(run: LoadedRun, prompt: str, tokens: int, sampling: Sampling) -> str:
    return "".join(generate.generate(run, prompt, tokens, sampling))


PROMPTS = ["the mill", "the water falls, the wheel, the stone, the mill turns", "", "stone", "wheel the", "a"]


def test_texts_generated_at_once_are_those_generated_one_by_one(run, client):
    """Six for three slots, of different lengths, some greedy and some sampled."""
    requests = [
        (prompt, 6 + 3 * number, Sampling(temperature=0.9 * (number % 2), top_k=0, top_p=0.9, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]

    def complete(prompt: str, tokens: int, sampling: Sampling) -> str:
        options = dict(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
        completion = client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, **options)
        return completion.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(lambda request: complete(*request), requests))
    assert texts == [generate_text(run, *request) for request in requests]
    assert len(set(texts)) == len(texts)


def test_a_stream_is_the_same_text_in_pieces(run, client):
    expected = generate_text(run, "the mill", 20, Sampling(0, 0, 1.0))
    events = list(
        client.completions.create(
            model="tiny",
            prompt="the mill",
            max_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [event.choices[0].text for event in events if event.choices]
    assert "".join(pieces) == expected and sum(map(bool, pieces)) > 3
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 20
    assert events[-1].usage.prompt_tokens == 1 + len(run.tokenizer.encode("the mill"))


def test_a_chat_is_rendered_by_the_template(run, client):
    messages = [{"role": "user", "content": "the wheel"}]
    completion = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(run.recipe.run_dir)
    ids = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    new_ids = generate.sample_tokens(run, ids, 12, Sampling(0))
    expected = "".join(generate.decode_stream(run.tokenizer, ids, new_ids))
    message = completion.choices[0].message
    assert message.content == expected and message.role == "assistant"
    assert completion.usage.prompt_tokens == len(ids)
    streamed = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True
    )
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == expected


def test_a_text_ends_before_a_stop_sequence(run, client):
    text = generate_text(run, "the mill", 30, Sampling(0, 0, 1.0))
    stop = text[9:12]
    completion = client.completions.create(
        model="tiny", prompt="the mill", max_tokens=30, temperature=0, stop=["nowhere in it", stop]
    )
    choice = completion.choices[0]
    assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
    assert completion.usage.completion_tokens < 30


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (dict(prompt="the " * 80), "the prompt has .* tokens, and there is room for 63", None),
        (dict(prompt="a", max_tokens=100), "max_tokens: found 100", None),
        (
            dict(prompt="a", temperature=-1),
            "temperature: found -1, expected a number from 0 to 100",
            "temperature",
        ),
        (dict(prompt="a", temperature=10**400), r"temperature: found 10{39}\.\.\., expected", "temperature"),
        (dict(prompt="a", stream="yes"), "stream: found 'yes', expected true or false", "stream"),
        (dict(prompt="a", stream_options=5), "stream_options: found 5, expected an object", "stream_options"),
        (dict(prompt="a", max_tokens="9"), "max_tokens: found '9', expected a whole number", "max_tokens"),
        (dict(prompt="a", n=2), "n: found 2, not supported here", "n"),
        (dict(prompt="a", n=True), "n: found True, not supported here", "n"),
        (dict(prompt="a", logprobs=5), "logprobs: found 5, not supported", "logprobs"),
        (dict(prompt="a", logprobs=1), "logprobs: found 1, not supported", "logprobs"),
        (dict(prompt="a", logprobs=0), "logprobs: found 0, not supported", "logprobs"),
        (dict(prompt="a", logprobs=True), "logprobs: found True, not supported", "logprobs"),
        (dict(prompt="a", echo=True), "echo: found True, not supported", "echo"),
        (dict(prompt="a", presence_penalty=1), "presence_penalty: found 1, not", "presence_penalty"),
        (dict(prompt="a", repetition_penalty=0), "repetition_penalty: found 0, not", "repetition_penalty"),
        (dict(prompt="a", no_such_field=0), "no_such_field: found 0, not supported", "no_such_field"),
        (dict(prompt={}), "prompt: expected a text", "prompt"),
        (dict(prompt=[1, 10**6]), "prompt: expected tokens from 0 to", "prompt"),
        (dict(prompt="\ud800"), "half a character", "prompt"),
        ([], "expected a JSON object", None),
    ],
)
def test_a_bad_request_gets_the_error_object_of_openai(body, message, param, server):
    status, response = post(server, "/v1/completions", json.dumps(body).encode())
    assert status == 400 and response["error"]["type"] == "invalid_request_error"
    assert re.search(message, response["error"]["message"]) and response["error"]["param"] == param


def test_unsupported_fields_are_accepted_with_values_that_request_nothing(run, server):
    neutral = {name: value for name, values in openai_request.NEUTRAL_VALUES.items() for value in values}
    body = neutral | dict(prompt=[5], max_tokens=3, temperature=0, no_such_field=None, user="me")
    status, response = post(server, "/v1/completions", json.dumps(body).encode())
    new_ids = generate.sample_tokens(run, [5], 3, Sampling(0))
    expected = "".join(generate.decode_stream(run.tokenizer, [5], new_ids))
    assert status == 200 and response["choices"][0]["text"] == expected


def post(server: Any, path: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_unknown_addresses_and_models_and_invalid_bodies_are_refused(server, client):
    assert post(server, "/v1/completions", b"{")[0] == 400
    assert post(server, "/v1/nothing", b"{}")[0] == 404
    with pytest.raises(openai.NotFoundError, match="model: found 'gpt-4', expected tiny"):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.BadRequestError, match="messages: expected text"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": 7}])
    assert [model.id for model in client.models.list()] == ["tiny"]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/health") as response:
        assert json.load(response) == {"status": "ok"}
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as response:
        page = response.read().decode()
    assert "not for production" in page and "http://" not in page and "https://" not in page


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_slot(run, stream):
    """One that disconnects while it waits for a slot never gets one."""
    with serving(run, slots=1, length=16_384) as server:
        # Greedy, which goes in circles: a sampled token could be the end of the text.
        body = json.dumps(dict(prompt="the", max_tokens=16_000, temperature=0, stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(head + body)
            wait_for(lambda: server.engine.jobs[0] is not None and server.engine.jobs[0].generated > 2)
            job = server.engine.jobs[0]
            with socket.create_connection(("127.0.0.1", server.server_port)) as second:
                second.sendall(head + body)
                wait_for(lambda: server.engine.waiting.qsize() == 1)
                waiting_job = server.engine.waiting.queue[0]
        body = json.dumps(dict(prompt="a", max_tokens=2)).encode()
        status, response = post(server, "/v1/completions", body)
        assert status == 200 and response["usage"]["completion_tokens"] <= 2
        assert job.finish_reason == "cancelled" and job.generated < 16_000
        assert waiting_job.finish_reason == "cancelled" and waiting_job.generated == 0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_top_k_above_the_vocabulary_means_all_tokens(run, server):
    body = json.dumps(dict(prompt="the mill", max_tokens=5, top_k=10**14, seed=3)).encode()
    status, response = post(server, "/v1/completions", body)
    assert status == 200
    expected = generate_text(run, "the mill", 5, Sampling(1.0, 0, 1.0, seed=3))
    assert response["choices"][0]["text"] == expected


def test_a_prompt_that_fails_does_not_affect_other_jobs(server):
    other = server.engine.submit([1, 2], 40, Sampling(0), frozenset())
    tokens = iter(other)
    next(tokens)
    failing = server.engine.submit([2**40], 2, Sampling(0), frozenset())  # does not fit in an int32
    with pytest.raises(OverflowError):
        list(failing)
    assert len(list(tokens)) == 39 and other.finish_reason == "length"
    assert post(server, "/v1/completions", json.dumps(dict(prompt="a", max_tokens=2)).encode())[0] == 200


def test_requests_to_a_failed_engine_get_a_server_error(run):
    with serving(run, slots=1) as server:
        server.engine.caches = None  # as after the loss of a device
        body = json.dumps(dict(prompt="a", max_tokens=2)).encode()
        for message in ("the model failed", "the server has stopped"):
            status, response = post(server, "/v1/completions", body)
            assert status == 500 and response["error"]["type"] == "server_error"
            assert message in response["error"]["message"]
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/health")
        caught.value.close()
        assert "all further requests are refused" in serve_http.format_failure(server.engine.error)


def test_prompts_are_split_into_chunks_of_nine_sizes():
    for length in (1, 2, 7, 256, 300, 1000):
        chunks = list(split_prompt(list(range(length))))
        assert list(itertools.chain(*chunks)) == list(range(length))
        assert all(len(chunk) in {1, 2, 4, 8, 16, 32, 64, 128, 256} for chunk in chunks)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "model",
    [
        dict(use="gemma3", head_dim=16, window=8),
        dict(use="moe", experts=4, top_k=2),
        dict(recurrence=dict(rounds=2, prelude=1, coda=0), layers=3),
    ],
)
def test_other_families_are_served_too(model, tmp_path):
    run = make(tmp_path / "tiny", **model)
    with serving(run, slots=2) as server:
        for prompt, seed in (("the mill turns", 0), ("wheel", 1)):
            body = dict(prompt=prompt, max_tokens=10, temperature=0.8, top_k=50, seed=seed)
            status, response = post(server, "/v1/completions", json.dumps(body).encode())
            assert status == 200
            assert response["choices"][0]["text"] == generate_text(run, prompt, 10, Sampling(seed=seed))


def test_invalid_options_of_the_command_are_refused(run, capsys):
    assert main(["serve", run.recipe.run_dir, "--slots", "0"]) == 2
    assert "--slots" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["serve", run.recipe.run_dir, "--port", str(other.getsockname()[1])]) == 2
    assert "--port: cannot serve at 127.0.0.1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(run):
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", run.recipe.run_dir, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert process.stdout is not None
    with process:
        line = process.stdout.readline()
        assert "not for production" in line
        address = line.split(" at ")[1].split(",")[0]
        body = json.dumps(dict(prompt="the", max_tokens=3, temperature=0)).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{address}/v1/completions", body)) as response:
            assert json.load(response)["choices"][0]["text"] == generate_text(run, "the", 3, Sampling(0))
        process.send_signal(signal.SIGINT)
        remainder = process.stdout.read()
        assert process.wait(30) == 0 and remainder.endswith("stopped\n"), remainder
