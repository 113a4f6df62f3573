"""`tandem doctor --peer` measures a path, and says what it cannot."""

import msgspec
import pytest
from tests_transfer_world import SECRET
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.core.errors import ConfigError, PeerLostError, PermissionDeniedError
from tandem.transfer.measure import measure_path


def test_path_is_measured_by_every_transport(world, tmp_path):
    giver = world.engine(name="giver")
    giver.allocate(1 << 20, name="shared")
    (tmp_path / "secret").write_text(SECRET + "\n")
    command = ["doctor", "--peer", giver.address, "--secret-file", str(tmp_path / "secret")]
    shown = CliRunner().invoke(app, [*command, "--json"])
    assert shown.exit_code == 0, shown.output
    report = msgspec.json.decode(shown.output)
    assert report["name"] == "giver"
    assert report["buffer"] == "shared"
    assert report["round_trip_us"] > 0
    paths = {path["transport"]: path for path in report["transports"]}
    assert set(paths) == {"shm", "cma", "tcp"}
    for name in ("shm", "tcp"):
        assert paths[name]["latency_us"] > 0, paths[name]
        assert paths[name]["throughput_gbps"] > 0
    text = CliRunner().invoke(app, command)
    assert "Gbit/s" in text.output


def test_what_cannot_be_measured_has_a_reason(world):
    giver, taker = world.engine(), world.engine(transports=("tcp",))
    assert measure_path(taker, giver.address).transports == []
    giver.register(bytearray(100))
    paths = {path.transport: path for path in measure_path(taker, giver.address).transports}
    assert paths["tcp"].latency_us is not None
    assert paths["shm"].latency_us is None
    assert "no transport" in paths["shm"].reason


def test_wrong_peers_and_secrets_are_named(world, tmp_path):
    from tandem.cli.commands.doctor import measure_peer

    giver = world.engine()
    secret = tmp_path / "secret"
    with pytest.raises(ConfigError, match="secret"):
        measure_peer(giver.address, secret)
    secret.write_text("another secret of sixteen bytes")
    with pytest.raises(PermissionDeniedError):
        measure_peer(giver.address, secret)
    secret.write_text(SECRET)
    with pytest.raises(PeerLostError):
        measure_peer("127.0.0.1:1", secret)
