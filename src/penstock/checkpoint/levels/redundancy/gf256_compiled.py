"""The doubling loops of `gf256` as machine code without the GIL, for where numba is installed.

They work on words of eight bytes, with everything in registers. Coverage cannot see compiled bodies run;
tests compare them with the arithmetic of single elements. Imported by `gf256.load_loops` alone.
"""

from typing import Any, Final

import numba
import numpy as np

from penstock.compiling import compile_loop

_ALL_BUT_LOWEST: Final = np.uint64(0xFEFEFEFEFEFEFEFE)
_LOWEST: Final = np.uint64(0x0101010101010101)
_REDUCED: Final = np.uint64(0x1D1D1D1D1D1D1D1D)
_ONE: Final = np.uint64(1)
_SEVEN: Final = np.uint64(7)
_EIGHT: Final = np.uint64(8)


def compile_loops() -> tuple[Any, Any]:
    """`double_and_add` and `add_scaled`, from numba's cache if they are there."""
    two, three = "(uint64[::1], uint64[::1])", "(uint64[::1], uint64[::1], uint64[::1])"
    return (
        compile_loop(_double_and_add, f"void{two}"),
        compile_loop(_add_scaled, f"void{three}"),
    )


@numba.njit
def _doubled(word: Any) -> Any:  # pragma: no cover - compiled
    """Each of eight bytes times 2: a shift, and the modulus where a bit was shifted out."""
    carries = (word >> _SEVEN) & _LOWEST
    return ((word << _ONE) & _ALL_BUT_LOWEST) ^ (((carries << _EIGHT) - carries) & _REDUCED)


def _double_and_add(weighted: Any, piece: Any) -> None:  # pragma: no cover - compiled
    for position in range(piece.size):
        weighted[position] = _doubled(weighted[position]) ^ piece[position]


def _add_scaled(total: Any, piece: Any, masks: Any) -> None:  # pragma: no cover - compiled
    # Unrolled by hand: a loop over the masks would not stay in registers.
    mask_0, mask_1, mask_2, mask_3 = masks[0], masks[1], masks[2], masks[3]
    mask_4, mask_5, mask_6, mask_7 = masks[4], masks[5], masks[6], masks[7]
    for position in range(piece.size):
        word = piece[position]
        scaled = word & mask_0
        word = _doubled(word)
        scaled ^= word & mask_1
        word = _doubled(word)
        scaled ^= word & mask_2
        word = _doubled(word)
        scaled ^= word & mask_3
        word = _doubled(word)
        scaled ^= word & mask_4
        word = _doubled(word)
        scaled ^= word & mask_5
        word = _doubled(word)
        scaled ^= word & mask_6
        word = _doubled(word)
        total[position] ^= scaled ^ (word & mask_7)
