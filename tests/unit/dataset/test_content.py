"""Content: the same everywhere and for ever, unique, incompressible, and verified as fast as it is made."""

import pickle
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b, sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dataset.content import CONTENT_VERSION, IRREDUCIBLE, Content, Reduction
from penstock.errors import UsageError

BLOCK = 4096
M64 = 2**64 - 1

shares = st.sampled_from([0.0, 0.1, 0.5, 0.999, 1.0])
reductions = st.builds(Reduction, compressible=shares, dedupable=shares)
names = st.one_of(st.integers(0, M64), st.text(max_size=20))


@pytest.fixture(autouse=True, scope="module")
def _compiled_before_anything_is_timed() -> None:
    Content(1, 1).prepare_verification()


def made(content: Content, size_bytes: int, offset: int = 0) -> bytes:
    buffer = bytearray(size_bytes)
    content.fill(memoryview(buffer), offset)
    return bytes(buffer)


def blocks_of(content: bytes) -> list[bytes]:
    return [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]


class Reference:
    """The algorithm once more, word for word from its statement, in plain integers."""

    def __init__(self, seed: int, name: int | str, reduction: Reduction) -> None:
        identity = b"n" + name.encode() if isinstance(name, str) else b"i" + name.to_bytes(8, "little")
        self.a, self.b = self.keys(seed.to_bytes(8, "little") + identity)
        self.p, self.q = self.keys(seed.to_bytes(8, "little") + b"p")
        self.share = round(reduction.dedupable * 2**32)
        self.zeros = round(reduction.compressible * 512 * 2**24)

    @staticmethod
    def keys(identity: bytes) -> tuple[int, int]:
        digest = blake2b(identity, digest_size=16, person=b"penstock content").digest()
        return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")

    @staticmethod
    def word(a: int, b: int, i: int) -> int:
        x = a + i * 0x9E3779B97F4A7C15 & M64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 + b & M64
        x = (x ^ x >> 27) * 0x94D049BB133111EB & M64
        return x ^ x >> 31

    def block(self, k: int) -> bytes:
        a, b, draw = self.a, self.b, self.word(self.b, self.a, k)
        if draw >> 32 < self.share:
            a, b, k = self.p, self.q, draw % 256
            draw = self.word(b, a, k)
        num_zeros = min(511, self.zeros + (draw >> 8) % 2**24 >> 24)
        words = [self.word(a, b, k * 512 + j) for j in range(512 - num_zeros)]
        return b"".join(word.to_bytes(8, "little") for word in words) + bytes(8 * num_zeros)

    def bytes(self, offset: int, size_bytes: int) -> bytes:
        first = offset // BLOCK
        last = (offset + size_bytes) // BLOCK
        whole = b"".join(self.block(k) for k in range(first, last + 1))
        return whole[offset - first * BLOCK :][:size_bytes]


@given(
    st.integers(0, M64),
    names,
    reductions,
    st.one_of(st.integers(0, 3 * BLOCK), st.integers(0, 2**64 - 20_000)),
    st.integers(0, 2 * BLOCK + 9),
)
def test_every_byte_is_what_the_stated_algorithm_says(
    seed: int, name: int | str, reduction: Reduction, offset: int, size_bytes: int
) -> None:
    expected = Reference(seed, name, reduction).bytes(offset, size_bytes)
    assert made(Content(seed, name, reduction), size_bytes, offset) == expected


GOLDEN = {
    (0, 0, 0.0, 0.0): "d585fca3ae44c41ad731c89d1acaf9c4",
    (42, 7, 0.0, 0.0): "9ac903e8a722df3bc7bc3de0f808a393",
    (42, "train/img_07_of_10.npz", 0.0, 0.0): "1ad553b84e0282ebb777bc93a9ca6ed0",
    (M64, M64, 0.5, 0.0): "1e758b9afcc7d7f8e422bf29bf138c96",
    (42, 7, 0.3, 0.6): "e605070d6162db1ad0889f9886a027fd",
}


@pytest.mark.parametrize("case", GOLDEN, ids=str)
def test_the_bytes_of_version_1_never_change(case: tuple[int, int | str, float, float]) -> None:
    seed, name, compressible, dedupable = case
    content = Content(seed, name, Reduction(compressible=compressible, dedupable=dedupable))
    digest = sha256(made(content, 1 << 16) + made(content, 1000, offset=10**15 + 3)).hexdigest()
    assert digest[:32] == GOLDEN[case]
    assert CONTENT_VERSION == 1


def test_the_first_bytes_can_be_compared_by_eye() -> None:
    assert made(Content(0, 0), 16).hex() == "7a0fc77af0bd0e3720ec901825f2212c"


@given(reductions, st.integers(0, 2 * BLOCK), st.integers(0, 3 * BLOCK), st.data())
def test_a_part_is_the_same_as_in_the_whole_at_any_address(
    reduction: Reduction, offset: int, size_bytes: int, data: st.DataObject
) -> None:
    content = Content(3, "x", reduction)
    whole = made(content, 5 * BLOCK)
    shift = data.draw(st.integers(0, 9))
    buffer = memoryview(bytearray(size_bytes + 20))
    content.fill(buffer[shift : shift + size_bytes], offset)
    assert buffer[shift : shift + size_bytes] == whole[offset : offset + size_bytes]
    assert not any(buffer[:shift])
    assert not any(buffer[shift + size_bytes :])


@given(reductions, st.integers(0, BLOCK), st.integers(1, 3 * BLOCK), st.data())
def test_the_first_wrong_byte_is_found_and_right_ones_are_not_accused(
    reduction: Reduction, offset: int, size_bytes: int, data: st.DataObject
) -> None:
    content = Content(9, 1, reduction)
    buffer = bytearray(made(content, size_bytes, offset))
    assert content.verify(memoryview(buffer), offset) is None
    wrong = data.draw(st.lists(st.integers(0, size_bytes - 1), min_size=1, max_size=4))
    for position in wrong:
        buffer[position] ^= data.draw(st.integers(1, 128))
    flipped = sorted({position for position in wrong if wrong.count(position) == 1})
    if len(flipped) == len(wrong):
        assert content.verify(memoryview(buffer), offset) == flipped[0]


@pytest.mark.parametrize("bit", range(8))
def test_any_single_flipped_bit_of_a_block_is_found(bit: int) -> None:
    content = Content(5, 5, Reduction(compressible=0.5))
    buffer = bytearray(made(content, BLOCK + 5, offset=3))
    for position in range(0, len(buffer), 7):
        buffer[position] ^= 1 << bit
        assert content.verify(memoryview(buffer), 3) == position
        buffer[position] ^= 1 << bit
    assert content.verify(memoryview(buffer), 3) is None


def test_content_at_another_offset_or_of_another_object_or_seed_is_wrong_from_the_first_word() -> None:
    buffer = memoryview(bytearray(made(Content(1, 1), BLOCK)))
    for content, offset in ((Content(1, 1), BLOCK), (Content(1, 2), 0), (Content(2, 1), 0)):
        wrong = content.verify(buffer, offset)
        assert wrong is not None
        assert wrong < 8


def test_reading_only_memory_is_enough_to_verify_and_too_little_to_fill() -> None:
    content = Content(1, 1)
    frozen = memoryview(made(content, BLOCK + 3, offset=5))
    assert content.verify(frozen, 5) is None
    with pytest.raises(TypeError):
        content.fill(frozen[:BLOCK], 0)
    with pytest.raises(TypeError):
        content.fill(frozen[:4], 1)


def test_buffers_of_other_items_are_filled_as_bytes() -> None:
    array = np.zeros((4, 3, 5), dtype=np.float32)
    Content(1, 1).fill(array.data, 2)
    assert array.tobytes() == made(Content(1, 1), array.nbytes, 2)


def many_objects() -> Iterator[Content]:
    for seed in (0, 1, 2**63, M64):
        for name in (0, 1, 2, 255, 256, 2**32, 2**63, M64, "", "0", "1", "a", "b", "train/img_1_of_2.npz"):
            yield Content(seed, name)


@pytest.mark.parametrize("num_blocks", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_no_word_occurs_twice_over_objects_offsets_and_seeds(num_blocks: int) -> None:
    offsets = (0, 2**20, 2**40 - 2**15, 2**63)
    parts = [made(content, num_blocks * BLOCK, offset) for content in many_objects() for offset in offsets]
    words = np.frombuffer(b"".join(parts), dtype=np.uint64)
    assert words.size == 56 * 4 * num_blocks * 512
    assert np.unique(words).size == words.size


def test_no_block_of_an_object_resembles_another_under_any_shift_by_words() -> None:
    one, other = (np.frombuffer(made(Content(1, name), 64 * BLOCK), dtype=np.uint64) for name in (1, 2))
    for shift in (0, 1, 511, 512, 513, 4096):
        difference = one[: one.size - shift] ^ other[shift:]
        assert np.unique(difference).size == difference.size
        bits = np.unpackbits(difference.view(np.uint8)).mean()
        assert abs(bits - 0.5) < 0.002


def test_content_does_not_compress_whatever_its_object() -> None:
    for content in (Content(0, 0), Content(M64, "name"), Content(1, 2, IRREDUCIBLE)):
        whole = made(content, 1 << 18)
        assert len(zlib.compress(whole, 1)) > 0.99 * len(whole)
        assert len(zlib.compress(whole, 9)) > 0.99 * len(whole)


def test_bits_and_bytes_are_evenly_distributed_in_every_position() -> None:
    words = np.frombuffer(made(Content(11, 12), 1 << 20), dtype=np.uint64)
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = words.nbytes / 256
    assert ((counts - expected) ** 2 / expected).sum() < 360  # 255 degrees of freedom: p = 1e-5
    for bit in range(64):
        share = float(((words >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 5 * 0.5 / words.size**0.5


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9, 1.0])
def test_the_compressible_share_of_each_block_is_zero_and_at_its_end(share: float) -> None:
    content = Content(2, 3, Reduction(compressible=share))
    whole = made(content, 1 << 20)
    words = np.frombuffer(whole, dtype=np.uint64).reshape(-1, 512)
    zero = (words == 0).mean()
    assert abs(zero - min(share, 511 / 512)) < 2e-4
    per_block = (words == 0).sum(axis=1)
    assert per_block.max() - per_block.min() <= 1
    assert all((row[512 - num :] == 0).all() for row, num in zip(words, per_block, strict=True))
    assert len(zlib.compress(whole, 1)) / len(whole) == pytest.approx(1 - zero, abs=0.02)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9, 1.0])
def test_compressible_content_is_still_unique(share: float) -> None:
    seen = [
        block
        for name in range(8)
        for block in blocks_of(made(Content(2, name, Reduction(compressible=share)), 1 << 18))
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("compressible", [0.0, 0.4])
def test_the_dedupable_share_of_blocks_comes_from_one_small_pool_for_all_objects(
    share: float, compressible: float
) -> None:
    reduction = Reduction(dedupable=share, compressible=compressible)
    pool = Reduction(dedupable=1.0, compressible=compressible)
    pooled = set(blocks_of(made(Content(4, "any", pool), 1 << 23)))
    assert len(pooled) == 256
    blocks = [block for name in range(4) for block in blocks_of(made(Content(4, name, reduction), 1 << 20))]
    drawn = [block for block in blocks if block in pooled]
    assert len(drawn) / len(blocks) == pytest.approx(share, abs=5 * 0.5 / len(blocks) ** 0.5)
    others = [block for block in blocks if block not in pooled]
    assert len(set(others)) == len(others)


def test_another_seed_has_another_pool() -> None:
    pools = [set(blocks_of(made(Content(seed, 0, Reduction(dedupable=1.0)), 1 << 20))) for seed in (1, 2)]
    assert not pools[0] & pools[1]


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["compressible", "dedupable"])
def test_shares_outside_of_0_to_1_are_refused_by_name(which: str, wrong: float) -> None:
    with pytest.raises(UsageError, match=which):
        Reduction(**{which: wrong})


@pytest.mark.parametrize("number", [-1, 2**64])
def test_seeds_objects_and_offsets_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(UsageError, match="seed"):
        Content(number, 0)
    with pytest.raises(UsageError, match="object"):
        Content(0, number)
    for verb in (Content(0, 0).fill, Content(0, 0).verify):
        with pytest.raises(UsageError, match="offset"):
            verb(memoryview(bytearray(1)), number)
    assert made(Content(0, 0), 8, 2**64 - 8)


def test_an_empty_buffer_is_right_and_stays_empty() -> None:
    assert made(Content(1, 1), 0, 12345) == b""
    assert Content(1, 1).verify(memoryview(b""), 12345) is None


def test_content_travels_to_other_processes_as_what_it_was() -> None:
    content = Content(7, "name", Reduction(compressible=0.25, dedupable=0.5))
    copy = pickle.loads(pickle.dumps(content))
    assert copy == content
    assert made(copy, 20_000, 77) == made(content, 20_000, 77)
    assert Content(7, "name") != content


def test_names_that_no_encoding_knows_have_content_too() -> None:
    foreign = b"img_\xff.npz".decode("utf-8", "surrogateescape")
    assert made(Content(1, foreign), 64) != made(Content(1, "img_.npz"), 64)


def test_threads_fill_parts_of_one_object_at_once() -> None:
    content = Content(8, 8, Reduction(dedupable=0.3))
    buffer = memoryview(bytearray(1 << 22))
    step = 300_007
    starts = range(0, buffer.nbytes, step)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda start: content.fill(buffer[start : start + step], start), starts))
        found = list(threads.map(lambda start: content.verify(buffer[start : start + step], start), starts))
    assert found == [None] * len(starts)
    assert bytes(buffer) == made(content, 1 << 22)
