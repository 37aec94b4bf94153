"""The report in Chromium, opened from the disk: no error, no request, what a reader does works, axe finds nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from cluster.report.page import write
from tests.cluster.reported import make_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a report of 9 steps of two groups."""
    run = make_run(tmp_path_factory.mktemp("run"), steps=9)
    return write(run, None, 5000, None, lambda done, total: None).path.as_uri()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser, report: str) -> Iterator[Page]:
    """The page when all of it is drawn; at the end, nothing may have gone wrong in it."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: wrong.append(request.url) if request.url.startswith(("http", "ws")) else None)
    page.goto(report)
    page.wait_for_selector("html[data-ready]")
    yield page
    assert page.evaluate("window.hit") is None  # what the hostile token would set
    assert wrong == []
    page.close()


def token(page: Page, place: int) -> Locator:
    """Of the first group: tokens 0 and 1 are the right completion's, 2 and 3 the wrong one's."""
    return page.locator("button.t").nth(place)


def credit_of(page: Page, place: int) -> str:
    return (token(page, place).get_attribute("aria-label") or "").split("credit ")[1]


def test_credit_has_the_sign_of_the_advantage_and_the_size_of_the_weight(page: Page):
    labels = [token(page, i).get_attribute("aria-label") for i in range(4)]
    # the weights .5, 1.5, 1 and 1, times .707
    assert labels == ["1, credit +0.354", "<eos>, credit +1.06", "+, credit −0.707", "<eos>, credit −0.707"]
    shades = [token(page, i).evaluate("e => e.style.getPropertyValue('--a')") for i in range(4)]
    assert shades == ["0.333", "1.000", "0.667", "0.667"]  # of the group's largest
    page.get_by_role("radio", name="Completion").check()
    assert token(page, 2).evaluate("e => e.style.getPropertyValue('--a')") == "1.000"


def test_hover_and_keyboard_show_everything_that_is_known_of_a_token(page: Page):
    inspector = page.locator("#inspector")
    token(page, 0).hover()
    pairs = "() => [...document.querySelectorAll('#inspector dt')].map(e => [e.innerText, e.nextSibling.innerText])"
    known = dict(page.evaluate(pairs))
    assert known["credit"] == "+0.354" and known["weight"] == "0.5" and known["advantage"] == "+0.707"
    assert known["log-prob, sampler"] == "−0.5" and known["log-prob, base"] == "−1" and known["residual"] == "1"
    assert known["quadrant"] == "PLR" and known["version"] == "v2" and known["digest"] == "abababababab"
    page.keyboard.press("Escape")
    assert inspector.is_hidden()
    page.mouse.move(0, 0)
    token(page, 0).focus()
    page.keyboard.press("ArrowRight")
    assert "+1.06" in inspector.inner_text()
    assert token(page, 1).get_attribute("aria-describedby") == "inspector"
    page.keyboard.press("ArrowDown")
    assert "−0.707" in inspector.inner_text()


def test_methods_can_be_switched_on_the_same_trajectory_and_permuted(page: Page):
    page.get_by_label("Method").select_option("uniform")
    assert token(page, 1).get_attribute("aria-label") == "<eos>, credit +0.707"
    page.get_by_label("Method").select_option("arca")
    before = sorted(credit_of(page, i) for i in range(2))
    page.get_by_label("Permuted control").check()
    after = [credit_of(page, i) for i in range(2)]
    assert sorted(after) == before
    starts, order, credit = page.evaluate("() => [A.start, A.order, credit].map(values => Array.from(values))")
    page.get_by_label("Permuted control").uncheck()
    plain = page.evaluate("() => Array.from(credit)")
    for start, end in pairwise(starts):
        assert credit[start:end] == [plain[start + i] for i in order[start:end]]


def test_filters_leave_what_matches(page: Page):
    count = page.locator("#count")
    sync_api.expect(count).to_have_text("36 of 36 completions in 18 groups")
    page.locator(".filters summary").click()
    page.locator("[name=reward]").select_option("right")
    sync_api.expect(count).to_have_text("9 of 36 completions in 9 groups")
    page.locator("[name=step_from]").fill("8")
    sync_api.expect(count).to_have_text("2 of 36 completions in 2 groups")
    page.locator("[name=quadrant]").select_option("NHR")
    sync_api.expect(count).to_have_text("0 of 36 completions in 0 groups")
    page.get_by_role("button", name="Clear").click()
    sync_api.expect(count).to_have_text("36 of 36 completions in 18 groups")
    page.locator("[name=length_from]").fill("3")
    sync_api.expect(count).to_have_text("18 of 36 completions in 9 groups")
    page.get_by_role("button", name="Clear").click()
    page.locator("[name=regime]").select_option("uniform")
    page.locator("[name=sign]").select_option("-1")
    sync_api.expect(count).to_have_text("9 of 36 completions in 9 groups")


def test_pages_hold_some_groups_each(page: Page):
    assert page.locator("article").count() == 8
    page.get_by_role("button", name="Next").first.click()
    assert "page 2 of 3" in page.locator(".pager").first.inner_text()
    page.get_by_role("button", name="Next").last.click()
    assert page.locator("article").count() == 2
    assert page.get_by_role("button", name="Next").first.is_disabled()


def test_shares_of_credit_are_sums_over_the_tokens(page: Page):
    # of a group .354 + 1.06 above zero, and twice .707 below: tokens of low entropy .354 and .707, of high the rest
    cells = page.locator(".four .big").all_inner_texts()
    assert [cell.replace("\u00a0", " ") for cell in cells] == ["38 %", "25 %", "13 %", "25 %"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, theme: str):
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    if theme == "dark":
        page.get_by_role("button", name="Dark").click()
        assert page.get_by_role("button", name="Dark").get_attribute("aria-pressed") == "true"
    page.locator(".filters summary").click()
    token(page, 0).focus()
    page.locator(".plot canvas").first.wait_for(state="attached")
    results = axe.Axe().run(page)
    found = results.response["violations"]
    assert not found, [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found]
    assert len(results.response["passes"]) > 20
