"""Two engines, one transfer: run it, it moves a megabyte and checks it."""

import secrets

import numpy as np

from tandem.transfer import Op, Transfer, TransferConfig, TransferEngine


def main() -> None:
    secret = secrets.token_urlsafe(32)
    with (
        TransferEngine(TransferConfig(name="giver", secret=secret)) as giver,
        TransferEngine(TransferConfig(name="taker", secret=secret)) as taker,
    ):
        weights = np.arange(2**18, dtype=np.float32)
        giver.register(weights, name="weights", remote="read")

        segment = taker.open(giver.address)
        target = np.zeros_like(weights)
        local = taker.register(target, remote=False)
        remote = segment.buffer("weights")
        batch = taker.submit([Transfer(Op.READ, local, segment, remote.offset, remote.length)])
        batch.wait(deadline_s=10)
        taker.notify(segment, "done", b"thank you")

        assert np.array_equal(weights, target)
        print(f"moved {remote.length} bytes; {giver.notifications(1)[0].payload.decode()}")


if __name__ == "__main__":
    main()
