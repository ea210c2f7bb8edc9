"""RoPE taken out of keys and put back: the angles are those of the models."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bitkv_dist.codec.rope import PAGES, Rope, channel_pairs, page_numbers

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("parameters", [PLAIN, YARN])
@pytest.mark.parametrize("page_tokens", [64, 128])
def test_keys_come_back_as_they_were(parameters, page_tokens):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=parameters)
    rotary = LlamaRotaryEmbedding(config)
    k = torch.randn(1, 3, 8 * page_tokens, 32)
    cos, sin = rotary(k, torch.arange(k.shape[2])[None])
    _, turned = apply_rotary_pos_emb(k, k, cos, sin)
    rope = Rope(rotary.inv_freq, rotary.attention_scaling, page_tokens, torch.device("cpu"))
    paged = turned[0].unflatten(1, (8, page_tokens)).transpose(0, 1)
    pages = torch.arange(8)
    found = rope.undo(paged, pages).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(found, k[0], atol=2e-3, rtol=0)  # the model's own angles are rounded: 1e-3 at position 1,000
    torch.testing.assert_close(rope.apply(rope.undo(paged, pages), pages), paged, atol=1e-5, rtol=1e-5)


def test_channels_that_rope_leaves_alone():
    rope = Rope(torch.tensor([1.0, 0.1]), 1.0, 64, torch.device("cpu"))
    k = torch.randn(1, 2, 64, 8)
    turned = rope.apply(k, torch.tensor([5]))
    assert torch.equal(turned[..., 4:], k[..., 4:]) and not torch.equal(turned[..., :4], k[..., :4])
    assert channel_pairs(2, 8).tolist() == [[0, 2], [1, 3], [4, 5], [6, 7]]


def test_a_page_does_not_depend_on_the_others():
    rope = Rope(10000.0 ** -(torch.arange(0, 32, 2) / 32), 1.0, 64, torch.device("cpu"))
    k = torch.randn(7, 2, 64, 32)
    pages = torch.tensor([3, 9000, 1, 16383, 77, 0, 2])
    together = rope.undo(k, pages)
    for i in range(7):
        assert torch.equal(rope.undo(k[i : i + 1].clone(), pages[i : i + 1]), together[i : i + 1])


def test_pages_beyond_the_tables_are_refused():
    with pytest.raises(ValueError, match=rf"page {PAGES}: keys before RoPE are served in pages below {PAGES}; use larger"):
        page_numbers([3, PAGES], torch.device("cpu"))
