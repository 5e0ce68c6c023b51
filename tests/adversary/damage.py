"""Damage to files at random: of bytes, of numbers, of tokens of text, and of whole files of a folder."""

import gzip
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

Change = Callable[[random.Random, bytearray], None]

_TOKEN: Final = re.compile(rb'-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|"[^"\n]{0,200}"|\b[A-Za-z_][\w.]*\b')
_VALUES: Final = (
    *(b"0", b"-1", b"1", b"4294967296", b"9223372036854775807", b"9223372036854775808", b"1e308", b"1e999"),
    *(b"-1e999", b"NaN", b"Infinity", b"9" * 400, b"9" * 5000, b"1" + b"0" * 12, b"0.1", b"1e-320", b"01"),
    *(b"null", b"true", b"false", b"[]", b"{}", b'""', b"[[]]", b'{"a": {}}', b"[1, 2]", b"!!python/none"),
    *(b'"\\ud800"', b'"\\u0000"', b'"a\\nb"', b'"/dev/zero"', b'"../../../../etc/passwd"', b'"$(touch x)"'),
    *(b'"' + b"x" * 100_000 + b'"', b"[" * 2000, b'{"a":' * 2000, b"*a", b"&a [*a, *a]", b"<b>"),
    *(b"'; DROP TABLE events --", b"\xe2\x80\xae", b"2026-13-45T99:00:00Z", b"-inf", b"0x10", b"::"),
)  # fmt: skip
_PIECES: Final = (
    *(b'"', b"{", b"}", b"\n", b"\\", b"[", b"]", b",", b":", b"\x00", b"\xff", b"-", b".", b"\t", b"\r\n"),
    *(b"cos\nsystem\n(S'touch ran'\ntR", b"\x80\x04", b"\x8c\x02os\x8c\x06system\x93", b"q\0", b"h\0"),
    *(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x1f\x8b\x08", b"PAR1"),
)  # fmt: skip


def _at(draw: random.Random, content: bytearray) -> int:
    return draw.randrange(len(content) + 1)


def _flip(draw: random.Random, content: bytearray) -> None:
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def _cut(draw: random.Random, content: bytearray) -> None:
    start = _at(draw, content)
    del content[start : start + draw.randrange(1, 300)]


def _end(draw: random.Random, content: bytearray) -> None:
    del content[_at(draw, content) :]


def _noise(draw: random.Random, content: bytearray) -> None:
    start = _at(draw, content)
    content[start:start] = draw.randbytes(draw.randrange(1, 60))


def _piece(draw: random.Random, content: bytearray) -> None:
    start = _at(draw, content)
    content[start : start + draw.randrange(3)] = draw.choice(_PIECES)


def _number(draw: random.Random, content: bytearray) -> None:
    """A binary number becomes an extreme one."""
    start, size = _at(draw, content), draw.choice((1, 2, 4, 8))
    value = draw.choice((0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), (1 << (8 * size - 1)) - 1))
    content[start : start + size] = value.to_bytes(size, draw.choice(("little", "big")))


def _copy(draw: random.Random, content: bytearray) -> None:
    """A part stands elsewhere, too, perhaps very often."""
    start, target = _at(draw, content), _at(draw, content)
    part = content[start : start + draw.choice((1, 8, 100, 1000))]
    content[target:target] = part * draw.choice((1, 1, 2, 1000))


def _swap(draw: random.Random, content: bytearray) -> None:
    one, other = sorted((_at(draw, content), _at(draw, content)))
    content[one:other] = content[one:other][::-1]


def _token(draw: random.Random, content: bytearray) -> None:
    """A value or a name of text becomes another, of any type."""
    start = _at(draw, content)
    if (found := _TOKEN.search(content, start)) or (found := _TOKEN.search(content)):
        content[found.start() : found.end()] = draw.choice(_VALUES)


def _exchange(draw: random.Random, content: bytearray) -> None:
    """A value or a name becomes one that stands elsewhere."""
    one, other = (_TOKEN.search(content, _at(draw, content)) for _ in range(2))
    if one and other:
        content[one.start() : one.end()] = bytes(other[0])


_CHANGES: Final[tuple[Change, ...]] = (_flip, _cut, _end, _noise, _piece, _number, _copy, _swap)
_CHANGES_OF_TEXT: Final[tuple[Change, ...]] = (_token, _token, _token, _token, _exchange)


def damage(draw: random.Random, content: bytes) -> bytes:
    """One to six changes; what is packed by gzip is changed inside as often as outside."""
    if content.startswith(b"\x1f\x8b") and draw.random() < 0.7:
        return gzip.compress(damage(draw, gzip.decompress(content)), 1)
    changed = bytearray(content)
    is_text = b"\0" not in content[:2000]
    for _ in range(draw.choice((1, 1, 1, 2, 3, 6))):
        draw.choice(_CHANGES + _CHANGES_OF_TEXT * (2 if is_text else 1))(draw, changed)
    return bytes(changed)


def _seal(folder: Path) -> None:
    """Give a manifest the right checksum of itself, so that what follows the checksum is looked at."""
    for path in filter(_is_plain, folder.rglob("penstock.json")):
        content = path.read_bytes()
        if found := re.match(rb'(\{"format":"penstock.checkpoint","xxh3_128":")[0-9a-f]{32}', content):
            rest = found[1], content[found.end() :]
            path.write_bytes(rest[0] + xxhash.xxh3_128(b"".join(rest)).hexdigest().encode() + rest[1])


def damage_folder(draw: random.Random, folder: Path, named: str) -> None:
    """Damage one to three files below `folder`.

    Only what is not `named` becomes a pipe: whoever names one waits for its writer, as with other programs.
    """
    files = sorted(filter(_is_plain, folder.rglob("*")))
    for path in draw.sample(files, min(len(files), draw.choice((1, 1, 1, 2, 3)))):
        kind, source = draw.random(), draw.choice(files)
        if not (_is_plain(path) and _is_plain(source)):
            continue  # a former turn put something else there
        if kind < 0.9:
            path.write_bytes(damage(draw, path.read_bytes()))
        elif kind < 0.93:
            path.unlink()
        elif kind < 0.96:
            shutil.copy(source, path.with_name(f"{path.name}.copied"))
            with suppress(OSError):
                path.with_name(f"{path.name}.copied").replace(draw.choice(files))
        else:
            path.unlink()
            kinds = ("folder", "loop", "dangling", "zero", "empty") + (
                () if path.name in named else ("fifo",)
            )
            _put_in_place(draw.choice(kinds), path)
    if draw.random() < 0.8:
        with suppress(OSError):
            _seal(folder)


def _is_plain(path: Path) -> bool:
    """Whether it is a file whose content ends."""
    return path.is_file() and not path.is_symlink()


def _put_in_place(kind: str, path: Path) -> None:
    """Something that is no file of bytes."""
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "empty":
        path.touch()
    else:
        path.symlink_to({"loop": path.name, "dangling": "nowhere", "zero": "/dev/zero"}[kind])
