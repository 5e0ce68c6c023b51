"""Generate any byte of the data from (seed, object, offset) alone, at the speed of memory.

Data is verified from the seed, without stored checksums. Each version of the algorithm always generates
the same bytes, on every machine. Version 1, in unsigned little-endian 64-bit integers:

    a, b       = both halves of blake2b-128(seed as 8 bytes + kind + object, person "penstock content"), where
                 kind is "i" and object a number of 8 bytes, or kind is "n" and object a name in UTF-8;
                 p, q are the halves for kind "p" and no object
    word(a, b, i): x = a + i * 0x9E3779B97F4A7C15
                 x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 + b
                 x = (x ^ x >> 27) * 0x94D049BB133111EB
                 x ^ x >> 31
    content    = word(a, b, 0), word(a, b, 1), ...: 512 words are block 0, the next 512 block 1, and so on

For one object, `word` is a bijection of i, so it never repeats a word; two objects differ in 128 bits of key.
If the data should compress or deduplicate, a number d = word(b, a, k) decides for each block k:

    dedupable    if d >> 32 < share * 2**32, the block is block k' = d mod 256 of the pool instead: from here
                 on the keys are p and q, and d = word(q, p, k')
    compressible the last (share * 512 * 2**24 + (d >> 8 mod 2**24)) >> 24 words, but at most 511, are zero
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.storage.aligned import flat

Words = NDArray[np.uint64]

CONTENT_VERSION: Final = 1
"""Recorded with generated data: with a different version, the same seed gives different bytes."""

_WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 512
_END: Final = 2**64
_PERSON: Final = b"penstock content"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The space that storage may save on content: shares from 0 to 1, exact on average over blocks of 4 KiB.

    `compressible` zeroes that share at the end of each block; the block keeps its first word, so that zeroing
    does not make it dedupable. `dedupable` takes that share of blocks from a pool of 256, which is the same
    for all objects of a seed.
    """

    compressible: float = 0.0
    dedupable: float = 0.0

    def __post_init__(self) -> None:
        for name, share in (("compressible", self.compressible), ("dedupable", self.dedupable)):
            if not 0.0 <= share <= 1.0:
                raise UsageError(f"{name} is {share}", fix="It is a share of the content: from 0 to 1.")


IRREDUCIBLE: Final = Reduction()
"""Unique and incompressible content: the default."""


@dataclass(frozen=True, slots=True)
class Content:
    """One object's bytes. `name` identifies the object within the seed: a number below 2**64, or a string.

    Any thread may use it, at any offset and length. The first `Content` on a machine compiles a loop, which
    takes half a second; later ones load the loop from a cache. Create one before timing, and call
    `prepare_verification` if content is verified in a timed section.
    """

    seed: int
    name: int | str
    reduction: Reduction = IRREDUCIBLE
    _recipe: Words = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kind = (
            b"n" + self.name.encode("utf-8", "surrogateescape")
            if isinstance(self.name, str)
            else b"i" + _eight(self.name, "object")
        )
        seed = _eight(self.seed, "seed")
        recipe = _shared_recipe(seed, self.reduction).copy()
        recipe[:2] = _keys(seed + kind)
        object.__setattr__(self, "_recipe", recipe)
        _load_fill()

    def prepare_verification(self) -> None:
        """Load what `verify` needs from a cache, or compile it."""
        _load_find()

    def fill(self, buffer: memoryview, offset: int = 0) -> None:
        """Overwrite `buffer` with the object's bytes from `offset` onward."""
        target = flat(buffer)
        _require_offset(target, offset)
        if target.nbytes:
            _load_fill()(np.frombuffer(target, dtype=np.uint8), offset, self._recipe)

    def verify(self, buffer: memoryview, offset: int = 0) -> int | None:
        """Compare `buffer` with the object's bytes from `offset` onward.

        Returns the position in `buffer` of the first byte that differs, or None.
        """
        stored = flat(buffer)
        _require_offset(stored, offset)
        head = min(-offset % _WORD_BYTES, stored.nbytes)
        num_words = (stored.nbytes - head) // _WORD_BYTES
        body_end = head + num_words * _WORD_BYTES
        if stored[:head] != self._bytes(offset, head):
            return self._first_difference(stored[:head], offset)
        if num_words:
            words = np.frombuffer(stored[head:body_end], dtype=np.uint64)
            wrong = _load_find()(words, (offset + head) // _WORD_BYTES, self._recipe)
            if wrong >= 0:
                start = head + wrong * _WORD_BYTES
                return start + self._first_difference(stored[start : start + _WORD_BYTES], offset + start)
        if stored[body_end:] != self._bytes(offset + body_end, stored.nbytes - body_end):
            return body_end + self._first_difference(stored[body_end:], offset + body_end)
        return None

    def _bytes(self, offset: int, size_bytes: int) -> bytes:
        """Return a few bytes of content, for the parts of a buffer before and after its whole words."""
        found = np.empty(size_bytes, dtype=np.uint8)
        _load_fill()(found, offset, self._recipe)
        return found.tobytes()

    def _first_difference(self, stored: memoryview, offset: int) -> int:
        expected = self._bytes(offset, stored.nbytes)
        return next(at for at in range(stored.nbytes) if stored[at] != expected[at])


@lru_cache(maxsize=64)
def _shared_recipe(seed: bytes, reduction: Reduction) -> Words:
    """Return the part of a recipe that all objects of a seed share: everything but the first two words."""
    shares = np.array([reduction.dedupable * 2**32, reduction.compressible * _BLOCK_WORDS * 2**24])
    pool = _keys(seed + b"p")
    return np.concatenate([pool, pool, np.rint(shares).astype(np.uint64)])


@cache
def _load_fill() -> Callable[[NDArray[np.uint8], int, Words], None]:
    # Imported here because numba takes a third of a second, which only users of content should spend.
    from penstock.dataset.content_kernels import load_fill  # noqa: PLC0415

    return load_fill()


@cache
def _load_find() -> Callable[[Words, int, Words], int]:
    from penstock.dataset.content_kernels import load_find  # noqa: PLC0415 - see above

    return load_find()


def _require_offset(buffer: memoryview, offset: int) -> None:
    if not 0 <= offset <= _END - buffer.nbytes:
        raise UsageError(f"No content at offset {offset}", fix="Objects have offsets from 0 to 2**64.")


def _keys(identity: bytes) -> Words:
    digest = blake2b(identity, digest_size=16, person=_PERSON).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _eight(number: int, what: str) -> bytes:
    if not 0 <= number < _END:
        raise UsageError(f"{what} {number} is out of range", fix="It is a number from 0 to 2**64 - 1.")
    return number.to_bytes(_WORD_BYTES, "little")
