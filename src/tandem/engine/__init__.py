"""Inference engine: requests, blocks, prefix index, scheduler, sampler, runner."""
