"""Collector of the discovery directory: its owner and mode, and the state of its records."""

import json
import os
import stat
from collections.abc import Iterator, Mapping

from dynamo.core.errors import ConfigError
from dynamo.core.private_paths import check_trusted_directory, user_id
from dynamo.ops.doctor.facts import DirectoryFacts
from dynamo.runtime.discovery.file import EXPIRY_S, PERSISTENT_S, RECORD_BYTES_MAX, UNFINISHED, VARIABLE, decode_name
from dynamo.runtime.discovery.file import default_root as default_directory

RECORDS_MAX = 10_000  # Files that are examined; a directory with more is reported by the first ones.


def directory_facts(variables: Mapping[str, str], now: float, path: str | None = None) -> DirectoryFacts:
    """Return the facts about the directory that processes will use. `now`: seconds since the epoch."""
    path = os.path.abspath(path or default_directory())
    is_named = bool(variables.get(VARIABLE))
    if not os.path.lexists(path):
        parent = os.path.dirname(path)
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        return DirectoryFacts(
            path=path, exists=False, is_named=is_named, is_writable=os.access(parent, os.W_OK | os.X_OK)
        )
    try:
        check_trusted_directory(path, VARIABLE)
    except ConfigError as error:
        return DirectoryFacts(path=path, exists=True, is_named=is_named, problem=str(error))
    live, stale, foreign, unreadable = 0, [], [], []
    for key, found, data in records(path):
        if found.st_uid not in (user_id(), 0):
            foreign.append(key)
        elif not _is_record(key, data):
            unreadable.append(key)
        elif now - found.st_mtime > EXPIRY_S and found.st_mtime - now < PERSISTENT_S:
            stale.append(key)
        else:
            live += 1
    return DirectoryFacts(
        path=path,
        exists=True,
        is_named=is_named,
        is_writable=os.access(path, os.W_OK | os.X_OK),
        live=live,
        stale=tuple(stale),
        foreign=tuple(foreign),
        unreadable=tuple(unreadable),
    )


def records(root: str) -> Iterator[tuple[str, os.stat_result, bytes]]:
    """Yield key, status and content of each record; the content of one that cannot be read is empty."""
    count = 0
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            bucket = os.path.relpath(folder, root)
            key = decode_name(name)
            try:
                found = os.lstat(path)
                if name.startswith(UNFINISHED) or not stat.S_ISREG(found.st_mode):
                    continue
                data = b""
                if os.access(path, os.R_OK):
                    with open(path, "rb") as file:
                        data = file.read(RECORD_BYTES_MAX)
            except OSError:  # Removed by its owner in the meantime.
                continue
            yield f"{bucket}/{key if key is not None else name}", found, data
            count += 1
            if count >= RECORDS_MAX:
                return


def _is_record(key: str, data: bytes) -> bool:
    """Return whether a file is a record: an encoded key, and JSON."""
    if "%" in key:
        return False
    try:
        json.loads(data)
    except ValueError:
        return False
    return True
