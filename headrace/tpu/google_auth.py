"""Access to Google's APIs: addresses, project, and credentials, which stay in memory."""

import os
from typing import TYPE_CHECKING, Any

from headrace.errors import UserError
from headrace.tpu import clock

if TYPE_CHECKING:
    from google.auth.credentials import Credentials
    from google.auth.transport.requests import AuthorizedSession
    from requests import Response

TPU = "https://tpu.googleapis.com"
COMPUTE = "https://compute.googleapis.com/compute/v1"
STORAGE = "https://storage.googleapis.com"
RETRY_SECONDS = 20.0  # before an API counts as unreachable
RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def api_url(service: str, default: str) -> str:
    """Address of an API. It can be replaced by the variable that gcloud reads too."""
    return (os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}") or default).rstrip("/")


def storage_url() -> str:
    """Address of the Cloud Storage API, or of its emulator."""
    url = os.environ.get("STORAGE_EMULATOR_HOST", STORAGE).rstrip("/")
    return url if "://" in url else f"http://{url}"


def load_credentials(url: str) -> "tuple[Credentials, str | None]":
    """The user's default credentials and their project. Raises UserError if there are none.

    For a connection that is not encrypted they are anonymous: nothing secret is sent over it."""
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
        raise UserError(format_login_error(error)) from None


def resolve_project(option: str | None) -> str:
    """The Google Cloud project: that of --project, of gcloud's variables, or of the credentials."""
    project = option or os.environ.get("CLOUDSDK_CORE_PROJECT") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        _, project = load_credentials(api_url("TPU", TPU))
    if not project:
        raise UserError("--project: found none, expected the name of a Google Cloud project")
    return project


def format_login_error(error: Exception) -> str:
    """Message for credentials that are not accepted, with the command that renews them."""
    return f"Google Cloud: {' '.join(str(error).split())[:300]} (`gcloud auth application-default login`)"


def open_session(url: str) -> "AuthorizedSession":
    """An HTTP session with the user's credentials, for APIs without a client library here."""
    credentials, _ = load_credentials(url)
    from google.auth.transport.requests import AuthorizedSession

    return AuthorizedSession(credentials)


def send_with_retries(session: "AuthorizedSession", method: str, url: str, body: Any = None) -> "Response":
    """Send a request with `body` as JSON, and repeat it for `RETRY_SECONDS` while the API is busy or
    unreachable. Returns the response whatever its status is; raises UserError if there is none."""
    from google.auth.exceptions import GoogleAuthError, TransportError
    from requests.exceptions import RequestException

    deadline, delay = clock.monotonic() + RETRY_SECONDS, 0.5
    while True:
        is_last = clock.monotonic() + delay > deadline
        try:
            response = session.request(method, url, json=body, timeout=60)
            if response.status_code not in RETRIED_STATUS or is_last:
                return response
        except (RequestException, TransportError) as error:
            if is_last:
                raise UserError(f"{type(error).__name__} from {url}") from None
        except GoogleAuthError as error:
            raise UserError(format_login_error(error)) from None
        clock.sleep(delay)
        delay *= 2
