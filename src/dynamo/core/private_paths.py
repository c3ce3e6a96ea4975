"""Private paths: directories and files that only this process's user can change, and the checks of this property."""

import contextlib
import os
import stat
import tempfile

from dynamo.core.config import setting
from dynamo.core.errors import ConfigError, StartupError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
SYSTEM = ("/tmp", "/var/tmp")  # noqa: S108 - only named in a message, as the directories that Python tries


def user_id() -> int:
    """Return the effective user id; 0 on systems that have none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def check_trusted_directory(path: str, name: str) -> None:
    """Raise `ConfigError` for a directory that another user owns or can write to; `name` is the setting that names it.

    Symbolic links are followed: the directory that is used is checked.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"{name}={path!r}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{name}={path!r}: Not a directory")
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != user_id():
        raise ConfigError(
            f"{name}={path!r}: owned by user {found.st_uid}, expected user {user_id()} that runs this process; "
            "name another directory"
        )
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid)):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(f"{name}={path!r}: mode {mode:04o} lets other users write; run: chmod go-w {path}")


def make_private_directories(path: str) -> None:
    """Create a directory and its missing parents with mode 0700. Raise `OSError`."""
    missing: list[str] = []
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, DIRECTORY_MODE)
        except FileExistsError:  # Created concurrently by another process; or a file, then the next line raises.
            if not os.path.isdir(directory):
                raise


def unlink_all(*paths: str) -> None:
    """Remove files; those that cannot be removed stay."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def private_opener(path: str, flags: int) -> int:
    """Open a file for `open(…, opener=…)`; one that is made has mode 0600."""
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def temporary_directory() -> str:
    """Return the system's temporary directory. Raise `StartupError`, with each directory's own error, if none is usable."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        named = [directory for name in ("TMPDIR", "TEMP", "TMP") if (directory := setting(name, "", str))]
        reasons = [f"{path}: {reason}" for path in dict.fromkeys((*named, *SYSTEM)) if (reason := refusal(path))]
        text = "; ".join(reasons) or "the current directory is not usable either"
        raise StartupError(
            f"no usable temporary directory: {text}; free space there, or set TMPDIR to a directory of this user"
        ) from None


def refusal(directory: str) -> str:
    """Return why no file can be written in a directory, as on a full disk; empty if one can be, which is removed."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def runtime_directory() -> str:
    """Return this user's directory for sockets, made with mode 0700 in `XDG_RUNTIME_DIR` or the temporary directory.

    Raise `ConfigError` where it cannot be made, or where another user can enter it.
    """
    parent = setting("XDG_RUNTIME_DIR", "", str)
    name = "dynamo"
    if not parent or not os.access(parent, os.W_OK):
        parent, name = temporary_directory(), f"dynamo-{user_id()}"
    path = os.path.join(parent, name)
    try:
        make_private_directories(path)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"cannot create the directory for local sockets {path!r}: {error.strerror}") from None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == user_id()
    if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"the directory for local sockets {path!r}: expected a directory of user {user_id()} with mode 0700, "
            f"found one of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}"
        )
    return path


def _is_private_group(group_id: int) -> bool:
    """Return whether a group is the user's own, with the user's name and no other member."""
    try:
        import grp
        import pwd

        user, group = pwd.getpwuid(user_id()), grp.getgrgid(group_id)
    except (ImportError, KeyError):
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
