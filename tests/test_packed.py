"""Many runs in one file: read as their directories were, deleted only once they are read back, and never believed."""

import functools
import itertools
import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_helpers import make_run

from normlab import NormlabError, load_runs, packed, runs, store


def test_packed_runs_are_read_as_their_directories_were(tmp_path):
    tables = ("schema", "other")
    for name in (*tables, "third"):
        path = make_run(tmp_path / "search", name)
        (path / runs.WEIGHTS).unlink()
        if name in tables:
            rows = [("skip_delta_loss", "block", layer, None, 0.5 + layer, 0.25) for layer in (1, 2)]
            frame = pd.DataFrame(rows, columns=runs.EXPERIMENT_COLUMNS).astype({"layer": "Int64", "other": "Int64"})
            frame.to_parquet(path / runs.EXPERIMENTS, index=False)
    folder = tmp_path / "search"
    read = (load_runs, runs.load_experiments, runs.load_configs)
    before = [load(folder) for load in read]
    manifests = {path.name: runs.read_run(path).manifest for path in runs.find_runs(folder)}
    file = packed.pack(folder)
    assert list(folder.iterdir()) == [file]
    for load, table in zip(read, before, strict=True):
        pd.testing.assert_frame_equal(load(folder), table)
    assert {path.name: runs.read_run(path).manifest for path in runs.find_runs(folder)} == manifests
    assert load_runs(folder / "third").run.unique().tolist() == ["third"]
    assert store.is_run(folder / "third") and not store.is_run(folder / "fourth")
    store.check_root(folder)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(NormlabError, match=r"packed_runs.parquet cannot be read"):
        load_runs(folder)


def test_a_sweep_under_way_adds_what_it_has_finished(tmp_path):
    sweep, folder = tmp_path / "sweep", tmp_path / "data"
    assert packed.add(sweep, folder) is None and not folder.exists()
    make_run(sweep, "first")
    packed.add(sweep, folder)
    kept = make_run(sweep, "second")
    make_run(sweep / store.PARTIAL, "third")
    shutil.rmtree(sweep / "first")  # a sweep elsewhere has other runs
    assert packed.add(sweep, folder) == folder / packed.FILE
    assert set(load_runs(folder).run) == {"first", "second"}
    assert (kept / runs.WEIGHTS).is_file() and not list(folder.rglob(runs.WEIGHTS))
    shutil.copy(folder / packed.FILE, sweep)  # a run that is there in both forms counts once
    assert [path.name for path in runs.find_runs(sweep)] == ["first", "second"]


def test_a_packed_run_that_is_replaced_by_one_of_another_text_is_named(tmp_path):
    for sweep, text in (("first", "a"), ("same", "a"), ("other", "b")):
        for name in ("one", "two"):
            make_run(tmp_path / sweep, name, corpus={"unigram_entropy": 6.5, "content_hash": text})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed.add(tmp_path / "first", tmp_path / "data")
        packed.add(tmp_path / "same", tmp_path / "data")
    with pytest.warns(UserWarning, match="on another text: one and 1 more$"):
        packed.add(tmp_path / "other", tmp_path / "data")
    assert runs.read_run(tmp_path / "data" / "one").manifest["corpus"]["content_hash"] == "b"


def test_only_runs_without_weights_are_packed(tmp_path):
    make_run(tmp_path)
    with pytest.raises(NormlabError, match="bhyt-a keeps its weights"):
        packed.pack(tmp_path)
    assert (tmp_path / "bhyt-a").is_dir()
    with pytest.raises(NormlabError, match="has no run to pack"):
        packed.pack(tmp_path / "bhyt-a")


def plain(folder: Path, *names: str) -> Path:
    """Runs without weights, named by their values: the last loss of the first is 2, of the second 3, ..."""
    for number, name in enumerate(names):
        path = make_run(folder, name)
        (path / runs.WEIGHTS).unlink()
        table = pd.read_parquet(path / runs.STATS)
        table.assign(value=table["value"] + number).to_parquet(path / runs.STATS, index=False)
    return folder


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def last_losses(folder: Path) -> dict[str, float]:
    rows = load_runs(folder).query("metric == 'loss' and step == 3")
    return dict(zip(rows["run"], rows["value"], strict=True))


# --- packing deletes what it has read back, and nothing else ---


def with_a_note(path: Path) -> None:
    (path / "note.txt").write_text("the third seed was odd")


def with_an_empty_manifest(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / runs.MANIFEST).write_text("{}")


def with_a_folder(path: Path) -> None:
    (path / "plots").mkdir()


def with_a_damaged_table(path: Path) -> None:
    (path / runs.STATS).write_bytes(b"PAR1")


def without_a_table(path: Path) -> None:
    (path / runs.STATS).unlink()


def as_a_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.with_name("elsewhere")), target_is_directory=True)


NOT_PACKED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a note": (with_a_note, "two has note.txt, which is not packed: move it elsewhere"),
    "a folder": (with_a_folder, "two has plots, which is not packed"),
    "a foreign manifest": (with_an_empty_manifest, "two/manifest.json is no run's: nothing was packed"),
    "a damaged table": (with_a_damaged_table, "two/stats.parquet cannot be read .*: nothing was packed"),
    "no table": (without_a_table, "two has no stats.parquet: it is no finished run"),
    "a link": (as_a_link, "two is a link"),
}


@pytest.mark.parametrize("case", NOT_PACKED)
def test_a_folder_with_anything_but_runs_is_refused_and_keeps_every_file(case, tmp_path):
    change, message = NOT_PACKED[case]
    folder = plain(tmp_path / "runs", "one", "two")
    change(folder / "two")
    before = content(tmp_path)
    with pytest.raises(NormlabError, match=message) as caught:
        packed.pack(folder)
    assert "\n" not in str(caught.value)
    assert content(tmp_path) == before


def test_a_run_that_was_packed_otherwise_is_not_deleted(tmp_path):
    folder = plain(tmp_path, "one", "two")
    packed.pack(folder)
    plain(folder, "two")  # its losses are now those of the first
    with pytest.raises(NormlabError, match="two/stats.parquet is not as packed_runs.parquet has it: nothing was"):
        packed.pack(folder)
    assert (folder / "two" / runs.STATS).is_file()


def _or_die(path: Path, act: Callable, steps: Any, kill_at: int, *args: Any, **options: Any) -> Any:
    if next(steps) == kill_at:
        raise KeyboardInterrupt
    return act(path, *args, **options)


def test_packing_can_be_killed_at_every_step_and_be_finished(tmp_path, monkeypatch):
    names = ("one",)
    expected = last_losses(plain(tmp_path / "expected", *names))
    for kill_at in itertools.count():
        folder, steps = plain(tmp_path / str(kill_at), *names), itertools.count()

        with monkeypatch.context() as patch:
            for name in ("replace", "unlink", "rmdir"):
                patch.setattr(Path, name, functools.partialmethod(_or_die, getattr(Path, name), steps, kill_at))
            try:
                packed.pack(folder)
                break
            except KeyboardInterrupt:
                pass
        assert last_losses(folder) == expected
        assert all(runs.read_run(folder / name).table().shape for name in names)
        packed.pack(folder)
        assert [path.name for path in folder.iterdir()] == [packed.FILE] and last_losses(folder) == expected
    assert kill_at > 4


def test_more_runs_join_a_pack_and_two_packers_do_not_meet(tmp_path):
    folder = plain(tmp_path, "one")
    packed.pack(folder)
    plain(folder, "two")
    with packed._alone(folder), pytest.raises(NormlabError, match="another process packs the runs of"):
        packed.pack(folder)
    packed.pack(folder)
    assert [path.name for path in folder.iterdir()] == [packed.FILE] and set(last_losses(folder)) == {"one", "two"}


def test_the_command_that_packs_refuses_in_one_line(tmp_path, capsys):
    for arguments in ([str(tmp_path)], ["--from", str(tmp_path)], []):
        assert packed.main(arguments) == 2
        out, err = capsys.readouterr()
        assert not out and err.startswith("normlab: error: ") and err.count("\n") == 1
    assert packed.main([str(plain(tmp_path, "one"))]) == 0


# --- files of strangers ---

Columns = dict[str, list[Any]]


def rewritten(folder: Path, change: Callable[[Columns], None], **types: Any) -> None:
    """Change the columns of a folder's file; types: of columns that get another one."""
    table = parquet.read_table(folder / packed.FILE)
    columns = table.to_pydict()
    change(columns)
    kinds = {field.name: field.type for field in table.schema} | types
    arrays = {name: pa.array(values, kinds.get(name)) for name, values in columns.items()}
    parquet.write_table(pa.table(arrays), folder / packed.FILE)


def named(name: Any) -> Callable[[Columns], None]:
    return lambda columns: columns.update(run=[name, *columns["run"][1:]])


def all_named(*names: Any) -> Callable[[Columns], None]:
    return lambda columns: columns.update(run=list(names))


def manifest_is(text: Any) -> Callable[[Columns], None]:
    return lambda columns: columns.update(manifest=[text, *columns["manifest"][1:]])


def first_rows(change: Callable[[dict[str, Any]], None]) -> Callable[[Columns], None]:
    return lambda columns: [change(row) for row in columns["stats"][0]] and None


STRUCT = pa.struct([("a", pa.int64())])
TEXTS = pa.list_(pa.string())
IN_TEXT = pa.list_(pa.struct([(name, pa.string()) for name in runs.STATS_COLUMNS]))
FEWER = pa.list_(pa.struct([("step", pa.int64()), ("value", pa.float64())]))
# What is changed, what types it gets, the runs that are left, and the line about the others.
STRANGE: dict[str, tuple[Callable[[Columns], None], dict[str, Any], set[str], str]] = {
    "two runs of one name": (all_named("one", "one", "two"), {}, {"two"}, "one: .*2 runs have this name"),
    "an absolute name": (named("/etc"), {}, {"two", "three"}, "'/etc' is no name of a run"),
    "a name that leads out": (named("../one"), {}, {"two", "three"}, "'../one' is no name of a run"),
    "a name with a drive": (named("C:one"), {}, {"two", "three"}, "'C:one' is no name of a run"),
    "an empty name": (named(""), {}, {"two", "three"}, "'' is no name of a run"),
    "a name with NUL": (named("a\0b"), {}, {"two", "three"}, "is no name of a run"),
    "no name": (named(None), {}, {"two", "three"}, "None is no name of a run"),
    "names that are numbers": (all_named(1, 2, 3), {"run": pa.int64()}, set(), "[123] is no name of a run"),
    "names that are structs": (all_named({"a": 1}, None, None), {"run": STRUCT}, set(), "is no name of a run"),
    "no names": (lambda columns: columns.pop("run") and None, {}, set(), "packed_runs.parquet cannot be read"),
    "no manifest": (manifest_is(None), {}, {"two", "three"}, "one: .*manifest.json is missing"),
    "a broken manifest": (manifest_is("{"), {}, {"two", "three"}, "one: manifest.json cannot be read"),
    "a manifest without end": (manifest_is("[" * 10**5), {}, {"two", "three"}, "one: manifest.json cannot be read"),
    "manifests that are numbers": (
        lambda columns: columns.update(manifest=[1, 2, 3]), {"manifest": pa.int64()}, set(), "manifest.json is missing",
    ),
    "manifests that are bytes": (
        lambda columns: columns.update(manifest=[b"\xff"] * 3), {"manifest": pa.binary()}, set(), "is missing",
    ),
    "no manifests": (lambda columns: columns.pop("manifest") and None, {}, set(), "cannot be read"),
    "no statistics": (lambda columns: columns.update(stats=[None, *columns["stats"][1:]]), {}, {"two", "three"},
                      "one: stats.parquet cannot be read .it is missing"),
    "empty statistics": (lambda columns: columns.update(stats=[[], *columns["stats"][1:]]), {}, {"two", "three"},
                         "one: stats.parquet cannot be read .it has no row"),
    "an empty row": (lambda columns: columns["stats"][0].append(None), {}, {"two", "three"}, "step has an empty entry"),
    "an empty step": (first_rows(lambda row: row.update(step=None)), {}, {"two", "three"}, "step has an empty entry"),
    "an empty site": (first_rows(lambda row: row.update(site=None)), {}, {"two", "three"}, "site has an empty entry"),
    "a long site": (first_rows(lambda row: row.update(site="x" * 500)), {}, set(), "site has a name of more than 200"),
    "statistics in words": (lambda columns: columns.update(stats=["a", "b", "c"]), {"stats": pa.string()}, set(),
                            "stats is of another type"),
    "statistics that are lists of words": (lambda columns: columns.update(stats=[["a"]] * 3), {"stats": TEXTS}, set(),
                                           "stats is of another type"),
    "steps in words": (lambda columns: columns.update(stats=[[{"step": "1"}]] * 3), {"stats": IN_TEXT}, set(),
                       "column step is of type string"),
    "fewer columns": (lambda columns: columns.update(stats=[[{"step": 1}]] * 3), {"stats": FEWER}, set(),
                      "it has columns"),
    "one column more": (lambda columns: columns.update(note=["x"] * 3), {}, {"one", "two", "three"},
                        "column 'note' is unknown"),
}


@pytest.fixture(scope="module")
def three_packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """A folder in which "strange" has three packed runs and "good" a run, and the last loss of each."""
    root = tmp_path_factory.mktemp("packed")
    expected = last_losses(plain(root / "strange", "one", "two", "three")) | {"good": 2.0}
    packed.pack(root / "strange")
    plain(root / "good", "good")
    return root, expected


@pytest.mark.parametrize("case", STRANGE)
def test_a_run_that_a_stranger_packed_wrongly_has_a_line_and_the_others_load(case, three_packed, tmp_path):
    change, types, left, message = STRANGE[case]
    root, expected = three_packed
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "strange"
    rewritten(folder, change, **types)
    before = (folder / packed.FILE).read_bytes()
    with pytest.warns(UserWarning, match=message) as warned:
        losses = last_losses(tmp_path)
    assert losses == {name: expected[name] for name in (*left, "good")}
    assert all(str(one.message).startswith("left out: ") and "\n" not in str(one.message) for one in warned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert set(runs.read_configs(tmp_path)) >= {*left, "good"}
        for path in runs.find_runs(tmp_path):
            assert path.is_relative_to(tmp_path)
    if case not in ("no statistics", "a broken manifest", "a manifest without end", "empty statistics"):
        shutil.copytree(tmp_path / "good" / "good", folder / "four")
        with pytest.raises(NormlabError):  # a file that cannot be read as a whole is not written anew
            packed.pack(folder)
        assert (folder / packed.FILE).read_bytes() == before and (folder / "four" / runs.STATS).is_file()


def broken(content: bytes) -> dict[str, bytes]:
    return {
        "truncated": content[: len(content) // 2],
        "without its footer": content[:-8],
        "empty": b"",
        "no Parquet": b"PAR1" + bytes(100) + b"PAR1",
    }


@pytest.mark.parametrize("case", broken(b""))
def test_a_damaged_file_takes_no_other_runs_with_it(case, tmp_path):
    folder = plain(tmp_path / "bad", "one", "two")
    packed.pack(folder)
    plain(tmp_path / "good", "good")
    file = folder / packed.FILE
    file.write_bytes(broken(file.read_bytes())[case])
    with pytest.warns(UserWarning, match="left out: .*bad/.*packed_runs.parquet.* cannot be read"):
        assert set(last_losses(tmp_path)) == {"good"}
    with pytest.warns(UserWarning, match="left out: "):
        assert set(load_runs([folder, tmp_path / "good"]).run) == {"good"}
    with pytest.raises(NormlabError, match="cannot be read") as caught:
        load_runs(folder)
    assert "\n" not in str(caught.value)
    plain(folder, "own")  # a run beside the file
    assert set(load_runs(folder / "own").run) == {"own"}


def test_no_damaged_byte_gives_other_numbers(tmp_path):
    expected = last_losses(plain(tmp_path, "one", "two"))
    file = packed.pack(tmp_path)
    whole = file.read_bytes()
    for at in range(4, len(whole), len(whole) // 60):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                losses = last_losses(tmp_path)
            except NormlabError as error:
                assert "\n" not in str(error)
            else:
                assert losses.items() <= expected.items()


BOMBS: dict[str, Callable[[], pa.Table]] = {
    "a long text": lambda: pa.table({"run": ["one"], "manifest": [" " * 2**22]}),
    "rows without end": lambda: pa.table({"run": pa.array(["one"]).dictionary_encode().take(pa.array([0] * 10**6))}),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_small_file_that_would_fill_the_memory_is_not_unpacked(case, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "UNPACKED_BYTES", 2**20)
    parquet.write_table(BOMBS[case](), tmp_path / packed.FILE, compression="zstd")
    assert (tmp_path / packed.FILE).stat().st_size < 2**13
    with pytest.raises(NormlabError, match=r"cannot be read .its [\d,]+ bytes unpack to [\d,]+.: fetch it again"):
        load_runs(tmp_path)


@pytest.mark.parametrize("is_packed", [False, True])
def test_too_little_memory_is_not_a_damaged_run(is_packed, tmp_path, monkeypatch):
    path = make_run(tmp_path, "schema")
    (path / runs.WEIGHTS).unlink()
    if is_packed:
        packed.pack(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise pa.lib.ArrowMemoryError("malloc of size 66176 failed")

    monkeypatch.setattr(packed, "_read", full)
    with pytest.raises(MemoryError):
        load_runs(tmp_path)


def test_a_file_is_read_as_it_is_now_whatever_its_date(tmp_path):
    folder = plain(tmp_path, "one", "two")
    packed.pack(folder)
    file = folder / packed.FILE
    os.utime(file, (0, 0))  # as archives date their files
    assert set(load_runs(folder).run) == {"one", "two"} and store.is_run(folder / "one")
    rewritten(folder, all_named("one", "six"))
    os.utime(file, (0, 0))  # replaced within one tick of the clock
    assert [path.name for path in runs.find_runs(folder)] == ["one", "six"] and not store.is_run(folder / "two")


def test_runs_are_read_while_another_process_packs_and_deletes_them(tmp_path, monkeypatch):
    folder = plain(tmp_path, "one", "two")
    expected = last_losses(folder)
    found, rows = runs._found, runs.Run._rows
    with monkeypatch.context() as patch:  # between the search and the first run
        patch.setattr(runs, "_found", lambda root: (found(root), packed.pack(folder))[0])
        assert last_losses(folder) == expected
    with monkeypatch.context() as patch:  # the file goes while it is read
        patch.setattr(runs, "_found", lambda root: (found(root), (folder / packed.FILE).unlink())[0])
        assert last_losses(folder) == expected
    plain(folder, "one", "two")
    with monkeypatch.context() as patch:  # between a run's manifest and its table
        patch.setattr(runs.Run, "_rows", lambda run: (packed.pack(folder) if run.path.exists() else None, rows(run))[1])
        assert last_losses(folder) == expected
    plain(tmp_path / "gone", "three")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_found", lambda root: (found(root), shutil.rmtree(tmp_path / "gone"))[0])
        with pytest.warns(UserWarning, match="left out: .*three holds no run"):
            assert last_losses(tmp_path) == expected


# --- generated files ---

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["/etc/passwd", "../..", "", "\0", "x" * 300]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ["schema", "run", "status", "eval_loss", "bigram_loss", "config", "corpus", "measured", "environment", "other"]
FIELDS += [f"config.{name}" for name in ("scheme", "depth", "width", "seed", "lr", "dtype", "model", "corpus")]
READERS = (load_runs, runs.load_experiments, runs.load_configs, runs.read_configs, runs.find_runs)


def test_no_generated_manifest_is_a_traceback_or_costs_a_file(tmp_path):
    folder = plain(tmp_path / "runs", "bad", "good")
    packed.pack(folder)
    plain(tmp_path / "runs", "own")
    whole = json.loads(packed.Pack(folder).manifest("bad"))

    @settings(max_examples=20)
    @given(field=st.sampled_from(FIELDS), value=VALUES, in_pack=st.booleans())
    def check(field: str, value: Any, in_pack: bool) -> None:
        manifest = json.loads(json.dumps(whole))
        outer, _, inner = field.rpartition(".")
        (manifest[outer] if outer else manifest)[inner] = value
        text = json.dumps(manifest)
        if in_pack:
            rewritten(folder, lambda columns: columns.update(manifest=[text, columns["manifest"][1]]))
        else:
            (folder / "own" / runs.MANIFEST).write_text(text)
        before = content(tmp_path)
        for read in READERS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = read(folder)
                    assert read is not load_runs or "good" in set(found["run"])
                except NormlabError as error:
                    assert "\n" not in str(error)
        assert content(tmp_path) == before

    check()


TYPES = [pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.binary(), pa.list_(pa.int64()), STRUCT, pa.null()]


@pytest.mark.parametrize("column", ["run", "manifest", "stats"])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_no_column_of_another_type_is_a_traceback_or_costs_a_file(column, kind, tmp_path):
    folder = plain(tmp_path, "one")
    packed.pack(folder)
    table = parquet.read_table(folder / packed.FILE)
    place = table.column_names.index(column)
    value = {pa.int64(): 7, pa.float64(): 0.5, pa.string(): "a", pa.bool_(): True, pa.binary(): b"\xff"}.get(kind)
    parquet.write_table(table.set_column(place, column, pa.array([value], kind)), folder / packed.FILE)
    before = content(tmp_path)
    for act in (*READERS, packed.pack):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                act(folder)
            except NormlabError as error:
                assert "\n" not in str(error)
    assert content(tmp_path) == before
