"""The page that `agl report` writes, in a real browser: whole by itself, readable, and deaf to what others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.cli.main import run
from tests.cli.test_report import converse
from tests.dashboard.world import browser
from tests.node import installed

AXE = Path(__file__).parent / "package.json"


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
async def test_it_asks_nobody_fits_and_is_accessible(
    page_of_hostile_rollouts: Path, scheme: str, width: int, anyio_backend: str
) -> None:
    happened: list[str] = []
    url = page_of_hostile_rollouts.as_uri()
    async with browser() as opened:
        # Only so can the examiner itself be run in it: the page's policy allows no script.
        context = await opened.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
        )
        page = await context.new_page()
        page.on("dialog", lambda dialog: happened.append(dialog.message))
        page.on("request", lambda asked: happened.append(asked.url) if not asked.url.startswith("data:") else None)
        await page.goto(url)
        for summary in await page.locator("summary").all():
            await summary.click()
        assert await page.get_by_text("<script>alert(1)</script> is worth 0.9").is_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        await page.add_script_tag(content=(installed(AXE) / "node_modules" / "axe-core" / "axe.min.js").read_text())
        found = await page.evaluate("axe.run().then(found => found.violations)")
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"][:3]]) for one in serious] == []
    assert happened == [url]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def page_of_hostile_rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        converse([0.1, 0.9, 0.5])
        assert run(["report", "--out", "out"]) == 0
    return folder / "out" / "report.html"
