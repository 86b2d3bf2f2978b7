"""Attention, rotary positions and masks against hand-worked numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from kvcourse.layers import RMSNorm, attention, attention_with_sinks, rotary_tables, rotate, visible


def by_hand(q, k, v, mask):
    """Attention in plain loops: one query, one head, one sum at a time. Float64."""
    B, H, T, D = q.shape
    group = H // k.shape[1]
    out = torch.zeros(B, H, T, D, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [s for s in range(k.shape[2]) if mask[b, 0, t, s]]
                scores = [float(q[b, h, t] @ k[b, h // group, s]) / math.sqrt(D) for s in seen]
                weights = [math.exp(score - max(scores)) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    out[b, h, t] += weight / sum(weights) * v[b, h // group, s]
    return out


def random_qkv(B=2, H=6, H_kv=2, T=5, S=5, D=8):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return draw(B, H, T, D), draw(B, H_kv, S, D), draw(B, H_kv, S, D)


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
def test_attention_equals_plain_loops(heads):
    q, k, v = random_qkv(H=heads[0], H_kv=heads[1])
    positions = torch.arange(5).expand(2, 5)
    mask = visible(positions, positions)
    expected = by_hand(q, k, v, mask)
    torch.testing.assert_close(attention(q, k, v, mask), expected)
    torch.testing.assert_close(attention(q, k, v, causal=True), expected)


def test_attention_test_can_fail_when_heads_are_tiled_instead_of_repeated():
    q, k, v = random_qkv(H=6, H_kv=2)
    positions = torch.arange(5).expand(2, 5)
    mask = visible(positions, positions)
    tiled = F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1), attn_mask=mask)
    assert (tiled - by_hand(q, k, v, mask)).abs().max() > 0.1


def test_a_chunk_at_the_end_sees_everything_before_it():
    """Zero queries weigh all visible keys alike, so outputs are means of the values 0..4 that are seen."""
    q, k = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 5, 4)
    v = torch.arange(5.0).reshape(1, 1, 5, 1).expand(1, 1, 5, 4)
    mask = visible(torch.tensor([[3, 4]]), torch.arange(5)[None])
    assert attention(q, k, v, mask)[0, 0, :, 0].tolist() == [1.5, 2.0]
    # What PyTorch's own causal flag does with two queries and five keys: the triangle sits at the top left.
    wrong = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert wrong[0, 0, :, 0].tolist() == [0.0, 0.5]
    with pytest.raises(ValueError, match="as many queries as keys, got 2 and 5"):
        attention(q, k, v, causal=True)


def test_visible_by_hand():
    positions = torch.tensor([[2, 3], [0, -1]])
    key_positions = torch.tensor([[0, 1, 2, 3], [0, -1, -1, -1]])
    expected = [[[1, 1, 1, 0], [1, 1, 1, 1]], [[1, 0, 0, 0], [1, 1, 1, 1]]]  # the last query is padding
    assert visible(positions, key_positions)[:, 0].int().tolist() == expected


def test_visible_follows_positions_not_slots():
    """A cache may hold its keys out of order."""
    mask = visible(torch.tensor([[5]]), torch.tensor([[4, 5, 6, 3]]))
    assert mask[0, 0, 0].tolist() == [True, True, False, True]


def test_a_window_counts_the_token_itself():
    positions = torch.tensor([[0, 1, 5, -1]])
    mask = visible(positions, torch.arange(6)[None], window=2)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert visible(positions, torch.arange(6)[None], window=1)[0, 0, 2].int().tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_rows_are_numbers(dtype):
    """A softmax over nothing is NaN, and NaN times 0 is NaN: it would spread in the next layer."""
    q, k, v = (x.to(dtype) for x in random_qkv(B=1, T=4, S=4))
    positions = torch.tensor([[0, 1, -1, -1]])
    assert attention(q, k, v, visible(positions, positions)).isfinite().all()
    nothing = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    scores = (q @ k.repeat_interleave(3, 1).transpose(-1, -2)).masked_fill(~nothing, -torch.inf)
    assert scores.softmax(-1).isnan().all()  # what the rule for padding prevents


def test_rotary_angles_by_hand():
    cos, sin = rotary_tables(torch.tensor([[3]]), d_head=4, theta=100.0)
    angles = [3.0, 3.0 / 10, 3.0, 3.0 / 10]  # theta**0 and theta**(-1/2), the same for both halves
    torch.testing.assert_close(cos[0, 0, 0], torch.tensor(angles).cos())
    torch.testing.assert_close(sin[0, 0, 0], torch.tensor(angles).sin())
    turned = rotate(torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]]), cos, sin)
    torch.testing.assert_close(turned[0, 0, 0], torch.tensor([math.cos(3), 0, math.sin(3), 0]))


def test_rotated_dot_product_depends_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    dot = lambda i, j: float(  # noqa: E731
        (
            rotate(q, *rotary_tables(torch.tensor([[i]]), 64, 1e4))
            * rotate(k, *rotary_tables(torch.tensor([[j]]), 64, 1e4))
        ).sum()
    )
    assert dot(7, 3) == pytest.approx(dot(107, 103), abs=1e-4)
    assert abs(dot(7, 3) - dot(7, 4)) > 1e-2


def test_rotary_tables_stay_in_float32_for_half_precision_models():
    cos, _ = rotary_tables(torch.tensor([[4097]]), 64, 1e4)
    assert cos.dtype == torch.float32
    exact = math.cos(4097)
    assert abs(float(cos[0, 0, 0, 0]) - exact) < 1e-3
    assert abs(math.cos(float(torch.tensor(4097.0, dtype=torch.bfloat16))) - exact) > 0.1  # bf16 rounds 4097 to 4096


def test_rmsnorm_by_hand_and_without_half_precision_overflow():
    norm = RMSNorm(2, eps=0.0, dtype=torch.float32)
    torch.testing.assert_close(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / math.sqrt(12.5))
    big = torch.full((4,), 300.0, dtype=torch.float16)  # 300**2 is past the largest float16
    assert RMSNorm(4, eps=0.0, dtype=torch.float16)(big).tolist() == [1.0] * 4


def test_scores_with_sinks_are_not_rounded_to_half():
    """Scores of a hundred or so, which differ by less than 1; in bfloat16 they lie half a unit apart."""
    q, k, v = random_qkv(D=64)
    q, k, v = (x.bfloat16() for x in (2 + 0.1 * q, 6 + 0.3 * k, v))
    mask = visible(torch.arange(5).expand(2, 5), torch.arange(5).expand(2, 5))
    sinks = torch.tensor([0]), torch.ones(2, 1, dtype=torch.bool)
    exact = by_hand(*(x.double() for x in (q, k, v)), mask)
    torch.testing.assert_close(attention_with_sinks(*(x.double() for x in (q, q, k, v)), mask, *sinks), exact)
    out = attention_with_sinks(q, q, k, v, mask, *sinks)
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() < 0.02
    k, v = (x.repeat_interleave(3, 1) for x in (k, v))
    rounded = (q / 8 @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    assert (rounded @ v.float() - exact).abs().max() > 0.1  # the partner
