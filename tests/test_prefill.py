"""Prefill: exact causal attention of a chunk, and how prompts are cut into chunks."""

import math
from contextlib import nullcontext

import pytest
import torch

from bitkv_dist import prefill
from bitkv_dist.cache import Step
from bitkv_dist.kernels import cpu, dispatch
from bitkv_dist.kernels.prefill import causal_attention, masked_sdpa

SHAPES = [(heads, group, n) for heads in (1, 2) for group in (1, 3) for n in (1, 2, 3, 17, 128, 440)]


def inputs(heads: int, group: int, n: int, total: int, dim: int = 32, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(n)
    return tuple(torch.randn(shape).to(dtype) for shape in ((heads, group, n, dim), (heads, total, dim), (heads, total, dim)))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Softmax attention in float64 with the mask written out: query i of n sees the first T - n + i + 1 tokens."""
    n, total = q.shape[2], k.shape[1]
    scores = q.double() @ k.double().unsqueeze(1).transpose(2, 3) * scaling
    hidden = torch.arange(total) > torch.arange(total - n, total)[:, None]
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v.double().unsqueeze(1)


@pytest.mark.parametrize(("heads", "group", "n"), SHAPES)
@pytest.mark.parametrize("before", [0, 1, 33, 512])
@pytest.mark.parametrize("backend", ["best", "reference"])
def test_chunk_attention_is_causal_softmax(heads, group, n, before, backend):
    q, k, v = inputs(heads, group, n, before + n)
    with dispatch.forced(backend) if backend == "reference" else nullcontext():
        found = causal_attention(q, k, v, 0.21)
    assert found.dtype == torch.float32 and found.shape == q.shape
    torch.testing.assert_close(found.double(), plain(q, k, v, 0.21), atol=3e-6, rtol=0)


@pytest.mark.parametrize(("group", "n"), [(1, 1), (3, 17), (1, 128), (3, 440)])
@pytest.mark.parametrize("before", [0, 512])
def test_bfloat16_loses_no_more_than_its_own_rounding(group, n, before):
    """At most twice the error of a softmax in bfloat16."""
    q, k, v = inputs(2, group, n, before + n, dtype=torch.bfloat16)
    found, wanted = causal_attention(q, k, v, 0.21), plain(q, k, v, 0.21)
    hidden = torch.arange(before + n) > torch.arange(before, before + n)[:, None]
    scores = (q @ k.unsqueeze(1).transpose(2, 3) * 0.21).masked_fill(hidden, -math.inf)
    naive = scores.softmax(-1) @ v.unsqueeze(1)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).abs().max() <= 2 * (naive.double() - wanted).abs().max() + 1e-3
    rounded = wanted.bfloat16().double()
    assert (found.double() - wanted).norm() <= 1.5 * (rounded - wanted).norm()  # of the whole, not of each step of it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_gpus_pairs_the_same_heads(dtype):
    """Run on a CPU, where torch takes another kernel for the same call."""
    q, k, v = inputs(2, 3, 17, 50, dtype=dtype)
    found, wanted = masked_sdpa(q, k, v, 0.21), plain(q, k, v, 0.21)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_a_mask_on_the_wrong_corner_would_show():
    """C11: two queries over four tokens with equal scores see three and four of them."""
    v = torch.arange(1.0, 5.0)[None, :, None].expand(1, 4, 8)
    found = causal_attention(torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 8), v, 1.0)
    torch.testing.assert_close(found[0, 0], torch.tensor([2.0, 2.5])[:, None].expand(2, 8))


@pytest.mark.parametrize(("heads", "group", "n"), [(1, 3, 2), (1, 7, 1), (1, 3, 21), (1, 3, 22), (2, 1, 128), (1, 3, 440)])
@pytest.mark.parametrize("before", [0, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(heads, group, n, before, dtype):
    q, k, v = inputs(heads, group, n, before + n, 64, dtype)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(causal_attention(q, k, v, 0.125))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


@pytest.mark.skipif(cpu.load() is None, reason="no C++ kernels")
@pytest.mark.parametrize("dim", [8, 24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_chunks_nor_instruction_sets_change_a_bit(dim, dtype):
    """Ours stands at fixed blocks of keys: a query's output is a function of its own keys alone. One instruction set has
    products in bfloat16, which give other bits."""
    q, k, v = inputs(2, 3, 200, 200, dim, dtype)
    pieces = [(0, 200), (0, 1), (1, 78), (78, 200)]
    found, alone = [], []
    for isa in ("avx512bf16", "avx512", "avx2"):
        try:
            cpu.choose(isa)
        except ValueError:
            continue
        with dispatch.forced(isa):
            whole, *parts = [causal_attention(q[:, :, a:b], k[:, :b], v[:, :b], dim**-0.5) for a, b in pieces]
        assert torch.equal(torch.cat(parts, dim=2), whole)
        (alone if isa == "avx512bf16" and dtype == torch.bfloat16 else found).append(whole)
    if not found:
        pytest.skip("no AVX2: prompts go through torch")
    assert all(torch.equal(other, found[0]) for other in found)
    for whole in (found[0], *alone):
        atol = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(whole.double(), plain(q, k, v, dim**-0.5), atol=atol, rtol=0)
    if alone:
        assert not torch.equal(alone[0], found[0])  # or it has not run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows(dtype):
    q, k, v = inputs(1, 1, 70, 70, dtype=dtype)
    k[0, 40, 3] = float("nan")
    found = causal_attention(q, k, v, 0.2)
    assert torch.isfinite(found[0, 0, :40]).all() and not torch.isfinite(found[0, 0, 40:]).any()


@pytest.mark.parametrize("n", [1, 17, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_stay_finite(n, dtype):
    q, k, v = inputs(2, 2, n, 300, dtype=dtype)
    found = causal_attention(q * 0 + 24, k * 0 + 24, v, 1.0)
    assert torch.isfinite(found).all()


class Recorder:
    """A model of one layer and a cache of two sequences that only note what they are asked to do."""

    def __init__(self, held: list[int]) -> None:
        self.held, self.calls = held, []
        self.device, self.step, self.layers = torch.device("cpu"), None, [None]

    def length(self, sequence: int) -> int:
        return self.held[sequence]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float().unsqueeze(-1)

    def rotary(self, hidden, positions):
        return positions

    def layer(self, index, hidden, positions, rotary, cache, round_rows):
        assert cache is self and isinstance(self.step, Step)
        self.calls.append((self.step.sequences, positions[0].tolist(), hidden[0, :, 0].tolist()))
        return hidden


@pytest.mark.parametrize(
    ("held", "new", "chunk", "pieces"),
    [
        (0, 10, 512, [(0, 10)]),
        (0, 20, 8, [(0, 8), (8, 16), (16, 20)]),
        (5, 20, 8, [(5, 8), (8, 16), (16, 24), (24, 25)]),
        (8, 8, 8, [(8, 16)]),
        (7, 1, 8, [(7, 8)]),
        (511, 2, 512, [(511, 512), (512, 513)]),
        (3, 3, 1, [(3, 4), (4, 5), (5, 6)]),
    ],
)
def test_packed_chunks_end_at_multiples_of_the_chunk_in_the_whole_sequence(held, new, chunk, pieces):
    """So the shape of the work is a function of position alone, wherever a turn begins."""
    recorder, progress = Recorder([99, held]), []
    tokens = [100 + i for i in range(new)]
    last = list(prefill.packed_chunks(recorder, recorder, Step([1]), tokens, chunk))[-1]
    assert [(positions[0], positions[-1] + 1) for _, positions, _ in recorder.calls] == pieces
    assert all(sequences == [1] for sequences, _, _ in recorder.calls)
    assert [token for _, _, ids in recorder.calls for token in ids] == tokens
    assert last[0, -1, 0] == tokens[-1]

    recorder = Recorder([held, 0])
    found = prefill.packed(recorder, recorder, [tokens, [7]], chunk, lambda done, total: progress.append((done, total)))
    assert found.flatten().tolist() == [tokens[-1], 7]
    assert progress[-1] == (new + 1, new + 1) and progress == sorted(progress)
