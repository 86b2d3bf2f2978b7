"""Grouped-query attention in three forms: against transformers, by hand, and what each of them copies."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import eager_attention_forward

from kvcourse.gqa import attend_fused, attend_grouped, attend_repeated
from kvcourse.layers import visible

FORMS = [attend_repeated, attend_grouped, attend_fused]


def draw(H, H_kv, T=5, S=5, B=2, D=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, H_kv, S, D), (B, H_kv, S, D)
    return [torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]


def llama(q, k, v, mask=None):
    """What transformers computes; there masks are added to the scores. Its softmax is in float32."""
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False)
    added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, float("-inf"))
    return eager_attention_forward(module, q, k, v, added, q.shape[-1] ** -0.5)[0].transpose(1, 2)


def causal(T, S, B=1):
    positions = torch.arange(S).expand(B, S)
    return visible(positions[:, S - T :], positions)


@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize(("H", "H_kv"), [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3)])
@pytest.mark.parametrize(("T", "S"), [(5, 5), (1, 9), (3, 9)])
def test_each_form_equals_transformers(attend, H, H_kv, T, S):
    q, k, v = draw(H, H_kv, T, S)
    for mask in (causal(T, S), causal(T, S, B=2), None):
        torch.testing.assert_close(attend(q, k, v, mask), llama(q, k, v, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("H", "H_kv"), [(8, 2), (8, 1), (6, 3)])
def test_the_forms_are_equal_far_below_what_transformers_can_tell(H, H_kv):
    q, k, v = draw(H, H_kv)
    first, *others = (attend(q, k, v, causal(5, 5)) for attend in FORMS)
    for other in others:
        torch.testing.assert_close(other, first, atol=1e-13, rtol=0)


@pytest.mark.parametrize("attend", FORMS)
def test_rows_of_unequal_length(attend):
    """The second row has three keys and an empty slot or two; the first has all five."""
    q, k, v = draw(8, 2, T=1)
    key_positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])
    out = attend(q, k, v, visible(torch.tensor([[4], [2]]), key_positions))
    torch.testing.assert_close(out[:1], llama(q[:1], k[:1], v[:1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(out[1:], llama(q[1:], k[1:, :, :3], v[1:, :, :3]), atol=1e-6, rtol=0)
    assert (out - llama(q, k, v)).abs().max() > 0.1  # without the mask it is something else


@pytest.mark.parametrize("attend", FORMS)
def test_heads_that_share_stand_next_to_each_other(attend):
    """Zero queries give the mean of the values, here the number of the key/value head: 0 0 0 1 1 1, and not the
    0 1 0 1 0 1 of heads laid out like tiles."""
    q, k = torch.zeros(1, 6, 1, 4), torch.randn(1, 2, 3, 4)
    v = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 3, 4)
    heads = attend(q, k, v)[0, :, 0, 0]
    assert heads.tolist() == pytest.approx([0, 0, 0, 1, 1, 1])
    tiled = attend(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))[0, :, 0, 0]
    assert tiled.tolist() == pytest.approx([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("attend", FORMS)
def test_half_precision(attend):
    q, k, v = draw(8, 2, dtype=torch.bfloat16)
    out = attend(q, k, v, causal(5, 5))
    assert out.dtype == torch.bfloat16
    exact = llama(*(x.double() for x in (q, k, v)), causal(5, 5))
    torch.testing.assert_close(out.double(), exact, atol=0.02, rtol=0)


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation wrote into memory of its own."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.data_ptr() not in given:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_only_the_repeated_form_copies_keys_and_values():
    """At a step of decoding: one query a head, keys and values that are part of a longer cache."""
    B, H, H_kv, S, D = 2, 8, 2, 100, 16
    q, k, v = draw(H, H_kv, T=1, S=2 * S, B=B, D=D)
    k, v = k[:, :, :S], v[:, :, :S]
    written = {}
    for attend in (attend_repeated, attend_grouped):
        with Largest() as largest:
            attend(q, k, v, causal(1, S))
        written[attend] = largest.numbers
    assert written[attend_repeated] >= B * H * S * D
    assert written[attend_grouped] == B * H * S  # the scores


@pytest.mark.parametrize("attend", FORMS)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, k, v: (q, k[:, :1].repeat(1, 3, 1, 1), v[:, :1].repeat(1, 3, 1, 1)), "8 query heads cannot share 3"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "8 query heads cannot share 0"),
        (lambda q, k, v: (q, k, v[:, :, :4]), r"k \(2, 2, 5, 8\), v \(2, 2, 4, 8\)"),
        (lambda q, k, v: (q, k[..., :6], v[..., :6]), "the same B and D"),
        (lambda q, k, v: (q[:1], k, v), "the same B and D"),
        (lambda q, k, v: (q[0], k[0], v[0]), r"q \(8, 5, 8\)"),
        (lambda q, k, v: (q, k, v, causal(5, 5)[:, 0]), r"mask must be bool and \(B, 1, T, S\)"),
        (lambda q, k, v: (q, k, v, causal(4, 5)), r"mask must be .*\(1, 1, 4, 5\)"),
        (lambda q, k, v: (q, k, v, causal(5, 5).double()), "mask must be bool .*float64"),
    ],
)
def test_what_does_not_belong_together_is_refused(attend, change, said):
    with pytest.raises(ValueError, match=said):
        attend(*change(*draw(8, 2)))


@pytest.mark.parametrize("attend", FORMS)
def test_products_past_the_largest_float16_are_scaled_first(attend):
    """Each product of query and key is 64 x 40 x 40 = 102,400, past 65,504; divided by 8 it is not."""
    q, k, v = draw(8, 2, D=64, dtype=torch.float16)
    q, k = torch.full_like(q, 40), torch.full_like(k, 40)
    out = attend(q, k, v, causal(5, 5))
    assert (q[0, 0] @ k[0, 0].T).isinf().all()
    torch.testing.assert_close(out.double(), llama(q.double(), k.double(), v.double(), causal(5, 5)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("attend", [attend_repeated, attend_grouped])
def test_softmax_is_taken_in_float32(attend, monkeypatch):
    seen = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", lambda *args, **kw: seen.append(softmax(*args, **kw)) or seen[-1])
    for dtype, wide in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        assert attend(*draw(8, 2, dtype=dtype)).dtype == dtype
        assert seen.pop().dtype == wide
