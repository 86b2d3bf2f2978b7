"""Checkers of notebook 08: the grid of a group, what it takes in memory, and codes packed into bytes."""

import torch

from kvcourse.check.framework import compare, exercise, normal


def group_of(*numbers: float) -> torch.Tensor:
    """A group in float64, so that a message shows the numbers as they are written here."""
    return torch.tensor(numbers, dtype=torch.float64)


EIGHT = group_of(0.237, -0.412, 0.105, 0.7, -0.66, 0.031, -0.288, 0.519)


@exercise
def round_to_grid(answer):
    """round_to_grid(group, bits): the numbers that a group becomes on a symmetric grid: whole multiples of a scale, of
    which the number with the largest magnitude takes the outermost, 2^(bits - 1) - 1 steps from zero."""

    def steps(bits):
        return 2 ** (bits - 1) - 1

    def on_grid(group, scale, least, most, rounding=torch.round):
        return rounding(group / scale).clamp(least, most) * scale

    def right(group, bits):
        return on_grid(group, group.abs().max() / steps(bits), -steps(bits), steps(bits))

    def with_scale(scale_of, rounding=torch.round, clamp=True):
        def wrong(group, bits):
            most = steps(bits) if clamp else 10**9
            return on_grid(group, scale_of(group, bits), -most - clamp, most, rounding)

        return wrong

    def scale_of(group, bits):
        return group.abs().max() / steps(bits)

    return compare(
        answer,
        right,
        cases=[
            (EIGHT, 4),
            (group_of(-1.0, 0.3, 0.23), 4),
            (normal(64), 4),
            (normal(64, seed=1), 3),
            (normal(64, seed=2), 8),
            (group_of(0.9, -0.2, 0.5, 0.1), 2),
            (1000 * normal(32, seed=3), 4),
        ],
        mistakes={
            "the largest number is cut off: with 2^(bits - 1) steps it needs a code too many, so take one step less": (
                with_scale(lambda group, bits: group.abs().max() / 2 ** (bits - 1))
            ),
            "the largest number gets a code that `bits` bits have not: there are 2^(bits - 1) - 1 steps above zero": (
                with_scale(lambda group, bits: group.abs().max() / 2 ** (bits - 1), clamp=False)
            ),
            "7 steps hold for 4 bits only; `bits` bits have 2^(bits - 1) - 1": (
                with_scale(lambda group, bits: group.abs().max() / 7, clamp=False)
            ),
            "the largest number lies half a step off, as 7.5 steps are no whole number: take 2^(bits - 1) - 1": (
                with_scale(lambda group, bits: group.abs().max() / ((2**bits - 1) / 2), clamp=False)
            ),
            "this grid has twice as many values as the bits can name: take 2^(bits - 1) - 1 steps on each side": (
                with_scale(lambda group, bits: group.abs().max() / (2**bits - 1), clamp=False)
            ),
            "the scale comes from the lowest and the highest number; a symmetric grid takes the largest magnitude": (
                with_scale(lambda group, bits: (group.max() - group.min()) / (2**bits - 1), clamp=False)
            ),
            "the scale comes from the lowest and the highest number, and the largest magnitude is cut off": (
                with_scale(lambda group, bits: (group.max() - group.min()) / (2**bits - 1))
            ),
            "the sign is not taken off before the largest is sought; a group may be largest on its negative side": (
                with_scale(lambda group, bits: group.max() / steps(bits), clamp=False)
            ),
            "numbers are rounded down; the nearest value of the grid is wanted": with_scale(scale_of, torch.floor),
            "numbers are cut off towards zero; the nearest value of the grid is wanted": (
                with_scale(scale_of, torch.trunc)
            ),
            "these are the codes; multiply them by the scale": lambda group, bits: (
                group / scale_of(group, bits)
            ).round(),
            "nothing is rounded yet": lambda group, bits: group,
        },
    )


@exercise
def zero_point(answer):
    """zero_point(group, bits): (scale, zero) of a grid of 2^bits values that reaches from the lowest to the highest
    number of the group, and holds 0; zero is the code that means 0."""

    def ends(group):
        return min(0.0, float(group.min())), max(0.0, float(group.max()))

    def grid(low, high, bits, top=None):
        scale = (high - low) / (2**bits - 1 if top is None else top)
        return scale, round(-low / scale)

    def right(group, bits):
        return grid(*ends(group), bits)

    def without_zero(group, bits):
        return grid(float(group.min()), float(group.max()), bits)

    def clipped(group, bits):
        scale, zero = without_zero(group, bits)
        return scale, min(max(zero, 0), 2**bits - 1)

    def symmetric(group, bits):
        return float(group.abs().max()) / (2 ** (bits - 1) - 1), 2 ** (bits - 1)

    def changed(change):
        return lambda group, bits: change(*right(group, bits), group)

    return compare(
        answer,
        right,
        cases=[
            (EIGHT, 4),
            (group_of(1.0, 2.1), 4),
            (group_of(-3.0, -1.25, -2.0), 4),
            (normal(64), 8),
            (normal(64, seed=5), 3),
            (group_of(0.0, 0.5, 0.31), 2),
            (group_of(0.33, -0.67, 0.1), 3),
        ],
        mistakes={
            "where all numbers have one sign your zero is no code at all: let the grid reach to 0": without_zero,
            "where all numbers have one sign your zero does not mean 0: let the grid reach to 0": clipped,
            "where all numbers are negative your grid ends below 0: let its upper end reach to 0, too": (
                lambda group, bits: grid(ends(group)[0], float(group.max()), bits)
            ),
            "zero is in the middle of the codes; it is as many steps up as the lowest number is below 0": (
                lambda group, bits: (right(group, bits)[0], 2 ** (bits - 1))
            ),
            "2^bits values have 2^bits - 1 steps between them": lambda group, bits: grid(*ends(group), bits, 2**bits),
            "this is a symmetric grid; let it reach from the lowest to the highest number": symmetric,
            "zero has the wrong sign: codes count upwards from the lowest number": changed(lambda s, z, _: (s, -z)),
            "the scale comes first, then zero": changed(lambda s, z, _: (z, s)),
            "zero is a code, a whole number: round it": changed(lambda s, z, group: (s, -ends(group)[0] / s)),
            "zero is the lowest number; the code that means 0 is wanted": changed(
                lambda s, z, group: (s, ends(group)[0])
            ),
            "zero is cut off, not rounded": changed(lambda s, z, group: (s, int(-ends(group)[0] / s))),
        },
    )


@exercise
def quantized_bytes(answer):
    """quantized_bytes(rows, columns, bits, group_size): bytes of a weight on zero-point grids: codes of `bits` bits,
    and for each group a scale of 16 bits and a zero of `bits` bits."""

    def total(rows, columns, bits, group_size, beside, per_group=True):
        groups = rows * columns // group_size if per_group else rows
        return (rows * columns * bits + groups * beside) / 8

    def right(rows, columns, bits, group_size):
        return total(rows, columns, bits, group_size, 16 + bits)

    return compare(
        answer,
        right,
        cases=[
            (576, 1536, 4, 32),
            (1, 256, 4, 128),
            (4096, 4096, 4, 128),
            (8192, 1024, 3, 64),
            (64, 512, 2, 128),
            (192, 512, 8, 512),
        ],
        mistakes={
            "these are the codes alone; each group has a scale and a zero beside them": lambda r, c, b, g: total(
                r, c, b, g, 0
            ),
            "the zeros are missing: each group has one, of `bits` bits": lambda r, c, b, g: total(r, c, b, g, 16),
            "the scales are missing: each group has one, of 16 bits": lambda r, c, b, g: total(r, c, b, g, b),
            "these are bits; a byte has 8": lambda r, c, b, g: 8 * right(r, c, b, g),
            "the scale counts 16 bytes; it has 16 bits": lambda r, c, b, g: total(r, c, b, g, 8 * 16 + b),
            "scale and zero are counted in bytes; they are given in bits": lambda r, c, b, g: total(
                r, c, b, g, 8 * (16 + b)
            ),
            "scale and zero are counted once a row; each group of a row has its own": lambda r, c, b, g: total(
                r, c, b, g, 16 + b, per_group=False
            ),
            "groups are cut within a row: each of the `rows` has columns / group_size of them": lambda r, c, b, g: (
                (r * c * b + (r // g) * (c // g) * (16 + b)) / 8
            ),
            "the groups of one row are counted; every row has as many": lambda r, c, b, g: (
                (r * c * b + c // g * (16 + b)) / 8
            ),
            "scale and zero are counted for every number; a whole group shares them": lambda r, c, b, g: (
                r * c * (16 + 2 * b) / 8
            ),
            "the zero counts 16 bits, as the scale does; it is a code, of `bits` bits": lambda r, c, b, g: total(
                r, c, b, g, 16 + 16
            ),
            "this scale has 32 bits; 16 are kept": lambda r, c, b, g: total(r, c, b, g, 32 + b),
            "this is the weight in 16 bits": lambda r, c, b, g: 2 * r * c,
        },
    )


@exercise
def pack_nibbles(answer):
    """pack_nibbles(codes): bytes that hold an even number of codes from 0 to 15, two in each: the first in the low half
    of the first byte, the second in its high half, and so on."""

    def packed(codes):
        made = answer(codes)
        if made is None or isinstance(made, bytes | str):
            return made
        try:
            return bytes(int(number) for number in made)
        except (TypeError, ValueError):
            return made

    def pairs(codes):
        return zip(codes[::2], codes[1::2], strict=True)

    def right(codes):
        return bytes(low | high << 4 for low, high in pairs(codes))

    def halves(codes):
        return zip(codes[: len(codes) // 2], codes[len(codes) // 2 :], strict=True)

    codes = [7, 0, 15, 3, 8, 8, 1, 12]
    return compare(
        packed,
        right,
        cases=[([3, 1],), (codes,), ([0, 15, 15, 0],), ([5] * 6,), (list(range(16)),), ([],)],
        mistakes={
            "the two halves are swapped: the first code of a pair goes into the low half": lambda codes: bytes(
                low << 4 | high for low, high in pairs(codes)
            ),
            "each code has a byte of its own, so nothing is saved: put two into one byte": lambda codes: bytes(codes),
            "the second code must be moved up by 4 bits, else the two cannot be told apart": lambda codes: bytes(
                low + high for low, high in pairs(codes)
            ),
            "the second code must be moved up by 4 bits, else the two lie on top of each other": lambda codes: bytes(
                low | high for low, high in pairs(codes)
            ),
            "`+` binds before `<<`, so both codes were moved: write `low + (high << 4)`, or take `|`": lambda codes: (
                bytes((low + high) << 4 & 255 for low, high in pairs(codes))
            ),
            "the second code is multiplied by 10; in binary, four bits further up is times 16": lambda codes: bytes(
                low + 10 * high for low, high in pairs(codes)
            ),
            "code i is paired with code i + n/2, as GGUF does; here neighbors share a byte": lambda codes: bytes(
                low | high << 4 for low, high in halves(codes)
            ),
            "the bytes are in reverse order": lambda codes: right(codes)[::-1],
            "only every second code is kept": lambda codes: bytes(codes[::2]),
        },
    )
