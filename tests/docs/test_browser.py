"""The site and the HTML report in a real browser, as wide as a phone and as a desk's
screen.

One Chromium loads every page in a frame of each width, served from this process.
Nothing is asked of the network. A page must fit its frame, show its heading and leave
no error in the console.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gradwire_bench.report import html
from gradwire_bench.report.live import LivePage
from scripts.site_pages import ROOT

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None
)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("site"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium: apt-get install chromium"
    ),
]
WIDTHS = (390, 1280)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--dump-dom",
]
HARNESS = """<!doctype html><title>harness</title><pre id="found"></pre><script>
const found = [];
const later = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
async function look(path, width) {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 900px; border: 0`;
  frame.src = path;
  const loaded = new Promise((done) => { frame.onload = done; });
  document.body.append(frame);
  await loaded;
  await later(0.2);
  const page = frame.contentDocument, heading = page.querySelector("h1");
  const box = heading && heading.getBoundingClientRect();
  const wide = [...page.body.querySelectorAll("*")].filter(
    (one) => one.getBoundingClientRect().right > width + 1 && !scrolls(one, page));
  found.push({path, width, needs: page.documentElement.scrollWidth,
    heading: heading ? heading.textContent : "",
    shown: Boolean(box && box.width && box.height),
    wide: wide.slice(0, 3).map((one) => one.outerHTML.slice(0, 120))});
  frame.remove();
}
function scrolls(one, page) {
  for (let at = one; at && at !== page.body; at = at.parentElement)
    if (!["visible", ""].includes(frameStyle(at, page).overflowX)) return true;
  return false;
}
const frameStyle = (one, page) => page.defaultView.getComputedStyle(one);
(async () => {
  for (const [path, width] of WORK) await look(path, width);
  document.getElementById("found").textContent = JSON.stringify(found);
  document.title = "done";
})();
</script>"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and says nothing."""

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which the files of a folder are found."""
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def looked_at(
    paths: list[str], folder: Path, profile: Path
) -> tuple[list[dict[str, Any]], list[str]]:
    """What each page is like at each width, and the console's errors."""
    work = json.dumps([(path, width) for path in paths for width in WIDTHS])
    (folder / "harness.html").write_text(
        HARNESS.replace("WORK", work), encoding="utf-8"
    )
    budget_ms = 2000 + 700 * len(paths) * len(WIDTHS)
    with served(folder) as address:
        done = subprocess.run(
            [
                CHROMIUM,
                *QUIET,
                f"--user-data-dir={profile}",
                f"--virtual-time-budget={budget_ms}",
                "--window-size=1400,1000",
                f"{address}/harness.html",
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
    text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert text[1], f"the browser came to no end:\n{done.stderr[-2000:]}"
    errors = [
        line
        for line in done.stderr.splitlines()
        if "CONSOLE" in line and "rror" in line
    ]
    return json.loads(unescape(text[1])), errors


def unfit(pages: list[dict[str, Any]]) -> list[str]:
    """What is wrong with pages, in words."""
    return [
        f"{page['path']} at {page['width']} px: "
        + (
            f"needs {page['needs']} px: {page['wide']}"
            if page["heading"]
            else "no heading is shown"
        )
        for page in pages
        if page["needs"] > page["width"] or not page["heading"] or not page["shown"]
    ]


def test_every_page_of_the_site_fits_its_window_without_errors(
    site: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "served"
    shutil.copytree(site, folder)
    paths = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*.html")
    )
    # Pages of algorithms are of one form: of those the longest speak for all.
    alike = sorted(
        (p for p in paths if p.startswith("algorithms/")), key=lambda p: -len(p)
    )
    chosen = [path for path in paths if path not in alike[3:] and path != "404.html"]
    assert len(chosen) > 15
    pages, errors = looked_at(chosen, folder, tmp_path / "profile")
    assert len(pages) == len(chosen) * len(WIDTHS)
    assert unfit(pages) == []
    assert errors == []


def test_a_wide_report_fits_its_window(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="the report needs gradwire[report]")
    row = {f"a_column_of_a_long_name_{i}": 1.5 * i for i in range(14)}
    html.write(
        tmp_path / "report.html",
        title="Four hosts at 200 Mbit",
        command="gradwire demo --hosts 4 --rate 200mbit "
        + 8 * "--compressor one_more ",
        machine={"cpu": "Some CPU of a long name " * 5, "memory_bytes": 8_000_000_000},
        rows=[{"name": "ddp", **row}, {"name": "onebit", **row}],
        pictures={"one step": ROOT / "docs" / "pictures" / "step.png"},
        notes=["losses after 40 steps " * 12],
    )
    pages, errors = looked_at(["report.html"], tmp_path, tmp_path / "profile")
    assert unfit(pages) == []
    assert errors == []


def test_a_live_page_fits_its_window_before_and_after(tmp_path: Path) -> None:
    page = LivePage(
        folder=tmp_path,
        methods=["DDP, AdamW", "gradwire local steps, Muon"],
        place="An LSTM learns to write, on 4 ranks at 50mbit, 40 ms one way.",
        steps=80,
        command="gradwire try --far --no-browser --out " + "folder/" * 20,
    )
    lines = [
        [
            {"step": 5 * at, "seconds": pace * at, "loss": 5.5 / (1 + at / 8)}
            for at in range(17)
        ]
        for pace in (2.5, 0.2)
    ]
    page.begin()
    page.path.rename(tmp_path / "before.html")
    page.end(lines, 2.6, "gradwire local steps, Muon: 3.0 s to DDP's loss.")
    paths = ["before.html", "index.html"]
    pages, errors = looked_at(paths, tmp_path, tmp_path / "profile")
    assert unfit(pages) == []
    assert errors == []
