"""Checkers of notebook 08: a block of a GGUF file, one column of GPTQ, and a scale of AWQ folded into the model."""

import numpy as np
import torch

from kvcourse.check.framework import compare, diagnose, error_of, exercise, normal


def block(scale: float, codes, order: str = "<f2") -> bytes:
    """A Q4_0 block of 18 bytes."""
    codes = np.asarray(codes, np.uint8)
    return np.array([scale], order).tobytes() + (codes[:16] | codes[16:] << 4).tobytes()


@exercise
def read_q4_0(answer):
    """read_q4_0(block): the 32 numbers of a Q4_0 block: 2 bytes of scale (float16), then 16 bytes of codes, number i in
    the low half of byte i and number i + 16 in its high half; a number is (code - 8) x scale."""

    def parts(data, scale_at=0, codes_at=2, dtype="<f2"):
        scale = np.frombuffer(data[scale_at : scale_at + 2], dtype).astype(np.float64)[0]
        codes = np.frombuffer(data[codes_at : codes_at + 16], np.uint8).astype(np.int64)
        return scale, codes & 15, codes >> 4

    def right(block, middle=8):
        scale, low, high = parts(block)
        return (np.concatenate([low, high]) - middle) * scale

    def neighbors(data):
        scale, low, high = parts(data)
        return (np.stack([low, high], axis=1).ravel() - 8) * scale

    def swapped(data):
        scale, low, high = parts(data)
        return (np.concatenate([high, low]) - 8) * scale

    def in_float16(data):
        return right(data).astype(np.float16)

    def not_centered(data):
        return right(data) + 8 * parts(data)[0]

    def signed(data):
        scale, low, high = parts(data)
        codes = np.concatenate([low, high])
        return np.where(codes > 7, codes - 16, codes) * scale

    def wrapped(data):
        scale, low, high = parts(data)
        return (np.concatenate([low, high]) - 8) % 256 * scale

    def codes_of(data):
        return right(data) / parts(data)[0]

    def big_endian(data):
        return codes_of(data) * parts(data, dtype=">f2")[0]

    def bfloat(data):
        bits = int.from_bytes(data[:2], "little") << 16
        return codes_of(data) * np.array([bits], np.uint32).view(np.float32)[0]

    def high_not_shifted(data):
        scale, low, high = parts(data)
        return (np.concatenate([low, high << 4]) - 8) * scale

    def low_not_masked(data):
        scale, low, high = parts(data)
        return (np.concatenate([low | high << 4, high]) - 8) * scale

    draw = np.random.Generator(np.random.PCG64(0))
    return compare(
        answer,
        right,
        cases=[
            (block(1.0, [1, *[8] * 15, 2, *[8] * 15]),),
            (block(0.5, range(32) % np.int64(16)),),
            (block(-0.0123, draw.integers(0, 16, 32)),),
            (block(0.037, draw.integers(0, 16, 32)),),
        ],
        mistakes={
            "the two codes of a byte are taken for neighbors; all low halves come first, then all high ones": (
                neighbors
            ),
            "the high halves come first; numbers 0 to 15 are in the low ones": swapped,
            "the product was rounded to float16: make float32 of codes and scale before you multiply": in_float16,
            "the codes are not centered: code 8 means 0": not_centered,
            "7 is taken off the codes; code 8 means 0, so take 8 off": lambda data: right(data, middle=7),
            "the codes are taken for signed numbers; take 8 off instead": signed,
            "uint8 has no negative numbers, and 3 - 8 becomes 251: make floats of the codes first": wrapped,
            "these are codes; multiply by the scale": codes_of,
            "the two bytes of the scale are read in the wrong order: a GGUF file is little-endian": big_endian,
            "the scale is read as bfloat16; it is a float16": bfloat,
            "the high half was not moved down: shift it by 4 bits": high_not_shifted,
            "the low half has the high one in it: keep its four bits only, with `& 15`": low_not_masked,
        },
    )


@exercise
def gptq_update(answer):
    """gptq_update(weight, rounded, inverse): the columns that are not rounded yet `(rows, n)`, after the first of them
    was set to `rounded` `(rows,)` and the others were changed so that the output changes least. `inverse` `(n, n)` is
    the inverse of the Hessian of these columns."""

    def right(weight, rounded, inverse):
        error = (weight[:, 0] - rounded) / inverse[0, 0]
        return weight - error[:, None] * inverse[0]

    def spread(change):
        """`rounded`, and the other columns moved by `change(error of the column, inverse)`."""

        def wrong(weight, rounded, inverse):
            moved = weight + change(weight[:, 0] - rounded, inverse)
            moved[:, 0] = rounded
            return moved

        return wrong

    def next_only(weight, rounded, inverse):
        moved = weight.clone()
        moved[:, :2] = right(weight, rounded, inverse)[:, :2]
        return moved

    def rest(weight, rounded, inverse):
        return right(weight, rounded, inverse)[:, 1:]

    def first_kept(weight, rounded, inverse):
        moved = right(weight, rounded, inverse)
        moved[:, 0] = weight[:, 0]
        return moved

    def case(rows, n, seed):
        inputs = normal(4 * n, n, seed=seed) @ (torch.eye(n) + 0.4 * normal(n, n, seed=seed + 1))
        weight = normal(rows, n, seed=seed + 2)
        return weight, weight[:, 0].mul(2).round().div(2), torch.linalg.inv(2 * inputs.T @ inputs / len(inputs))

    by_hand = torch.tensor([[0.25, 0.5]]), torch.tensor([0.0]), torch.tensor([[2.0, -1.0], [-1.0, 2.0]])
    return compare(
        answer,
        right,
        cases=[case(3, 4, 0), by_hand, case(5, 8, 10)],
        mistakes={
            "the error is added with the wrong sign: the others must make up for it, not add to it": spread(
                lambda error, inverse: error[:, None] * inverse[0] / inverse[0, 0]
            ),
            "the error is added: with this sign the first column moves away from `rounded`": (
                lambda weight, rounded, inverse: 2 * weight - right(weight, rounded, inverse)
            ),
            "without a division by inverse[0, 0] the first column does not become `rounded`": (
                lambda weight, rounded, inverse: weight - (weight[:, 0] - rounded)[:, None] * inverse[0]
            ),
            "the error is not divided by inverse[0, 0]": spread(lambda error, inverse: -error[:, None] * inverse[0]),
            "the error is multiplied by inverse[0, 0]; divide by it": spread(
                lambda error, inverse: -error[:, None] * inverse[0] * inverse[0, 0]
            ),
            "that is a row of the Hessian; take one of its inverse": spread(
                lambda error, inverse: -error[:, None] * (h := torch.linalg.inv(inverse))[0] / h[0, 0]
            ),
            "each column has its own inverse[j, j] under the line; it is that of the column being rounded": spread(
                lambda error, inverse: -error[:, None] * inverse[0] / inverse.diagonal()
            ),
            "nothing was passed on: only the first column has changed, which is rounding to nearest": spread(
                lambda error, inverse: 0 * error[:, None]
            ),
            "all columns take the same part of the error; how much, row 0 of the inverse says": spread(
                lambda error, inverse: error[:, None].expand(-1, len(inverse))
            ),
            "only the next column has changed; all that are left take part": next_only,
            "the first column is missing; give back all of them, it holds `rounded` now": rest,
            "the first column must hold `rounded` now": first_kept,
            "all rows were moved by the same amount; each row has its own error": spread(
                lambda error, inverse: -error.mean() * inverse[0] / inverse[0, 0]
            ),
        },
    )


@exercise
def fold_value_scale(answer):
    """fold_value_scale(v, o, scale, n_heads, d_head): weights of the value and the output projection, so that inputs of
    the output projection are divided by `scale` `(KV heads x d_head,)`, its columns are multiplied by it, and the
    layer's output is what it was. Query heads that share a KV head stand next to each other."""

    def repeated(scale, n_heads, d_head):
        return scale.reshape(-1, d_head).repeat_interleave(n_heads * d_head // len(scale), dim=0).flatten()

    def right(v, o, scale, n_heads, d_head):
        return v / scale[:, None], o * repeated(scale, n_heads, d_head)

    def tiled(v, o, scale, n_heads, d_head):
        return v / scale[:, None], o * scale.repeat(n_heads * d_head // len(scale))

    def each(v, o, scale, n_heads, d_head):
        return v / scale[:, None], o * scale.repeat_interleave(n_heads * d_head // len(scale))

    def swapped(v, o, scale, n_heads, d_head):
        return v * scale[:, None], o / repeated(scale, n_heads, d_head)

    def columns(v, o, scale, n_heads, d_head):
        return v / scale, o * repeated(scale, n_heads, d_head)

    def case(n_heads, n_kv_heads, d_head, d_model, seed):
        kept = n_kv_heads * d_head
        scale = normal(kept, seed=seed).exp()
        return normal(kept, d_model, seed=seed + 1), normal(d_model, n_heads * d_head, seed=seed + 2), scale

    shared, unshared = (*case(4, 2, 3, 6, 0), 4, 3), (*case(2, 2, 4, 8, 20), 2, 4)
    if isinstance(error_of(answer, *shared), RuntimeError) and error_of(answer, *unshared) is None:
        if diagnose(answer(*unshared), right(*unshared)) is None:
            return (
                "right where no heads share, but with shared heads the sizes differ: each KV head's scale is needed "
                "once per query head"
            )
    return compare(
        answer,
        right,
        cases=[shared, (*case(6, 2, 2, 4, 10), 6, 2), unshared, (*case(3, 1, 4, 5, 30), 3, 4)],
        mistakes={
            "the scales of all KV heads are repeated one after the other; query heads that share a KV head stand next "
            "to each other, so repeat each head's scales": tiled,
            "each number is repeated; repeat each head's `d_head` scales as a whole": each,
            "the two are swapped: divide the rows of v, multiply the columns of o": swapped,
            "v is left as it was: what it writes must be divided by the scale": lambda v, o, *rest: (
                v,
                right(v, o, *rest)[1],
            ),
            "o is left as it was: its columns must be multiplied by the scale": lambda v, o, *rest: (
                right(v, o, *rest)[0],
                o,
            ),
            "the columns of v are divided; its rows make the values": columns,
            "both are divided; then the output changes": lambda v, o, scale, n_heads, d_head: (
                v / scale[:, None],
                o / repeated(scale, n_heads, d_head),
            ),
            "both are multiplied; then the output changes": lambda v, o, scale, n_heads, d_head: (
                v * scale[:, None],
                o * repeated(scale, n_heads, d_head),
            ),
        },
    )
