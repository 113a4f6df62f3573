"""Stage dpo: trl's trainer over our frozen model.

The reference is the model with its adapter switched off, so it needs no memory of its own. trl
multiplies hidden states by the head's weight itself, so the head stays a tensor.
"""

from typing import Any

from datasets import Dataset as Table
from transformers import TrainerCallback
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
        """Return trl's loss of a batch, in which the chosen answers come first, and count its
        tokens.
        """
        if model.training:
            self.num_tokens += int(inputs["attention_mask"].sum())
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


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
    if keys.pref_ftx:
        losses, weights = [*losses, "sft"], [*weights, keys.pref_ftx]
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
    callbacks: list[TrainerCallback],
) -> PairTrainer:
    """Return the trainer of a model with adapters; its reference is the same model without them."""
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
            callbacks=callbacks,
        )
    # trl copies the adapter as the reference. The copy is deleted, so that trl computes the
    # reference without an adapter: the copy of a resumed run would be the trained adapter, not the
    # first one.
    if REFERENCE in model.peft_config:
        model.delete_adapter(REFERENCE)
    return trainer


def _make_table(examples: list[PairExample]) -> Table:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    return Table.from_dict({name: [getattr(e, name) for e in examples] for name in names})
