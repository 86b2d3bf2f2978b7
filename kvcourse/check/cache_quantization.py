"""Checkers of notebook 09: groups along the right axis, what waits until its group is full, and what is exact."""

from functools import partial

import torch

from kvcourse.check.framework import compare, error_of, exercise, normal


@exercise
def round_keys(answer):
    """round_keys(x, bits, axis, group_size): x `(tokens, channels)` rounded in groups that share a scale and a minimum:
    `group_size` tokens of one channel ("channel"), or `group_size` channels of one token ("token")."""

    def along(axis, rounding, x, bits, size):
        """x with each row of its groups, (groups, size), replaced by what `rounding` makes of it."""
        table = x.T if axis == "channel" else x
        rounded = rounding(table.reshape(-1, size), bits).reshape(table.shape)
        return rounded.T if axis == "channel" else rounded

    def grid(low=torch.amin, high=torch.amax, steps=lambda bits: 2**bits - 1, to_codes=torch.round, back=None):
        back = back or (lambda codes, scale, lowest: codes * scale + lowest)

        def rounding(groups, bits):
            lowest, highest = (end(groups, 1, keepdim=True) for end in (low, high))
            scale = (highest - lowest) / steps(bits)
            return back(to_codes((groups - lowest) / scale), scale, lowest)

        return rounding

    def both(rounding, axes=("channel", "token")):
        return lambda x, bits, group_size: tuple(along(axis, rounding, x, bits, group_size) for axis in axes)

    def whole_rows(x, bits, group_size):
        return along("channel", grid(), x, bits, x.shape[0]), along("token", grid(), x, bits, x.shape[1])

    def spread_groups(x, bits, group_size, put_back=True):
        """Numbers of a group do not stand beside each other."""
        rounded = []
        for table in (x.T, x):
            order = torch.arange(table.shape[1]).reshape(group_size, -1).T.reshape(-1)
            made = along("token", grid(), table[:, order], bits, group_size)
            rounded.append(made[:, order.argsort()] if put_back else made)
        return rounded[0].T, rounded[1]

    def not_turned(x, bits, group_size):
        """Groups of x.T, put back as if they had been groups of x."""
        groups = grid()(x.T.reshape(-1, group_size), bits)
        return groups.reshape(x.shape), along("token", grid(), x, bits, group_size)

    def no_minimum(groups, bits):
        scale = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / (2**bits - 1)
        return torch.round(groups / scale) * scale

    def through_zero(end, groups, dim, keepdim):
        found = end(groups, dim, keepdim=keepdim)
        return found.clamp(max=0) if end is torch.amin else found.clamp(min=0)

    def along_both(x, bits, group_size):
        channel, token = (answer(x, bits, axis, group_size) for axis in ("channel", "token"))
        return None if channel is None and token is None else (channel, token)

    return compare(
        along_both,
        both(grid()),
        cases=[
            (normal(8, 16) + 5 * torch.arange(16), 2, 4),
            (normal(16, 8, seed=1), 4, 8),
            (normal(8, 16, seed=2) + 20, 3, 4),
            (normal(8, 16, seed=3) - 20, 8, 4),
        ],
        mistakes={
            'the axes are swapped: a group of "channel" is tokens of one channel, one of "token" channels of a token': (
                both(grid(), ("token", "channel"))
            ),
            'it groups channels of a token for both axes: with "channel" turn x over, before and after': both(
                grid(), ("token", "token")
            ),
            'it groups tokens of a channel for both axes: with "token" a group is channels of one token': both(
                grid(), ("channel", "channel")
            ),
            'for "channel" the groups were made of x.T: reshape to the shape of x.T first, then turn': not_turned,
            "a whole channel (or token) shares one scale: cut it into groups of `group_size`": whole_rows,
            "all numbers share one scale: each group has its own lowest and highest": both(
                grid(*(lambda groups, dim, keepdim, end=end: end(groups) for end in (torch.amin, torch.amax)))
            ),
            "`bits` bits have 2^bits values; your grid has one more: between them is one step less, 2^bits - 1": both(
                grid(steps=lambda bits: 2**bits)
            ),
            "the grid ends a step before the highest number: 2^bits values have 2^bits - 1 steps between them": (
                lambda x, bits, group_size: both(
                    grid(steps=lambda bits: 2**bits, to_codes=lambda places: places.round().clamp(0, 2**bits - 1))
                )(x, bits, group_size)
            ),
            "the grid reaches to zero, where no number of the group is; let it reach from the lowest to the highest": (
                both(grid(partial(through_zero, torch.amin), partial(through_zero, torch.amax)))
            ),
            "the upper end of the grid reaches to zero; let it end at the highest number of the group": both(
                grid(high=partial(through_zero, torch.amax))
            ),
            "the lower end of the grid reaches to zero; let it begin at the lowest number of the group": both(
                grid(low=partial(through_zero, torch.amin))
            ),
            "the grid lies evenly around zero; let it reach from the lowest to the highest number": both(
                grid(
                    lambda groups, dim, keepdim: -groups.abs().amax(dim, keepdim=keepdim),
                    lambda groups, dim, keepdim: groups.abs().amax(dim, keepdim=keepdim),
                )
            ),
            "codes are rounded down; the nearest value of the grid is wanted": both(grid(to_codes=torch.floor)),
            "these are the codes; what they stand for is wanted: code times scale, plus the minimum": both(
                grid(back=lambda codes, scale, lowest: codes)
            ),
            "the minimum was taken off, but not added again": both(
                grid(back=lambda codes, scale, lowest: codes * scale)
            ),
            "the minimum is missing: take it off before dividing, add it after": both(no_minimum),
            "numbers that share a group do not stand beside each other; cut x into pieces of `group_size` in a row": (
                spread_groups
            ),
            "numbers that share a group do not stand beside each other, and do not come back to their places; cut x "
            "into pieces of `group_size` in a row": partial(spread_groups, put_back=False),
        },
    )


@exercise
def exact_tokens(answer):
    """exact_tokens(n, residual, group_size): (keys, values) that are exact after n tokens. Keys are rounded whenever
    `residual` of them wait (`group_size` if it is 0), all at once; values are, all but the latest `residual`."""

    def keys(n, residual, size):
        return n % (residual or size)

    def values(n, residual):
        return min(n, residual)

    def right(n, residual, group_size):
        return keys(n, residual, group_size), values(n, residual)

    if isinstance(error_of(answer, 70, 0, 32), ZeroDivisionError):
        return "with a residual of 0 it divides by 0 (ZeroDivisionError): then keys wait until their group is full"

    return compare(
        answer,
        right,
        cases=[
            (200, 32, 32),
            (20, 32, 32),
            (33, 32, 32),
            (192, 32, 32),
            (100, 64, 32),
            (70, 0, 32),
            (64, 0, 16),
            (0, 32, 32),
            (300, 128, 32),
        ],
        mistakes={
            "keys and values are swapped: keys come first": lambda n, r, g: right(n, r, g)[::-1],
            "these are the rounded ones; the exact ones are wanted": lambda n, r, g: (
                n - keys(n, r, g),
                n - values(n, r),
            ),
            "keys keep the latest `residual`, as values do; but once that many wait, all of them are rounded": (
                lambda n, r, g: (min(n, r), min(n, r))
            ),
            "keys do not keep the residual besides; once `residual` of them wait, all are rounded at once": (
                lambda n, r, g: (min(n, r + n % g), values(n, r))
            ),
            "values wait for whole groups, as keys do; a value's group lies within its own token, so it waits for "
            "nobody, and the latest `residual` are always exact": lambda n, r, g: (keys(n, r, g), keys(n, r, g)),
            "keys are rounded as soon as a group is full; they wait until `residual` of them are there": (
                lambda n, r, g: (n % g, values(n, r))
            ),
            "when just `residual` keys wait they are rounded; with you they wait on": lambda n, r, g: (
                (n - 1) % (r or g) + 1 if n else 0,
                values(n, r),
            ),
            "with a residual of 0 keys still wait until their group is full": lambda n, r, g: (
                n % r if r else 0,
                values(n, r),
            ),
            "values: a text shorter than the residual has only its own tokens": lambda n, r, g: (keys(n, r, g), r),
        },
    )


@exercise
def full_groups(answer):
    """full_groups(waiting, group_size): keys `(n, d)` that wait, the oldest first -> (full groups `(m, group_size, d)`,
    those that go on waiting `(r, d)`)."""

    def cut(waiting, size, m):
        return waiting[: m * size].reshape(m, size, waiting.shape[1]), waiting[m * size :]

    def right(waiting, group_size):
        return cut(waiting, group_size, len(waiting) // group_size)

    def newest(waiting, size):
        rest = len(waiting) % size
        return waiting[rest:].reshape(-1, size, waiting.shape[1]), waiting[:rest]

    def padded(waiting, size):
        missing = -len(waiting) % size
        filled = torch.cat((waiting, torch.zeros(missing, waiting.shape[1])))
        return filled.reshape(-1, size, waiting.shape[1]), waiting[:0]

    def transposed(waiting, size):
        m, d = len(waiting) // size, waiting.shape[1]
        return waiting[: m * size].reshape(size, m, d).transpose(0, 1), waiting[m * size :]

    def keeps_one(waiting, size):
        return cut(waiting, size, max(0, (len(waiting) - 1) // size))

    def from_the_end(waiting, size):
        rest = len(waiting) % size
        taken = waiting[:-rest]
        return taken.reshape(len(taken) // size, size, waiting.shape[1]), waiting[-rest:]

    slice_of_zero = "with nothing left over, a slice such as [:-0] is empty; count from the front"
    error = error_of(answer, normal(8, 2, seed=2), 4)
    if isinstance(error, RuntimeError) and not error_of(answer, normal(7, 3), 4):
        return f"8 keys fill 2 groups of 4, and it raises {type(error).__name__}: {slice_of_zero}"

    return compare(
        answer,
        right,
        cases=[
            (normal(7, 3), 4),
            (normal(11, 3, seed=1), 4),
            (normal(8, 2, seed=2), 4),
            (normal(3, 2, seed=3), 4),
            (normal(32, 4, seed=4), 8),
        ],
        mistakes={
            "the newest tokens are grouped and the oldest go on waiting; it must be the other way round": newest,
            "the newest tokens are grouped, and some of them go on waiting as well; take the oldest, from the front": (
                lambda w, size: (newest(w, size)[0], right(w, size)[1])
            ),
            "the last group is filled up with zeros; what fills no group goes on waiting, exactly as it is": padded,
            "only one group is taken; take all that are full": lambda w, size: cut(w, size, min(1, len(w) // size)),
            "when the last group is just full it is kept back; nothing need wait then": keeps_one,
            slice_of_zero: from_the_end,
            "what fills no group is lost; it goes on waiting": lambda w, size: (right(w, size)[0], w[:0]),
            "everything goes on waiting, the grouped tokens too; they must leave": lambda w, size: (
                right(w, size)[0],
                w,
            ),
            "tokens of a group do not stand beside each other: reshape to (groups, group_size, d)": transposed,
        },
    )
