"""Text and progress on the terminal.

Whatever a program prints, its libraries' warnings, logs and tracebacks included, passes `_Text`: it
cannot control the terminal, and holds no secrets. `show` does the same in a notebook. Progress goes
to stderr: on a terminal and in a notebook one line that is drawn again, with rate, ETA and a bar,
else a new line every 15 seconds. `protect_streams` lets every print outlive a closed, full or
broken stream.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from kinject.secrets import without_secrets

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console
    from rich.live import Live

_SECONDS_BETWEEN_LINES, _SECONDS_IN_NOTEBOOK = 15.0, 1.0
_NOTEBOOK_COLUMNS = 100
_FEWEST_UNITS, _FEWEST_SECONDS = 3, 2.0
"""Units and seconds before the time that is left is known."""
_WIDEST_BAR, _NARROWEST = 40, 8
"""Columns of a bar; a bar or a piece of a status that has fewer is left out."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change the direction of text, and lone
surrogates."""


_READER_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)
"""Errors of a write whose reader has left: a pipe, a socket, a terminal. That reader wants no more
text."""


class _Screen(io.FileIO):
    """A stream without errors: after the first failed write it drops everything, and `failure` is
    the error."""

    failure: OSError | None = None

    def write(self, data: ReadableBuffer) -> int:
        """Write, if need be after waiting for a stream that does not block; return the number of
        bytes, dropped ones included."""
        while self.failure is None:
            try:
                n_bytes = super().write(data)
            except OSError as error:
                self.failure = error
                break
            if n_bytes is not None:
                return n_bytes
            select.select([], [self], [])
        return memoryview(data).nbytes


class _Text(io.TextIOWrapper):
    """Printable text without secrets: tracebacks, warnings, logs, argparse and the libraries write
    here, too.

    A carriage return stays, for the bars of downloads.
    """

    def write(self, text: str) -> int:
        """Write `text`; return its length."""
        super().write(_harmless(text))
        return len(text)


def _harmless(text: str) -> str:
    return "\r".join(map(printable, without_secrets(text).split("\r")))


class _AboveLine:
    """A stream that rich prints above a progress line: past `_Text`, so its text is made printable
    and without secrets here."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text`; return its length."""
        self._stream.write(_harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Canvas:
    """The same stream for what kinject draws itself, from text that is printable already."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` as it is; return its length."""
        return io.TextIOWrapper.write(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Make the standard streams of this process safe, for every library and child process, too.

    A closed one is /dev/null from now on, so that no other file gets its number. A character
    outside of a stream's encoding is written as an escape. A write that fails raises nothing;
    `lost_output` returns the reason.
    """
    _protect_input()
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, _protected_output(number, getattr(sys, name)))


def _protect_input() -> None:
    target = _target(0, sys.stdin)
    if sys.stdin is None:
        sys.stdin = open(target, encoding="utf-8", closefd=False)  # noqa: SIM115 (to the end)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")


def _protected_output(number: int, stream: TextIO | None) -> _Text:
    target = _target(number, stream)
    # What Python still holds would come after what is written from here on.
    if stream is not None:
        stream.flush()
    return _Text(
        io.BufferedWriter(_Screen(target, "w", closefd=False)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        # Standard error as Python makes it: a message is there when its line ends.
        line_buffering=number == 2 or getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def _target(number: int, stream: TextIO | None) -> int:
    """Return the file descriptor of a standard stream, opened on /dev/null if it is closed.

    A process may start without the stream although another file has its number: then a descriptor
    of /dev/null is returned.
    """
    if not _is_open(number):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)
        return number
    return number if stream is not None else os.open(os.devnull, os.O_RDWR)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def lost_output() -> OSError | None:
    """Return why text for standard output was lost; None if nothing was, or if its reader had left.
    For `protect_streams`."""
    sys.stdout.flush()
    screen = getattr(sys.stdout.buffer, "raw", None)
    failure = screen.failure if isinstance(screen, _Screen) else None
    if failure is None or failure.errno in _READER_GONE:
        return None
    return failure


def printable(text: str) -> str:
    """Return `text` with U+FFFD in place of every character that controls a terminal."""
    return _CONTROL.sub("\ufffd", text)


def show(
    text: str | Path | Exception = "",
    *,
    end: str = "\n",
    file: TextIO | None = None,
    flush: bool = False,
) -> None:
    """Print `printable` text without secrets on standard output, or on `file`."""
    print(
        printable(without_secrets(str(text))),
        end=end,
        file=sys.stdout if file is None else file,
        flush=flush,
    )


class _ScreenLog(logging.Handler):
    """Shows what is logged on the standard error of that moment.

    A stream that is kept may be closed by then: a command called from Python under its caller's
    stream left such a handler, and a later slow answer ended in "--- Logging error ---" with a
    traceback through the judge that had asked.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record; one that cannot be formatted is reported as logging does it."""
        try:
            show(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  (a message that fails must not end a run)
            self.handleError(record)


def log_to_screen() -> None:
    """Show what is logged by this process, from level info on, in place of what was set up."""
    # Of the handler, too: bm25s sets its logger to debug when it is imported.
    handler = _ScreenLog(logging.INFO)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler], force=True)


def format_count(n: int, noun: str) -> str:
    """Return ``1 question`` or ``1,200 questions``."""
    return f"1 {noun}" if n == 1 else f"{n:,} {noun}s"


def rounded_p(p: float, threshold: float) -> str:
    """Return p as ``0.012``, below a thousandth as ``< 0.001``. Near `threshold`: ``< 0.05`` or
    ``> 0.05``."""
    if p < 0.001:
        return "< 0.001"
    # A p that is rounded to the threshold must still tell on which side of it it lies.
    if p != threshold and f"{p:.3f}" == f"{threshold:.3f}":
        side = "<"
        if p > threshold:
            side = ">"
        return f"{side} {threshold}"
    return f"{p:.3f}"


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with so many significant digits; a larger one in full, as ``12,345``, which
    can be read aloud, and not as 1.23e+04."""
    # From here on it would be rounded to a power of ten.
    if abs(value) >= 10**digits - 0.5:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def exact_number(value: float) -> str:
    """Return a number in the fewest digits that are read as the same: ``0.25``, ``1e-05``.

    For names: by six digits alone 0.25 and 0.25000001 would be one folder, or one arm.
    """
    short = f"{value:g}"
    if float(short) == value:
        return short
    return repr(float(value))


CURRENCY = "in the currency of the prices"
"""Behind each cost: kinject knows no currency but that of the prices in a recipe."""


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int]) -> str:
    """Return `rows` as columns, those in `right` aligned to the right, each line indented by
    two."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        columns = (
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(columns).rstrip())
    return "\n".join(lines)


_NOISE = {
    # An optional kernel is missing; the plain one works.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # The config gets the tokenizer's ids.
    "transformers.trainer_utils": "The tokenizer has new PAD/BOS/EOS tokens",
    # `kinject.models.check_model` says what it says in one line.
    "transformers.modeling_utils": " LOAD REPORT",
    # Of a recipe's trainer.torch_compile.
    "transformers.training_args": "The speedups for torchdynamo mostly come",
}
"""Logger of a library -> a part of its message that tells a user nothing to act on."""


def leave_out_noise() -> None:
    """Drop the messages of `_NOISE`, each at its own logger; every other message of these libraries
    is kept."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_useful)


def _is_useful(record: logging.LogRecord) -> bool:
    return _NOISE[record.name] not in str(record.msg)


class Progress:
    """Counts `total` units of work inside ``with``; `done` of them were done before (a resumed
    run).

    Rate and ETA count only the work of this process. The status (a loss, a number of refusals) is
    shown after them; two spaces part it into pieces, of which the last go first where the line is
    too narrow.
    """

    def __init__(self, label: str, total: int, unit: str, *, done: int = 0) -> None:
        self.label = printable(without_secrets(label))
        self.total = total
        self.unit = unit
        self.done = self._done_before = done
        self._status_text = ""
        self._start = self._last_line = self._last_advance = monotonic()
        self._live: Live | None = None
        self._cell: Any = None

    def advance(self, n: int = 1, *, earlier: bool = False) -> None:
        """Count `n` more units; those of an `earlier` run do not count towards the rate."""
        self.done += n
        self._done_before += n * earlier
        self._last_advance = monotonic()
        self._show()

    def set_status(self, status: str) -> None:
        """Set the text after the count."""
        self._status_text = printable(status)
        self._show()

    @property
    def rate(self) -> float:
        """Units per second in this process, up to the last one."""
        return (self.done - self._done_before) / max(self._last_advance - self._start, 1e-9)

    def line(self, width: int) -> str:
        """Return the progress in at most `width` columns: count, rate and ETA, then the status,
        then a bar if there is room."""
        text = _joined(self._count_text(), self._rate_text(), self._time_text())
        for part in filter(None, self._status_text.split("  ")):
            room = width - len(self.label) - len(text) - 4
            if len(part) > room:
                if room >= _NARROWEST:
                    text += f"  {part[: room - 3]}..."
                break
            text += f"  {part}"
        room = min(width - len(self.label) - len(text) - 4, _WIDEST_BAR)
        if room >= _NARROWEST:
            n_full = round(room * min(self.done / max(self.total, 1), 1))
            text = f"{'#' * n_full}{'-' * (room - n_full)}  {text}"
        return f"{self.label}: {text}"[:width]

    def _count_text(self) -> str:
        return f"{self.done:,}/{self.total:,} {self.unit}"

    def _rate_text(self) -> str:
        return rate_text(self.rate, self.unit)

    def _time_text(self) -> str:
        """Return the time that is left; the time that has passed while the first units and seconds
        tell nothing of it."""
        now = monotonic()
        n_new = self.done - self._done_before
        # One at least: where an earlier run did all there is no rate to divide by.
        fewest = max(1, min(_FEWEST_UNITS, self.total - self._done_before))
        if n_new < fewest or now - self._start < _FEWEST_SECONDS:
            return f"{duration(now - self._start)} so far"
        # Up to the last unit: by the time that has passed, an ETA grows while a long unit runs.
        left = (self.total - self.done) / self.rate - (now - self._last_advance)
        return f"ETA {duration(max(0.0, left))}"

    def _show(self) -> None:
        if self._live is not None:
            return  # it draws itself
        now, in_notebook = monotonic(), _is_notebook()
        pause = _SECONDS_IN_NOTEBOOK if in_notebook else _SECONDS_BETWEEN_LINES
        if now - self._last_line < pause:
            return
        if in_notebook:
            self._last_line = now
            self._show_in_cell()
        elif self.done < self.total:
            self._last_line = now
            count = f"{self.label}: {self._count_text()}"
            line = _joined(count, self._rate_text(), self._status_text, self._time_text())
            show(line, file=sys.stderr, flush=True)

    def _show_in_cell(self) -> None:
        """Draw the line again in its place in a notebook; a saved one has the last."""
        from IPython.display import display  # a notebook has it

        line = {"text/plain": self.line(_NOTEBOOK_COLUMNS)}
        if self._cell is None:
            self._cell = display(line, raw=True, display_id=True)
        else:
            self._cell.update(line, raw=True)

    def __enter__(self) -> Progress:
        self._start = self._last_line = self._last_advance = monotonic()
        on_terminal = sys.stderr is not None and sys.stderr.isatty() and not _is_notebook()
        if on_terminal and self.total > self.done:
            from rich.console import Console

            canvas: Any = _Canvas(sys.stderr) if isinstance(sys.stderr, _Text) else None
            self._live = self._draw_on(Console(file=canvas, stderr=True))
            before = sys.stdout, sys.stderr
            self._live.start()
            # Until it is stopped, rich has streams of its own in these places.
            for name, stream in zip(("stdout", "stderr"), before, strict=True):
                if getattr(sys, name) is not stream:
                    setattr(sys, name, _AboveLine(getattr(sys, name)))
        return self

    def _draw_on(self, console: Console) -> Live:
        """Return the line of a terminal that is drawn again and again."""
        from rich.live import Live
        from rich.text import Text

        def line() -> Text:
            # Not a string: a name such as [/red] is markup to rich, and ended a run with an
            # exception.
            return Text(self.line(console.width), no_wrap=True)

        return Live(get_renderable=line, console=console, transient=True)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the line from a terminal; a notebook keeps the last."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._cell is not None:
            self._show_in_cell()
            self._cell = None


def _is_notebook() -> bool:
    return type(sys.stderr).__module__.startswith("ipykernel.")


def _joined(*parts: str) -> str:
    """Return the parts that are not empty, two spaces between them."""
    return "  ".join(filter(None, parts))


def rate_text(rate: float, unit: str) -> str:
    """Return units a second, or the seconds of a unit where it takes longer; "" without a rate."""
    if not rate:
        return ""
    if rate >= 1:
        return f"{rate:,.1f} {unit}/s"
    seconds = 1 / rate
    text = f"{seconds:.1f} s" if seconds < 100 else duration(seconds)
    one = unit.removesuffix("s")
    if unit.endswith("ches"):
        one = unit.removesuffix("es")  # batches
    return f"{text}/{one}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``45 s``, ``12 min``, ``3 h 20 min``."""
    total = round(seconds)
    minutes = total // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    # Up to three minutes seconds tell more than rounded minutes.
    return f"{minutes} min" if minutes > 2 else f"{total} s"


def sparkline(values: Sequence[float]) -> str:
    """Return `values`, none below 0, as a line of at most 48 bars, each the mean over its part of
    them."""
    bars, top = "▁▂▃▄▅▆▇█", max(values)
    n_bars, line = min(48, len(values)), ""
    if not top:
        return bars[0] * n_bars
    for bar in range(n_bars):
        part = values[bar * len(values) // n_bars : (bar + 1) * len(values) // n_bars]
        level = sum(part) / len(part) / top
        line += bars[min(int(level * len(bars)), len(bars) - 1)]
    return line
