"""Plain-torch twin of every kernel: readable first, and the definition that the fast ones are tested against.

Shapes use the letters of the design: HK KV heads, G query heads of a group, Q query positions, P page tokens, D head dim,
B stored bits, S scanned bits, n granules of `pages` pages each. Integer parts are exact: sums of small integers held in
fp32 stay below 2^24, so any order of summation gives the same number.
"""

from bitkv_dist.kernels.reference.attention import Attended, attend, attend_dense, quantize_weights, value_integers, value_pass
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
from bitkv_dist.kernels.reference.pages import Plane, decode, encode, level_unit, levels
from bitkv_dist.kernels.reference.rotation import dct_matrix, hadamard, rotate, rotate_back, small_matmul, split_dim
from bitkv_dist.kernels.reference.scores import Query, quantize_query, score, score_integers
from bitkv_dist.kernels.reference.selection import Selection, largest, select
from bitkv_dist.kernels.reference.sums import divide, exp2, fold_sum, safe_divide, tree_sum

__all__ = ["HALF_MAX", "SCALE_FACTORS", "Attended", "Codes", "Plane", "Query", "Selection", "attend", "attend_dense", "bit_table", "dct_matrix", "decode", "divide", "encode", "exp2", "fold_sum", "hadamard", "largest", "level_unit", "levels", "move_last", "pack_bits", "pack_key_plane", "pack_low", "pack_planes", "pack_value_plane", "quantize", "quantize_query", "quantize_weights", "rotate", "rotate_back", "safe_divide", "score", "score_integers", "search_scale", "select", "small_matmul", "split_dim", "to_half", "tree_sum", "unpack_bits", "unpack_key_plane", "unpack_low", "unpack_planes", "unpack_value_plane", "value_integers", "value_pass"]
