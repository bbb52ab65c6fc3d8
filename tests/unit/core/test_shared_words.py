"""Ids, internal tokens, keys, settings, log lines and frames: what every process agrees on."""

import json
import logging
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import ids, internal_token, tenancy
from core.errors import DIALECTS, Code, Refusal, refuse
from core.fleet import Beat, Capacity, JournalEntry, ReplicaState
from core.log import JSONFormatter, configure
from core.protocol import (
    FRAME_BYTES_MAX,
    Choice,
    Failed,
    Finished,
    FrameReader,
    Generate,
    Load,
    Nack,
    ProtocolError,
    Sampling,
    Started,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
    decode_generate,
    encode_frame,
    encode_generate,
)
from core.registry import deployment_name
from core.settings import SettingsError, env_name, read_settings

SECRET = b"sixteen bytes or more"
ENTROPY = bytes(range(12))

FRAMES = [
    Nack(reason="full"),
    Started(boot_id="boot_1", prompt_tokens=3, cached_tokens=0),
    Tokens(choice=0, ids=(1, 2), text="hé", logprobs=(TokenLogprob(id=1, logprob=-0.5),)),
    Tokens(choice=0, finish="stop", stop="\n"),
    Load(boot_id="b", seq=1, kv_blocks_total=9, kv_blocks_free=8, running=1, waiting=0),
    Finished(cause="complete", usage=Usage(prompt_tokens=3), timings=Timings(), journal_seq=4),
    Finished(
        cause="aborted",
        usage=Usage(
            prompt_tokens=9,
            cached_tokens=1,
            cache_write_5m_tokens=2,
            cache_write_1h_tokens=3,
            output_tokens=8,
            reasoning_tokens=7,
        ),
        timings=Timings(),
        journal_seq=5,
    ),
    Failed(code="internal", message="x", retryable=True),
]


def a_generate() -> Generate:
    return Generate(
        request_id="req_1",
        attempt=1,
        version="v",
        prompt_ids=(1, 2),
        choices=(Choice(index=0),),
        sampling=Sampling(seed=1, max_tokens=4),
        tenant_salt=b"salt",
    )


def test_an_id_names_its_kind():
    digits = ENTROPY.hex()
    assert ids.tenant_id(ENTROPY) == f"ten_{digits}"
    assert ids.key_id(ENTROPY) == f"key_{digits}"
    now_ms = 1_700_000_000_000
    assert ids.request_id("eu", b"\xff" * 8, now_ms) == f"req_eu_018bcfe56800{'ff' * 8}"
    assert ids.boot_id(ENTROPY) == f"boot_{digits}"
    assert ids.gateway_id(ENTROPY) == f"gw_{digits}"
    assert ids.pool_id("model", "eu") == "model@eu"
    with pytest.raises(AssertionError):
        ids.tenant_id(b"short")
    for entropy, bad_ms in ((ENTROPY, now_ms), (b"\xff" * 8, 1 << 48), (b"\xff" * 8, -1)):
        with pytest.raises(AssertionError):
            ids.request_id("eu", entropy, bad_ms)


def test_a_deployment_is_named_after_its_version():
    assert deployment_name("small", "0123456789abcdef") == "small-01234567"


def signed(**changes):
    fields = {"audience": "worker", "subject": "gw_1", "expires_ms": 1000}
    return internal_token.sign(SECRET, **fields | changes)


def verified(token, **changes):
    return internal_token.verify(SECRET, token, **{"audience": "worker", "now_ms": 999} | changes)


def test_a_token_is_good_for_its_audience_until_it_expires():
    assert verified(signed()) == "gw_1"
    assert verified(signed(), now_ms=1000) is None
    assert verified(signed(), audience="control-plane") is None
    assert (
        internal_token.verify(b"another secret here", signed(), audience="worker", now_ms=0) is None
    )


@given(st.text(max_size=80), st.integers(0, 200))
def test_no_other_text_is_a_token(text, cut):
    good = signed()
    assert verified(text) is None
    assert verified(good[:cut]) in (None, "gw_1" if cut >= len(good) else None)
    assert verified(good + text) in (None, "gw_1" if not text else None)


def test_a_signed_token_of_another_shape_is_none():
    for claims in ("v2.worker.gw_1.1000", "v1.worker.gw_1", "v1.worker.gw.1.1000"):
        assert verified(f"{claims}.{internal_token._mac(SECRET, claims)}") is None


@given(st.binary(min_size=25, max_size=25), st.data())
def test_a_key_is_well_formed_and_no_misspelling_of_it_is(entropy, data):
    key = tenancy.mint_key(entropy)
    assert tenancy.well_formed(key)
    assert tenancy.public_part(key) == key[:11]
    place = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567_"))
    misspelt = key[:place] + letter + key[place + 1 :]
    assert tenancy.well_formed(misspelt) == (misspelt == key)


def test_a_stored_key_depends_on_the_pepper():
    key = tenancy.mint_key(bytes(25))
    assert len(tenancy.key_digest(b"pepper", key)) == 32
    assert tenancy.key_digest(b"pepper", key) != tenancy.key_digest(b"salt", key)
    assert not tenancy.well_formed("sk-somebody-else")


class Example(msgspec.Struct, frozen=True, kw_only=True):
    database_url: str
    port: int = 8000
    place: Path = Path("/")


def test_settings_come_from_the_environment_by_name():
    found = read_settings(
        Example,
        {"DATABASE_URL": "plain", "HEADWORKS_PORT": "9", "HEADWORKS_PLACE": "/tmp", "OTHER": "x"},
    )
    assert found == Example(database_url="plain", port=9, place=Path("/tmp"))
    ours = {"DATABASE_URL": "plain", "HEADWORKS_DATABASE_URL": "ours"}
    assert read_settings(Example, ours).database_url == "ours"
    assert env_name("port") == "HEADWORKS_PORT"


def test_a_bad_setting_is_named():
    with pytest.raises(SettingsError, match="HEADWORKS_DATABASE_URL is not set"):
        read_settings(Example, {})
    with pytest.raises(SettingsError, match=r"HEADWORKS_PORT: Expected `int`"):
        read_settings(Example, {"DATABASE_URL": "x", "HEADWORKS_PORT": "many"})


class Fussy(msgspec.Struct, frozen=True, kw_only=True):
    port: int = 1

    def __post_init__(self) -> None:
        if self.port < 1:
            raise ValueError("port must be positive")


def test_a_refusal_of_the_whole_is_told_as_it_is():
    with pytest.raises(SettingsError, match="port must be positive"):
        read_settings(Fussy, {"HEADWORKS_PORT": "-1"})


def test_a_log_line_is_one_json_object():
    record = logging.LogRecord("a.b", logging.INFO, __file__, 1, "two\nlines %d", (7,), None)
    record.facts = {"request_id": "req_1"}
    line = JSONFormatter("gateway").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["message"], told["request_id"], told["process"]) == (
        "two\nlines 7",
        "req_1",
        "gateway",
    )


def test_a_log_line_holds_its_exception():
    try:
        int("boom")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 1, "x", None, sys.exc_info())
    assert "boom" in json.loads(JSONFormatter("p").format(record))["exception"]


def test_configuring_sends_every_logger_to_standard_error(capsys):
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    try:
        configure("cli")
        logging.getLogger("anything").info("hello")
        logging.getLogger("httpx").info("a request")
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["hello"]


@given(st.lists(st.sampled_from(FRAMES)), st.data())
def test_frames_survive_any_cut_of_their_stream(frames, data):
    stream = b"".join(map(encode_frame, frames))
    reader, told = FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        told += reader.feed(stream[:size])
        stream = stream[size:]
    assert told == frames
    assert not reader.mid_frame


def test_usage_is_understood_across_versions():
    # An older worker names three totals, a newer one may name some that we do not know.
    plain = {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 1}
    usage = Usage(prompt_tokens=3, output_tokens=1)
    for body in (plain, plain | {"audio_tokens": 4}, msgspec.to_builtins(usage)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=Usage) == usage


def test_half_a_frame_is_seen():
    reader = FrameReader()
    assert list(reader.feed(encode_frame(FRAMES[0])[:-1])) == []
    assert reader.mid_frame


@pytest.mark.parametrize(
    "data",
    [(FRAME_BYTES_MAX + 1).to_bytes(4, "big"), b"\0\0\0\1\xc1", b"\0\0\0\0"],
    ids=["too long", "not msgpack", "empty"],
)
def test_a_broken_frame_is_refused(data):
    with pytest.raises(ProtocolError):
        list(FrameReader().feed(data))


def test_a_generate_survives_the_wire():
    assert decode_generate(encode_generate(a_generate())) == a_generate()


@given(st.binary(max_size=60))
def test_other_bytes_are_no_generate(data):
    with pytest.raises(ProtocolError):
        decode_generate(data)


def test_every_refusal_has_a_status():
    assert set(DIALECTS) == set(Code)
    assert Refusal(code=Code.QUOTA, message="x").status == 429
    error = refuse(Code.CONFLICT, "taken", param="name")
    assert (error.refusal.status, error.refusal.param, str(error)) == (409, "name", "taken")


def test_fleet_messages_refuse_what_they_do_not_know():
    beat = Beat(
        replica_id="r",
        boot_id="b",
        seq=1,
        state=ReplicaState.READY,
        kv_blocks_free=1,
        running=0,
        waiting=0,
        steps=0,
    )
    sent = msgspec.json.encode(beat)
    assert msgspec.json.decode(sent, type=Beat) == beat
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(sent[:-1] + b',"mood":1}', type=Beat)
    for kind in (Capacity, JournalEntry):
        assert kind.__struct_config__.forbid_unknown_fields
