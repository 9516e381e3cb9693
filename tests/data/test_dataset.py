"""Datasets: what is read from files, and errors that name the file, the line and the field."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from rllm.data.dataset import Dataset, load_dataset
from rllm.errors import DataError
from rllm.types import Task


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_jsonl_with_bom_crlf_and_blank_lines_is_read(tmp_path: Path) -> None:
    data = '\ufeff{"id": "a", "question": "one", "target": 3}\r\n\r\n  \n{"question": "two"}\r\n'
    tasks = list(load_dataset(write(tmp_path, "d.jsonl", data)))
    assert [(t.id, t.instruction) for t in tasks] == [("a", "one"), ("1", "two")]
    assert tasks[0].metadata == {"id": "a", "question": "one", "target": 3}


def test_line_separators_inside_a_string_are_data_and_end_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\u2029three\x0bfour\x85five"
    data = json.dumps({"question": text}, ensure_ascii=False)
    tasks = load_dataset(write(tmp_path, "d.jsonl", data))
    assert [t.instruction for t in tasks] == [text]


def test_a_row_of_id_text_and_metadata_keeps_exactly_that_metadata(tmp_path: Path) -> None:
    row = {"id": 7, "instruction": "x", "metadata": {"nums": [1, 2]}}
    task = load_dataset(write(tmp_path, "d.json", json.dumps([row])))[0]
    assert (task.id, task.metadata) == ("7", {"nums": [1, 2]})


def test_chat_messages_are_an_instruction(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    task = load_dataset(write(tmp_path, "d.jsonl", json.dumps({"prompt": messages})))[0]
    assert task.instruction == messages


def test_csv_with_bom_quotes_and_upper_case_suffix_is_read(tmp_path: Path) -> None:
    data = '\ufeffquestion,target\r\n"two\nlines, and a comma",5\r\nplain,6\r\n'
    tasks = load_dataset(write(tmp_path, "d.CSV", data))
    assert [t.instruction for t in tasks] == ["two\nlines, and a comma", "plain"]
    assert tasks[1].metadata["target"] == "6"


def test_several_files_are_one_dataset_with_ids_that_do_not_collide(tmp_path: Path) -> None:
    names = [write(tmp_path, f"{k}.jsonl", '{"question": "x"}\n{"question": "y"}') for k in "ab"]
    assert [t.id for t in load_dataset(names)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"question": "a"}\n{"question": }', r"d\.jsonl:2: not valid JSON at column 14"),
        ("d.jsonl", '{"question": "a"}\n\n{"question": null}', r"d\.jsonl:3: question: found None"),
        ("d.jsonl", '{"question": ""}', r"d\.jsonl:1: question: found ''"),
        ("d.jsonl", '{"prompt": 5}', r"d\.jsonl:1: prompt: found 5"),
        ("d.jsonl", '{"answer": 5}', r"d\.jsonl:1: no text.*found answer"),
        ("d.jsonl", "[1, 2]", r"d\.jsonl:1.*must be an object"),
        ("d.jsonl", "\n \r\n", "no rows"),
        ("d.jsonl", b'{"question": "\xff"}', "not UTF-8 at byte 14"),
        ("d.jsonl", "[" * 100_000, r"d\.jsonl:1: JSON that cannot be read"),
        ("d.jsonl", '{"question": "a", "n": ' + "9" * 5000 + "}", r"d\.jsonl:1: JSON that cannot be read"),
        ("d.jsonl", '{"id": 1, "question": "a"}\n{"id": "1", "question": "b"}', "two tasks have the id '1'"),
        ("d.json", '{"question": "a"}', "must hold a list of rows"),
        ("d.json", '[{"question": "a"}, 3]', "row 2.*must be an object"),
        ("d.json", "[]", "no rows"),
        ("d.json", b"\xff", "not UTF-8"),
        ("d.csv", "question,a\nx,1,2\n", r"d\.csv:2: more cells than the header"),
        ("d.csv", "a,question\n1\n", r"d\.csv:2: question: found None"),
        ("d.csv", "question\n", "no rows"),
        ("d.csv", 'question\n"open', "not valid CSV"),
        ("d.csv", b"question\n\xe9\n", "not UTF-8"),
        ("d.txt", "x", r"unknown kind '\.txt'; use \.jsonl"),
    ],
)
def test_unusable_files_are_errors_that_say_where(
    tmp_path: Path, name: str, content: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_dataset(write(tmp_path, name, content))


def test_a_missing_file_or_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl' does not exist.*countdown"):
        load_dataset(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        load_dataset(str(tmp_path))


def test_parquet_rows_are_tasks_and_a_broken_file_is_an_error(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]

    parquet.write_table(pyarrow.table({"question": ["a", "b"], "nums": [[1], [2, 3]]}), tmp_path / "d.parquet")
    tasks = load_dataset(str(tmp_path / "d.parquet"))
    assert [(t.instruction, t.metadata["nums"]) for t in tasks] == [("a", [1]), ("b", [2, 3])]
    with pytest.raises(DataError, match="not a readable Parquet file"):
        load_dataset(write(tmp_path, "bad.parquet", "nonsense"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pyarrow(name: str, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match="pip install pyarrow"):
        load_dataset(write(tmp_path, "d.parquet", "PAR1"))


def letters(n: int = 6) -> Dataset:
    return Dataset([Task(id=str(i), instruction=chr(97 + i)) for i in range(n)], "letters", "val")


def test_shuffle_is_a_seeded_copy() -> None:
    dataset = letters()
    ids = [[task.id for task in dataset.shuffle(seed)] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]
    assert sorted(ids[0]) == [task.id for task in dataset] == list("012345")


def test_select_and_slices_are_datasets_of_the_same_name() -> None:
    chosen, sliced = letters().select([4, 0]), letters()[1:3]
    assert [task.id for task in chosen] == ["4", "0"]
    assert [task.id for task in sliced] == ["1", "2"]
    assert (sliced.name, sliced.split) == ("letters", "val")


def test_repeated_tasks_have_ids_of_their_own_so_their_groups_stay_apart() -> None:
    assert [task.id for task in letters(2).repeat(3)] == ["0", "0#1", "0#2", "1", "1#1", "1#2"]
