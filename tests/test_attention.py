"""The attention function forwards what the cache needs and refuses everything else by name."""

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from bitkv_dist import attention


class Recorder:
    """A cache handle that remembers what it was asked."""

    def attend(self, query, scaling):
        self.query, self.scaling = query, scaling
        return query.transpose(1, 2)


@pytest.fixture
def handle() -> Recorder:
    return Recorder()


QUERY = torch.arange(48.0).reshape(1, 2, 3, 8)  # [B, H, n, D]


def attend(handle, mask=None, **keywords):
    return attention.attention(torch.nn.Identity(), QUERY, handle, handle, mask, **keywords)


def test_forwards_query_and_scaling(handle):
    output, weights = attend(handle, scaling=1 / 12)
    assert handle.query is QUERY
    assert handle.scaling == 1 / 12
    assert torch.equal(output, QUERY.transpose(1, 2))
    assert weights is None


def test_scaling_defaults_to_the_head_dim(handle):
    attend(handle)
    assert handle.scaling == 8**-0.5


def test_irrelevant_and_absent_keywords_pass(handle):
    attend(handle, position_ids=torch.arange(3)[None], use_cache=True, sliding_window=None, softcap=None, s_aux=None)


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"sliding_window": 16}, "sliding_window 16"),
        ({"softcap": 50.0}, "softcap 50.0"),
        ({"s_aux": torch.zeros(2)}, r"s_aux tensor\[2\]"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"mask": torch.ones(1, 1, 3, 3)}, "attention_mask"),
        ({"head_mask": torch.ones(2)}, "head_mask"),
        ({"a_feature_of_next_year": False}, "a_feature_of_next_year False"),
    ],
)
def test_refuses_by_name(handle, keywords, named):
    with pytest.raises(ValueError, match=named):
        attend(handle, **keywords)


def test_refuses_plain_tensors():
    keys = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="cache Tensor"):
        attention.attention(torch.nn.Identity(), QUERY, keys, keys, None)


def test_register_is_explicit_and_idempotent():
    attention.register()
    attention.register()
    assert AttentionInterface()[attention.NAME] is attention.attention
    assert attention.NAME in ALL_MASK_ATTENTION_FUNCTIONS


def test_padding_is_refused_not_dropped():
    attention.register()
    config = LlamaConfig(vocab_size=31, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    module = LlamaForCausalLM(config).eval()
    module.set_attn_implementation(attention.NAME)
    with pytest.raises(ValueError, match="attention_mask"):
        module(torch.tensor([[1, 2, 3]]), attention_mask=torch.tensor([[0, 1, 1]]))
