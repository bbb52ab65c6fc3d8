"""A slice of `python -m tests.soak.engine`; `SOAK_ENGINE_S` is for how long."""

import os
import secrets

import pytest

from tests.support.engine_soak import Soak, soak_settings
from tests.support.small_model import SMALL_MODEL, small_model_store

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_nothing_is_left_of_random_traffic_at_kv_pressure(tmp_path):
    # vllm 46283: aborts while KV was on its way never freed blocks. sglang 11970: "memory leak
    # detected". vllm 45388, vllm-ascend 16315: deadlock and thrash under pressure.
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(10**9))
    manifest = small_model_store(tmp_path).find(SMALL_MODEL)
    assert manifest is not None
    told = [f"SOAK_SEED={seed}"]
    soak = Soak(soak_settings(tmp_path, manifest.version), seed, told.append)
    try:
        soak.run(float(os.environ.get("SOAK_ENGINE_S") or 20), phases=2)
    except AssertionError as error:
        raise AssertionError("\n".join(told)) from error
    assert sum(soak.aborted.values()) > 0
    assert soak.ends["complete"] > 0
