"""Takes screenshots of the documentation site with a headless browser, at the widths of a desktop and a phone.

    python docs/screenshots.py                         # twelve pages, 1280 and 390 pixels wide, into build/screenshots
    python docs/screenshots.py --dark dp choose        # these pages, in the dark theme

The script fails if a page is wider than its window, because readers would have to scroll horizontally. The browser is
Debian's ``chromium``, or the program given with ``--chromium``. The script controls it over two pipes, without a port.
"""

import argparse
import base64
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "screenshots"
PAGES = (
    "index",
    "install",
    "choose",
    "ddp",
    "ddp_spawn",
    "agreement",
    "metrics",
    "failures",
    "troubleshooting",
    "faq",
    "benchmarks",
    "reference/pytorch",
)
WIDTHS = {1280: 900, 390: 844}
#: Maximum height of a screenshot, in pixels.
MAX_HEIGHT = 12_000


class Browser:
    """A browser that is controlled over pipes with the DevTools protocol.

    Args:
        program: Path of the browser.
        home: Empty directory for the browser's profile.
    """

    def __init__(self, program: str, home: str) -> None:
        to_browser, self._commands = _pipe()
        self._replies, from_browser = _pipe()
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--hide-scrollbars",
            f"--user-data-dir={home}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # chromium's sandbox refuses to run as root
        ]
        self._log = Path(home, "chromium.log")
        with self._log.open("w") as log:
            self._pid = os.posix_spawn(
                program,
                [program, *options],
                dict(os.environ),
                # File descriptors that chromium uses for --remote-debugging-pipe.
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, to_browser, 3),
                    (os.POSIX_SPAWN_DUP2, from_browser, 4),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
            )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command to the browser and returns its result.

        Raises:
            RuntimeError: If the command fails, or the browser has exited.
        """
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (reply := self._receive()).get("id") != self._number:
            pass
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]  # type: ignore[no-any-return]

    def wait_for(self, event: str) -> None:
        """Waits for an event."""
        while self._receive().get("method") != event:
            pass

    def close(self) -> None:
        """Closes the browser."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            received = os.read(self._replies, 1 << 20)
            if not received:
                raise RuntimeError(f"The browser has exited. Its output:\n{self._log.read_text()}")
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]


def _pipe() -> list[int]:
    # The browser uses file descriptors 3 and 4.
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


def take_picture(browser: Browser, page: Path, width: int, picture: Path) -> bool:
    """Saves a screenshot of a page; returns whether the page fits the width of its window."""
    browser(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=WIDTHS[width],
        deviceScaleFactor=1,
        mobile=width < 800,
    )
    browser("Page.enable")
    browser("Page.navigate", url=page.resolve().as_uri())
    browser.wait_for("Page.loadEventFired")
    expression = "JSON.stringify([innerWidth, document.documentElement.scrollWidth])"
    inner, wide = json.loads(browser("Runtime.evaluate", expression=expression)["result"]["value"])
    size = browser("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": width, "height": min(size["height"], MAX_HEIGHT), "scale": 1}
    data = browser("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
    picture.write_bytes(base64.b64decode(data))
    fits = inner == wide == width
    print(f"{picture}: {width} x {int(size['height'])}{'' if fits else f', BUT ITS CONTENT IS {wide} PIXELS WIDE'}")
    return bool(fits)


def main() -> int:
    """Takes the screenshots; returns 1 if a page does not fit its window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="paths of the pages in their URLs, without .html")
    parser.add_argument("--dark", action="store_true", help="use the dark theme")
    parser.add_argument("--chromium", default="chromium", help="the browser")
    arguments = parser.parse_args()
    program = shutil.which(arguments.chromium)
    if program is None:
        print(
            f"The browser {arguments.chromium!r} was not found. Install it (apt install chromium), or set its path:"
            " make docs-screenshots CHROMIUM=/path/to/chromium",
            file=sys.stderr,
        )
        return 2
    missing = [page for page in arguments.pages if not (SITE / f"{page}.html").exists()]
    if missing:
        print(f"The site has no page {', '.join(missing)}. Run `make docs` first.", file=sys.stderr)
        return 2
    PICTURES.mkdir(parents=True, exist_ok=True)
    scheme = "dark" if arguments.dark else "light"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        browser = Browser(program, home)
        try:
            browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            fits = [
                take_picture(
                    browser,
                    SITE / f"{page}.html",
                    width,
                    PICTURES / f"{page.replace('/', '-')}-{width}{'-dark' if arguments.dark else ''}.png",
                )
                for page in arguments.pages
                for width in WIDTHS
            ]
        finally:
            browser.close()
    return 0 if all(fits) else 1


if __name__ == "__main__":
    raise SystemExit(main())
