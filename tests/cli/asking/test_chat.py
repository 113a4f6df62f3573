"""Goal: a conversation in the terminal obeys its commands, and its lines break between words.

Method: the session without a server; a writer over a terminal of a given width; a piped
conversation with ``input`` replaced.
"""

import io
import json

from tandem.cli.asking import terminal_input, wrapping
from tandem.cli.asking.chat_session import ChatSession
from tandem.cli.asking.stream import StreamEvent, StreamResult, _Choice, _Usage
from tandem.cli.asking.wrapping import _Wrapper


def test_commands_change_what_is_asked(tmp_path, capsys):
    session = ChatSession({"max_tokens": 9, "temperature": None}, None)
    session.defaults = {"min_p": 0.05, "top_p": 1.0}
    for line in (
        "/set parameter temperature 0.5",
        "/set top_k 40",
        "/set system Be brief.",
        "/set seed 3",
    ):
        assert session.run_command(line)
    assert session.run_command("/set seed")
    session.messages.append({"role": "user", "content": "Hi"})
    body = session.make_body("m")
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 40,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
    }
    path = tmp_path / "a talk.json"
    assert session.run_command(f"/save '{path}'")
    assert json.loads(path.read_text()) == body["messages"]
    assert session.run_command("/clear")
    assert session.messages == body["messages"][:1]
    assert session.run_command(f"/load '{path}'")
    assert session.make_body("m") == body
    for line in ("/show", "/set"):
        assert session.run_command(line)
        shown = capsys.readouterr().out
        assert "top_k        40\n" in shown
        assert "min_p        0.05 (the model's default)\n" in shown
        assert "top_p        1 (the model's default)\n" in shown
        assert "seed         not set\n" in shown
    for line in ("/exit", "/bye"):
        assert not session.run_command(line)


def test_wrong_commands_are_told_and_change_nothing(tmp_path, capsys):
    session = ChatSession({}, "S")
    (tmp_path / "x").write_text("[{}]")
    for line, words in {
        "/set temperature hot": "give a number",
        "/set colour red": "temperature",
        "/nothing": "/help",
        "/save": "/help",
        f"/load {tmp_path}/none": "No such file",
        f"/load {tmp_path}/x": "no conversation",
        "/set 'a": "quotation",
    }.items():
        before = session.make_body(None)
        assert session.run_command(line)
        assert words in capsys.readouterr().err
        assert session.make_body(None) == before


def test_lines_break_between_words(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(wrapping.sys, "stdout", out)
    wrapper = _Wrapper(11)
    for piece in ("one two th", "ree four", "teen\nab ", "x" * 25):
        wrapper.write(piece)
    screen = [""]
    text = out.getvalue()
    while text:
        if text.startswith("\x1b["):
            end = next(i for i, char in enumerate(text) if char in "DK")
            if text[end] == "D":
                screen[-1] = screen[-1][: -int(text[2:end])]
            text = text[end + 1 :]
        elif text[0] == "\n":
            screen.append("")
            text = text[1:]
        else:
            screen[-1] += text[0]
            text = text[1:]
    assert screen == ["one two ", "three ", "fourteen", "ab ", "x" * 10, "x" * 10, "x" * 5]


def test_messages_of_several_lines(monkeypatch):
    typed = iter(['"""first', "second", 'third"""', "a\\", "b", '"""one line"""', "last"])

    def read():
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    reader = terminal_input.make_reader()
    assert list(iter(reader, None)) == ["first\nsecond\nthird", "a\nb", "one line", "last"]


def test_rates_are_one_line_also_of_a_stopped_answer(capsys):
    result = StreamResult()
    for count in (1, 2, 3):
        result.take(StreamEvent([_Choice(text="x")], _Usage(7, count)), 0.5 * count)
    result.total_s = 1.5
    result.print_rates()
    assert capsys.readouterr().err == (
        "prompt 7 tokens in 0.50 s, 14.0 tokens/s; answer 3 tokens in 1.00 s, 2.0 tokens/s\n"
    )
