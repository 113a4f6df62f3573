"""The training itself: the model, the loss, the trainer, its checkpoints."""
