"""The console in a real browser, on the real stack: every page's main job."""

import re
import secrets
import shutil

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

from tests.support.stack import MODEL

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed"),
]

PASSWORD = "three blue herons fly"
PAGES = (
    "",
    "fleet",
    "models",
    "rollouts",
    "scaling",
    "tenants",
    "usage",
    "safety",
    "users",
    "audit",
)
WAIT_MS = 30_000
PHONE = {"width": 390, "height": 844}
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def a_user(stack, role):
    email = f"{role}-{secrets.token_hex(4)}@example.com"
    body = {"email": email, "name": role.title(), "password": PASSWORD, "roles": [role]}
    with stack.admin() as admin:
        made = admin.post("/admin/users", json=body)
    assert made.status_code == 201, made.text
    return email


def sign_in(context, stack, email, password=PASSWORD):
    page = context.new_page()
    page.goto(f"{stack.status['control_plane_url']}/console/sign-in")
    page.get_by_label("Email").fill(email)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Sign in").click()
    return page


@pytest.fixture(scope="module")
def admins_state(browser, stack):
    """What a browser keeps of an admin who has signed in."""
    context = browser.new_context()
    page = sign_in(context, stack, a_user(stack, "admin"))
    page.wait_for_url("**/console")
    yield context.storage_state()
    context.close()


@pytest.fixture
def look(browser, stack, admins_state):
    """Opens a page as an admin, and fails a test whose page complained of anything."""
    contexts, complaints = [], []

    def look(path="", **options):
        context = browser.new_context(storage_state=admins_state, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: said.type == "error" and complaints.append(said.text))
        page.goto(f"{stack.status['control_plane_url']}/console/{path}")
        return page

    yield look
    for context in contexts:
        context.close()
    # A refusal is an answer, of which the browser speaks as of an error.
    assert [c for c in complaints if "the server responded with a status of 4" not in c] == []


def test_a_wrong_password_is_told_and_the_right_one_leads_in(browser, stack):
    email = a_user(stack, "viewer")
    context = browser.new_context()
    page = sign_in(context, stack, email, "not the password at all")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/sign-in")
    page.goto(f"{stack.status['control_plane_url']}/console/fleet")
    expect(page).to_have_url(re.compile("sign-in"))
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_keeps_anybody_out(look, scheme):
    page = look(color_scheme=scheme, bypass_csp=True)  # or axe may not try colours
    for path in (*PAGES, "playground"):
        page.goto(f"{page.url.split('/console')[0]}/console/{path}")
        expect(page.locator("h1")).to_be_visible()
        found = Axe().run(page)
        grave = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
        told = [(v["id"], [n["html"][:120] for n in v["nodes"][:3]]) for v in grave]
        assert told == [], path


@pytest.mark.parametrize("path", ["", "tenants", "usage", "playground"])
def test_a_phone_scrolls_no_page_sideways(look, path):
    page = look(path, viewport=PHONE)
    page.get_by_role("button", name="Menu").click()
    expect(page.get_by_role("link", name="Fleet")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_overview_renews_itself(look, openai_client):
    page = look()
    expect(page.locator(".figure").first).to_contain_text("requests ended")
    page.evaluate("document.documentElement.dataset.whole = 'yes'")

    told = page.locator(".figure", has_text="Goodput").locator("span")
    before = told.inner_text()
    for _ in range(2):
        openai_client.completions.create(model=MODEL, prompt="One", max_tokens=2)
    expect(told).not_to_have_text(before)
    # It was merged in: nothing was loaded anew.
    assert page.evaluate("document.documentElement.dataset.whole") == "yes"


def test_a_tenant_and_its_key_are_made_used_and_taken_back(look, stack):
    name = f"console-{secrets.token_hex(4)}"
    page = look("tenants")
    page.get_by_text("New tenant").click()
    form = page.locator("form[data-api='POST /admin/tenants']")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Billed").uncheck()
    form.get_by_role("button", name="Create").click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()

    page.get_by_text("New key").click()
    page.locator("form[data-show=key]").get_by_label("Name").fill("first")
    page.get_by_role("button", name="Create").click()
    key = page.locator(".notice code").inner_text()
    expect(page.get_by_role("row", name=re.compile("first"))).to_be_visible()

    def asked():
        body = {"model": MODEL, "prompt": "One", "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(
            f"{stack.gateway_url}/v1/completions", json=body, headers=headers, timeout=60
        )

    assert asked().status_code == 200, asked().text
    page.get_by_role("button", name="Revoke").click()
    page.get_by_role("button", name="Go on").click()
    expect(page.get_by_role("row", name=re.compile("first.*revoked"))).to_be_visible()
    page.wait_for_timeout(1_500)  # within a second, everywhere
    assert asked().status_code == 401


def test_a_refusal_is_told_at_the_field_that_it_names(look):
    page = look("tenants")
    page.get_by_text("New tenant").click()
    form = page.locator("form[data-api='POST /admin/tenants']")
    form.get_by_label("Name").fill("demo")
    form.get_by_role("button", name="Create").click()
    expect(form.get_by_role("alert")).to_contain_text("demo")
    expect(form.get_by_label("Name")).to_have_attribute("aria-invalid", "true")


def test_the_playground_streams_an_answer(look, stack):
    page = look("playground")
    page.get_by_label("Key").fill(stack.key)
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Message").fill("Count to five.")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_label("Answer")).not_to_be_empty()
    expect(page.locator("[data-told]")).to_contain_text("first token")
    page.get_by_label("Key").fill("hwk_nobody")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("[data-told]")).to_contain_text(re.compile("key", re.IGNORECASE))


def test_whoever_is_invited_sets_a_password_and_is_in(look, browser, stack):
    page = look("users")
    page.get_by_text("Invite somebody").click()
    name = f"Grace {secrets.token_hex(4)}"
    page.get_by_label("Name").fill(name)
    page.get_by_label("Email").fill(f"{secrets.token_hex(6)}@example.com")
    page.get_by_role("button", name="Invite").click()
    invitation = page.locator(".notice code").inner_text()
    expect(page.get_by_role("row", name=re.compile(f"{name}.*viewer.*invited"))).to_be_visible()
    context = browser.new_context()
    other = context.new_page()
    other.goto(f"{stack.status['control_plane_url']}/console/welcome")
    other.get_by_label("Invitation").fill(invitation)
    other.get_by_label("A password").fill(PASSWORD)
    other.get_by_role("button", name="Begin").click()
    expect(other.get_by_role("heading", name="Overview")).to_be_visible()
    context.close()


def test_a_viewer_is_told_what_their_role_does_not_show(browser, stack):
    context = browser.new_context()
    page = sign_in(context, stack, a_user(stack, "viewer"))
    page.get_by_role("link", name="Audit log").click()
    expect(page.get_by_text("Your role does not show you the audit log.")).to_be_visible()
    page.get_by_role("link", name="Tenants", exact=True).click()
    page.get_by_text("New tenant").click()
    page.locator("form[data-api='POST /admin/tenants']").get_by_label("Name").fill("mine")
    page.get_by_role("button", name="Create").click()
    expect(page.locator(".notice.bad")).to_be_visible()
    context.close()
