"""Base of the runners of tests: one method computes a step when it is waited for."""

from tandem.engine.stepping.messages import SampledToken, SequenceResult, StepResult


class StepRunner:
    """Runs steps by ``compute``; keeps what a real runner keeps, the start of each sequence."""

    def __init__(self) -> None:
        self.started = {}

    def begin(self, step, on_layer=None):
        def run():
            for sequence_id in step.ends:
                self.started.pop(sequence_id, None)
            self.started |= {start.sequence_id: start for start in step.starts}
            results = [SequenceResult(s.sequence_id) for s in step.sequences]
            for sequence, result in zip(step.sequences, results, strict=True):
                self.compute(sequence, result)
            return StepResult(results)

        return run

    def finish(self, handle):
        return handle()

    def compute(self, sequence, result) -> None:
        if sequence.sampling is not None:
            result.tokens = [SampledToken(self.pick(sequence))]

    def pick(self, sequence) -> int:
        """The token that a sequence samples."""
        raise AssertionError("a runner of tests defines pick or compute")
