"""The console's own way to the admin API, one for all who look."""

import msgspec
import pytest
from litestar import Request

from control_plane.ui.client import AdminApi

pytestmark = pytest.mark.anyio


async def an_api(scope, receive, send):
    """Gives a cookie, and says which it was shown, or who renews."""
    told = dict(scope["headers"])
    shown = told.get(b"cookie", told.get(b"hx-request", b"")).decode()
    headers = [(b"set-cookie", b"who=ada; Path=/"), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(shown)})


def by(**headers):
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw})


async def test_nobody_is_asked_for_with_a_cookie_that_somebody_else_was_given():
    api = AdminApi(an_api)
    assert (await api.get(by(cookie="who=grace"), "/me")).data == "who=grace"
    assert (await api.get(by(), "/me")).data == ""


async def test_a_page_that_renews_itself_says_so_to_the_api():
    asked = Request({"type": "http", "headers": [(b"hx-request", b"true")]})
    assert (await AdminApi(an_api).get(asked, "/me")).data == "true"
