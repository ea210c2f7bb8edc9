"""Residual codebooks: channels normalised by their own mean and deviation, blocks of 4 coded twice, the second time what the
first word left over. 16 words each: 2 bits per element and nothing else, encoded once on write, decoded once on read.

Keys are normalised before RoPE, where a channel has a mean. The words come from the calibration file (fit/books.py makes it):
those of the first stage are fitted to data and frozen before those of the second are fitted to what they leave.
"""

from __future__ import annotations

from bitkv_dist.codec.book_pages import BookCodec


class ResidualCodec(BookCodec):
    """All of it is in the books: two stages, a mean and a deviation for each channel."""
