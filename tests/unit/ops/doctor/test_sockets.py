"""The process that listens on a port, from a /proc."""

from pathlib import Path

from dynamo.ops.doctor.sockets import command_of, listener_of, listening_inodes

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4242 1\n"
ESTABLISHED = LINE.replace(" 0A ", " 01 ").replace("4242", "9")


def proc_of(root: Path) -> str:
    (root / "net").mkdir()
    (root / "net" / "tcp").write_text(HEAD + LINE + ESTABLISHED)
    descriptors = root / "31" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to("socket:[4242]")
    (root / "31" / "cmdline").write_text("/usr/bin/python3\0-m\0http.server\08000\0")
    return str(root)


def test_listener_is_named_with_its_pid(tmp_path: Path) -> None:
    proc = proc_of(tmp_path)
    assert listener_of(8000, proc) == "python3 -m http.server 8000 (pid 31)"
    assert listener_of(8001, proc) == ""


def test_listener_of_another_user_is_described(tmp_path: Path) -> None:
    proc = proc_of(tmp_path)
    (tmp_path / "31" / "fd" / "3").unlink()
    assert listener_of(8000, proc) == "a process of another user"


def test_only_listening_sockets_of_the_port_are_counted() -> None:
    assert listening_inodes([LINE, ESTABLISHED], 8000) == {"4242"}
    assert command_of("1", "/nowhere") == "process"
