"""Removal of secrets from messages and records.

Secrets are user names and signatures in URLs, values of environment variables that hold a token or a key, and
tokens of well-known forms."""

import os
import re
import sys
import traceback
from types import TracebackType
from urllib.parse import parse_qsl, urlsplit, urlunsplit

HIDDEN = "***"
MIN_SECRET_CHARS = 8  # hiding shorter values of environment variables would hide common words
SECRET_VARIABLE = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|ACCESS|PRIVATE|SECRET)_?KEY)(_|$)", re.I
)
SECRET_PARAMETER = re.compile(
    r"(^|[-_])(sig|signature|token|key|keyid|secret|password|credential|auth)s?($|[-_])", re.I
)
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>`]+", re.I)
KNOWN_TOKENS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|\bAIza[\w-]{30,}|ya29\.[\w.-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.S,
)


def find_url_secret(text: str) -> str | None:
    """Describe the secret that a URL carries: "a user name or password" or "a signature or token".

    None if it carries none, or if the text is not a URL."""
    if "://" not in text:
        return None
    parts = urlsplit(text)
    if "@" in parts.netloc:
        return "a user name or password"
    if _has_secret_parameter(parts.query):
        return "a signature or token"
    return None


def redact_url(url: str) -> str:
    """Replace the secrets in a URL by ***. Other URLs, and paths, are returned as they are."""
    if find_url_secret(url) is None:
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = HIDDEN if _has_secret_parameter(parts.query) else parts.query
    return urlunsplit((parts.scheme, host, parts.path, query, ""))


def redact(text: str) -> str:
    """Replace the secrets in a message by ***."""
    for value in sorted(env_secrets(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return KNOWN_TOKENS.sub(HIDDEN, URL.sub(lambda match: redact_url(match[0]), text))


def env_secrets() -> set[str]:
    """Values of the environment variables of this process that hold a secret.

    The path of a key file is not a secret."""
    return {
        value
        for name, value in os.environ.items()
        if SECRET_VARIABLE.search(name) and len(value) >= MIN_SECRET_CHARS and not os.path.exists(value)
    }


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without secrets, for `sys.excepthook`: errors of libraries quote their arguments."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def _has_secret_parameter(query: str) -> bool:
    return any(SECRET_PARAMETER.search(name) for name, _ in parse_qsl(query, keep_blank_values=True))
