"""Plain-torch twin of every kernel: readable first, and the definition that the fast ones are tested against.

Shapes use the letters of the design: HK KV heads, G query heads of a group, Q query positions, P page tokens, D head dim,
B stored bits, S scanned bits, n granules of `pages` pages each. Integer parts are exact: sums of small integers held in
fp32 stay below 2^24, so any order of summation gives the same number.
"""

# ruff: noqa: F401

from bitkv_dist.kernels.reference.attention import Attended, attend, attend_dense, quantize_weights, value_integers, value_pass
from bitkv_dist.kernels.reference.calibration import slope_sums, tail_weights, true_scores
from bitkv_dist.kernels.reference.codes import HALF_MAX, SCALE_FACTORS, Codes, quantize, search_scale, to_half
from bitkv_dist.kernels.reference.layout import (
    bit_table,
    move_last,
    pack_bits,
    pack_key_plane,
    pack_low,
    pack_planes,
    pack_value_plane,
    unpack_bits,
    unpack_key_plane,
    unpack_low,
    unpack_planes,
    unpack_value_plane,
)
from bitkv_dist.kernels.reference.pages import Plane, decode, decode_rotated, encode, level_unit, levels
from bitkv_dist.kernels.reference.rotation import dct_matrix, hadamard, rotate, rotate_back, small_matmul, split_dim
from bitkv_dist.kernels.reference.scores import Noise, Query, centroid_scores, key_scores, quantize_query, score, score_integers
from bitkv_dist.kernels.reference.selection import (
    Selection,
    Whole,
    competing,
    largest,
    peak_and_mass,
    rank_keys,
    select,
    share_counts,
)
from bitkv_dist.kernels.reference.sums import divide, exp2, fold_sum, safe_divide, tree_sum
