"""Static files: the pages of the console with the headers under which browsers run them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: nothing from other origins, no inline scripts or styles."""
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
REPORT_HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""A report is a page of its own with inline scripts: it runs in an origin of its own and cannot reach the frontend."""


class StaticFile(Struct, frozen=True):
    """One file."""

    content: bytes
    media_type: str
    etag: str


def static_files() -> dict[str, StaticFile]:
    """Return the files by path below `/console/`."""
    found: dict[str, StaticFile] = {}
    _read(Path(__file__).with_name("static"), "", found)  # `importlib.resources` would import `zipfile`.
    return found


def _read(folder: Path, path: str, found: dict[str, StaticFile]) -> None:
    for entry in folder.iterdir():
        name = f"{path}{entry.name}"
        if entry.is_dir():
            _read(entry, f"{name}/", found)
            continue
        media = MEDIA.get(f".{entry.name.rpartition('.')[2]}")
        if media is not None:
            content = entry.read_bytes()
            found[name] = StaticFile(content, media, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
