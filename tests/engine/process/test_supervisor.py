"""Goal: an instance that cannot be started is given up and reported, not waited for.

Method: the supervisor over a launcher that only notes what it is told, in virtual time.
"""

import asyncio
from unittest.mock import AsyncMock

import pytest

from tandem.core.errors import ConfigError, PeerLostError
from tandem.core.wire import InstanceStage
from tandem.engine.config import EngineConfig
from tandem.engine.process.instance import InstanceSpec
from tandem.engine.process.supervisor import InstanceSupervisor
from tandem.models.config import ModelConfig
from tandem.rpc import RpcConfig
from tandem.sim import run_virtual

SPEC = InstanceSpec(model=ModelConfig(path="demo"), engine=EngineConfig(), rpc=RpcConfig())
TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConfigError("rpc.runtime_dir", "no folder"), "no folder"),
        (OSError("no process"), "no proc"),
        (TypeError("a flaw"), "TypeError: a flaw"),
    ],
)
def test_an_instance_that_cannot_be_started_is_reported(error, reason):
    """Not waited for: without a temporary folder a server said "starting" for ever."""

    async def work() -> None:
        launcher = AsyncMock()
        launcher.start.side_effect = error
        async with asyncio.timeout(TIMEOUT_S), InstanceSupervisor(SPEC, launcher=launcher) as one:
            with pytest.raises(PeerLostError, match=reason):
                await one.wait_ready()
            assert one.stage.stage is InstanceStage.FAILED
        launcher.close.assert_awaited_once()

    run_virtual(work)
