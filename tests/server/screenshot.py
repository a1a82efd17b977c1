"""Takes the screenshots of docs/serving.md: python -m tests.server.screenshot DIRECTORY [FLAGS...]

The demo model on the emulated device during an answer: light, dark, and on a phone.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.server.browser import browser_page, import_modules
from tests.server.running import running_server

QUESTION = "Tell me a long story about two processors that share their work."
FLAGS = ("--device", "emulated", "--gpu-memory", "300MB")
_ENOUGH_CHARACTERS = 190


def main() -> int:
    directory, *flags = sys.argv[1:]
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as profile,
        running_server("demo", *(flags or FLAGS), "--shutdown-timeout", "0") as server,
        browser_page(Path(profile)) as page,
    ):
        page.resize(1280, 800, scale=1.25)
        page.prefer("light")
        page.open(server.address + "/")
        page.wait_for("document.getElementById('model').textContent === 'demo'")
        import_modules(page)
        page.run("own.settings.temperature = '0'; own.settings.max_tokens = '400'")
        page.run(f"own.ask({QUESTION!r}); 1")
        page.wait_for(f"document.body.textContent.length > 0 && own.live.speeds.length > 8 && "
                      f"[...document.querySelectorAll('.assistant .text')].some("
                      f"(e) => e.textContent.length > {_ENOUGH_CHARACTERS})")  # fmt: skip
        (out / "serve.png").write_bytes(page.picture())
        page.prefer("dark")
        time.sleep(0.5)
        (out / "serve-dark.png").write_bytes(page.picture())
        page.prefer("light")
        page.resize(390, 800, scale=2)
        time.sleep(0.5)
        page.run("document.getElementById('view-live').click()")
        time.sleep(0.8)
        (out / "serve-phone.png").write_bytes(page.picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
