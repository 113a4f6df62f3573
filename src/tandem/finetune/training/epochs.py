"""The order of the training data, which is the same in a resumed run, and the whole run's loss."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader
from transformers import Trainer

__all__ = ["EpochTrainer"]


class EpochSampler(BatchSampler):
    """A sampler of batches, in a new order for each epoch that depends only on the seed and the
    epoch.

    transformers' Trainer sets the epoch of the loader. But a run that resumes within an epoch reads
    from another loader, which accelerate makes of this sampler to skip the batches of earlier
    steps; then the epoch is set here.
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
        """Set the epoch, whose number and the seed determine the order of the next iteration."""
        self._epoch = epoch


class EpochLoader(DataLoader[Any]):
    """A loader of batches in the order of an ``EpochSampler``; it draws no number from torch's
    global random generator.
    """

    def __init__(self, sampler: EpochSampler, **options: Any) -> None:
        super().__init__(batch_sampler=sampler, generator=torch.Generator(), **options)
        self._epochs = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, whose number and the seed determine the order of the next iteration.
        Called by the Trainer.
        """
        self._epochs.set_epoch(epoch)


class EpochTrainer(Trainer):
    """transformers' Trainer, with an order of the data that only the seed and the epoch determine,
    and with the loss of the whole run at its end, where a resumed run would tell that of its last
    steps.
    """

    num_tokens = 0
    """Number of tokens trained on so far, without padding."""
    loss_sum = 0.0
    """Sum of the losses of all steps so far, those before a resumed run's checkpoint included. A
    loss that is no finite number adds nothing.
    """
    lr_ratio = 1.0
    """Learning rate of the adapters' B matrices over that of A (LoRA+); set before training."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return transformers' optimizer, with separate parameter groups for A and B matrices if
        their learning rates differ.
        """
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

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch, as its share of its step's, after the backward pass."""
        loss = super().training_step(*args, **kwargs)
        value = float(loss)
        self.loss_sum += value if math.isfinite(value) else 0.0
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log values; ``train_loss``, the last of a run, is set to the mean over all its steps."""
        if "train_loss" in logs:
            logs["train_loss"] = self.loss_sum / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training examples in batches, in the order that ``EpochSampler``
        gives.
        """
        dataset: Any = self.train_dataset
        batch_size = self.args.per_device_train_batch_size
        return EpochLoader(
            EpochSampler(len(dataset), batch_size, self.args.seed),
            dataset=dataset,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
