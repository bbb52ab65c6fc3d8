"""What a second start of the system leaves as it is."""

import httpx

from local.seed import Admin


def test_a_table_that_an_operator_wrote_is_left_standing() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(409 if request.method == "PUT" else 200, json={})

    with Admin("http://control-plane", "token") as admin:
        admin._client.close()
        admin._client = httpx.Client(
            base_url="http://control-plane", transport=httpx.MockTransport(answer)
        )
        assert admin.put("/admin/routes/smol", {"deployment": "smol-a"}) is None
