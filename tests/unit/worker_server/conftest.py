"""A control plane without sockets: it answers what a test says, and keeps what it was told."""

import httpx
import msgspec
import pytest

from core.fleet import BeatReply, Journal, JournalReply, Registered

TAKEN = {
    "/fleet/register": Registered(beat_interval_ms=10, journal_acked=0),
    "/fleet/beat": BeatReply(known=True),
    "/fleet/journal": JournalReply(acked=0),
}


class ScriptedPlane:
    """Takes everything, unless `answer` gives an answer of its own."""

    def __init__(self):
        self.calls = []
        self.told = {}  # request id -> output tokens
        self.answer = lambda _path, _entries: None

    def __call__(self, request):
        path = request.url.path
        self.calls.append(path)
        entries = ()
        if path == "/fleet/journal":
            entries = msgspec.json.decode(request.content, type=Journal).entries
        answer = self.answer(path, entries)
        if answer is not None:
            return answer
        self.told |= {entry.request_id: entry.usage.output_tokens for entry in entries}
        return httpx.Response(200, content=msgspec.json.encode(TAKEN[path]))


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
