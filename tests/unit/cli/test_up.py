"""How `up` ends: one sentence and status 1, or well and at once when asked to stop."""

import argparse
import os
import subprocess
import sys

import pytest

from cli import models, seed, up
from cli.models import pull_with_progress
from cli.output import Output
from local.pulling import PullStoppedError
from tests.support.services import free_port


def command(tmp_path, *words):
    ports = [f"--{name}-port={free_port()}" for name in ("gateway", "control-plane", "worker")]
    return [sys.executable, "-m", "cli", "up", f"--data={tmp_path}", *ports, *words]


def test_a_bad_database_url_is_one_sentence(tmp_path):
    ended = subprocess.run(
        command(tmp_path, "--model=./none"),
        env={**os.environ, "DATABASE_URL": "nonsense", "REDIS_URL": "redis://elsewhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("headworks: DATABASE_URL's database could not be used: ")
    assert ended.stderr.count("\n") == 1


def test_secrets_that_cannot_be_read_are_one_sentence(tmp_path):
    (tmp_path / "secrets.json").write_text("{")
    ended = subprocess.run(
        command(tmp_path), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "secrets.json cannot be read" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_an_unexpected_error_is_a_sentence_with_its_kind():
    assert up._sentence(KeyError("x")) == "KeyError: 'x'"
    assert up._sentence(OSError("no room")) == "no room"
    assert up._sentence(OSError()) == "OSError: "


def test_a_pull_ends_at_the_next_report_after_it_was_asked_to(tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    reports = []

    def stopped():
        reports.append(1)
        return True

    def pull(_spec, _store, report, **_):
        report(models.Progress(stage="download", bytes_done=1, bytes_total=2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "pull", pull)
        with pytest.raises(PullStoppedError, match="was stopped"):
            pull_with_progress(str(model), tmp_path, Output(), stopped=stopped)
    assert reports


def test_the_region_of_a_seed_is_a_choice():
    parser = argparse.ArgumentParser()
    seed.add_parser(parser.add_subparsers())
    words = ["seed", "--control-plane=u", "--models=m", "--demo-key=k"]
    assert parser.parse_args(words).region == "local"
    assert parser.parse_args([*words, "--region=eu"]).region == "eu"
