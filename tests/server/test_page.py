"""Tests of the page in a real browser."""

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.server.browser import Page, browser_page, find_chromium, import_modules
from tests.server.cable import cable_to
from tests.server.page_talk import (
    DONE,
    TEXT,
    drawn,
    open_page,
    say,
    script_answers,
    serious,
    set_field,
)
from tests.server.running import RunningServer

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="Chromium is not installed (Debian: apt install chromium)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser: Page, server: RunningServer) -> Iterator[Page]:
    browser.resize(1280, 800)
    browser.prefer("light")
    browser.open(server.address)
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(server.address + "/")
    browser.problems.clear()
    browser.urls.clear()
    browser.wait_for("document.getElementById('model').textContent === 'tiny'")
    import_modules(browser)
    yield browser
    assert browser.problems == []
    assert all(url.startswith((server.address, "data:")) for url in browser.urls), browser.urls


def test_a_question_is_answered_as_it_streams(page: Page) -> None:
    set_field(page, "temperature", "0")
    set_field(page, "max_tokens", "40")
    say(page, "hello")
    page.wait_for(DONE)
    assert page.run("document.querySelector('.message.user .text').textContent") == "hello"
    first = page.run(TEXT)
    assert len(first) > 10
    assert "40 tokens" in page.run("document.querySelector('.about').textContent")
    say(page, "again")
    page.wait_for("document.querySelectorAll('.about').length === 2")
    assert page.run("own.conversation.length") == 4


def test_escape_and_the_button_stop_an_answer(page: Page, server: RunningServer) -> None:
    set_field(page, "temperature", "0")
    set_field(page, "max_tokens", "3000")
    for stop in ("page.press", "click"):
        say(page, "hello")
        page.wait_for(f"!!document.querySelector('.busy') && {TEXT}.length > 3")
        assert page.run("document.getElementById('send').hidden")
        if stop == "click":
            page.run("document.getElementById('stop').click()")
        else:
            page.press("Escape")
        page.wait_for(DONE)
        server.wait_for("tandem_requests_running", 0)
    assert not page.run("document.getElementById('send').hidden")


def test_the_grid_lights_up_where_experts_are_used(page: Page, server: RunningServer) -> None:
    page.wait_for("own.live.layers > 0")
    cells = page.run("own.live.layers * own.live.experts")
    assert page.run("own.live.uses.length") == cells
    server.chat(max_tokens=30, temperature=0)
    page.wait_for("own.live.uses.some((uses) => uses > 0)")
    page.wait_for("own.live.speeds.some((speed) => speed > 0) && own.live.steps.length > 5")
    # Something has been drawn, in more than one colour.
    script = """(() => { const c = document.getElementById('grid');
        const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const seen = new Set();
        for (let i = 0; i < data.length; i += 4) seen.add(data[i] << 16 | data[i + 1] << 8);
        return seen.size; })()"""
    server.chat(max_tokens=30, temperature=0)
    page.wait_for(f"{script} > 2")
    # The picture has the grid, the processors and a line of figures.
    script = "(() => { const p = own.picture(); return [p.width, p.height]; })()"
    width, height = page.run(script)
    assert width >= page.run("document.getElementById('grid').width")
    parts = "['grid', 'processors'].map((name) => document.getElementById(name).height)"
    assert height > sum(page.run(parts))
    page.run("own.savePicture(); 1")
    page.run("document.getElementById('grid').focus()")
    page.press("ArrowRight")
    page.press("ArrowDown")
    assert "layer 1, expert 1" in page.run("document.getElementById('cell').textContent")


def test_errors_are_shown_where_the_answer_would_be(page: Page) -> None:
    set_field(page, "max_tokens", "1")
    page.run("own.conversation.push({role: 'user', content: 'x'.repeat(40000)})")
    page.run("own.ask('y')")
    page.wait_for("!!document.querySelector('.problem')")
    assert "shorten it" in page.run("document.querySelector('.problem').textContent")
    page.problems.clear()  # the browser logs the 400 itself


def test_a_server_that_goes_and_comes_back_is_told(page: Page, server: RunningServer) -> None:
    with cable_to(server.port) as cable:
        open_page(page, cable.address)
        page.run("Object.assign(own.settings, {temperature: '0', max_tokens: '3000'})")
        page.run("own.ask('hello'); 1")
        page.wait_for(f"!!document.querySelector('.busy') && {TEXT}.length > 3")
        cable.cut()
        page.wait_for("!!document.querySelector('.problem') && !document.querySelector('.busy')")
        assert "connection broke" in page.run("document.querySelector('.problem').textContent")
        page.wait_for("!!document.querySelector('.dot.gone')")
        cable.mend()
        page.wait_for("!!document.querySelector('.dot.ready')")
        server.wait_for("tandem_requests_running", 0)
        page.run("own.settings.max_tokens = '7'; document.querySelector('.again').click()")
        page.wait_for("!!document.querySelector('.about')?.textContent.includes('7 tokens')")
        assert page.run("own.conversation.map((message) => message.role)") == ["user", "assistant"]
        assert page.run("document.querySelectorAll('.message').length") == 2
        page.open(server.address + "/")
    page.urls.clear()  # another address this once
    page.problems.clear()  # the browser logs what it could not reach


MARKDOWN = """# Title
One **strong** and *soft* `a*b*c` line
that goes on, 2 * 3 * 4, snake_case_name.

- first
  ```py
  if x:

      pass
  ```
- second
  1. inner
> quoted

| a | b |
|---|--:|
| 1 | `2` |

See [this](https://example.org/x?a=1) and https://example.org/y.
```
<b>not bold</b>
"""


def test_markdown_is_drawn_alike_however_it_comes(page: Page) -> None:
    whole = drawn(page, MARKDOWN)
    assert drawn(page, *(MARKDOWN[:n] for n in range(len(MARKDOWN) + 1))) == whole
    for part in (
        "<h3>Title</h3>", "<strong>strong</strong>", "<em>soft</em>", "<code>a*b*c</code>",
        "2 * 3 * 4, snake_case_name", "<pre><code>if x:\n\n    pass</code></pre>",
        "<ol start=\"1\"><li><span>inner</span></li></ol>", "<blockquote><p>quoted</p>",
        "<td>1</td><td><code>2</code></td>", "<a href=\"https://example.org/x?a=1\"",
        "rel=\"noopener noreferrer\">this</a>", ">https://example.org/y</a>.",
        "&lt;b&gt;not bold&lt;/b&gt;",
    ):  # fmt: skip
        assert part in whole, part


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "[x](javascript:alert(1)) [y](data:text/html,z)",
        "```html\n</code></pre><script>alert(1)</script>\n```",
        "| <img src=x> | b |\n|---|---|\n| [z](JaVaScRiPt:a) | <svg onload=a> |",
        '[a](https://x.org"onmouseover=alert(1)) **<i>** `<i>`',
    ],
)
def test_no_text_becomes_markup(page: Page, text: str) -> None:
    found = drawn(page, text)
    for tag in ("<script", "<img", "<svg", "<i>", 'href="javascript', 'href="data', 'onmouse="'):
        assert tag not in found.lower()


def test_an_answer_and_its_code_can_be_copied(page: Page) -> None:
    page.run("""Object.defineProperty(navigator, 'clipboard', {configurable: true,
        value: {writeText: async (text) => { window.pasted = text; }}})""")
    page.run("""sessionStorage.setItem('tandem-chat', JSON.stringify([
        {role: 'user', content: 'code?'}, {role: 'assistant', content: '```py\\na = 1\\n```'}]))""")
    page.run("own.showKept()")
    page.run("document.querySelector('.code-head .copy').click()")
    page.wait_for("window.pasted === 'a = 1'")
    page.run("document.querySelector('.about .copy').click()")
    page.wait_for("window.pasted.startsWith('```py')")


def test_a_conversation_outlives_a_reload_until_a_new_one(
    page: Page, server: RunningServer
) -> None:
    set_field(page, "max_tokens", "5")
    page.run("own.ask('hello'); 1")
    page.wait_for(DONE)
    open_page(page, server.address)
    assert page.run("own.conversation.map((message) => message.role)") == ["user", "assistant"]
    assert page.run("document.querySelectorAll('.message').length") == 2
    page.run("document.getElementById('clear').click()")
    assert page.run("document.querySelectorAll('.message').length + own.conversation.length") == 0
    assert page.run("sessionStorage.getItem('tandem-chat')") == "[]"


def test_calls_are_shown_and_their_results_given_back(page: Page, server: RunningServer) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "look_up", "arguments": '{"text": "sky"}'}}
    other = {"index": 1, "id": "c2", "function": {"name": "now", "arguments": "{}"}}
    script_answers(
        page,
        [{"reasoning_content": "I look"}, {"content": "Wait."}, {"tool_calls": [call, other]}],
        [{"content": "It is blue."}],
    )
    page.run("""own.settings.tools = '[{"name": "look_up"}]'; own.ask('why?'); 1""")
    page.wait_for(f"{DONE} && document.querySelectorAll('.result-form').length === 2")
    assert page.run("sent[0].tools") == [{"type": "function", "function": {"name": "look_up"}}]
    assert page.run("document.querySelector('.message details .text').textContent") == "I look"
    assert not page.run("document.querySelector('.message details').open")
    assert "sky" in page.run("document.querySelector('.call pre').textContent")
    assert page.run("document.querySelector('.call').getAttribute('aria-label')").endswith(
        "look_up"
    )
    for text in ("blue <b>", "noon"):
        page.run("document.querySelector('.result-form textarea').focus()")
        page.write(text)
        page.run("document.querySelector('.result-form button').click()")
    page.wait_for(f"{TEXT} === 'It is blue.'")
    roles = [message["role"] for message in page.run("sent[1].messages")]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert page.run("sent[1].messages[2]") == {
        "role": "tool", "tool_call_id": "c1", "content": "blue <b>",
    }  # fmt: skip
    page.wait_for(DONE)
    open_page(page, server.address)
    assert page.run("document.querySelectorAll('.call').length") == 2
    assert page.run("document.querySelectorAll('.result-form').length") == 0
    assert page.run("document.querySelector('.call details pre').textContent") == "blue <b>"


CHOOSE = """(async () => { const canvas = document.createElement('canvas');
   canvas.width = 3000; canvas.height = 30; const blob = await new Promise((d) => canvas.toBlob(d));
    const files = [new File([blob], 'a.png'), new File(['x'], 'b.txt')];
    await own.choosePictures(files); return 1; })()"""


def test_pictures_are_attached_where_models_take_them(page: Page, server: RunningServer) -> None:
    assert page.run("document.getElementById('attach').hidden")
    page.run(CHOOSE)
    assert not page.run("own.hasPictures()")
    page.run("own.offerPictures(true)")
    for _ in range(2):
        page.run(CHOOSE)
    problem = page.run("document.getElementById('picture-problem').textContent")
    assert problem == "b.txt is no picture that this browser opens"
    names = "[...document.querySelectorAll('#pictures img')].map((one) => one.alt)"
    assert page.run(names) == ["a.png", "a.png"]
    page.run("document.querySelector('#pictures button').click()")
    script_answers(page, [{"content": "A line."}], [{"content": "Still."}])
    say(page, "What is it?")
    page.wait_for(f"{TEXT} === 'A line.' && {DONE}")
    picture, text = page.run("sent[0].messages[0].content")
    assert picture["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert text == {"type": "text", "text": "What is it?"}
    assert page.run(names) == []
    assert page.run("document.querySelector('.message.user .picture').naturalWidth") == 1536
    page.run(CHOOSE)
    page.run("document.getElementById('send').click()")
    page.wait_for(f"{TEXT} === 'Still.' && {DONE}")
    assert len(page.run("sent[1].messages[2].content")) == 1
    open_page(page, server.address)
    assert page.run("document.querySelectorAll('.message.user .picture').length") == 2
    assert page.run("own.conversation[0].content[0].type") == "image_url"


def test_tools_that_are_no_json_are_told(page: Page) -> None:
    page.run("own.settings.tools = '[oops'; own.ask('why?'); 1")
    page.wait_for("!!document.querySelector('.problem')")
    assert "are no JSON" in page.run("document.querySelector('.problem').textContent")


def test_several_chats_are_kept_until_they_are_deleted(page: Page, server: RunningServer) -> None:
    shown = "[...document.querySelectorAll('.message.user .text')].map((m) => m.textContent)"
    names = "[...document.getElementById('chats').options].map((option) => option.textContent)"
    for question in ("first question", "second question"):
        script_answers(page, [{"content": f"answer to the {question}"}])
        page.run(f"own.ask('{question}'); 1")
        page.wait_for(DONE)
        page.run("document.getElementById('clear').click()")
    assert page.run(names) == ["New chat", "second question", "first question"]
    page.run("""(() => { const list = document.getElementById('chats'); list.value = '2';
        list.dispatchEvent(new Event('change')); })()""")
    assert page.run(shown) == ["first question"]
    assert page.run(names) == ["first question", "second question"]
    open_page(page, server.address)
    assert page.run(shown) == ["first question"]
    page.run("document.getElementById('forget').click()")
    assert page.run(shown) == ["second question"]
    assert page.run("document.getElementById('chats').hidden")


def test_settings_outlive_a_reload(page: Page, server: RunningServer) -> None:
    set_field(page, "temperature", "0.7")
    open_page(page, server.address)
    assert page.run("own.settings.temperature") == "0.7"


def test_a_phone_shows_one_view_at_a_time(page: Page) -> None:
    page.resize(360, 720)
    shown = "getComputedStyle(document.getElementById('{}')).display !== 'none'"
    wide = "| " + "wide | " * 40 + "\n" + "|---" * 40 + "|\n```\n" + "wide " * 99
    messages = [{"role": "user", "content": "x" * 999}, {"role": "assistant", "content": wide}]
    page.run(f"sessionStorage.setItem('tandem-chat', JSON.stringify({json.dumps(messages)}))")
    page.run("own.showKept()")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run(shown.format("chat"))
    assert not page.run(shown.format("live"))
    page.run("document.getElementById('view-live').click()")
    assert page.run(shown.format("live"))
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_everything_can_be_reached_with_the_keyboard(page: Page) -> None:
    page.run("document.body.focus(); document.activeElement.blur()")
    reached = set()
    page.run("own.putAside([{role: 'user', content: 'x'}]); own.listChats(own.conversation)")
    for _ in range(18):
        page.press("Tab")
        reached.add(page.run("document.activeElement.id || document.activeElement.className"))
    assert {
        "chats",
        "forget",
        "clear",
        "open-settings",
        "prompt",
        "send",
        "grid",
        "idea",
    } <= reached


def test_dark_is_dark(page: Page) -> None:
    light = page.run("getComputedStyle(document.documentElement).backgroundColor")
    page.prefer("dark")
    dark = page.run("getComputedStyle(document.documentElement).backgroundColor")
    assert light == "rgb(251, 250, 248)"
    assert dark == "rgb(20, 21, 23)"


def test_pictures_can_be_taken(page: Page, tmp_path: Path) -> None:
    picture = page.picture()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1280, "light"), (390, "dark"), pytest.param(390, "light", marks=pytest.mark.slow)],
)
def test_axe_finds_nothing_serious(page: Page, width: int, scheme: str) -> None:
    axe = (resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8")
    page.resize(width, 800)
    page.prefer(scheme)
    set_field(page, "max_tokens", "8")
    say(page, "hello")
    page.wait_for(DONE)
    page.run(axe)
    assert serious(page) == []
    page.run("document.getElementById('open-settings').click()")
    assert serious(page) == []
    page.run("document.getElementById('settings').append(document.createElement('button'))")
    assert serious(page) == ["button-name"]  # it finds what there is
