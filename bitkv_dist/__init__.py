"""Distributed long-context inference over a bit-plane packed, sequence-sharded KV cache."""

__version__ = "0.1.0"
