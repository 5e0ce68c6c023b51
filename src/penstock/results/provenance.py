"""Where a run's figures come from: hosts, command line, settings, versions, git state, process.

These facts are read once, before a run starts. Invariant: secrets are replaced with `***` before anything is
recorded.
"""

import importlib.metadata
import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.environment import Environment, user_settings
from penstock.storage.process_id import ProcessId, current_process

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """The facts of one host.

    `cpuinfo` (of the host's last core) and `meminfo` have the kernel's names and values.
    """

    host: str
    kernel: str
    machine: str
    num_cores: int
    memory_bytes: int
    cpuinfo: Mapping[str, str]
    meminfo: Mapping[str, str]


def read_host(host: str, *, proc: Path = PROC) -> HostFacts:
    """Read the facts of this machine, which the job calls `host`."""
    meminfo = read_meminfo(proc)
    kernel = platform.uname()
    return HostFacts(
        host=host,
        kernel=f"{kernel.system} {kernel.release}",
        machine=kernel.machine,
        num_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes(meminfo),
        cpuinfo=parse_pairs((proc / "cpuinfo").read_text(encoding="utf-8")),
        meminfo=meminfo,
    )


def read_meminfo(proc: Path = PROC) -> dict[str, str]:
    return parse_pairs((proc / "meminfo").read_text(encoding="utf-8"))


def memory_bytes(meminfo: Mapping[str, str]) -> int:
    """Return the memory that the kernel manages. Raises `KeyError` if MemTotal is missing."""
    return int(meminfo["MemTotal"].removesuffix(" kB")) * 1024


def unique_hosts(facts: Iterable[HostFacts]) -> tuple[HostFacts, ...]:
    """Return the facts of each host once, as its lowest rank gave them, in rank order."""
    by_host: dict[str, HostFacts] = {}
    for host in facts:
        by_host.setdefault(host.host, host)
    return tuple(by_host.values())


def parse_pairs(text: str) -> dict[str, str]:
    """Parse lines of `name : value`. If a name occurs for several cores, the last core's value counts."""
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


PACKAGES: Final = (
    "numpy", "numba", "pyarrow", "h5py", "Pillow", "obstore", "minio", "s3dlio", "s3torchconnector",
    "torch", "mpi4py", "mpich",
)  # fmt: skip
"""Packages whose versions can change a figure."""

# Tokens of a model, as in --chunk-tokens, are not secrets.
_SECRET_NAME: Final = re.compile(
    r"(?i)secret|token(?!s)|pass|credential|key|auth|signature|\bsig\b|cookie|cert"
)
_USER_INFO: Final = re.compile(r"://[^/@\s]+@")
_URI: Final = re.compile(r"\w+://[^\s()'\"]+")
_HIDDEN: Final = "***"
_GIT_TIMEOUT_S: Final = 5.0
_HARMLESS_SETTING: Final = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|symlinks|precomposeunicode)"
    r"|remote\..*\.(url|fetch|tagopt|prune)|(branch|user|pull|push|rebase|gc|advice)\..*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GitState:
    """The commit checked out in the working folder, and whether any files differ from it."""

    commit: str
    is_modified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """Identifies one process permanently, even after its end, after a reboot and from another container."""

    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int


def redact(words: Sequence[str]) -> tuple[str, ...]:
    """Replace the secrets in a command line with `***`: values with suspicious names, and users in URIs."""
    shown: list[str] = []
    for word in words:
        before = shown[-1] if shown else ""
        follows_secret_option = before.startswith("--") and "=" not in before and _SECRET_NAME.search(before)
        shown.append(_HIDDEN if follows_secret_option else redact_word(word))
    return tuple(shown)


def redact_settings(environment: Environment) -> dict[str, str]:
    """Return the user's own variables (`AWS_*`, `PENSTOCK_*`), with secrets replaced."""
    return redact_variables(user_settings(environment))


def redact_variables(variables: Environment) -> dict[str, str]:
    """Return the variables sorted by name, with secrets replaced."""
    return {
        replace_surrogates(name): _HIDDEN if _SECRET_NAME.search(name) else redact_word(value)
        for name, value in sorted(variables.items())
    }


def replace_surrogates(word: str) -> str:
    """Replace bytes that are not UTF-8 in a string from the system with U+FFFD: JSON cannot hold them."""
    return word.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the installed ones among `names`, from metadata: nothing is imported."""
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path) -> GitState | None:
    """Return the state of the repository around `folder`, or None without a repository or git.

    Also returns None if settings of the repository might run a program, because a stranger may have made it.
    """
    settings = _git(folder, "config", "--local", "--includes", "--list", "--name-only")
    if settings is None or not all(map(_HARMLESS_SETTING.fullmatch, settings.splitlines())):
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return None if commit is None or status is None else GitState(commit=commit, is_modified=bool(status))


def identify_this_process() -> ProcessMark:
    process = current_process()
    return ProcessMark(
        boot_id=process.kernel,
        pid_namespace=int(process.numbering.strip("pid:[]")),
        pid=process.pid,
        start_ticks=int(process.started),
    )


def is_alive(mark: ProcessMark) -> bool | None:
    """Check whether a process is running; return None if it is on another host or in another container."""
    observer = current_process()
    process = ProcessId(
        host=observer.host,
        pid=mark.pid,
        started=str(mark.start_ticks),
        kernel=mark.boot_id,
        numbering=f"pid:[{mark.pid_namespace}]",
    )
    has_ended = process.has_ended(observer=observer)
    return None if has_ended is None else not has_ended


def redact_word(word: str) -> str:
    """Replace the secrets in a word: values with suspicious names (also in a URI), and the user in a URI."""
    word = replace_surrogates(word)
    name, equals, _ = word.partition("=")
    if equals and not re.search(r"[?]|://", name) and _SECRET_NAME.search(name):
        return f"{name}={_HIDDEN}"
    open_word = _USER_INFO.sub(f"://{_HIDDEN}@", word)
    address, question, query = open_word.partition("?")
    if "://" not in address or not question:
        return open_word
    return f"{address}?{'&'.join(map(redact_word, query.split('&')))}"


def redact_uris(value: Any) -> Any:
    """Replace the secrets in all URIs of a text, or of all texts in lists and mappings."""
    if isinstance(value, str):
        return _URI.sub(lambda uri: redact_word(uri[0]), value)
    if isinstance(value, Mapping):
        return {key: redact_uris(one) for key, one in value.items()}
    return [redact_uris(one) for one in value] if isinstance(value, list | tuple) else value


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
