"""The file of finished cells: what is found again, what is refused, and that a stop in between loses nothing."""

import json

import pytest

from bitkv_dist.evaluate.ledger import Ledger

KEY = ("codec", "text")
SETTINGS = {"model": "tiny", "positions": (1, 9), "codec 2bit": {"key_bits": 2}}
ROW = {"codec": "2bit", "text": "a.txt", "ppl": 2.5}


def test_rows_are_found_again(tmp_path):
    path = tmp_path / "r.json"
    first = Ledger(path, KEY, SETTINGS)
    assert first.find("2bit", "a.txt") is None and not path.exists()
    first.add([ROW])
    again = Ledger(path, KEY, SETTINGS)
    assert again.find("2bit", "a.txt") == ROW and again.find("2bit", "b.txt") is None
    again.add([ROW | {"text": "b.txt"}])
    assert [row["text"] for row in json.loads(path.read_text())["rows"]] == ["a.txt", "b.txt"]
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_other_codecs_and_texts_may_join(tmp_path):
    path = tmp_path / "r.json"
    Ledger(path, KEY, SETTINGS).add([ROW])
    joined = Ledger(path, KEY, SETTINGS | {"codec 1bit": {"key_bits": 1}})
    joined.add([ROW | {"codec": "1bit"}])
    assert {"codec 1bit", "codec 2bit"} <= json.loads(path.read_text())["settings"].keys()


@pytest.mark.parametrize("change", [{"model": "other"}, {"positions": [1, 10]}, {"codec 2bit": {"key_bits": 3}}])
def test_other_settings_are_refused(tmp_path, change):
    path = tmp_path / "r.json"
    Ledger(path, KEY, SETTINGS).add([ROW])
    with pytest.raises(ValueError, match=f"holds results of {next(iter(change))} .*; give another file"):
        Ledger(path, KEY, SETTINGS | change)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"schema": 99, "settings": {}, "rows": []}', '{"rows": [', "\xff"])
def test_a_file_that_is_not_ours_is_left_alone(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="is not a file of results"):
        Ledger(path, KEY, SETTINGS)
    assert path.read_text(encoding="latin-1") == text


def test_a_stop_while_writing_leaves_the_old_rows(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    Ledger(path, KEY, SETTINGS).add([ROW])
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        Ledger(path, KEY, SETTINGS).add([ROW | {"text": "b.txt"}])
    monkeypatch.undo()
    assert Ledger(path, KEY, SETTINGS).rows == [ROW]


def test_without_a_file_rows_stay_in_memory():
    ledger = Ledger(None, KEY, SETTINGS)
    ledger.add([ROW])
    assert ledger.find("2bit", "a.txt") == ROW
