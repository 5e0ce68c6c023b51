"""The two loops that generate and compare content, compiled to machine code, without the GIL.

`content.py` describes the algorithm and is the only caller; it imports this module, and with it numba, when
content is first used. Every number in a compiled body is a uint64 or a position, because numba turns a
mixture of signed and unsigned into a float.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from penstock.compiling import compile_loop

Words = NDArray[np.uint64]

BLOCK_WORDS: Final = 512
"""The number of words in a block of 4 KiB, the smallest unit in which storage systems look for duplicates."""
POOL_BLOCKS: Final = 256
"""The number of blocks from which dedupable content is drawn: 1 MiB, more than compressors look back."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = np.uint64(0x94D049BB133111EB)
_BLOCK_WORDS: Final = np.uint64(BLOCK_WORDS)
_POOL_BLOCKS: Final = np.uint64(POOL_BLOCKS)
_WORD_BYTES: Final = np.uint64(8)
_RUN_WORDS: Final = np.uint64(8192)  # 64 KiB: the amount compared at a time, out of the nearest caches
_FRACTION_BITS: Final = np.uint64(24)
_FRACTION_MASK: Final = np.uint64(2**24 - 1)

# Compiled because NumPy is too slow: with arrays that fit the cache, the same arithmetic makes 4 GiB/s on a
# core with AVX-512, where these loops make 33, because each of NumPy's ten operations reads and writes
# memory. Coverage cannot see compiled bodies; tests compare them with an independent implementation.


@numba.njit
def _mix(counter: Any, key_b: Any) -> Any:  # pragma: no cover - compiled
    mixed = (counter ^ (counter >> np.uint64(30))) * _FIRST_FACTOR + key_b
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


@numba.njit
def _run(recipe: Any, index: Any, num_wanted: Any) -> Any:  # pragma: no cover - compiled
    """Describe the content from word `index` onward, as far as one rule generates it.

    Returns the counter of the first word, the second key, the number of random words, and the total number of
    words; those after the random ones are zeros.
    """
    key_a, key_b, share, zeros = recipe[0], recipe[1], recipe[4], recipe[5]
    if share == np.uint64(0) and zeros == np.uint64(0):
        num_words = min(_RUN_WORDS, num_wanted)
        return key_a + index * _STEP, key_b, num_words, num_words
    block, inside = index // _BLOCK_WORDS, index % _BLOCK_WORDS
    draw = _mix(key_b + block * _STEP, key_a)
    if (draw >> np.uint64(32)) < share:
        key_a, key_b = recipe[2], recipe[3]
        block = draw % _POOL_BLOCKS
        draw = _mix(key_b + block * _STEP, key_a)
    dither = (draw >> np.uint64(8)) & _FRACTION_MASK
    num_zeros = min((zeros + dither) >> _FRACTION_BITS, _BLOCK_WORDS - np.uint64(1))
    num_words = min(_BLOCK_WORDS - inside, num_wanted)
    num_random = min(max(_BLOCK_WORDS - num_zeros, inside) - inside, num_words)
    return key_a + (block * _BLOCK_WORDS + inside) * _STEP, key_b, num_random, num_words


@numba.njit
def _edge(target: Any, offset: Any, recipe: Any) -> None:  # pragma: no cover - compiled
    """Generate the bytes of one word that `target` does not hold completely."""
    counter, key_b, num_random, _ = _run(recipe, offset // _WORD_BYTES, np.uint64(1))
    word = _mix(counter, key_b) if num_random else np.uint64(0)
    shift = offset % _WORD_BYTES
    for position in range(target.size):
        target[position] = np.uint8((word >> (np.uint64(8) * (shift + np.uint64(position)))) & np.uint64(255))


def _fill(target: Any, offset: Any, recipe: Any) -> None:  # pragma: no cover - compiled
    head = min(np.int64(-offset % _WORD_BYTES), target.size)
    end = head + (target.size - head) // 8 * 8
    if head:
        _edge(target[:head], offset, recipe)
    if end < target.size:
        _edge(target[end:], offset + np.uint64(end), recipe)
    first_word = (offset + np.uint64(head)) // _WORD_BYTES
    left = target[head:end].view(np.uint64)
    while left.size:
        counter, key_b, num_random, num_words = _run(recipe, first_word, np.uint64(left.size))
        random, zeros = left[: np.int64(num_random)], left[np.int64(num_random) : np.int64(num_words)]
        for position in range(random.size):
            random[position] = _mix(counter, key_b)
            counter += _STEP
        zeros[:] = np.uint64(0)
        left = left[np.int64(num_words) :]
        first_word += num_words


def _find(words: Any, first_word: Any, recipe: Any) -> int:  # pragma: no cover - compiled
    left = words
    while left.size:
        first, key_b, num_random, num_words = _run(recipe, first_word, np.uint64(left.size))
        random, zeros = left[: np.int64(num_random)], left[np.int64(num_random) : np.int64(num_words)]
        # The whole run is compared before anything is decided: a branch per word would prevent vectorization.
        difference, counter = np.uint64(0), first
        for position in range(random.size):
            difference |= random[position] ^ _mix(counter, key_b)
            counter += _STEP
        for position in range(zeros.size):
            difference |= zeros[position]
        if difference != np.uint64(0):
            position = 0
            while left[position] == (
                _mix(first + np.uint64(position) * _STEP, key_b) if position < random.size else np.uint64(0)
            ):
                position += 1
            return int(words.size - left.size + position)
        left = left[np.int64(num_words) :]
        first_word += num_words
    return -1


_RECIPE: Final = "Array(uint64, 1, 'C', True, aligned=True)"


@cache
def load_fill() -> Callable[[NDArray[np.uint8], int, Words], None]:
    """Return the loop that writes an object's bytes, from the cache on disk or compiled in half a second.

    It takes bytes at any address, their offset in the object, and the recipe: two keys of the object, two of
    the pool, the share of the pool, and the share of zeros.
    """
    return compile_loop(_fill, f"void(Array(uint8, 1, 'C', False, aligned=False), uint64, {_RECIPE})")


@cache
def load_find() -> Callable[[Words, int, Words], int]:
    """Return the loop that finds the position of the first wrong word, which is -1 if all are right."""
    return compile_loop(_find, f"int64(Array(uint64, 1, 'C', True, aligned=False), uint64, {_RECIPE})")
