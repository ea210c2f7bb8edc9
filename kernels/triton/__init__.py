"""Triton kernels: twins of kernels/reference that read the packed pages in place, with the functions of kernels/cpu."""

# ruff: noqa: F401

from bitkv_dist.kernels.triton.attend import Refinement, Table, attend, attend_lanes, granule_table, lane_bounds
from bitkv_dist.kernels.triton.conclude import conclude
from bitkv_dist.kernels.triton.encode import encode
from bitkv_dist.kernels.triton.exact import attend_exact
from bitkv_dist.kernels.triton.layout import Layout
from bitkv_dist.kernels.triton.merge import halve, tree
from bitkv_dist.kernels.triton.query import Query, quantize_query, rotate_back
from bitkv_dist.kernels.triton.words import Keys, Values, WordPages, attend_words, padded_groups
