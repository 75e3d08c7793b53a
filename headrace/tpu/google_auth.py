"""Whom to ask at Google, and as whom: addresses, project and credentials, which stay in memory."""

import os
import time
from typing import Any

from headrace.errors import UserError

TPU = "https://tpu.googleapis.com"
COMPUTE = "https://compute.googleapis.com/compute/v1"
STORAGE = "https://storage.googleapis.com"
PATIENCE = 20.0  # seconds of asking again before an API counts as silent
BUSY = (408, 429, 500, 502, 503, 504)
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def address(service: str, usual: str) -> str:
    """Of an API, by gcloud's own variable, so that both can be pointed to another at once."""
    return (os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}") or usual).rstrip("/")


def storage() -> str:
    found = os.environ.get("STORAGE_EMULATOR_HOST", STORAGE).rstrip("/")
    return found if "://" in found else f"http://{found}"


def credentials(url: str) -> tuple[Any, str | None]:
    """And the project that they belong to. None are sent over a line that is not encrypted."""
    try:
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import GoogleAuthError
    except ImportError:
        raise UserError(
            "tpu: google-cloud-tpu is not installed: pip install -e '.[cloud]' in a clone of Headrace"
        ) from None
    if not url.startswith("https://"):
        return AnonymousCredentials(), None
    try:
        return google.auth.default(scopes=[SCOPE])
    except GoogleAuthError as error:
        raise UserError(logged_out(error)) from None


def project(named: str | None) -> str:
    found = named or os.environ.get("CLOUDSDK_CORE_PROJECT") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not found:
        _, found = credentials(address("TPU", TPU))
    if not found:
        raise UserError("--project: found none, expected the name of a Google Cloud project")
    return found


def logged_out(error: Exception) -> str:
    """What to say of credentials that are taken no more."""
    return f"Google Cloud: {' '.join(str(error).split())[:300]} (`gcloud auth application-default login`)"


def session(url: str) -> Any:
    """For the APIs that have no client here: answers as `requests` gives them."""
    found, _ = credentials(url)
    from google.auth.transport.requests import AuthorizedSession

    return AuthorizedSession(found)


def ask(session: Any, method: str, url: str, body: Any = None) -> Any:
    """The answer, asked for again while the API is busy or cannot be reached."""
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    end, delay = time.monotonic() + PATIENCE, 0.5
    while True:
        last = time.monotonic() + delay > end
        try:
            answer = session.request(method, url, json=body, timeout=60)
            if answer.status_code not in BUSY or last:
                return answer
        except (RequestException, TransportError) as error:
            if last:
                raise UserError(f"{type(error).__name__} from {url}") from None
        except GoogleAuthError as error:
            raise UserError(logged_out(error)) from None
        time.sleep(delay)
        delay *= 2
