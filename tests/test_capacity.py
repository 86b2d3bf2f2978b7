"""What fits: by hand, and by trying every length and batch."""

from dataclasses import replace

import pytest
from reference import SMOLLM2, small_config

from kvcourse.capacity import DEVICES, fits, largest_batch, longest_context
from kvcourse.published import PUBLISHED

SMALL = replace(small_config(window=(20, None)), max_seq_len=60)
WEIGHTS = 2 * (2 * (64 * (64 + 16) * 2 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 97 * 64)  # bytes, at 16 bits
TOKEN = 2 * 2 * 8 * 2  # bytes of cache in one layer


def test_llama_70b_by_hand():
    """The article's case: 141 GB of weights in 16 bits, and 41.9 GB of cache at 128,000 tokens."""
    llama = PUBLISHED["Llama 3.1 70B"]
    h200 = fits(llama, DEVICES["H200 141 GB"], 128_000)
    assert h200 == (141_107_412_992, 41_943_040_000, 126_900_000_000) and not h200.fits
    laptop = fits(llama, DEVICES["laptop 64 GB"], 8192, weight_bits=4.5)
    assert laptop == (39_686_459_904, 2_684_354_560, 57_600_000_000) and laptop.fits
    # (57.6 - 39.686...) GB over 327,680 bytes a token
    assert longest_context(llama, DEVICES["laptop 64 GB"], weight_bits=4.5) == 54_667
    assert longest_context(llama, DEVICES["laptop 64 GB"]) == 0


def test_exactly_full_fits():
    room = WEIGHTS + 3 * (20 + 30) * TOKEN
    assert fits(SMALL, room, 30, 3, usable=1.0).fits
    assert not fits(SMALL, room - 1, 30, 3, usable=1.0).fits
    assert not fits(SMALL, room, 31, 3, usable=1.0).fits


@pytest.mark.parametrize("options", [{}, {"bits": 8, "weight_bits": 4.5}, {"usable": 1.0, "bits": 4.25}])
def test_every_length_and_batch_tried(options):
    lengths = range(1, SMALL.max_seq_len + 1)
    for extra in [0, 1, 64, 129, 500, 4000, 20_000, 60_000]:
        memory = fits(SMALL, 1, 1, **options).weights / options.get("usable", 0.9) + extra
        for batch_size in (1, 2, 7):
            tried = [n for n in lengths if fits(SMALL, memory, n, batch_size, **options).fits]
            assert longest_context(SMALL, memory, batch_size, **options) == max(tried, default=0)
        for seq_len in (1, 19, 20, 21, 60, 200):
            count = 0
            while fits(SMALL, memory, seq_len, count + 1, **options).fits:
                count += 1
            assert largest_batch(SMALL, memory, seq_len, **options) == count


def test_the_model_may_bind_before_the_memory():
    mistral = PUBLISHED["Mistral 7B v0.1"]  # its cache stops growing at 4096 tokens
    assert longest_context(mistral, DEVICES["RTX 4090 24 GB"]) == mistral.max_seq_len
    assert longest_context(replace(mistral, max_seq_len=10**6), DEVICES["RTX 4090 24 GB"]) == 10**6
    assert longest_context(replace(mistral, window=None), DEVICES["T4 16 GB"]) == 0
    assert longest_context(SMOLLM2, DEVICES["T4 16 GB"]) == SMOLLM2.max_seq_len


def test_nothing_fits_without_room_for_the_weights():
    for memory in (1, WEIGHTS / 0.9 - 10):
        assert longest_context(SMALL, memory) == largest_batch(SMALL, memory, 5) == 0


def test_devices():
    assert list(DEVICES.values()) == [16e9, 24e9, 64e9, 80e9, 141e9]


def test_bad_numbers_are_refused():
    for call, message in [
        (lambda: fits(SMALL, 0, 5), "memory=0"),
        (lambda: fits(SMALL, -16e9, 5), "memory=-16000000000.0"),
        (lambda: fits(SMALL, "H100 80 GB", 5), "memory='H100 80 GB'"),
        (lambda: fits(SMALL, float("nan"), 5), "memory=nan"),
        (lambda: fits(SMALL, 16e9, -1), "seq_len=-1"),
        (lambda: fits(SMALL, 16e9, 5, 0), "batch_size=0"),
        (lambda: fits(SMALL, 16e9, 5, bits=0), "bits=0"),
        (lambda: fits(SMALL, 16e9, 5, weight_bits="4"), "weight_bits='4'"),
        (lambda: fits(SMALL, 16e9, 5, usable=0), "usable=0"),
        (lambda: fits(SMALL, 16e9, 5, usable=90), "usable=90 must be at most 1"),
        (lambda: fits("Llama 3.1 8B", 16e9, 5), "shape must be a Shape"),
        (lambda: largest_batch(SMALL, 16e9, 0), "seq_len=0"),
        (lambda: longest_context(SMALL, 16e9, 0), "batch_size=0"),
        (lambda: longest_context("Llama 3.1 8B", 16e9), "shape must be a Shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_option_of_another_function_is_refused():
    """A batch size given to `largest_batch` would divide its answer, and a length has no place in `longest_context`."""
    with pytest.raises(TypeError, match=r"largest_batch\(\) got an unexpected keyword argument 'batch_size'"):
        largest_batch(SMALL, 16e9, 5, batch_size=5)
    with pytest.raises(TypeError, match=r"longest_context\(\) got an unexpected keyword argument 'seq_len'"):
        longest_context(SMALL, 16e9, seq_len=5)


def test_bits_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match=r"bits=1e\+305"):
        fits(SMALL, 16e9, 5, weight_bits=1e305)
