"""Records are frozen and strict; files are read with clear errors and written whole or not at all."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.arguments import (
    MAX_INTEGER,
    BatchInt,
    Constant,
    Device,
    Dtype,
    Fields,
    ParamRef,
    Ref,
    decode,
    encode,
    leaves,
    map_argument,
)
from planner.errors import FileFormatError, UsageError
from planner.records import Fraction, NonNegativeFloat, PositiveInt, Record, read_json, read_text, validate, write_text


class Inner(Record):
    weight: NonNegativeFloat
    share: Fraction = 0.5


class Outer(Record):
    count: PositiveInt
    inner: Inner
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner] = {}


GOOD = {"count": 2, "inner": {"weight": 1.5}, "many": [{"weight": 0}], "by_name": {"a": {"weight": 2}}}


def test_valid_data_becomes_a_frozen_record() -> None:
    record = validate(Outer, GOOD, source="file")
    assert record.many[0].share == 0.5
    with pytest.raises(ValidationError, match="frozen"):
        record.count = 3  # type: ignore[misc]


def test_replace_validates_anew() -> None:
    record = validate(Outer, GOOD, source="file")
    assert record.replace(count=5).count == 5
    with pytest.raises(ValidationError):
        record.replace(count=0)


@pytest.mark.parametrize(
    ("change", "words", "hint"),
    [
        ({"cuont": 2}, ["file", "unknown key 'cuont'"], "did you mean 'count'?"),
        ({"inner": {"weight": 1, "wieght": 2}}, ["unknown key 'inner.wieght'"], "did you mean 'weight'?"),
        ({"many": [{"weight": 1, "shares": 2}]}, ["unknown key 'many.0.shares'"], "did you mean 'share'?"),
        ({"by_name": {"a": {"weight": 1, "zzz": 2}}}, ["unknown key 'by_name.a.zzz'"], "share, weight"),
        ({"inner": {"wieght": 1}}, ["unknown key 'inner.wieght'"], "did you mean 'weight'?"),
        ({"inner": {}}, ["'inner.weight' is missing"], "add 'inner.weight'"),
        ({"inner": {"weight": -1}}, ["inner.weight", "greater than or equal to 0", "-1"], "correct"),
        ({"inner": {"weight": math.nan}}, ["inner.weight", "finite", "nan"], "correct"),
        ({"inner": {"weight": math.inf}}, ["inner.weight", "finite", "inf"], "correct"),
        ({"inner": {"weight": 1, "share": 1.5}}, ["inner.share", "less than or equal to 1", "1.5"], "correct"),
        ({"count": 0}, ["count", "greater than or equal to 1", "0"], "correct"),
        ({"count": 2.0}, ["count", "2.0"], "correct"),
        ({"count": "2"}, ["count", "2"], "correct"),
        ({"count": 10**5000}, ["count", "found a larger integer"], "correct"),
        ({"inner": {"weight": True}}, ["inner.weight", "not a number", "True"], "correct"),
        ({"inner": {"weight": "1"}}, ["inner.weight", "not a number", "'1'"], "correct"),
        ({"inner": {"weight": 10**400}}, ["inner.weight", "too large"], "correct"),
        ({"inner": {"weight": 1e300}}, ["inner.weight", "less than or equal to 1000"], "correct"),
        ({"inner": 3}, ["inner"], "correct"),
    ],
)
def test_bad_data_names_the_file_the_key_and_what_is_right(
    change: dict[str, object], words: list[str], hint: str
) -> None:
    with pytest.raises(FileFormatError) as caught:
        validate(Outer, GOOD | change, source="file")
    assert all(word in caught.value.message for word in words), caught.value.message
    assert hint in caught.value.hint


def test_reading_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json(path, what="profile") == {"a": 1}
    for text, words in [
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": ', "not JSON at line 1"),
        ("", "not JSON at line 1"),
        ("[" * 100000, "nested too deeply"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ("1" * 5000, "limit"),
    ]:
        path.write_text(text)
        with pytest.raises(FileFormatError) as caught:
            read_json(path, what="profile")
        assert words in caught.value.message
        assert caught.value.hint


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, words in [("missing", "does not exist"), (".", "can't be read"), ("binary", "can't be read")]:
        with pytest.raises(UsageError) as caught:
            read_text(tmp_path / name, what="cluster")
        assert words in caught.value.message
        assert "cluster" in caught.value.message


def test_writing_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail(source: str, target: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UsageError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert read_text(link, what="plan") == "new"


def test_devices_and_folders_are_neither_read_nor_written(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "file").write_text("")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for path in (fifo, tmp_path, Path(os.devnull)):
        for use in (lambda path: read_text(path, what="plan"), lambda path: write_text(path, "text")):
            with pytest.raises(UsageError) as caught:
                use(path)
            assert str(path) in caught.value.message
    for path in (tmp_path / "file" / "inside", tmp_path / "circle", tmp_path / ("n" * 300)):
        with pytest.raises(UsageError) as caught:
            write_text(path, "text")
        assert str(path) in caught.value.message


names = st.sampled_from(["x", "y_1", "layers"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-MAX_INTEGER, MAX_INTEGER),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.just(...),
    names.map(Ref),
    st.sampled_from(["a.weight", "layers.3.bias"]).map(ParamRef),
    st.builds(BatchInt, st.integers(1, 9), st.integers(0, 9)),
    st.sampled_from(["float32", "model"]).map(Dtype),
    st.just(Constant("channels_last")),
    st.just(Device()),
    st.builds(slice, st.none() | names.map(Ref), st.none() | st.integers(-9, 9), st.none()),
)
arguments = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.lists(st.tuples(names, inner), max_size=2).map(lambda items: Fields(tuple(items))),
    ),
    max_leaves=8,
)


@given(arguments)
def test_arguments_of_programs_survive_json(value: object) -> None:
    text = json.dumps(encode(value), allow_nan=False)
    assert decode(json.loads(text)) == value
    assert map_argument(value, lambda leaf: leaf) == value
    assert all(not isinstance(leaf, list | tuple | dict | Fields) for leaf in leaves(value))
