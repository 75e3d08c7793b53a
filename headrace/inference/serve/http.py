"""The HTTP server: OpenAI's completions and chat completions, the list of models, a health check and a chat
page."""

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from headrace import __version__
from headrace.checkpoint.open_run import LoadedRun
from headrace.errors import UserError
from headrace.inference.generate import check_can_generate
from headrace.inference.serve import page
from headrace.inference.serve.engine import BatchEngine
from headrace.inference.serve.openai_request import BadRequest, JsonObject, StreamedText, parse_request

NOTICE = "for trying out a trained model, not for production"
MAX_REQUEST_BYTES = 10_000_000


class Server(ThreadingHTTPServer):
    """Serves the model of an engine under a name."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, engine: BatchEngine, name: str, address: tuple[str, int]) -> None:
        """Open the port of `address`, (host, port). Raises UserError if that is not possible."""
        self.engine, self.model, self.created = engine, name, int(time.time())
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            super().__init__(address, RequestHandler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"--port: cannot serve at {address[0]}:{address[1]}: {error}; use another port"
            ) from None


def serve(
    run: LoadedRun, *, host: str, port: int, slots: int, length: int | None, report: Callable[[str], None]
) -> None:
    """Serve a run's model until it is interrupted (Ctrl-C).

    `slots` texts are generated at once. A prompt and its continuation have at most `length` tokens, by
    default the sequence length of training. `report` is called with lines for the user."""
    check_can_generate(run)
    if slots < 1:
        raise UserError(f"--slots: found {slots}, expected 1 or more")
    length = run.recipe.data.sequence_length if length is None else length
    if length < 2:
        raise UserError(f"--length: found {length}, expected 2 or more")
    report_failure = lambda error: report(format_failure(error))
    engine = BatchEngine(run, slots=slots, length=length, on_failure=report_failure)
    server = Server(engine, Path(run.recipe.run_dir).name, (host, port))
    engine.start()
    url = f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}"
    report(f"headrace {__version__}: {run.recipe.run_dir} at {url}, {NOTICE}")
    report(f"OpenAI clients: base_url={url}/v1, with any API key; Ctrl-C stops the server")
    if host not in ("127.0.0.1", "localhost", "::1"):
        report("warning: API keys are not checked; anyone who can reach this address can use the server")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        report("stopped")
    finally:
        server.server_close()
        engine.close()


def format_failure(error: BaseException) -> str:
    """The line for the user when the engine has failed."""
    return f"error: the model failed, and all further requests are refused: {error}"


class RequestHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = f"headrace/{__version__}"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: prompts may be private, and the terminal is for problems."""

    def do_GET(self) -> None:
        """Answer with the page, the health or the models."""
        model = {
            "id": self.server.model,
            "object": "model",
            "created": self.server.created,
            "owned_by": "you",
        }
        tokenizer = self.server.engine.run.tokenizer
        path = self.path.partition("?")[0]
        if path == "/":
            has_template = tokenizer is not None and tokenizer.chat_template is not None
            content = page.render_chat_page(self.server.model, NOTICE, has_template=has_template)
            self.send_content(200, content, "text/html; charset=utf-8")
        elif path == "/health":
            error = self.server.engine.error
            self.send_json(500 if error else 200, {"status": f"failed: {error}" if error else "ok"})
        elif path == "/v1/models":
            self.send_json(200, {"object": "list", "data": [model]})
        elif path == f"/v1/models/{self.server.model}":
            self.send_json(200, model)
        else:
            self.send_bad_request(BadRequest(f"no such address: {path}", status=404))

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Answer a completion or chat completion."""
        path = self.path.partition("?")[0]
        try:
            body = self.read_json()
            if path not in ("/v1/completions", "/v1/chat/completions"):
                raise BadRequest(f"no such address: {path}", status=404)
            is_chat = path == "/v1/chat/completions"
            request = parse_request(self.server.engine.run, body, is_chat=is_chat)
            assert isinstance(body, dict)
            if body.get("model") not in (None, self.server.model):
                raise BadRequest(
                    f"model: found {body['model']!r}, expected {self.server.model}", "model", status=404
                )
            stream = StreamedText(self.server.engine, request, self.is_disconnected)
        except BadRequest as error:
            self.send_bad_request(error)
            return
        response = ResponseFormat(self.server.model, is_chat)
        if request.stream:
            self.send_stream(response, stream, with_usage=request.stream_usage)
        else:
            self.send_completion(response, stream)

    def is_disconnected(self) -> bool:
        """Whether the client has closed the connection: there is something to read, and it is empty."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def read_json(self) -> object:
        """Read the body of the request."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_REQUEST_BYTES:
            self.close_connection = True  # the body is not read, so no request can follow it
            raise BadRequest(f"expected a body of at most {MAX_REQUEST_BYTES:,} bytes and its Content-Length")
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"not valid JSON: {error}") from None

    def send_completion(self, response: "ResponseFormat", stream: StreamedText) -> None:
        """Send the text when it is complete."""
        try:
            text = "".join(stream)
        except Exception as error:  # from the engine: any
            self.send_bad_request(BadRequest(f"the model failed: {error}", status=500))
            return
        self.send_json(200, response.make_completion(text, stream))

    def send_stream(self, response: "ResponseFormat", stream: StreamedText, *, with_usage: bool) -> None:
        """Send the text in pieces, as server-sent events."""
        self.close_connection = True
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Connection", "close")
            self.end_headers()
            for event in response.make_events(stream, with_usage=with_usage):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:  # the client has disconnected
            stream.job.cancel()
        except Exception as error:
            event = {"error": {"message": f"the model failed: {error}", "type": "server_error"}}
            with contextlib.suppress(OSError):  # it may have disconnected too
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def send_bad_request(self, error: BadRequest) -> None:
        """Send OpenAI's error object."""
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        content = {"message": str(error), "type": kind, "param": error.param, "code": None}
        self.send_json(error.status, {"error": content})

    def send_json(self, status: int, value: JsonObject) -> None:
        """Send an object as JSON."""
        self.send_content(status, json.dumps(value).encode(), "application/json")

    def send_content(self, status: int, content: bytes, content_type: str) -> None:
        """Send a response with its headers; to HEAD, only the headers."""
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:  # the client has disconnected
            self.close_connection = True


class ResponseFormat:
    """OpenAI's JSON of a response: a completion, or a message of a chat."""

    def __init__(self, model: str, is_chat: bool) -> None:
        self.is_chat = is_chat
        self.common_fields: JsonObject = {
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        }

    def make_completion(self, text: str, stream: StreamedText) -> JsonObject:
        """Make the response with the complete text of a stream."""
        content: JsonObject = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        return self.common_fields | {
            "choices": [self._choice(content, stream.finish_reason)],
            "usage": stream.usage,
        }

    def make_events(self, stream: StreamedText, *, with_usage: bool) -> Iterator[JsonObject]:
        """Yield the events for a stream: the pieces of the text, the reason for its end, the numbers of
        tokens."""
        common_fields = self.common_fields | ({"object": "chat.completion.chunk"} if self.is_chat else {})
        if self.is_chat:
            first: JsonObject = {"delta": {"role": "assistant", "content": ""}}
            yield common_fields | {"choices": [self._choice(first, None)]}
        for piece in stream:
            content: JsonObject = {"delta": {"content": piece}} if self.is_chat else {"text": piece}
            yield common_fields | {"choices": [self._choice(content, None)]}
        last: JsonObject = {"delta": {}} if self.is_chat else {"text": ""}
        yield common_fields | {"choices": [self._choice(last, stream.finish_reason)]}
        if with_usage:
            yield common_fields | {"choices": [], "usage": stream.usage}

    def _choice(self, content: JsonObject, finish_reason: str | None) -> JsonObject:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
