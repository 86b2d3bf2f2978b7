"""Packed codes against numbers worked out by hand, against Python's integers, and against NumPy's `packbits`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcourse.quant.packing import BITS, pack, packed_bytes, unpack

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def as_integer(packed):
    """A row of bytes as one integer, the first byte lowest."""
    return int.from_bytes(bytes(packed.tolist()), "little")


def test_codes_0_to_7_are_the_linear_word_of_gptq_and_not_the_interleaved_one_of_awq():
    codes = torch.arange(8, dtype=torch.uint8)
    assert as_integer(pack(codes, 4)) == 0x76543210
    assert as_integer(pack(codes[AWQ_ORDER], 4)) == 0x75316420


def test_three_bytes_worked_by_hand():
    """Codes 1, 2, ..., 7, 0 of 3 bits, first code lowest: 000 111 110 101 100 011 010 001."""
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0], dtype=torch.uint8)
    assert pack(codes, 3).tolist() == [0b11010001, 0b01011000, 0b00011111]


def test_signed_numbers_offset_by_8_fill_a_word():
    """-8 is code 0, 0 is code 8 and 7 is code 15; a row of zeros is 0x88888888, not 0x77777777."""
    signed = torch.tensor([-8, -7, -1, 0, 1, 2, 6, 7])
    assert as_integer(pack((signed + 8).to(torch.uint8), 4)) == 0xFEA98710
    assert as_integer(pack(torch.full((8,), 8, dtype=torch.uint8), 4)) == 0x88888888


@settings(max_examples=100, deadline=None)
@given(bits=st.sampled_from(BITS), data=st.data())
def test_packed_rows_are_pythons_integers_and_unpack_to_what_they_were(bits, data):
    rows, n = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 40))
    row = st.lists(st.integers(0, 2**bits - 1), min_size=n, max_size=n)
    codes = data.draw(st.lists(row, min_size=rows, max_size=rows))
    packed = pack(torch.tensor(codes, dtype=torch.uint8).reshape(rows, n), bits)
    assert packed.dtype == torch.uint8 and packed.shape == (rows, (n * bits + 7) // 8)
    assert packed.shape[1] == packed_bytes(n, bits)
    for got, expected in zip(packed, codes, strict=True):
        assert as_integer(got) == sum(code << (bits * i) for i, code in enumerate(expected))
    assert unpack(packed, bits, n).tolist() == codes


@pytest.mark.parametrize("bits", BITS)
def test_packed_bits_are_those_of_numpy(bits):
    codes = torch.randint(0, 2**bits, (3, 5, 37), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    stream = np.unpackbits(codes.numpy()[..., None], axis=-1, bitorder="little")[..., :bits].reshape(3, 5, -1)
    little = np.packbits(stream, axis=-1, bitorder="little")
    assert np.array_equal(pack(codes, bits).numpy(), little)
    big = np.packbits(stream, axis=-1, bitorder="big")
    assert not np.array_equal(pack(codes, bits).numpy(), big)
    assert torch.equal(unpack(torch.from_numpy(little), bits, 37), codes)


@pytest.mark.parametrize("bits", BITS)
def test_each_code_changes_the_bytes_that_hold_it_and_no_others(bits):
    codes = torch.zeros(19, dtype=torch.uint8)
    for i in range(19):
        one = codes.clone()
        one[i] = 2**bits - 1
        first, last = i * bits // 8, (i * bits + bits - 1) // 8
        assert pack(one, bits).nonzero().flatten().tolist() == list(range(first, last + 1))


@pytest.mark.parametrize("bits", BITS)
def test_packed_codes_lie_in_memory_of_their_own_size(bits):
    columns = torch.zeros(64, 13, dtype=torch.uint8)
    packed = pack(columns[:, ::2], bits)
    assert packed.untyped_storage().nbytes() == packed.numel() == 64 * packed_bytes(7, bits)
    codes = unpack(packed, bits, 7)
    codes.fill_(1)
    assert packed.count_nonzero() == 0


@pytest.mark.parametrize(
    "codes, bits, says",
    [
        (torch.tensor([0, 16], dtype=torch.uint8), 4, "code of 16 does not fit into 4 bits: the largest is 15"),
        (torch.tensor([4], dtype=torch.uint8), 2, "code of 4 does not fit into 2 bits: the largest is 3"),
        (torch.tensor([1, 2]), 4, "must be a row of uint8, or several, got torch.int64"),
        (torch.tensor(1, dtype=torch.uint8), 4, "of shape ()"),
        (torch.tensor([1], dtype=torch.uint8), 5, "bits=5 must be one of 2, 3, 4, 8"),
        (torch.tensor([1], dtype=torch.uint8), True, "bits=True must be one of 2, 3, 4, 8"),
    ],
)
def test_what_cannot_be_packed_is_refused(codes, bits, says):
    with pytest.raises(ValueError) as refused:
        pack(codes, bits)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "packed, n, says",
    [
        (torch.zeros(3, dtype=torch.uint8), 5, None),
        (torch.zeros(3, dtype=torch.uint8), 6, None),
        (torch.zeros(3, dtype=torch.uint8), 7, "7 codes of 4 bits take 4 bytes (uint8), got torch.uint8 of shape (3,)"),
        (torch.zeros(3, dtype=torch.uint8), 4, "4 codes of 4 bits take 2 bytes"),
        (torch.zeros(3, dtype=torch.int8), 6, "got torch.int8"),
        (torch.zeros(3, dtype=torch.uint8), -1, "n=-1 must be a whole number of at least 0"),
    ],
)
def test_bytes_that_hold_another_number_of_codes_are_refused(packed, n, says):
    if says is None:
        assert unpack(packed, 4, n).shape == (n,)
        return
    with pytest.raises(ValueError) as refused:
        unpack(packed, 4, n)
    assert says in str(refused.value)
