"""The server over real HTTP, by OpenAI's own client: each answer is what `headrace generate` gives alone."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import operator
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
from headrace.inference.serve.engine import BatchEngine, pieces_of
from headrace.model_wrappers import load_family
from headrace.nn import module, sharding

TEXT = "the mill turns, the water falls, the wheel, the stone"


def make(folder, **model: Any) -> LoadedRun:
    """A run with weights drawn at random, large enough to say different things."""
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
    folder.mkdir()
    (folder / "recipe.yaml").write_text(reader.dump(tree))
    tokenizer_io.save(tokenizer, folder)
    cfg = recipe.load_run(folder)
    rng = np.random.default_rng(0)

    def leaf(path: Any, wanted: Any) -> np.ndarray:
        around = 1.0 if module.path_name(path).endswith("_norm") else 0.0
        return rng.normal(around, 0.12, wanted.shape).astype(np.float32)

    shapes = module.shapes(load_family(cfg.model).Model, cfg.model)
    checkpoints = Checkpoints(str(folder))
    params = jax.tree_util.tree_map_with_path(leaf, shapes)
    checkpoints.save_params(params, {"step": 0, "recipe": reader.to_dict(cfg), "tokenizer_sha256": None})
    checkpoints.close()
    return on_one_device(open_run(cfg))


def on_one_device(run: LoadedRun) -> LoadedRun:
    """Programs for eight take thrice as long to compile."""
    devices = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), jax.devices()[:1])
    return dataclasses.replace(run, params=jax.device_get(run.params), mesh=devices)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> LoadedRun:
    return make(tmp_path_factory.mktemp("serve") / "tiny")


@contextlib.contextmanager
def serving(run: LoadedRun, slots: int = 3, length: int = 64):
    engine = BatchEngine(run, slots=slots, length=length)
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


def alone(run: LoadedRun, prompt: str, tokens: int, sampling: Sampling) -> str:
    return "".join(generate.generate(run, prompt, tokens, sampling))


PROMPTS = ["the mill", "the water falls, the wheel, the stone, the mill turns", "", "stone", "wheel the", "a"]


def test_many_at_once_get_what_each_would_get_alone(run, client):
    """Six for three slots, of different lengths, some greedy and some by chance."""
    asked = [
        (prompt, 6 + 3 * number, Sampling(temperature=0.9 * (number % 2), top_k=0, top_p=0.9, seed=number))
        for number, prompt in enumerate(PROMPTS)
    ]

    def ask(prompt: str, tokens: int, sampling: Sampling) -> str:
        how = dict(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed)
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, **how)
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: ask(*one), asked))
    assert found == [alone(run, *one) for one in asked]
    assert len(set(found)) == len(found)


def test_a_stream_is_the_same_text_in_pieces(run, client):
    wanted = alone(run, "the mill", 20, Sampling(0, 0, 1.0))
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
    assert "".join(pieces) == wanted and sum(map(bool, pieces)) > 3
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].usage.completion_tokens == 20
    assert events[-1].usage.prompt_tokens == 1 + len(run.tokenizer.encode("the mill"))


def test_a_conversation_is_written_by_the_template(run, client):
    messages = [{"role": "user", "content": "the wheel"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=12)
    theirs = transformers.AutoTokenizer.from_pretrained(run.recipe.run_dir)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    wanted = "".join(generate.decode_stream(run, ids, generate.sample(run, ids, 12, Sampling(0))))
    assert answer.choices[0].message.content == wanted and answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(ids)
    streamed = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True
    )
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == wanted


def test_a_text_ends_before_a_stop(run, client):
    whole = alone(run, "the mill", 30, Sampling(0, 0, 1.0))
    stop = whole[9:12]
    first = whole.index(stop)
    answer = client.completions.create(
        model="tiny", prompt="the mill", max_tokens=30, temperature=0, stop=["nowhere in it", stop]
    )
    assert answer.choices[0].text == whole[:first] and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 30


@pytest.mark.parametrize(
    ("asked", "message", "param"),
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
        (dict(prompt="a", unheard_of=0), "unheard_of: found 0, not supported", "unheard_of"),
        (dict(prompt={}), "prompt: expected a text", "prompt"),
        (dict(prompt=[1, 10**6]), "prompt: expected tokens from 0 to", "prompt"),
        (dict(prompt="\ud800"), "half a character", "prompt"),
        ([], "expected a JSON object", None),
    ],
)
def test_a_bad_request_is_told_as_openai_does(asked, message, param, server):
    status, told = post(server, "/v1/completions", json.dumps(asked).encode())
    assert status == 400 and told["error"]["type"] == "invalid_request_error"
    assert re.search(message, told["error"]["message"]) and told["error"]["param"] == param


def test_what_asks_for_nothing_is_no_reason_to_refuse(run, server):
    idle = {name: value for name, values in openai_request.NOTHING.items() for value in values}
    asked = idle | dict(prompt=[5], max_tokens=3, temperature=0, unheard_of=None, user="me")
    status, told = post(server, "/v1/completions", json.dumps(asked).encode())
    wanted = "".join(generate.decode_stream(run, [5], generate.sample(run, [5], 3, Sampling(0))))
    assert status == 200 and told["choices"][0]["text"] == wanted


def post(server: Any, path: str, body: bytes) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.server_port}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_other_addresses_models_and_bodies_are_refused(server, client):
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
def test_a_client_that_goes_away_leaves_its_slot(run, stream):
    """So does one that waits for a slot behind it, which then is given none."""
    with serving(run, slots=1, length=16_384) as server:
        # Always the likeliest, which goes round in circles: one drawn at random may be the end of the text.
        asked = json.dumps(dict(prompt="the", max_tokens=16_000, temperature=0, stream=stream)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(asked)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(head + asked)
            wait_for(lambda: server.engine.jobs[0] is not None and server.engine.jobs[0].count > 2)
            job = server.engine.jobs[0]
            with socket.create_connection(("127.0.0.1", server.server_port)) as second:
                second.sendall(head + asked)
                wait_for(lambda: server.engine.waiting.qsize() == 1)
                behind = server.engine.waiting.queue[0]
        status, told = post(server, "/v1/completions", json.dumps(dict(prompt="a", max_tokens=2)).encode())
        assert status == 200 and told["usage"]["completion_tokens"] <= 2
        assert job.ending == "cancelled" and job.count < 16_000
        assert behind.ending == "cancelled" and behind.count == 0


def wait_for(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_more_of_the_likeliest_than_there_are_tokens_are_all_of_them(run, server):
    asked = json.dumps(dict(prompt="the mill", max_tokens=5, top_k=10**14, seed=3)).encode()
    status, told = post(server, "/v1/completions", asked)
    assert status == 200
    assert told["choices"][0]["text"] == alone(run, "the mill", 5, Sampling(1.0, 0, 1.0, seed=3))


def test_a_prompt_that_fails_fails_alone(server):
    other = server.engine.submit([1, 2], 40, Sampling(0), frozenset())
    following = iter(other)
    next(following)
    failing = server.engine.submit([2**40], 2, Sampling(0), frozenset())  # no device holds such a token
    with pytest.raises(OverflowError):
        list(failing)
    assert len(list(following)) == 39 and other.ending == "length"
    assert post(server, "/v1/completions", json.dumps(dict(prompt="a", max_tokens=2)).encode())[0] == 200


def test_who_asks_an_engine_that_failed_is_told_so(run, capsys):
    with serving(run, slots=1) as server:
        server.engine.caches = None  # lost, as where a device is
        asked = json.dumps(dict(prompt="a", max_tokens=2)).encode()
        for message in ("the model failed", "the server has stopped"):
            status, told = post(server, "/v1/completions", asked)
            assert status == 500 and told["error"]["type"] == "server_error"
            assert message in told["error"]["message"]
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/health")
        caught.value.close()
    said = capsys.readouterr().err
    assert "nothing is answered any more" in said and "Traceback" not in said


def test_prompts_are_cut_into_few_sizes():
    for length in (1, 2, 7, 256, 300, 1000):
        pieces = list(pieces_of(list(range(length))))
        assert functools.reduce(operator.iadd, pieces, []) == list(range(length))
        assert all(len(piece) in {1, 2, 4, 8, 16, 32, 64, 128, 256} for piece in pieces)


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
            asked = dict(prompt=prompt, max_tokens=10, temperature=0.8, top_k=50, seed=seed)
            status, told = post(server, "/v1/completions", json.dumps(asked).encode())
            assert status == 200
            assert told["choices"][0]["text"] == alone(run, prompt, 10, Sampling(seed=seed))


def test_what_cannot_be_served_is_refused(run, tmp_path, capsys):
    assert main(["serve", run.recipe.run_dir, "--slots", "0"]) == 2
    assert "--slots" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", run.recipe.run_dir, "--port", str(taken.getsockname()[1])]) == 2
    assert "--port: nothing can be served" in capsys.readouterr().err


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
            assert json.load(response)["choices"][0]["text"] == alone(run, "the", 3, Sampling(0))
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(30) == 0 and "Traceback" not in rest, rest
