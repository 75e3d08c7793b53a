"""Keeps secrets out of what people read and what is kept: user names and signatures in URLs, the values of
environment variables that hold a token or a key, and tokens of well-known forms."""

import os
import re
import sys
import traceback
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

HIDDEN = "***"
SHORTEST = 8  # letters of a value that may be a secret: shorter ones would hide common words
NAMES = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|(API|ACCESS|PRIVATE|SECRET)_?KEY)(_|$)", re.I
)
QUERY = re.compile(r"(^|[-_])(sig|signature|token|key|keyid|secret|password|credential|auth)s?($|[-_])", re.I)
URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>`]+", re.I)
FORMS = re.compile(
    r"hf_[A-Za-z0-9]{16,}|\bAIza[\w-]{30,}|ya29\.[\w.-]{16,}|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|(?<=Bearer )[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|$)",
    re.S,
)


def in_url(text: str) -> str | None:
    """What kind of secret a URL carries; None if none."""
    if "://" not in text:
        return None
    parts = urlsplit(text)
    if "@" in parts.netloc:
        return "a user name or password"
    if any(QUERY.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return "a signature or token"
    return None


def shown(url: str) -> str:
    """A URL, or a path, as it may be told."""
    if in_url(url) is None:
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    keyed = any(QUERY.search(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    return urlunsplit((parts.scheme, host, parts.path, HIDDEN if keyed else parts.query, ""))


def clean(text: str) -> str:
    """A message without the secrets that may have found their way into it."""
    for value in sorted(held(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return FORMS.sub(HIDDEN, URL.sub(lambda found: shown(found[0]), text))


def held() -> set[str]:
    """Secrets of this process' environment. The path of a file with keys is none."""
    return {
        value
        for name, value in os.environ.items()
        if NAMES.search(name) and len(value) >= SHORTEST and not os.path.exists(value)
    }


def excepthook(kind: Any, error: Any, trace: Any) -> None:
    """For sys.excepthook: errors of libraries quote what they were given."""
    sys.stderr.write(clean("".join(traceback.format_exception(kind, error, trace))))
