"""The order of training data, which a resumed run repeats."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import Trainer

__all__ = ["EpochTrainer"]


class EpochSampler(Sampler[int]):
    """A new order for every epoch that depends on the seed and the epoch alone."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return iter(torch.randperm(self._size, generator=generator).tolist())

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch = epoch


class EpochLoader(DataLoader[Any]):
    """Batches in the order of an ``EpochSampler``; draws nothing from the global random stream."""

    def __init__(self, sampler: EpochSampler, **options: Any) -> None:
        super().__init__(sampler=sampler, generator=torch.Generator(), **options)
        self._epochs = sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer before each epoch."""
        self._epochs.set_epoch(epoch)


class EpochTrainer(Trainer):
    """transformers' Trainer with an order of data that depends on the seed and the epoch alone."""

    num_tokens = 0
    """Learned from so far, without padding."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training examples."""
        dataset: Any = self.train_dataset
        return EpochLoader(
            EpochSampler(len(dataset), self.args.seed),
            dataset=dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
