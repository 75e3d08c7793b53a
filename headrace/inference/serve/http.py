"""The addresses: OpenAI's completions and chat, which model there is, whether it is well, and a page."""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.serve import openai_request, page
from headrace.inference.serve.engine import BatchEngine
from headrace.model_wrappers import classification_head

NOTICE = "for looking at what was trained, not for production"
LARGEST = 10_000_000  # bytes of a request


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, engine: BatchEngine, name: str, address: tuple[str, int]) -> None:
        self.engine, self.model, self.began = engine, name, int(time.time())
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--port: nothing can be served at {address[0]}:{address[1]}: {error}; name another"
            ) from None


def serve(run: LoadedRun, *, host: str, port: int, slots: int, length: int | None) -> None:
    """Answers until it is interrupted."""
    refuse(run)
    if slots < 1:
        raise UserError(f"--slots: found {slots}, expected 1 or more")
    room = run.recipe.data.sequence_length if length is None else length
    if room < 2:
        raise UserError(f"--length: found {room}, expected 2 or more")
    engine = BatchEngine(run, slots=slots, length=room)
    server = Server(engine, Path(run.recipe.run_dir).name, (host, port))
    engine.start()
    shown = f"[{host}]" if ":" in host else host
    print(
        f"headrace {__version__}: {run.recipe.run_dir} at http://{shown}:{server.server_port}, {NOTICE}",
        flush=True,
    )
    print(
        f"OpenAI's clients: base_url=http://{shown}:{server.server_port}/v1, any key; Ctrl-C ends it",
        flush=True,
    )
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("it asks for no key: whoever reaches this address can use it", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended", flush=True)
    finally:
        server.server_close()
        engine.close()


def refuse(run: LoadedRun) -> None:
    classification_head.refuse_classifier(
        run.recipe, "`headrace eval` says how often it is right, `headrace export` hands it to transformers"
    )
    if run.recipe.objective.use == "diffusion":
        raise UserError(
            "objective.use: found diffusion, whose tokens come in another order than a server sends them; "
            "see `headrace generate`"
        )
    if not run.recipe.model.causal:
        raise UserError(
            f"model.use: {run.recipe.model.use} reads text in both directions and cannot continue it"
        )
    if run.tokenizer is None:
        raise UserError("no tokenizer.json in the run folder; copy the one the model was trained with there")


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"headrace/{__version__}"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a prompt may be private, and the terminal is for what goes wrong."""

    def do_GET(self) -> None:
        model = {"id": self.server.model, "object": "model", "created": self.server.began, "owned_by": "you"}
        tokenizer = self.server.engine.run.tokenizer
        path = self.path.partition("?")[0]
        if path == "/":
            has_chat = tokenizer is not None and tokenizer.chat_template is not None
            self.answer(200, page.chat(self.server.model, NOTICE, has_chat), "text/html; charset=utf-8")
        elif path == "/health":
            error = self.server.engine.error
            self.json(500 if error else 200, {"status": f"failed: {error}" if error else "ok"})
        elif path == "/v1/models":
            self.json(200, {"object": "list", "data": [model]})
        elif path == f"/v1/models/{self.server.model}":
            self.json(200, model)
        else:
            self.refuse(openai_request.BadRequest(f"no such address: {path}", status=404))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        try:
            asked = self.body()
            if path not in ("/v1/completions", "/v1/chat/completions"):
                raise openai_request.BadRequest(f"no such address: {path}", status=404)
            is_chat = path == "/v1/chat/completions"
            wanted = openai_request.read(self.server.engine.run, asked, is_chat=is_chat)
            if asked.get("model") not in (None, self.server.model):
                raise openai_request.BadRequest(
                    f"model: found {asked['model']!r}, expected {self.server.model}", "model", status=404
                )
            answer = openai_request.StreamedText(self.server.engine, wanted, self.left)
        except openai_request.BadRequest as error:
            return self.refuse(error)
        form = ResponseFormat(self.server.model, is_chat)
        if wanted.stream:
            self.stream(form, answer, with_usage=wanted.with_usage)
        else:
            self.whole(form, answer)

    def left(self) -> bool:
        """Whether the client has closed its end: then there is something to read, and nothing in it."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > LARGEST:
            self.close_connection = True  # what follows is not read
            raise openai_request.BadRequest(
                f"expected a body of at most {LARGEST:,} bytes and its Content-Length"
            )
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise openai_request.BadRequest(f"not valid JSON: {error}") from None

    def whole(self, form: "ResponseFormat", answer: openai_request.StreamedText) -> None:
        try:
            text = "".join(answer)
        except Exception as error:  # the engine's, which has nobody else to tell
            return self.refuse(openai_request.BadRequest(f"the model failed: {error}", status=500))
        self.json(200, form.whole(text, answer))

    def stream(
        self, form: "ResponseFormat", answer: openai_request.StreamedText, *, with_usage: bool
    ) -> None:
        self.close_connection = True
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in form.events(answer, with_usage):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client went away
            answer.job.cancel()
        except Exception as error:
            event = {"error": {"message": f"the model failed: {error}", "type": "server_error"}}
            with contextlib.suppress(OSError):  # it may have gone away meanwhile
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def refuse(self, error: openai_request.BadRequest) -> None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        told = {"message": str(error), "type": kind, "param": error.param, "code": None}
        self.json(error.status, {"error": told})

    def json(self, status: int, value: Any) -> None:
        self.answer(status, json.dumps(value).encode(), "application/json")

    def answer(self, status: int, content: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # the client went away
            self.close_connection = True


class ResponseFormat:
    """Answers as OpenAI writes them: a completion, or a message of a conversation."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self.is_chat = is_chat
        kind = "chat.completion" if is_chat else "text_completion"
        self.head = {"object": kind, "created": int(time.time()), "model": model}
        self.head["id"] = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"

    def whole(self, text: str, answer: openai_request.StreamedText) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"message": {"role": "assistant", "content": text}}
        return self.head | {"choices": [self.choice(said, answer.reason)], "usage": answer.usage}

    def events(self, answer: openai_request.StreamedText, with_usage: bool) -> Iterator[dict[str, Any]]:
        head = self.head | ({"object": "chat.completion.chunk"} if self.is_chat else {})
        if self.is_chat:
            first = {"delta": {"role": "assistant", "content": ""}}
            yield head | {"choices": [self.choice(first, None)]}
        for piece in answer:
            said: dict[str, Any] = {"delta": {"content": piece}} if self.is_chat else {"text": piece}
            yield head | {"choices": [self.choice(said, None)]}
        last: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        yield head | {"choices": [self.choice(last, answer.reason)]}
        if with_usage:
            yield head | {"choices": [], "usage": answer.usage}

    def choice(self, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}
