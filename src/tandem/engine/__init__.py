"""The inference engine: scheduler, prefix index, runner, sampler, and the instance process."""
