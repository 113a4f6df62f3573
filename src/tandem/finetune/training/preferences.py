"""Stage dpo: trl's trainer over our frozen model.

The reference is the model with its adapter switched off, so it needs no memory of its own. trl
multiplies hidden states by the head's weight itself, so the head stays a tensor.
"""

from typing import Any

import torch
from datasets import Dataset as Table
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from tandem.finetune.data.examples import PairExample
from tandem.finetune.recipes.recipe import PreferenceKeys
from tandem.finetune.recipes.targets import take_names_literally
from tandem.finetune.training.epochs import EpochTrainer

__all__ = ["PairTrainer", "make_pair_arguments", "make_pair_trainer"]

REFERENCE = "ref"
"""trl's name for the copy of the adapter that it makes as the reference."""


class PairTrainer(EpochTrainer, DPOTrainer):
    """trl's trainer of preferences (DPO) with this package's order of the data, for pairs of
    answers that are tokenized already.
    """

    answer_weight = 0.0
    """Weight of the chosen answers' own loss, which is added to trl's; set before training."""

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        # Examples are tokenized already: trl would render and tokenize text, without
        # LLaMA-Factory's label masks.
        del processing_class, args, dataset_name
        return dataset

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return trl's loss of a batch, in which the chosen answers come first, with that of the
        chosen answers by ``answer_weight``; count the batch's tokens.
        """
        if model.training:
            self.num_tokens += int(inputs["attention_mask"].sum())
        if not self.answer_weight:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs: list[Any] = []
        # The first pass through the model is that of the policy, the second one the reference's.
        hook = model.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            hook.remove()
        added = self.answer_weight * _average_answers(
            outputs[0].log_probs, inputs["completion_mask"]
        )
        return (found[0] + added, found[1]) if return_outputs else found + added


def _average_answers(log_probs: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the chosen answers of each one's mean loss by token.

    trl's loss "sft" is the mean over the tokens of the batch: in it long answers weigh more, and
    how many share a batch decides by how much.

    Shapes: B pairs, the chosen answers first; T tokens.

    Args:
        log_probs: [2 B, >= T - 1] of each token but the first; the last T - 1 are read.
        completion_mask: [2 B, T], 1 for an answer's tokens.
    """
    mask = completion_mask[: len(completion_mask) // 2, 1:]
    chosen = log_probs[: len(mask), -mask.shape[1] :]
    return -((chosen * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def make_pair_arguments(keys: PreferenceKeys, **options: Any) -> DPOConfig:
    """Return trl's training arguments for stage dpo.

    Args:
        keys: the recipe's settings of preferences.
        options: arguments of ``TrainingArguments``.
    """
    losses, weights = [keys.pref_loss], [1.0]
    if keys.dpo_label_smoothing:
        # The wanted loss is (1 - e) L(d) + e L(-d), which trl had as a loss of its own. Its robust
        # loss is ((1 - e) L(d) - e L(-d)) / (1 - 2 e) and its sigmoid loss is L(d): a weighted sum
        # of both gives it.
        smoothing = keys.dpo_label_smoothing
        losses, weights = ["sigmoid", "robust"], [2 * (1 - smoothing), 2 * smoothing - 1]
    # trl switches gradient checkpointing on unless the option is given.
    options.setdefault("gradient_checkpointing", False)
    return DPOConfig(
        **options,
        beta=keys.pref_beta,
        loss_type=losses,
        loss_weights=weights,
        label_smoothing=keys.dpo_label_smoothing,
        # Examples are cut to length already, so trl must not cut them.
        max_length=None,
    )


def make_pair_trainer(
    model: Any,
    arguments: DPOConfig,
    *,
    tokenizer: Any,
    train: list[PairExample],
    validation: list[PairExample],
    answer_weight: float,
) -> PairTrainer:
    """Return the trainer of a model with adapters; its reference is the same model without them.

    ``answer_weight`` is ``PairTrainer.answer_weight``.
    """
    base = model.get_base_model()
    if not getattr(base.config.get_text_config(), "output_router_logits", False):
        # The routers' auxiliary loss is added only if the checkpoint's configuration asks for it,
        # as in stage sft.
        arguments.router_aux_loss_coef = 0.0
    with take_names_literally(base):
        trainer = PairTrainer(
            model=model,
            args=arguments,
            train_dataset=_make_table(train),
            eval_dataset=_make_table(validation) if validation else None,
            processing_class=tokenizer,
        )
    trainer.answer_weight = answer_weight
    # trl copies the adapter as the reference. The copy is deleted, so that trl computes the
    # reference without an adapter: the copy of a resumed run would be the trained adapter, not the
    # first one.
    if REFERENCE in model.peft_config:
        model.delete_adapter(REFERENCE)
    return trainer


def _make_table(examples: list[PairExample]) -> Table:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Table.from_dict({name: [getattr(e, name) for e in examples] for name in names})
