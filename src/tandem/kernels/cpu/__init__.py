"""CPU execution: the native core runs the steps and holds packed matrices and experts."""
