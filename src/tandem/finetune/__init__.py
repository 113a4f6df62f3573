"""LoRA fine-tuning: recipes, data, frozen packed weights, trainer, evaluation and export."""
