"""The order of training data, which a resumed run repeats."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

__all__ = ["EpochTrainer"]


class EpochSampler(BatchSampler):
    """Batches in a new order for every epoch, which depends on the seed and the epoch alone.

    The Trainer sets the epoch at the loader, and a run that resumes inside an epoch at the batch
    sampler: there it takes batches from a loader of accelerate's, which skips those of the steps
    before and keeps of ours this sampler alone.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        super().__init__(range(num_rows), batch_size, drop_last=False)
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._num_rows, generator=generator).tolist()
        return iter([order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)])

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next."""
        self._epoch = epoch


class EpochLoader(DataLoader[Any]):
    """Batches in the order of an ``EpochSampler``; draws nothing from the global random stream."""

    def __init__(self, sampler: EpochSampler, **options: Any) -> None:
        super().__init__(batch_sampler=sampler, generator=torch.Generator(), **options)
        self._epochs = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; called by the Trainer before each epoch."""
        self._epochs.set_epoch(epoch)


class EpochTrainer(Trainer):
    """transformers' Trainer with an order of data that depends on the seed and the epoch alone."""

    num_tokens = 0
    """Learned from so far, without padding."""
    lr_ratio = 1.0
    """Learning rate of the adapters' B matrices over that of A (LoRA+); set before training."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' optimizer, its groups split where A and B learn at other rates."""
        optimizer: Any = super().create_optimizer(*args, **kwargs)
        if self.lr_ratio != 1.0:
            model: Any = self.model
            is_b = {id(p): "lora_B" in name for name, p in model.named_parameters()}
            groups = [
                {**group, "params": params, "lr": group["lr"] * (self.lr_ratio if side else 1.0)}
                for group in optimizer.param_groups
                for side in (False, True)
                if (params := [p for p in group["params"] if is_b[id(p)] == side])
            ]
            optimizer.param_groups[:] = groups
        return optimizer

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches of the training examples."""
        dataset: Any = self.train_dataset
        batch_size = self.args.per_device_train_batch_size
        return EpochLoader(
            EpochSampler(len(dataset), batch_size, self.args.seed),
            dataset=dataset,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
