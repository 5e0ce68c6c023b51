"""Mutation fuzz of all that Penstock reads: each damaged file is read, or refused by an error of ours.

    valid inputs of each reader -> damage by a seed -> a command line in a forked worker -> limits

Limits: no exit 70, no dead process, no code or program of the input, no write outside the output, less than
1 GiB of memory and 10 s of CPU.

    python -m tests.adversary.readers --seconds 600
    python -m tests.adversary.readers --seed 1234 --tries 1     # leaves the input in build/adversary
"""

import importlib
import io
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import psutil
from tests.adversary.attempts import Attempt, main
from tests.adversary.damage import damage_folder
from tests.adversary.reader_inputs import LIBRARY, READERS

from penstock.cli.app import DEFECT, app, run_at_edge

MOST_BYTES: Final = 1 << 30
MOST_CPU_S: Final = 10.0
MOST_WALL_S: Final = 90.0
"""For what sleeps; much more than the CPU's limit, because others may have the cores."""
INPUTS_A_WORKER: Final = 250
KEPT: Final = Path("build/adversary")
IN_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

_WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_STARTS: Final = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "socket.connect")
_CHANGES: Final = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.chmod",
    "os.truncate",
)


class Watch:
    """What the code of this process does to the world while an input is read, by Python's audit events."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] = ()
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.allowed:
            return
        if event in _STARTS:
            told = str(arguments)[:300]
            # Darshan's library reads in a process of its own: what it is given can end it.
            if not (event == "subprocess.Popen" and "penstock" in told and sys.executable in told):
                self.seen.append(f"{event}{told}")
        elif event == "open":
            path, mode, flags = arguments
            if (
                isinstance(path, str | bytes)
                and (flags or 0) & _WRITES
                and not self._is_ours(os.fsdecode(path))
            ):
                self.seen.append(f"opened {path!r} for writing ({mode}, {flags})")
        elif event in _CHANGES and not all(map(self._is_ours, _named(arguments))):
            self.seen.append(f"{event}{arguments}"[:300])

    def _is_ours(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self.allowed)  # noqa: PTH100 - what is heard is no Path


def _named(arguments: tuple[Any, ...]) -> list[str]:
    """The paths that a call names, whatever folder they are relative to."""
    folders = [
        str(Path(f"/proc/self/fd/{each}").readlink())
        for each in arguments
        if isinstance(each, int) and each > 2
    ]
    paths = [os.fsdecode(each) for each in arguments if isinstance(each, str | bytes)]
    return [os.path.join(folders[0], path) if folders else path for path in paths]  # noqa: PTH118


def read(way: str, folder: Path, out: Path) -> tuple[int, str]:
    """Read an input in one way: the exit code, and what was said about it."""
    words = [word.replace("{}", str(folder)).replace("{out}", str(out)) for word in way.split()]
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(said), redirect_stderr(said):
        if words[0] in LIBRARY:
            code = run_at_edge(lambda: LIBRARY[words[0]](words[1]), debug=True)
        else:
            code = run_at_edge(
                lambda: app.main(words, prog_name="penstock", standalone_mode=False), debug=True
            )
    said.seek(0)
    return code, said.read()


def try_input(way: str, folder: Path, out: Path, watch: Watch) -> str:
    """Read an input under all limits; what is wrong, or nothing."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins anew
    before = _memory("VmRSS")
    modules = set(sys.modules)
    watch.seen.clear()
    watch.allowed = (f"{out}/", str(out), "/dev/", tempfile.gettempdir() + "/penstock")
    code, said = read(way, folder, out)
    watch.allowed = ()
    peak_bytes = _memory("VmHWM") - before
    if code == DEFECT:
        return f"exit 70: {_end_of(said)}"
    if watch.seen:
        return "; ".join(watch.seen)
    if foreign := [
        name
        for name in set(sys.modules) - modules
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder.parent))
    ]:
        return f"imported {foreign}"
    if peak_bytes > MOST_BYTES:
        return f"took {peak_bytes >> 20} MiB"
    return ""


def _end_of(said: str) -> str:
    """The last frames of a traceback, and the error."""
    lines = [
        line.strip() for line in said.rsplit("Traceback (most recent call last)", maxsplit=1)[-1].splitlines()
    ]
    frames = [
        line.partition("src/")[2] for line in lines if line.startswith("File ") and "src/penstock" in line
    ]
    return f"{lines[-1][:300]} [{' <- '.join(reversed(frames[-3:]))}]"


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def make_inputs(folder: Path, modules: Path) -> None:
    """Write the valid inputs of all readers, once; one that cannot be made here is left out.

    Each is read once, too, so that `modules` lists what reading imports: workers find it imported.
    """
    logging.disable(logging.CRITICAL)
    for reader in READERS:
        (folder / reader.name).mkdir(parents=True)
        try:
            reader.make(folder / reader.name)
        except FileNotFoundError:
            (folder / reader.name).rmdir()
            continue
        for number, way in enumerate(reader.ways):
            out = folder.parent / f"out/{reader.name}-{number}"
            out.mkdir(parents=True)
            code, said = read(way, folder / reader.name, out)
            assert code in (0, 1, 3) or " ls " in way or " status " in way, f"{way}: {said}"
    modules.write_text("\n".join(sys.modules))


def prepare(seed: int, valid: Path, place: Path) -> tuple[str, str]:
    """Damage an input below `place` by this seed: its reader, and how it will be read."""
    draw = random.Random(seed)
    reader = draw.choice(READERS)
    while not (valid / reader.name).exists():  # no sample of it here
        reader = draw.choice(READERS)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(valid / reader.name, place / "in")
    (place / "out").mkdir()
    way = draw.choice(reader.ways)
    damage_folder(draw, place / "in", way)
    return reader.name, way


def _work(tasks: Connection, valid: Path, place: Path) -> None:
    """A worker: seeds come in, outcomes go out; what ends it, ends it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable(logging.CRITICAL)
    os.chdir(place.parent)
    os.environ |= {"COLUMNS": "100", "HOME": str(place.parent / "home")}
    watch = Watch()
    while (seed := tasks.recv()) is not None:
        kind, way = prepare(seed, valid, place)
        tasks.send((kind, way, None))
        tasks.send((kind, way, try_input(way, place / "in", place / "out", watch)))
    os._exit(0)


class Worker:
    """A process that reads inputs, and what it does now."""

    def __init__(self, valid: Path, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("fork")
        self.place = place / "input"
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, valid, self.place), daemon=True)
        self.process.start()
        theirs.close()
        self.left = INPUTS_A_WORKER
        self.seed = 0
        self.kind = self.way = ""
        self._begun = self._cpu = 0.0

    def begin(self, seed: int) -> None:
        self.seed, self.left = seed, self.left - 1
        self.kind, self.way = "preparing", ""
        self._begun, self._cpu = time.monotonic(), self._cpu_s()
        self.pipe.send(seed)

    def _cpu_s(self) -> float:
        with suppress(psutil.Error):
            used = psutil.Process(self.process.pid).cpu_times()
            return float(used.user + used.system + used.children_user + used.children_system)
        return 0.0

    def overdue(self) -> str:
        """What limit of time the input has passed, if any."""
        if self.way and (took := self._cpu_s() - self._cpu) > MOST_CPU_S:
            return f"took more than {took:.0f} s of CPU"
        if (waited := time.monotonic() - self._begun) > MOST_WALL_S:
            return f"did not end within {waited:.0f} s"
        return ""

    def hear(self) -> Attempt | None:
        """What it has to tell; None as long as it goes on."""
        try:
            self.kind, self.way, failure = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            self.left = 0
            return self._attempt(f"the process died: {self.process.exitcode}")
        self._cpu = self._cpu_s()
        return None if failure is None else self._attempt(failure)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.left = 0

    def end(self, failure: str) -> Attempt:
        """Kill it for what it did."""
        self.kill()
        return self._attempt(failure)

    def _attempt(self, failure: str) -> Attempt:
        if failure:
            kept = KEPT / f"{self.kind}-{self.seed}".replace(" ", "-")
            shutil.rmtree(kept, ignore_errors=True)
            with suppress(OSError, shutil.Error):
                shutil.copytree(self.place / "in", kept, symlinks=True)
            failure = f"{self.way}: {failure}"
        return Attempt(self.kind, self.seed, failure)


def attack(seeds: Iterator[int]) -> Iterator[Attempt]:
    """Damage the inputs of readers, and read them."""
    with ExitStack() as exits:
        root = Path(exits.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        valid = root / "valid"
        making = multiprocessing.get_context("fork").Process(
            target=make_inputs, args=(valid, root / "modules")
        )
        making.start()
        making.join()
        assert making.exitcode == 0, "the valid inputs could not be made and read"
        for name in (root / "modules").read_text().split():
            with suppress(ImportError):
                importlib.import_module(name)
        running: list[Worker] = []
        exits.callback(lambda: list(map(Worker.kill, running)))
        free: list[Worker] = [Worker(valid, root / str(n)) for n in range(len(os.sched_getaffinity(0)))]
        seed = next(seeds, None)
        while seed is not None or running:
            while free and seed is not None:
                worker = free.pop()
                if worker.left <= 0:
                    with suppress(OSError):
                        worker.pipe.send(None)
                    worker.process.join()
                    worker = Worker(valid, worker.place.parent)
                worker.begin(seed)
                running.append(worker)
                seed = next(seeds, None)
            ready = wait([worker.pipe for worker in running], 0.5)
            for worker in list(running):
                attempt = worker.hear() if worker.pipe in ready else None
                if attempt is None and (reason := worker.overdue()):
                    attempt = worker.end(reason)
                if attempt is not None:
                    running.remove(worker)
                    free.append(worker)
                    yield attempt


if __name__ == "__main__":
    try:
        sys.exit(main(attack))
    except KeyboardInterrupt:
        traceback.print_exc()
        sys.exit(130)
