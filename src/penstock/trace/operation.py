"""One name for each operation, whatever libc, kernel or wrapper called it: `op` beside the `name` as traced.

Without it, the same program counts `__xstat` on one system, `stat` on a newer one and `statx` under strace.
"""

from __future__ import annotations

from typing import Final

_SPELLINGS: Final = {
    "access": "faccessat faccessat2",
    "chmod": "fchmodat fchmodat2",
    "chown": "fchownat",
    "fadvise": "fadvise64 posix_fadvise posix_fadvise64",
    "fallocate": "fallocate64 posix_fallocate posix_fallocate64",
    "fcntl": "fcntl64",
    "fopen": "fopen64",
    "freopen": "freopen64",
    "fseek": "fseeko fseeko64",
    "fstat": "fstat64 fstatat fstatat64 newfstatat __fxstat __fxstat64 __fxstatat __fxstatat64",
    "fstatfs": "fstatfs64",
    "ftell": "ftello ftello64",
    "ftruncate": "ftruncate64",
    "getdents": "getdents64",
    "link": "linkat",
    "lseek": "lseek64 _llseek",
    "lstat": "lstat64 __lxstat __lxstat64",
    "mkdir": "mkdirat",
    "mknod": "mknodat",
    "mmap": "mmap64 mmap2",
    "open": "open64 openat openat64 openat2 creat creat64 __open __open64 __open_2 __open64_2",
    "pread": "pread64",
    "preadv": "preadv64 preadv2 preadv64v2",
    "pwrite": "pwrite64",
    "pwritev": "pwritev64 pwritev2 pwritev64v2",
    "readdir": "readdir64",
    "readlink": "readlinkat",
    "rename": "renameat renameat2",
    "sendfile": "sendfile64",
    "stat": "stat64 statx __xstat __xstat64",
    "statfs": "statfs64",
    "symlink": "symlinkat",
    "truncate": "truncate64",
    "unlink": "unlinkat",
    "utime": "utimes utimensat futimens futimesat",
}

_CANONICAL: Final = {
    spelling: canonical for canonical, spellings in _SPELLINGS.items() for spelling in spellings.split()
}


def canonical(name: str) -> str:
    """The operation that `name` is a spelling of; a name that is none of libc's stays what it is."""
    return _CANONICAL.get(name, name)


def spellings(op: str) -> tuple[str, ...]:
    """All names that are told as `op`."""
    return (op, *_SPELLINGS.get(op, "").split())
