"""A seed replays exactly: the same events, whatever the process, the hash seed or the tests."""

import json
import subprocess
import sys
from pathlib import Path

from simulator.config import WorldConfig
from simulator.faults import ALL_FAULTS
from simulator.world import World

ROOT = Path(__file__).parents[2]


def in_another_process(hash_seed, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "simulator", *arguments],
        cwd=ROOT,
        env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_same_seed_is_the_same_run():
    config = WorldConfig(seed=7, faults=ALL_FAULTS)
    assert World(config).run() == World(config).run()


def test_another_seed_is_another_run():
    one, other = (World(WorldConfig(seed=seed)).run() for seed in (7, 8))
    assert one.history != other.history


def test_the_command_replays_it_and_prints_a_summary():
    here = World(WorldConfig(seed=7, faults=ALL_FAULTS)).run()
    for hash_seed in ("1", "2"):
        done = in_another_process(hash_seed, "--seed", "7", "--faults", "all")
        summary = json.loads(done.stdout)
        assert (summary["history"], summary["events"]) == (here.history, here.events)
        assert summary["real_s"] > 0
        assert summary["events_per_s"] > 0


def test_a_run_can_be_cut_short():
    report = World(WorldConfig(seed=7, events_max=500)).run()
    assert report.events == 500


def test_the_command_knows_its_faults():
    done = in_another_process("0", "--seed", "7", "--faults", "gremlins")
    assert done.returncode == 2
    assert "gremlins" in done.stderr
