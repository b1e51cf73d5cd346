"""The site that `make docs` has built: links, what it loads, and how it looks in a browser, if there is one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
SOURCES = [ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.*"), *(ROOT / "tools" / "site").glob("*.py")]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

if not (SITE / "index.html").exists():
    pytest.skip("there is no site; `make docs` builds it", allow_module_level=True)
if (SITE / "index.html").stat().st_mtime < max(path.stat().st_mtime for path in SOURCES):
    pytest.skip("the site is older than its sources; `make docs` builds it anew", allow_module_level=True)

PAGES = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")


class Page(HTMLParser):
    """The links, anchors and resources of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.resources: list[str] = []
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[key] for key in ("id", "name") if key in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.resources.append(found.get("href", ""))
        if tag in ("script", "img", "source", "iframe") and "src" in found:
            self.resources.append(found["src"])


@cache
def page(path: Path) -> Page:
    return Page(path)


def test_every_link_leads_somewhere():
    broken = []
    for path in PAGES:
        for link in [*page(path).links, *page(path).resources]:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            fragment = unquote(parts.fragment) if target.suffix == ".html" else ""
            if not target.exists() or (fragment and fragment not in page(target).anchors):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    assert not broken, "\n".join(sorted(broken)[:20])


def test_nothing_is_loaded_from_a_network():
    for path in PAGES:
        assert not [r for r in page(path).resources if urlsplit(r).netloc], path
    for style in SITE.rglob("*.css"):
        urls = re.findall(r"url\(['\"]?([^)'\"]+)", style.read_text())
        assert not [u for u in urls if u.startswith(("http", "//"))], style


def test_mathematics_is_typeset():
    for path in PAGES:
        assert "arithmatex" not in page(path).text, path
    count = sum(page(path).text.count("<math") for path in PAGES)
    assert count > 1500


# -- in a browser -----------------------------------------------------------------------------------------------------

# Runs in the page; what it finds is read from the title.
PROBE = """
<script>
addEventListener("load", async () => {
  await document.fonts.ready;
  const light = (colour) => {
    const [r, g, b, a = 1] = colour.match(/[\\d.]+/g).map(Number);
    const linear = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const text = document.querySelector("article p");
  const shades = [light(getComputedStyle(text).color), light(getComputedStyle(document.body).backgroundColor)].sort((a, b) => a - b);
  const spills = (e) => e.scrollWidth > e.clientWidth + 1;
  const formulas = [...document.querySelectorAll("article math")].filter((m) => !m.closest("details"));
  document.title = "FACTS" + JSON.stringify({
    wide: document.documentElement.scrollWidth - innerWidth,
    width: innerWidth,
    contrast: (shades[1] + 0.05) / (shades[0] + 0.05),
    background: light(getComputedStyle(document.body).backgroundColor),
    cells: document.querySelectorAll("figure.start td[class]").length,
    spilling: [...document.querySelectorAll("figure.start :is(th, td)")].filter(spills).map((e) => e.textContent),
    formulas: formulas.length,
    flat: formulas.filter((m) => m.getBoundingClientRect().width < 3 || m.getBoundingClientRect().height < 3).length,
    font: [...document.fonts].filter((f) => f.family.includes("STIX")).map((f) => f.status).join(),
    figures: [...document.querySelectorAll("figure")].map((f) => f.getBoundingClientRect().width),
    images: [...document.images].filter((i) => !i.naturalWidth).length,
    loaded: performance.getEntriesByType("resource").map((r) => r.name),
  });
});
</script>
"""


def browse(name: str, width: int, dark: bool, folder: Path, script: str) -> tuple[dict, Path]:
    """What a script in a copy of a page, beside the original, writes to its title; and a picture of it."""
    path = SITE / name
    copy = path.with_name(f"probe-{folder.name}-{path.name}")
    copy.write_text(path.read_text().replace("</head>", script + "</head>"))
    picture = folder / "picture.png"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1000", f"--screenshot={picture}"]
    options += ["--force-dark-mode"] * dark
    try:
        shown = subprocess.run(
            [str(CHROMIUM), *options, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=60
        )
    finally:
        copy.unlink()
    found = re.search(r"<title>FACTS(.*?)</title>", shown.stdout, re.DOTALL)
    assert found, shown.stderr[-2000:]
    return json.loads(html.unescape(found[1])), picture


def shares(picture: Path) -> dict[str, float]:
    """Which share of a picture's points, below the bar at the top, is of the background's colour, red, or green."""
    image = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    colours = image.crop((0, 100, *image.size)).getcolors(maxcolors=2**24)
    total = sum(count for count, _ in colours)
    kinds = {
        "red": lambda r, g, b: r > 1.8 * max(g, b) and r > 120,
        "green": lambda r, g, b: g > 1.3 * max(r, b) and g > 80,
    }
    found = {kind: sum(count for count, colour in colours if is_so(*colour)) / total for kind, is_so in kinds.items()}
    return found | {"background": max(count for count, _ in colours) / total}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("name, formulas", [("index.html", 0), ("catalogue/linalg.html", 300)])
@pytest.mark.parametrize("width", [1300, 500])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser(name, formulas, width, dark, tmp_path):
    found, picture = browse(name, width, dark, tmp_path, PROBE)
    assert found["wide"] <= 0
    assert found["contrast"] > 7
    assert found["background"] < 0.05 if dark else found["background"] > 0.9
    assert found["formulas"] >= formulas and found["flat"] == 0
    assert not formulas or found["font"] == "loaded"
    assert found["images"] == 0
    assert all(0 < w <= found["width"] for w in found["figures"])
    assert found["spilling"] == []
    assert all(url.startswith("file:") for url in found["loaded"])
    seen = shares(picture)
    assert 0.4 < seen["background"] < 0.97
    if name == "index.html":
        assert found["cells"] == 72
        assert 0.005 < seen["red"] < seen["green"] < 0.2  # what is wrong, and what is right


SEARCH = """
<script>
addEventListener("load", () => {
  setTimeout(() => {
    document.querySelector("#__search").click();
    const input = document.querySelector("input.md-search__input");
    input.value = "cholesky";
    input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
  }, 500);
  setTimeout(() => {
    const found = [...document.querySelectorAll(".md-search-result__link")].map((a) => a.getAttribute("href"));
    document.title = "FACTS" + JSON.stringify({ found });
  }, 6000);
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_search_works_without_a_server(tmp_path):
    found, _ = browse("index.html", 1300, False, tmp_path, SEARCH)
    assert any("catalogue/linalg.html" in link for link in found["found"])
