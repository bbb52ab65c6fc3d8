"""Messages: what arrives, in which order, and what nobody gets to know."""

from random import Random

from core.protocol import Nack, Started, Tokens
from simulator.clock import Clock
from simulator.network import CONNECT_MS, Network, Weather
from simulator.tasks import Process

STARTED = Started(boot_id="b", prompt_tokens=1, cached_tokens=0)


def tokens(*ids):
    return Tokens(choice=0, ids=ids)


class Scene:
    def __init__(self, seed=1, **weather):
        self.clock = Clock()
        self.network = Network(self.clock, Random(seed))
        self.network.weather = Weather(**weather)
        self.client, self.server = Process(self.clock, "a"), Process(self.clock, "b")
        self.calls = []
        self.gone = 0

    def call(self, name, **kwargs):
        def handle():
            self.calls.append(name)
            return name

        return self.network.call(self.client, self.server, name, handle, timeout_ms=100, **kwargs)

    def stream(self):
        accepted = []
        answer = self.network.connect(self.client, self.server, "post", accepted.append)
        self.run()
        [server_side] = accepted
        server_side.listener = self
        assert answer.value is server_side
        return server_side

    def on_peer_gone(self):
        self.gone += 1

    def run(self):
        while self.clock.step() is not None:
            pass


def test_a_call_is_answered():
    scene = Scene()
    answer = scene.call("x")
    scene.run()
    assert (answer.value, scene.calls) == ("x", ["x"])


def test_a_service_that_is_down_refuses_at_once():
    scene = Scene()
    scene.server.kill()
    began_ms = scene.clock.now_ms
    answer = scene.call("x")
    while not answer.done:
        scene.clock.step()
    assert (answer.value, scene.calls) == (None, [])
    assert scene.clock.now_ms - began_ms < 10


def test_a_lost_reply_was_executed_all_the_same():
    heard = set()
    for seed in range(40):
        scene = Scene(seed, loss=0.5)
        answer = scene.call("x")
        scene.run()
        heard.add((answer.value, len(scene.calls)))
    assert heard == {("x", 1), (None, 1), (None, 0)}


def test_one_that_is_cut_off_is_not_heard():
    scene = Scene()
    scene.network.cut_off.add(("a", "b"))
    answer = scene.call("x")
    scene.run()
    assert (answer.value, scene.calls) == (None, [])


def test_calls_overtake_each_other_but_not_on_one_connection():
    def order(connection):
        scene = Scene(spike=0.5)
        for number in range(20):
            scene.call(number, connection=connection)
        scene.run()
        return scene.calls

    assert order("one") == list(range(20))
    assert order("") != list(range(20))
    assert sorted(order("")) == list(range(20))


def test_a_repeated_call_runs_twice_and_is_answered_once():
    scene = Scene(echo=1.0)
    answer = scene.call("x")
    scene.run()
    assert (answer.value, scene.calls) == ("x", ["x", "x"])


def test_frames_come_in_order_however_late():
    scene = Scene()
    stream = scene.stream()
    scene.network.weather = Weather(spike=0.5, loss=0.2)
    for number in range(20):
        stream.send([tokens(number)], last=number == 19)
    scene.run()
    got = stream.read()
    end = stream.read()
    scene.run()
    assert got.value == [tokens(number) for number in range(20)]
    assert end.value is None


def test_a_cut_stream_gives_what_came_before_and_ends():
    lengths = set()
    for seed in range(30):
        scene = Scene(seed)
        stream = scene.stream()
        scene.network.weather = Weather(cut=1.0)
        stream.send([STARTED, tokens(1), tokens(2)], last=True)
        scene.run()
        got = stream.read()
        scene.run()
        lengths.add(len(got.value or []))
    assert lengths == {0, 1, 2, 3}


def test_a_client_that_closes_is_noticed():
    scene = Scene()
    stream = scene.stream()
    stream.close()
    scene.run()
    stream.send([tokens(1)])
    assert scene.gone == 1


def test_a_connection_refused_and_one_never_answered():
    scene = Scene()
    scene.server.kill()
    refused = scene.network.connect(scene.client, scene.server, "post", scene.calls.append)
    scene.run()
    scene.network.cut_off.add(("a", "b"))
    began_ms = scene.clock.now_ms
    silent = scene.network.connect(scene.client, scene.server, "post", scene.calls.append)
    scene.run()
    assert (refused.value, silent.value, scene.calls) == (None, None, [])
    assert scene.clock.now_ms - began_ms == CONNECT_MS


def test_frames_wait_while_the_two_are_cut_off():
    scene = Scene()
    stream = scene.stream()
    scene.network.cut_off.add(("a", "b"))
    stream.send([STARTED])
    stream.send([Nack(reason="full")], last=True)
    scene.clock.after(1_000, "heal", scene.network.cut_off.clear)
    scene.run()
    got = stream.read()
    scene.run()
    assert got.value == [STARTED, Nack(reason="full")]
