"""The command that brings the system up and down: what it leaves, and what it says."""

import json
import os
import signal
import socket
import time

import psutil
import pytest

from local.layout import Layout
from local.state import read_state
from tests.support.services import open_directory
from tests.support.stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.model]


@pytest.fixture
def own_stack():
    with open_directory("own-stack") as data:
        made = Stack(data)
        yield made
        made.down()


def family(stack):
    """Every process of the stack, by its pid and birth, so that a reused pid is not one."""
    roots = [psutil.Process(p["pid"]) for p in stack.refresh()["processes"].values()]
    return [member for root in roots for member in [root, *root.children(recursive=True)]]


def wait_gone(members, within_s=30.0):
    _, alive = psutil.wait_procs(members, timeout=within_s)
    assert alive == []


def make_tenant(stack, name):
    with stack.admin() as admin:
        assert admin.post("/admin/tenants", json={"name": name}).status_code == 201


def tenants(stack):
    with stack.admin() as admin:
        return {tenant["name"] for tenant in admin.get("/admin/tenants").json()["tenants"]}


def test_down_leaves_no_process_and_loses_no_data(own_stack):
    own_stack.up()
    make_tenant(own_stack, "kept")
    key, members = own_stack.key, family(own_stack)
    own_stack.down()
    wait_gone(members, within_s=0)
    assert own_stack.refresh() == {"ready": False, "phase": "stopped"}
    started = time.monotonic()
    own_stack.up()
    assert time.monotonic() - started < 60
    assert tenants(own_stack) == {"demo", "kept"}
    assert own_stack.key == key
    assert own_stack.command("chat", "Hello").returncode == 0
    # A killed supervisor takes its children along, and leaves nothing stale.
    members = family(own_stack)
    state = read_state(Layout(own_stack.data))
    os.kill(state.supervisor_pid, signal.SIGKILL)
    wait_gone(members)
    own_stack.up()
    assert tenants(own_stack) == {"demo", "kept"}


def test_check_is_clean_and_says_what_it_looked_at(stack):
    stack.settles()
    done = stack.command("check", "--quiescent")
    assert done.returncode == 0, done.stdout
    assert "all well" in done.stdout
    report = json.loads(stack.command("check", "--json").stdout)
    assert {item["name"] for item in report["items"]} >= {
        *("reservations", "leases", "entries", "metered"),
        *("kv_blocks", "journals", "tickets", "dispatcher_accounts"),
    }


def test_status_says_where_everything_is(stack):
    done = stack.command("status", "--json")
    assert done.returncode == 0
    status = json.loads(done.stdout)
    assert status["ready"] is True
    assert set(status["processes"]) == {
        *("postgres", "valkey", "control-plane", "worker", "worker-2", "gateway", "gateway-2")
    }
    assert all(process["memory_mib"] > 0 for process in status["processes"].values())
    assert status["database_url"].startswith("postgresql://")
    assert status["redis_url"].startswith("redis://")
    assert status["demo_key_file"] == str(stack.data / "demo_key")
    assert status["admin_token_file"] == str(stack.data / "admin_token")


def test_a_second_up_on_the_same_data_is_refused(stack):
    done = stack.command("up", "--detach")
    assert done.returncode == 1
    assert "already runs" in done.stderr


def test_a_taken_port_is_named_with_its_option():
    with open_directory("taken") as data, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = Stack(data).command("up", f"--gateway-port={port}")
        assert done.returncode == 1
        assert f"port {port} for the gateway is taken" in done.stderr
        assert "--gateway-port" in done.stderr


def test_a_missing_model_is_named():
    with open_directory("missing") as data:
        stack = Stack(data)
        options = [f"--{k.replace('_', '-')}={v}" for k, v in stack._options.items()]
        done = stack.command("up", "--model=no-such-model", *options)
        assert done.returncode == 1
        assert "no-such-model" in done.stderr


def test_logs_are_kept_by_process(stack):
    done = stack.command("logs", "gateway", "-n", "200")
    assert done.returncode == 0
    assert "gateway" in done.stdout
    assert stack.command("logs", "frobnicator").returncode == 1


def test_commands_without_a_stack_say_so():
    with open_directory("nothing") as data:
        stack = Stack(data)
        for words in (["check"], ["chat", "Hello"], ["status"]):
            done = stack.command(*words)
            assert done.returncode == 1
            assert "no stack is running" in done.stderr
        assert stack.command("down").returncode == 0
