"""Records a command on a terminal as an animated SVG; waits of over two seconds are shortened.

python -m benchmarks.terminal_picture docs/pictures/run.svg -- tandem run -p "Why is the sky blue?"

A viewer without animation shows the last screen. It knows text, line ends, carriage returns and
line erasure; colours and other control sequences are dropped.
"""

import argparse
import codecs
import os
import pty
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

COLUMNS = 92
FRAME_SECONDS = 0.1  # what changes within it is one frame
PAUSE_SECONDS = 4.0  # the last screen stays so long before the recording begins again
LONGEST_WAIT_SECONDS = 2.0
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 8.43, 20, 16  # pixels, at 14 pixels a character
_CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[()=>].?")


@dataclass
class Version:
    """A line's content for some time."""

    line: int
    text: str
    start: float
    end: float | None = None


@dataclass
class Screen:
    """Lines of text that grow downwards."""

    lines: list[str] = field(default_factory=lambda: [""])
    column: int = 0

    def write(self, text: str) -> None:
        """Process a part of the output."""
        place = 0
        for control in _CONTROL.finditer(text):
            self._plain(text[place : control.start()])
            if control[2] == "K":
                self.lines[-1] = self.lines[-1][: self.column]
            place = control.end()
        self._plain(text[place:])

    def _plain(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.lines.append("")
                self.column = 0
            elif character == "\r":
                self.column = 0
            elif character >= " ":
                self._put(character)

    def _put(self, character: str) -> None:
        if self.column == COLUMNS:
            self.lines.append("")
            self.column = 0
        line = self.lines[-1].ljust(self.column)
        self.lines[-1] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1


def output_of(command: list[str]) -> Iterator[tuple[float, str]]:
    """Run a command on a terminal of its own; yield seconds and text as they come."""
    environment = {**os.environ, "TERM": "dumb", "COLUMNS": str(COLUMNS), "LINES": "40"}
    program = shutil.which(command[0]) or command[0]
    start = time.monotonic()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(program, command, environment)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # the terminal's end, on Linux
            break
        if not piece:
            break
        yield time.monotonic() - start, decoder.decode(piece)
    os.close(terminal)
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if exit_code:
        raise SystemExit(f"{shlex.join(command)} ended with {exit_code}; nothing is written")


def record(command: list[str]) -> tuple[list[Version], float]:
    """Return every version of every line, and the command's seconds."""
    screen = Screen()
    screen.write(f"$ {shlex.join(command)}\r\n")
    versions: list[Version] = []
    shown: dict[int, Version] = {}
    seconds, taken, last, cut = 0.0, -FRAME_SECONDS, 0.0, 0.0
    for real, text in output_of(command):
        cut += max(0.0, real - last - LONGEST_WAIT_SECONDS)
        seconds, last = real - cut, real
        if seconds - taken >= FRAME_SECONDS:
            _take(screen, shown, versions, max(taken, 0.0))
            taken = seconds
        screen.write(text)
    _take(screen, shown, versions, max(taken, 0.0))
    if cut:
        note = f"(played in real time, but for {cut:.0f} s of waiting that are left out)"
        versions.append(Version(len(screen.lines), note, 0.0))
    return versions, seconds


def _take(
    screen: Screen, shown: dict[int, Version], versions: list[Version], seconds: float
) -> None:
    """Record the lines that have changed."""
    for number, text in enumerate(screen.lines):
        before = shown.get(number)
        if before is not None and before.text == text:
            continue
        if before is not None:
            before.end = seconds
        shown[number] = Version(number, text, seconds)
        versions.append(shown[number])


def svg(versions: list[Version], seconds: float) -> str:
    """Return the recording as a picture that plays repeatedly."""
    total = seconds + PAUSE_SECONDS
    width = round(COLUMNS * CHARACTER_WIDTH + 2 * MARGIN)
    height = (max(v.line for v in versions) + 1) * LINE_HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" fill="#e6edf3">',
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117">',
        # Hidden: the clock of the lines' animation.
        f'<animate id="play" attributeName="x" from="0" to="0" begin="0s;play.end" '
        f'dur="{total:.2f}s"/></rect>',
    ]
    lines += [_text(version) for version in versions if version.text.strip()]
    return "\n".join([*lines, "</svg>", ""])


def _text(version: Version) -> str:
    y = MARGIN + (version.line + 1) * LINE_HEIGHT - 5
    head = f'<text x="{MARGIN}" y="{y}" xml:space="preserve"'
    body = escape(version.text.rstrip(), quote=False)
    if version.end is None:
        if version.start == 0:
            return f"{head}>{body}</text>"
        hidden = '<set attributeName="visibility" to="hidden" begin="play.begin" '
        return f'{head}>{body}{hidden}dur="{version.start:.2f}s"/></text>'
    duration = version.end - version.start
    seen = f'<set attributeName="visibility" to="visible" begin="play.begin+{version.start:.2f}s" '
    return f'{head} visibility="hidden">{body}{seen}dur="{duration:.2f}s"/></text>'


def main() -> None:
    """Record and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    versions, seconds = record(options.command)
    options.picture.write_text(svg(versions, seconds), encoding="utf-8")
    print(f"{options.picture}: {seconds:.1f} s, {len(versions)} lines", file=sys.stderr)


if __name__ == "__main__":
    main()
