"""The two loops that make and compare content, compiled to machine code, eight bytes a step, without the GIL.

`content.py` states the algorithm and is the only caller. Invariant: every number in a compiled body is a
uint64 or a position, because numba turns a mixture of signed and unsigned into a float.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from penstock.dataset.compiling import compile_loop

Words = NDArray[np.uint64]

BLOCK_WORDS: Final = 512
"""Words of a block of 4 KiB: the smallest unit in which storage systems look for duplicates."""
POOL_BLOCKS: Final = 256
"""Blocks that dedupable content draws from: 1 MiB, more than compressors look back."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = np.uint64(0x94D049BB133111EB)
_BLOCK_WORDS: Final = np.uint64(BLOCK_WORDS)
_POOL_BLOCKS: Final = np.uint64(POOL_BLOCKS)
_FRACTION_BITS: Final = np.uint64(24)
_FRACTION_MASK: Final = np.uint64(2**24 - 1)

# No tracer of lines sees compiled bodies run; tests hold them against an independent implementation.


@numba.njit
def _word(key_a: Any, key_b: Any, index: Any) -> Any:  # pragma: no cover - compiled
    mixed = key_a + index * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_FACTOR + key_b
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


@numba.njit
def _source(recipe: Any, block: Any) -> Any:  # pragma: no cover - compiled
    """Two keys, the first word's index and the number of words that aren't zero, of one block."""
    key_a, key_b, first = recipe[0], recipe[1], block * _BLOCK_WORDS
    share, zeros = recipe[4], recipe[5]
    if share == np.uint64(0) and zeros == np.uint64(0):
        return key_a, key_b, first, _BLOCK_WORDS
    draw = _word(key_b, key_a, block)
    if (draw >> np.uint64(32)) < share:
        key_a, key_b = recipe[2], recipe[3]
        block = draw % _POOL_BLOCKS
        first = block * _BLOCK_WORDS
        draw = _word(key_b, key_a, block)
    dither = (draw >> np.uint64(8)) & _FRACTION_MASK
    num_zeros = min((zeros + dither) >> _FRACTION_BITS, _BLOCK_WORDS - np.uint64(1))
    return key_a, key_b, first, _BLOCK_WORDS - num_zeros


def _fill(words: Any, first_word: Any, recipe: Any) -> None:  # pragma: no cover - compiled
    done = np.uint64(0)
    while done < np.uint64(words.size):
        index = first_word + done
        inside = index % _BLOCK_WORDS
        part = words[np.int64(done) : np.int64(min(done + _BLOCK_WORDS - inside, np.uint64(words.size)))]
        key_a, key_b, first, num_random = _source(recipe, index // _BLOCK_WORDS)
        random = part[: np.int64(max(num_random, inside) - inside)]
        for position in range(random.size):
            random[position] = _word(key_a, key_b, first + inside + np.uint64(position))
        if random.size < part.size:
            part[random.size :] = np.uint64(0)
        done += np.uint64(part.size)


def _find(words: Any, first_word: Any, recipe: Any) -> int:  # pragma: no cover - compiled
    done = np.uint64(0)
    while done < np.uint64(words.size):
        index = first_word + done
        inside = index % _BLOCK_WORDS
        part = words[np.int64(done) : np.int64(min(done + _BLOCK_WORDS - inside, np.uint64(words.size)))]
        key_a, key_b, first, num_random = _source(recipe, index // _BLOCK_WORDS)
        random = part[: np.int64(max(num_random, inside) - inside)]
        # The whole block is compared before anything is decided: a branch a word would cost the vectors.
        difference = np.uint64(0)
        for position in range(random.size):
            difference |= random[position] ^ _word(key_a, key_b, first + inside + np.uint64(position))
        zeros = part[random.size :]
        for position in range(zeros.size):
            difference |= zeros[position]
        if difference != np.uint64(0):
            for position in range(part.size):
                expected = np.uint64(0)
                if position < random.size:
                    expected = _word(key_a, key_b, first + inside + np.uint64(position))
                if part[position] != expected:
                    return int(done) + position
        done += np.uint64(part.size)
    return -1


class Kernels(NamedTuple):
    """The compiled loops. `recipe`: two keys of the object, two of the pool, share of the pool, zeros.

    Both take words at any address, the index of the first of them in its object, and the recipe.
    """

    fill: Callable[[Words, int, Words], None]
    """Write the object's words."""
    find: Callable[[Words, int, Words], int]
    """Position of the first word that isn't the object's; -1 if all are."""


@cache
def load_kernels() -> Kernels:
    """Both loops, from the cache on disk, or compiled in half a second: call it before timing anything."""
    recipe = "Array(uint64, 1, 'C', True, aligned=True)"
    fill = compile_loop(_fill, f"void(Array(uint64, 1, 'C', False, aligned=False), uint64, {recipe})")
    find = compile_loop(_find, f"int64(Array(uint64, 1, 'C', True, aligned=False), uint64, {recipe})")
    return Kernels(fill, find)
