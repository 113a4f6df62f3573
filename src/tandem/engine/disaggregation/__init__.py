"""Disaggregated serving: prefill on one instance, decode on another, with the KV sent between them.

The decode instance pulls. It asks the prefill instance for progress, reads each layer of a block
into its own memory as soon as that layer is computed, and then accepts the block only if the
prefill instance confirms that the block was not reused during the read. The prefill instance
therefore needs no memory of the decode instance, and no synchronised clocks.
"""
