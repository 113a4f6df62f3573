"""Goal: whatever the disk of latents does, a request's tokens are right or it ends with an error.

Method: rows of the file are spoiled while requests run, share them and copy from them, with steps
planned ahead too; random traffic in small pools, two engines in one folder; a process that is
killed while it computes.
"""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="models need the `serve` extra")

from latent_engines import LONGER, PROMPTS, Talk, build, generate
from sparse import TOP, save_sparse

from tandem.core.wire import FinishReason

STEM = PROMPTS[0][:112]
FORKS = [*([*STEM, 8 + i, 9, 7 * i + 3] for i in range(3)), LONGER, PROMPTS[1], PROMPTS[2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_sparse(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def expected(folder):
    """What an engine with all latents in memory says to each prompt, alone."""
    engine = build(folder).engine
    return [generate(engine, [prompt])[0][0] for prompt in FORKS]


def find_node(built, position):
    """The index's node of the first prompt's block at a position."""
    keys = []
    built.prefixes.extend_keys(built.prefixes.make_root_key(""), keys, PROMPTS[0])
    return built.prefixes.find_node(keys[position])


def spoil(built, block_id, keep=0):
    """Flip a bit of each row of a block in the file, but for the first, and let memory forget
    them.
    """
    tier = built.cache.latents
    file = tier.file._descriptor
    for layer in range(built.cache.layout.num_layers):
        rows = layer * tier.rows_per_layer + block_id * 16 + np.arange(keep, 16)
        for row, at in zip(rows, tier.file._find_bytes(rows).tolist(), strict=True):
            os.pwrite(file, flip(os.pread(file, 1, at + 7)), at + 7)
            if tier._slots[row]:
                tier._rows[tier._slots[row] - 1] = -1
                tier._slots[row] = 0


def flip(byte):
    return bytes([byte[0] ^ 4])


@pytest.mark.parametrize("overlap", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_requests_that_share_spoiled_latents_end_and_one_beside_them_goes_on(
    folder, tmp_path, expected, overlap
):
    built = build(folder, f"{(TOP + 1) * 80}B", tmp_path, overlap=overlap)
    talk = Talk(built.engine)
    for i in (0, 1, 4):
        talk.add(str(i), FORKS[i])
    while not all(talk.tokens.values()):
        talk.step()
    spoil(built, find_node(built, 3).block_id)
    talk.finish()
    for name in "01":
        assert talk.last[name].finish_reason is FinishReason.ERROR
        assert "latents are not what was written" in talk.last[name].error_text
        assert talk.tokens[name] == expected[int(name)][0][: len(talk.tokens[name])]
    assert talk.said("4") == expected[4]
    assert find_node(built, 3) is None
    built.prefixes.check()
    assert generate(built.engine, FORKS[:2])[0] == expected[:2]


@pytest.mark.parametrize("overlap", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_a_copy_of_spoiled_latents_ends_its_request_alone(folder, tmp_path, expected, overlap):
    built = build(folder, "6KiB", tmp_path, overlap=overlap)
    generate(built.engine, [PROMPTS[0]])
    spoil(built, find_node(built, 7).block_id)
    found, (last, _) = generate(built.engine, [LONGER, FORKS[4]])
    assert last.finish_reason is FinishReason.ERROR
    assert found[1] == expected[4]
    found, (last,) = generate(built.engine, [LONGER])
    assert found[0] == expected[3]
    assert last.cached_len == 112


def test_a_file_that_was_cut_ends_what_reads_behind_its_end(folder, tmp_path, expected):
    built = build(folder, "6KiB", tmp_path)
    generate(built.engine, [PROMPTS[0]])
    os.truncate(f"/proc/self/fd/{built.cache.latents.file._descriptor}", 4096)
    built.cache.latents._slots[:] = 0
    built.cache.latents._rows[:] = -1
    found, (good, bad) = generate(built.engine, [FORKS[4], LONGER])
    assert bad.finish_reason is FinishReason.ERROR
    assert f"latents in {tmp_path}: " in bad.error_text
    # Rows that are written behind the end are there.
    assert found[0] == expected[4]
    assert good.finish_reason is FinishReason.LENGTH
    # Each attempt forgets the blocks that it could not read.
    for _ in range(9):
        found, (last,) = generate(built.engine, [LONGER])
        if last.finish_reason is FinishReason.LENGTH:
            break
    assert found == [expected[3]]


class Traffic:
    """Random requests of one engine, of which some are cancelled; at times latents are spoiled."""

    def __init__(self, built, expected, seed, spoil_chance):
        self.built, self.expected, self.spoil_chance = built, expected, spoil_chance
        self.rng, self.talk, self.count = random.Random(seed), Talk(built.engine), 0
        self.asked = {}

    def act(self):
        rng, talk = self.rng, self.talk
        live = [name for name in self.asked if name not in talk.last]
        if rng.random() < 0.4 and len(live) < 4:
            name = str(self.count)
            self.count += 1
            self.asked[name] = rng.randrange(len(FORKS))
            talk.add(name, FORKS[self.asked[name]])
        if live and rng.random() < 0.04:
            talk.engine.cancel(rng.choice(live))
        if rng.random() < self.spoil_chance:
            used = list(self.built.prefixes._by_block)
            if used:
                spoil(self.built, rng.choice(used), rng.choice([0, 0, 12]))
        talk.step()

    def check(self):
        """Every answer is right as far as it goes; return how many ended in which way."""
        self.talk.finish()
        self.built.prefixes.check()
        assert self.built.engine.get_stats().num_used_blocks == 0
        ends = {}
        for name, last in self.talk.last.items():
            tokens, scores = self.expected[self.asked[name]]
            reason, length = last.finish_reason, len(self.talk.tokens[name])
            assert self.talk.said(name) == (tokens[:length], scores[:length]), name
            assert length == len(tokens) or reason is not FinishReason.LENGTH
            ends[reason] = ends.get(reason, 0) + 1
        return ends


@pytest.mark.parametrize(
    ("num_steps", "seeds", "spoil_chance"),
    [
        (60, [0], 0.0),
        pytest.param(300, range(1, 3), 0.0, marks=pytest.mark.slow),
        pytest.param(300, range(3), 0.05, marks=pytest.mark.slow),
    ],
)
def test_any_traffic_of_two_engines_in_one_folder_is_right(
    folder, tmp_path, expected, num_steps, seeds, spoil_chance
):
    for seed in seeds:
        settings = {"num_kv_blocks": 20, "max_model_len": 230}
        pair = [
            Traffic(
                build(folder, memory, tmp_path, overlap=overlap, **settings),
                expected,
                seed,
                spoil_chance,
            )
            for memory, overlap in ((f"{(TOP + 1) * 80}B", "on"), ("20KiB", "off"))
        ]
        for _ in range(num_steps):
            for traffic in pair:
                traffic.act()
        for traffic in pair:
            ends = traffic.check()
            assert ends[FinishReason.LENGTH] > num_steps // 30
            assert (FinishReason.ERROR in ends) == (spoil_chance > 0)


PROGRAM = """
import sys
sys.path[:0] = [{here!r}, {above!r}]
from latent_engines import PROMPTS, Talk, build
built = build({folder!r}, "6KiB", {place!r}, num_kv_blocks=4000)
talk = Talk(built.engine)
for i in range(3):
    talk.add(str(i), PROMPTS[i], 300)
talk.step(12)
print("running", flush=True)
talk.step(10**6)
"""


@pytest.mark.slow
def test_a_killed_engine_leaves_nothing_on_the_disk(folder, tmp_path, expected):
    here = Path(__file__).parent
    text = PROGRAM.format(
        here=str(here), above=str(here.parent), folder=str(folder), place=str(tmp_path)
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"running\n"
            names = [os.readlink(x) for x in Path(f"/proc/{process.pid}/fd").iterdir()]
            assert sum(str(tmp_path) in name for name in names) >= 2
            assert not list(tmp_path.iterdir())
        finally:
            process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    again = build(folder, "6KiB", tmp_path)
    found, (last,) = generate(again.engine, [LONGER])
    assert found == [expected[3]]
    assert last.cached_len == 0
