"""Which blocks a run trains on, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler


class Blocks(Dataset):
    """Rows of a memory-mapped array as examples, int64."""

    def __init__(self, blocks: np.ndarray) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self.blocks[index].astype(np.int64))
        return {"input_ids": ids, "labels": ids}


class SeededOrder(Sampler[int]):
    """`length` indices: one permutation of all blocks after another, from `seed` alone, whatever the model."""

    def __init__(self, blocks: int, length: int, seed: int) -> None:
        self.blocks, self.length, self.seed = blocks, length, seed

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        left = self.length
        while left > 0:
            order = torch.randperm(self.blocks, generator=generator).tolist()[:left]
            yield from order
            left -= len(order)
