"""The byte layout of a page record: named fields, one after the other, each on a 16-byte boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ALIGNMENT = 16


@dataclass(frozen=True)
class Field:
    """One array of a record: its offset in bytes, element type and shape."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RecordLayout:
    """Fields of a record; `bytes` is the size of one page of one KV head, padding included."""

    def __init__(self, *fields: tuple[str, torch.dtype, tuple[int, ...]]) -> None:
        self.fields: dict[str, Field] = {}
        self.bytes = 0
        for name, dtype, shape in fields:
            self.fields[name] = Field(name, self.bytes, dtype, shape)
            self.bytes += -(-self.fields[name].bytes // ALIGNMENT) * ALIGNMENT

    def view(self, records: torch.Tensor, name: str) -> torch.Tensor:
        """The field `name` of uint8 records [..., bytes] as a view [..., *shape]; writing to it writes the records."""
        field = self.fields[name]
        return records[..., field.offset : field.offset + field.bytes].view(field.dtype).unflatten(-1, field.shape)

    def write(self, records: torch.Tensor, **arrays: torch.Tensor) -> torch.Tensor:
        """Copies each array into its field and returns the records."""
        for name, array in arrays.items():
            self.view(records, name).copy_(array)
        return records
