"""A Ceph cluster of one on loopback: monitor, one OSD on a file, and radosgw, the S3 server in front of them.

It takes about 15 s to start and 700 MB of memory. Invariant: every process and file that it makes is gone
when the context ends, whatever happened in between.
"""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store
from tests.support.s3.server import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, S3Server

from penstock.environment import process_environment
from penstock.errors import Unavailable

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
COMMAND_LIMIT_S = 60.0
START_LIMIT_S = 90.0
STOP_LIMIT_S = 8.0

_CONFIGURATION = """
[global]
fsid = {fsid}
mon initial members = a
mon host = {mon_host}
public addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd crush initial weight = 1
mon allow pool size one = true
mon max pg per osd = 1000
log file = {folder}/log/$name.log
admin socket = {folder}/run/$name.asok
pid file = {folder}/run/$name.pid
run dir = {folder}/run
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = 8589934592
bluestore block create = true
osd max object name len = 256
osd max object namespace len = 64
osd memory target = 1073741824
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable usage log = false
rgw verify ssl = false
keyring = {folder}/keyring
"""


def missing_programs() -> list[str]:
    """Programs of Ceph that are not installed here; without any of them no radosgw runs."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def reserve_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for held in sockets:
        held.bind(("127.0.0.1", 0))
    ports = [int(held.getsockname()[1]) for held in sockets]
    for held in sockets:
        held.close()
    return ports


@contextmanager
def running_radosgw() -> Iterator[S3Server]:
    """A radosgw with the bucket `BUCKET`, for as long as the context lasts; `Unavailable` without Ceph."""
    if missing := missing_programs():
        raise Unavailable(
            f"No Ceph here: {', '.join(missing)} missing",
            fix="On Debian: apt-get install radosgw ceph-mon ceph-osd ceph-common",
        )
    folder = Path(tempfile.mkdtemp(prefix="penstock-ceph-"))
    cluster = _Cluster(folder)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


class _Cluster:
    """The daemons of one cluster, all of them below one folder and known by their process ids."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._fsid = str(uuid.uuid4())
        mon_v2, mon_v1, self._port = reserve_ports(3)
        self._mon_host = f"[v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]"

    def start(self) -> S3Server:
        """Start the daemons one after another, make a user and a bucket."""
        for name in ("log", "run", "mon", "osd"):
            (self._folder / name).mkdir()
        text = _CONFIGURATION.format(
            fsid=self._fsid, mon_host=self._mon_host, folder=self._folder, port=self._port
        )
        (self._folder / "ceph.conf").write_text(text)
        self._make_keys()
        self._start_monitor()
        self._start_osd()
        self._run(
            "radosgw-admin", "-n", "client.rgw.a", "user", "create", "--uid=tests", "--display-name=tests",
            f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}",
        )  # fmt: skip
        self._daemon("radosgw", "-n", "client.rgw.a")
        server = S3Server("radosgw", f"http://127.0.0.1:{self._port}")
        self._wait_for_answer(server)
        _make_bucket(server)
        return server

    def _run(self, program: str, *arguments: str) -> None:
        configured = [] if program in ("ceph-authtool", "monmaptool") else ["-c", f"{self._folder}/ceph.conf"]
        done = subprocess.run(
            [program, *configured, *arguments],
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
            env=_clean_environment(),
        )
        if done.returncode != 0:
            raise Unavailable(f"{program} failed: {done.stderr.strip()[-500:]}", where=" ".join(arguments))

    def _daemon(self, program: str, *arguments: str) -> None:
        """Start a daemon in the foreground, as our own child: it can be waited for and ended by its id."""
        with (self._folder / "log" / f"{program}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, "-c", f"{self._folder}/ceph.conf", "-f", *arguments],
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in the terminal is for pytest; we end them ourselves
                    env=_clean_environment(),
                )
            )

    def _make_keys(self) -> None:
        keyring = str(self._folder / "keyring")
        powers = {"mon": "allow *", "osd": "allow *", "mgr": "allow *"}
        for index, (name, caps) in enumerate(
            {
                "mon.": {"mon": "allow *"},
                "client.admin": powers,
                "client.rgw.a": powers,
                "osd.0": {"mon": "allow profile osd", "osd": "allow *"},
            }.items()
        ):
            flags = [word for service, cap in caps.items() for word in ("--cap", service, cap)]
            create = [] if index else ["--create-keyring"]
            self._run("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *flags)

    def _start_monitor(self) -> None:
        monmap = str(self._folder / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", self._mon_host, "--fsid", self._fsid, monmap)
        keyring = str(self._folder / "keyring")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._daemon("ceph-mon", "-i", "a")

    def _start_osd(self) -> None:
        osd_uuid = str(uuid.uuid4())  # the same in the map and on disk, or the OSD never boots
        connect = ("-k", str(self._folder / "keyring"), "--connect-timeout", "30")
        self._run("ceph", *connect, "osd", "create", osd_uuid)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid, "--no-mon-config")
        self._run("ceph", *connect, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._daemon("ceph-osd", "-i", "0")

    def _wait_for_answer(self, server: S3Server) -> None:
        deadline_s = time.monotonic() + START_LIMIT_S
        while not _answers(server):
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                raise Unavailable(f"radosgw did not start; ended daemons: {ended}", where=str(self._folder))
            time.sleep(0.2)

    def stop(self) -> None:
        """End the daemons in the opposite order; one that does not listen is killed."""
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + STOP_LIMIT_S
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(STOP_LIMIT_S)


def _clean_environment() -> dict[str, str]:
    """No virtual environment in front: Ceph's own scripts want the system's Python."""
    variables = dict(process_environment())
    folders = [path for path in variables.get("PATH", "").split(os.pathsep) if ".venv" not in path]
    return {**variables, "PATH": os.pathsep.join(folders)}


def _answers(server: S3Server) -> bool:
    connection = http.client.HTTPConnection(urlsplit(server.endpoint).netloc, timeout=2)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _make_bucket(server: S3Server) -> None:
    """PUT the bucket by a presigned URL of its empty key, which is its own."""
    root = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        region=REGION,
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    url = urlsplit(obstore.sign(root, "PUT", "", timedelta(minutes=5)))
    connection = http.client.HTTPConnection(url.netloc, timeout=COMMAND_LIMIT_S)
    try:
        connection.request("PUT", f"{url.path}?{url.query}", headers={"Content-Length": "0"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Unavailable(f"radosgw made no bucket: {answer.status} {answer.read(500)!r}")
    finally:
        connection.close()
