"""A control plane without sockets: it answers what a test says, and keeps what it was told."""

import itertools

import httpx
import msgspec
import pytest

from core.fleet import Beat, BeatReply, Journal, JournalReply, Register, Registered

TAKEN = {
    "/fleet/register": Registered(beat_interval_ms=10, journal_acked=0),
    "/fleet/beat": BeatReply(known=True),
    "/fleet/journal": JournalReply(acked=0),
}
KINDS = {"/fleet/register": Register, "/fleet/beat": Beat}


class ScriptedPlane:
    """Takes everything, unless `answer` gives an answer of its own."""

    def __init__(self):
        self.calls = []
        self.messages = []  # registrations and beats
        self.told = {}  # request id -> output tokens
        self.answer = lambda _path, _entries: None

    def __call__(self, request):
        path = request.url.path
        self.calls.append(path)
        entries = ()
        if path == "/fleet/journal":
            entries = msgspec.json.decode(request.content, type=Journal).entries
        if kind := KINDS.get(path):
            self.messages.append(msgspec.json.decode(request.content, type=kind))
        answer = self.answer(path, entries)
        if answer is not None:
            return answer
        self.told |= {entry.request_id: entry.usage.output_tokens for entry in entries}
        return httpx.Response(200, content=msgspec.json.encode(TAKEN[path]))

    def states(self):
        """As beats told them, each once in a row."""
        told = [message.state for message in self.messages if isinstance(message, Beat)]
        return [state for state, _ in itertools.groupby(told)]


@pytest.fixture
def plane(monkeypatch):
    """In place of what an HTTP client would reach."""
    plane = ScriptedPlane()
    make = httpx.AsyncClient

    def client(**options):
        return make(**options, transport=httpx.MockTransport(plane))

    monkeypatch.setattr("worker.control_link.httpx.AsyncClient", client)
    monkeypatch.setattr("worker.control_link.RETRY_FIRST_S", 0.01)
    monkeypatch.setattr("worker.control_link.RESTART_FIRST_S", 0.01)
    monkeypatch.setattr("worker.control_link.JOURNAL_INTERVAL_S", 0.01)
    return plane
