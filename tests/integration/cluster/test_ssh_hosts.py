"""Cluster facts by ssh: a fake ssh for four hosts, three of them broken, and a real server."""

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import main

FAKE = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/said"
env >> "$(dirname "$0")/environment"
while [ "$1" != -- ]; do shift; done
case "$2" in
    dead) echo "ssh: connect to host dead port 22: No route to host" >&2; exit 255 ;;
    hung) sleep 1000 ;;
    odd) printf 'Welcome!\\n<<penstock-facts\\n{"name": "odd"}\\npenstock-facts>>\\n'; exit 0 ;;
esac
exec sh -c "$3"
"""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a program `ssh` that reaches some hosts, and fails, hangs or babbles at others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def _collect(folder: Path, *words: str) -> int:
    return main(["cluster", "collect", "--via", "ssh", "-o", str(folder / "cluster.json"), *words])


@pytest.mark.usefixtures("fake_ssh")
def test_a_dead_a_hanging_and_a_babbling_host_are_named_with_their_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _collect(tmp_path, "--hosts", "good,dead:4,hung,odd", "--timeout", "12s") == 1
    said = capsys.readouterr().err
    assert "3 of 4 hosts did not report" in said
    assert "dead: exit code 255, with the output: ssh: connect to host dead port 22: No route to host" in said
    assert "hung: no response within 12 s" in said
    assert "odd: unreadable facts" in said
    assert "reported: good" in said
    assert not (tmp_path / "cluster.json").exists()


@pytest.mark.usefixtures("fake_ssh")
def test_what_there_is_can_be_kept_and_is_never_wholly_checked(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("good slots=4\ndead slots=4\n")
    assert _collect(tmp_path, "--hostfile", str(tmp_path / "hosts"), "--allow-partial") == 0
    document = json.loads((tmp_path / "cluster.json").read_text())
    assert document["is_partial"]
    assert "No route to host" in document["absent"][0]["stderr"]
    assert main(["cluster", "check", str(tmp_path / "cluster.json")]) == 3


def test_ssh_never_asks_and_gets_no_secrets(
    tmp_path: Path, fake_ssh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("DISPLAY", ":0")
    assert _collect(tmp_path, "--hosts", "good", "--launcher-arg=-p222") == 0
    said = (fake_ssh / "said").read_text()
    assert "BatchMode=yes -p222 -o ConnectTimeout=60 -- good exec " in said
    environment = (fake_ssh / "environment").read_text()
    assert "hush-hush" not in environment
    assert "DISPLAY" not in environment


@pytest.mark.usefixtures("fake_ssh")
def test_a_missing_interpreter_is_reported_for_its_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _collect(tmp_path, "--hosts", "good", "--python", "no-such-python") == 1
    said = capsys.readouterr().err
    assert "good: exit code 127" in said
    assert "no-such-python" in said


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A real server on this machine's loopback, of this user; the words that lead ssh to it."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("no sshd here: apt-get install openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where a server of root's keeps its unprivileged half
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)],
            check=True,
            timeout=60,
        )
    (tmp_path / "authorized").write_text((tmp_path / "user.pub").read_text())
    port = _free_port()
    (tmp_path / "server").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {tmp_path}/authorized\nStrictModes no\nPermitRootLogin prohibit-password\n"
    )
    (tmp_path / "client").write_text(
        f"Port {port}\nUser {getpass.getuser()}\nIdentityFile {tmp_path}/user\nIdentitiesOnly yes\n"
        f"StrictHostKeyChecking accept-new\nUserKnownHostsFile {tmp_path}/known\n"
    )
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen([program, "-D", "-e", "-f", str(tmp_path / "server")], stderr=log)
    try:
        _wait_for(port, server, tmp_path / "log")
        trial = subprocess.run(
            ["ssh", "-F", str(tmp_path / "client"), "-o", "BatchMode=yes", "127.0.0.1", "true"],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        if trial.returncode != 0:
            pytest.skip(f"this user may not log in here: {trial.stderr.strip()[-300:]}")
        yield ("--launcher-arg=-F", f"--launcher-arg={tmp_path}/client")
    finally:
        server.terminate()
        server.wait(timeout=60)
        log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            pytest.skip(f"sshd does not run here: {log.read_text()[-300:]}")
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("sshd does not answer")


def test_a_real_server_brings_a_host_s_facts_and_a_refused_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ssh_server: tuple[str, ...]
) -> None:
    assert _collect(tmp_path, "--hosts", "127.0.0.1", *ssh_server, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["via"] == "ssh"
    assert document["present"][0]["report"]["versions"]["python"].split(".")[:2] == [
        str(part) for part in sys.version_info[:2]
    ]
    assert _collect(tmp_path, "--hosts", "127.0.0.1,nobody@127.0.0.1", *ssh_server) == 1
    said = capsys.readouterr().err
    assert "nobody@127.0.0.1: exit code 255" in said
    assert "Permission denied" in said
    assert "reported: 127.0.0.1" in said
