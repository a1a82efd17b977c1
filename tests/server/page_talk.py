"""Helpers of the page's tests."""

import json
from typing import Any

from tests.server.browser import Page, import_modules

TEXT = "document.querySelector('.message.assistant:last-child .text').textContent"
DONE = "!document.querySelector('.busy') && !!document.querySelector('.message.assistant')"


def set_field(page: Page, name: str, value: str) -> None:
    page.run("document.getElementById('open-settings').click()")
    page.run(f"document.getElementById('set-{name}').value = '{value}'")
    page.run("document.querySelector('#settings .primary').click()")
    page.wait_for(f"own.settings.{name} === '{value}'")


def open_page(page: Page, address: str) -> None:
    page.open(f"{address}/")
    import_modules(page)


def say(page: Page, text: str) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.write(text)
    page.press("Enter")


def drawn(page: Page, *texts: str) -> Any:
    """Render texts one after another in one element; return its HTML."""
    return page.run(
        f"""(() => {{ const place = document.createElement('div');
            for (const text of {json.dumps(texts)}) own.writeMarkdown(place, text);
            return place.innerHTML; }})()"""
    )


def script_answers(page: Page, *answers: list[dict[str, Any]]) -> None:
    """Give the page scripted streams, each a list of deltas; record the bodies it sends."""
    streams = [
        "".join(
            f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n"
            for delta in deltas
        )
        + ": a comment\n\ndata: [DONE]\n\n"
        for deltas in answers
    ]
    page.run(f"""(() => {{ const streams = {json.dumps(streams)}, real = window.fetch;
        window.sent = [];
        window.fetch = async (url, options) => {{
          if (!String(url).includes('chat/completions') || streams.length === 0)
            return real(url, options);
          window.sent.push(JSON.parse(options.body));
          return new Response(streams.shift()); }}; }})()""")


def serious(page: Page) -> list[str]:
    """Return the serious and critical axe accessibility rules that the page violates."""
    page.run("window.found = null; axe.run().then((found) => { window.found = found; })")
    page.wait_for("window.found !== null")
    violations = page.run("found.violations.map((one) => [one.impact, one.id])")
    return [rule for impact, rule in violations if impact in ("serious", "critical")]
