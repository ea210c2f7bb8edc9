"""Scores, selection and attention of the plain-torch kernels against their formulas, written out slowly in float64."""

import math

import numpy as np
import pytest
import torch
from test_reference import RULES, equal_bits

from bitkv_dist.kernels import reference
from bitkv_dist.kernels.reference import Selection
from bitkv_dist.rotation import layer_signs

# --------------------------------------------------------------------------------------------- scores and selection


def granules(n: int, pages: int, heads: int, tokens: int, dim: int, key_bits=(4, 1), value_bits=(4, 1), seed=0):
    """(signs K, keys, values): encoded pages whose means and norms differ, leading dims [n, pages, heads]."""
    torch.manual_seed(seed)
    shape = (n * pages, heads, tokens, dim)

    def encoded(side: str, bits: tuple[int, int]) -> reference.Plane:
        x = torch.randn(shape) * torch.rand(*shape[:3], 1) + torch.randn(*shape[:2], 1, dim)
        plane = reference.encode(x, layer_signs(seed, 0, 0, heads, side, dim), *bits, side)
        return reference.Plane(*(part.unflatten(0, (n, pages)) for part in plane))

    return layer_signs(seed, 0, 0, heads, "K", dim), encoded("K", key_bits), encoded("V", value_bits)


def base2_query(heads: int, queries: int, group: int, dim: int) -> torch.Tensor:
    return torch.randn(heads, queries, group, dim) * dim**-0.5 * math.log2(math.e)


def slow_scores(query: reference.Query, keys: reference.Plane, low_bits: int, noise: float) -> np.ndarray:
    """float64 [n, HK, Q, G, T]: q.c + a_t <q, level> + 0.5 ln2 |q'|^2 r_t^2 / D, with the INT8 query in the second term."""
    bits = keys.planes.shape[-3] + low_bits
    levels = reference.levels(keys, "K", low_bits).double().numpy() * (1 if bits == 1 else 0.5)
    a = (keys.full if low_bits else keys.scan).double().numpy()
    q = (query.codes * query.scale.unsqueeze(-1)).double().numpy()
    exact_q, norm2 = query.rotated.double().numpy(), query.norm2.double().numpy()
    base = np.einsum("hqgd,nphd->nhqgp", exact_q, keys.centroid.double().numpy(), optimize=True)
    product = np.einsum("hqgd,nphtd,npht->nhqgpt", q, levels, a, optimize=True)
    lost = 0.5 * math.log(2) * noise * np.einsum("hqg,npht->nhqgpt", norm2, a * a)
    scores = base[..., None] + product + lost
    return scores.reshape(*scores.shape[:-2], -1)


@pytest.mark.parametrize(("bits", "scan_bits"), [(1, 1), (2, 2), (4, 1), (4, 2), (8, 8)])
@pytest.mark.parametrize("dim", [64, 80])
def test_score_is_the_formula(bits, scan_bits, dim):
    signs, keys, _ = granules(2, 2, 3, 64, dim, key_bits=(bits, scan_bits))
    query = reference.quantize_query(base2_query(3, 2, 2, dim), signs)
    for low_bits in {0, bits - scan_bits}:
        a = (keys.full if low_bits else keys.scan).float().transpose(1, 2).flatten(2)
        codes = reference.levels(keys, "K", low_bits).transpose(1, 2).flatten(2, 3)
        unit = reference.level_unit(scan_bits + low_bits)
        for noise in (0.0, 0.571):
            found = reference.score(query, codes, a, unit, keys.centroid.float(), noise)
            np.testing.assert_allclose(found.double(), slow_scores(query, keys, low_bits, noise), atol=2e-5)


def test_the_correction_makes_sealed_tokens_weigh_like_exact_ones():
    """Summed over many keys, 2^score of a sign code is too small by the lost variance; the log-normal term gives it back."""
    torch.manual_seed(0)
    dim = 64
    keys = torch.randn(64, 1, 128, dim)
    q = torch.randn(1, 1, 4, dim) * dim**-0.5 * math.log2(math.e) * 1.2
    signs = layer_signs(0, 0, 0, 1, "K", dim)
    plane = reference.encode(keys, signs, 1, 1, "K")
    query = reference.quantize_query(q, signs)
    true_mass = (2 ** (q[0, 0].double() @ keys[:, 0].flatten(0, 1).double().T)).sum(-1)

    def mass(noise: float) -> torch.Tensor:
        codes, scales = reference.levels(plane, "K", 0), plane.scan.float()
        scores = reference.score(query, codes, scales, 1.0, plane.centroid.float().unsqueeze(1), noise)
        return (2 ** scores.double()).sum((0, 1, 2, 4))

    assert ((mass(0.571) / true_mass - 1).abs() < 0.04).all()
    assert ((mass(0.0) / true_mass) < 0.85).all()


def slow_select(scores: np.ndarray, sealed: list[int], rule: Selection) -> np.ndarray:
    """The largest by (weight, lower position first), with float64 log-sum-exps."""
    chosen = np.zeros(scores.shape, bool)
    for n, count in enumerate(sealed):
        k = min(count, max(rule.min_tokens, math.ceil(rule.value * count)))
        for head, query in np.ndindex(scores.shape[1:3]):
            rows = scores[n, head, query].astype(np.float64)  # [G, T]
            if rule.group and len(rows) > 1:
                weights = rows - np.log2(np.exp2(rows).sum(-1, keepdims=True)) if count else rows
                rows = np.tile(weights.max(0), (len(rows), 1))
            for g, row in enumerate(rows):
                order = sorted(range(len(row)), key=lambda t, row=row: (-row[t], t))
                chosen[n, head, query, g, order[:k]] = True
    return chosen & ~np.isinf(scores)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rule", RULES)
def test_selection_with_many_ties(group, rule):
    """Integer scores, so that almost every boundary falls into a tie; granules with fewer sealed tokens, one with none."""
    torch.manual_seed(0)
    scores = torch.randint(-3, 4, (4, 2, 3, group, 128)).float()
    sealed = torch.tensor([128, 64, 0, 65])
    scores = torch.where(torch.arange(128) < sealed[:, None, None, None, None], scores, -math.inf)
    found = reference.select(scores, sealed, rule)
    np.testing.assert_array_equal(found.numpy(), slow_select(scores.numpy(), sealed.tolist(), rule))


def test_selection_counts_of_a_granule():
    for sealed, tokens in ((512, 26), (384, 20), (128, 7), (64, 4)):  # ceil(0.05 * sealed)
        scores = torch.where(torch.arange(512) < sealed, torch.randn(1, 1, 1, 1, 512), -math.inf)
        assert reference.select(scores, torch.tensor([sealed]), Selection(0.05, 1, True)).sum() == tokens


def test_a_head_with_small_scores_still_chooses_for_its_group():
    """A group ranks by weight inside each head, not by raw score."""
    scores = torch.zeros(1, 1, 1, 2, 64)
    scores[0, 0, 0, 0] += 100  # a head whose weights are all alike, on a high level
    scores[0, 0, 0, 1, 33] = 9  # the only token that carries a head
    found = reference.select(scores, torch.tensor([64]), Selection(0.0, 1, True))
    assert found.nonzero()[:, -1].tolist() == [33, 33]


# ---------------------------------------------------------------------------------------------------------- attend


def slow_attend(query, keys, values, page_valid, key_low, value_low, noise, chosen):
    """(m, l, o) in float64: weights are 127ths of the page's largest; chosen tokens at their full code, the tail as scanned."""
    pages = page_valid.shape[1]
    tokens = keys.scan.shape[-1]
    valid = np.repeat(page_valid.numpy(), tokens, 1)[:, None, None, None, :]
    key_scan, value_scan = keys.planes.shape[-3], values.planes.shape[-3]
    scores = slow_scores(query, keys, 0, noise[key_scan, key_scan + key_low])
    if key_low:
        scores = np.where(chosen, slow_scores(query, keys, key_low, noise[key_scan + key_low, key_scan + key_low]), scores)
    scores = np.where(valid, scores, -np.inf)
    m = scores.max(-1)
    p = np.exp2(scores - np.where(np.isinf(m), 0, m)[..., None])
    out = np.zeros((*m.shape, values.centroid.shape[-1]))
    for refined in {False, bool(value_low)}:
        bits = value_scan + (value_low if refined else 0)
        levels = reference.levels(values, "V", value_low if refined else 0).double().numpy() * (1 if bits == 1 else 0.5)
        a = (values.full if refined else values.scan).double().numpy()
        w = p if not value_low else np.where(chosen == refined, p, 0)
        w = w.reshape(*m.shape, pages, tokens) * a.transpose(0, 2, 1, 3)[:, :, None, None]
        peak = w.max(-1, keepdims=True)
        rounded = np.rint(127 * w / np.where(peak == 0, 1, peak)) * peak / 127
        out += np.einsum("nhqgpt,nphtd->nhqgd", rounded, levels, optimize=True)
    mass = p.reshape(*m.shape, pages, tokens).sum(-1)
    return m, p.sum(-1), out + np.einsum("nhqgp,nphd->nhqgd", mass, values.centroid.double().numpy())


NOISE = {(s, b): 0.5 / s for b in range(1, 9) for s in range(1, b + 1)}
ATTENTIONS = [  # key bits, value bits (stored, scanned), selection
    ((1, 1), (1, 1), None),
    ((2, 2), (4, 4), None),
    ((4, 1), (4, 1), Selection(0.05, 1, True)),
    ((4, 2), (2, 2), Selection(0.1, 1, False)),
    ((1, 1), (3, 1), Selection(0.05, 3, True)),
    ((4, 1), (4, 1), Selection(1.0, 1, True)),
]


@pytest.mark.parametrize(("key_bits", "value_bits", "selection"), ATTENTIONS)
def test_attention_is_the_formula(key_bits, value_bits, selection):
    signs, keys, values = granules(3, 2, 2, 64, 48, key_bits, value_bits)
    valid = torch.tensor([[True, True], [False, True], [False, False]])
    query = reference.quantize_query(base2_query(2, 3, 2, 48), signs)
    lows = key_bits[0] - key_bits[1], value_bits[0] - value_bits[1]
    found = reference.attend(query, keys, values, valid, *lows, NOISE, selection)
    if selection is None:
        assert found.refined is None
    else:
        scanned = slow_scores(query, keys, 0, NOISE[key_bits[1], key_bits[0]])
        scanned = np.where(np.repeat(valid.numpy(), 64, 1)[:, None, None, None], scanned, -np.inf)
        np.testing.assert_array_equal(found.refined.numpy(), slow_select(scanned, [128, 64, 0], selection))
    chosen = None if selection is None else found.refined.numpy()
    m, l, o = slow_attend(query, keys, values, valid, *lows, NOISE, chosen)
    np.testing.assert_allclose(found.m.double(), m, atol=2e-5)
    np.testing.assert_allclose(found.l.double(), l, rtol=5e-5)
    error = np.abs(found.o.double().numpy() - o).max(-1) / np.maximum(1e-9, np.abs(o).max(-1))
    assert np.median(error) < 2e-5 and error.max() < 3e-3  # a weight on the edge between two integers may go either way
    assert torch.isneginf(found.m[2]).all() and not found.l[2].any() and not found.o[2].any()


def with_threads(threads: int, function, *args):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return function(*args)
    finally:
        torch.set_num_threads(before)


def granule_of(plane: reference.Plane, index: int) -> reference.Plane:
    return reference.Plane(*(part[index : index + 1] for part in plane))


@pytest.mark.parametrize(("key_bits", "value_bits", "selection"), [ATTENTIONS[1], ATTENTIONS[2]])
def test_a_granule_does_not_depend_on_its_neighbours_or_on_threads(key_bits, value_bits, selection):
    signs, keys, values = granules(3, 4, 1, 128, 64, key_bits, value_bits)
    valid = torch.tensor([[False, True, True, True], [True] * 4, [True, False, False, False]])
    query = reference.quantize_query(base2_query(1, 1, 7, 64), signs)
    rest = (key_bits[0] - key_bits[1], value_bits[0] - value_bits[1], NOISE, selection)
    together = with_threads(1, reference.attend, query, keys, values, valid, *rest)
    threaded = with_threads(2, reference.attend, query, keys, values, valid, *rest)
    assert all(equal_bits(a, b) for a, b in zip(together[:3], threaded[:3], strict=True))
    for i in range(3):
        alone = reference.attend(query, granule_of(keys, i), granule_of(values, i), valid[i : i + 1], *rest)
        assert all(equal_bits(a[i : i + 1], b) for a, b in zip(together[:3], alone[:3], strict=True))


# ---------------------------------------------------------------------------------------------------- attend_dense


@pytest.mark.parametrize("tokens", [1, 31, 4096])
@pytest.mark.parametrize(("heads", "group"), [(1, 7), (3, 2)])
def test_dense_attention_against_float64(tokens, heads, group):
    """C02: the log-sum-exp within 1e-4 of torch's."""
    torch.manual_seed(tokens)
    q, k, v = base2_query(heads, 2, group, 64), torch.randn(3, heads, tokens, 64), torch.randn(3, heads, tokens, 64)
    m, l, o = reference.attend_dense(q, k, v, None)
    logits = torch.einsum("hqgd,nhtd->nhqgt", q.double(), k.double()) * math.log(2)
    lse = (m + l.log2()) * math.log(2)
    torch.testing.assert_close(lse.double(), torch.logsumexp(logits, -1), atol=1e-5, rtol=0)
    wanted = torch.einsum("nhqgt,nhtd->nhqgd", logits.softmax(-1), v.double())
    torch.testing.assert_close((o / l.unsqueeze(-1)).double(), wanted, atol=1e-5, rtol=0)


def test_dense_attention_over_nothing():
    q, k = torch.randn(2, 1, 3, 64), torch.randn(4, 2, 31, 64)
    nothing_valid = torch.zeros(1, 1, 1, 1, 31, dtype=torch.bool)
    for keys, valid in ((k[:, :, :0], None), (k, nothing_valid)):
        found = reference.attend_dense(q, keys, keys, valid)
        assert [part.shape for part in found] == [(4, 2, 1, 3), (4, 2, 1, 3), (4, 2, 1, 3, 64)]
        assert torch.isneginf(found[0]).all() and not found[1].any() and not found[2].any()


@pytest.mark.parametrize("tokens", [31, 128, 384])
@pytest.mark.parametrize("rows", [1, 3, 6, 7, 12])
def test_dense_attention_of_one_matrix_has_the_bits_of_a_batch(tokens, rows):
    """One KV head and one set of tokens: torch would split that product among threads, which changes last bits."""
    torch.manual_seed(rows)
    q, k, v = base2_query(1, 1, rows, 64), torch.randn(3, 1, tokens, 64), torch.randn(3, 1, tokens, 64)
    batch = reference.attend_dense(q, k, v, None)
    for threads in (1, 2):
        alone = with_threads(threads, reference.attend_dense, q, k[:1], v[:1], None)
        assert all(equal_bits(a[:1], b) for a, b in zip(batch, alone, strict=True))
