"""Notebooks from sources: deterministic, stripped of the machine, and checked."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from rich.console import Console

from helpers.course import build, checks, runner
from helpers.errors import NotebookError, RecordError, UnknownNameError


def cell_texts(notebook: NotebookNode) -> list[str]:
    return [cell.source for cell in notebook.cells]


def executed(*outputs: NotebookNode, source: str = "x = 1", **metadata: object) -> NotebookNode:
    """A notebook of one executed code cell with these outputs."""
    return new_notebook(cells=[new_code_cell(source, outputs=list(outputs), execution_count=1, metadata=metadata)])


def stream(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


# -- names -------------------------------------------------------------------------------------------------------------
def test_a_notebook_is_found_by_number_or_name_in_order(folder, add):
    add("02_later")
    add("01_first")
    assert [entry.name for entry in build.find([], folder)] == ["01_first", "02_later"]
    assert [entry.name for entry in build.find(["02", "01_first"], folder)] == ["01_first", "02_later"]


def test_an_unknown_notebook_suggests_the_nearest(folder, add):
    add("01_kv_cache")
    with pytest.raises(UnknownNameError) as caught:
        build.find(["01_kv_cach"], folder)
    assert "Did you mean '01_kv_cache'?" in caught.value.remedy


# -- reading -----------------------------------------------------------------------------------------------------------
def test_the_same_source_gives_the_same_bytes(folder, add):
    add("01_good", "print(1)\n# %%\nprint(1)")
    entry = build.find(["01"], folder)[0]
    assert nbformat.writes(build.read_source(entry)) == nbformat.writes(build.read_source(entry))


def test_moving_or_adding_a_cell_changes_no_other_id():
    cells = [{"cell_type": "code", "source": text} for text in ("a", "b", "a")]
    before = build.cell_ids(cells)
    assert len(set(before)) == 3
    after = build.cell_ids([{"cell_type": "code", "source": "new"}, *cells])
    assert after[1:] == before


def test_markdown_and_code_of_equal_text_have_different_ids():
    ids = build.cell_ids([{"cell_type": kind, "source": "a"} for kind in ("code", "markdown")])
    assert ids[0] != ids[1]


def test_solutions_are_folded_and_tags_kept(folder, add):
    add("01_good", 'pass\n# %% tags=["solution", "other"]\ny = 2')
    cells = build.read_source(build.find(["01"], folder)[0]).cells
    (solution,) = [cell for cell in cells if "solution" in build.tags(cell)]
    assert solution.metadata == {"tags": ["solution", "other"], "jupyter": {"source_hidden": True}}


def test_metadata_name_no_machine(folder, add):
    source = add("01_good")
    source.write_text(
        "# ---\n# jupyter:\n#   kernelspec:\n#     name: my_env\n#     display_name: Mine\n# ---\n" + source.read_text()
    )
    notebook = build.read_source(build.find(["01"], folder)[0])
    assert notebook.metadata.kernelspec == build.KERNELSPEC
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    nbformat.validate(notebook)


# -- building ----------------------------------------------------------------------------------------------------------
def test_a_build_keeps_outputs_and_drops_the_run(folder, add, tmp_path):
    add("01_good", "print('one')\nprint('two')")
    build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    text = (folder / "01_good.ipynb").read_text()
    assert "one" in text
    for trace in ("papermill", "injected-parameters", str(tmp_path), "start_time", "iopub"):
        assert trace not in text
    notebook = build.read_notebook(folder / "01_good.ipynb")
    assert [c.execution_count for c in notebook.cells if c.cell_type == "code"] == [1, 2, 3]
    nbformat.validate(notebook)


def test_only_what_changed_is_executed(folder, add, tmp_path):
    log = tmp_path / "log"
    add("01_good", f"open({str(log)!r}, 'a').write('x')")
    source = add("02_other", f"open({str(log)!r}, 'a').write('y')")

    def names() -> list[str]:
        return [path.stem for path in build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)]

    assert names() == ["01_good", "02_other"]
    assert names() == []
    source.write_text(source.read_text().replace("# # 02_other", "# # Another title"))
    assert names() == ["02_other"]
    assert log.read_text() == "xyy"


def test_a_run_of_the_same_source_is_kept_instead_of_executed_again(folder, add, tmp_path):
    log, out = tmp_path / "log", tmp_path / "run"
    source = add("01_good", f"open({str(log)!r}, 'a').write('x')\nprint('said')")
    options = {"folder": folder, "out": tmp_path / "out", "earlier": out, "say": lambda _: None}
    runner.run([], runner.Settings(profile="smoke", seed=1), folder=folder, out=out, console=Console(quiet=True))
    build.build([], **options)
    assert log.read_text() == "xx", "a run with another seed is not what a build makes"
    source.write_text(source.read_text() + "\n# changed\n")
    runner.run([], runner.Settings(profile="smoke"), folder=folder, out=out, console=Console(quiet=True))
    build.build([], **options)
    assert log.read_text() == "xxx" and "said" in (folder / "01_good.ipynb").read_text()
    assert build.is_current(build.find(["01"], folder)[0])
    source.write_text(source.read_text() + "# once more\n")
    build.build([], **options)
    assert log.read_text() == "xxxx", "a changed source is executed"


def test_a_failed_build_keeps_the_old_notebook(folder, add, tmp_path):
    source = add("01_good", "print('old')")
    build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    before = (folder / "01_good.ipynb").read_bytes()
    source.write_text(source.read_text().replace("print('old')", "1 / 0"))
    with pytest.raises(NotebookError, match="ZeroDivisionError"):
        build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    assert (folder / "01_good.ipynb").read_bytes() == before


DRAW = """
import pathlib

figures = pathlib.Path(OUT, "figures")
figures.mkdir()
(figures / "01_b.svg").write_text("<svg/>")
(figures / "01_b.json").write_text("{}")
"""


def test_a_build_keeps_the_run_s_figures_and_drops_what_is_no_longer_drawn(folder, add, tmp_path):
    add("01_good", DRAW)
    kept = tmp_path / "figures"
    kept.mkdir()
    for stale in ("01_a.svg", "01_a.json", "02_a.svg"):
        (kept / stale).write_text("old")
    build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    assert sorted(path.name for path in kept.iterdir()) == ["01_b.json", "01_b.svg", "02_a.svg"]


def test_a_figure_without_its_numbers_is_refused(folder, add, tmp_path):
    add("01_good", DRAW.replace('(figures / "01_b.json")', '(figures / "01_c.json")'))
    with pytest.raises(NotebookError, match=r"without their numbers: 01_b\.svg"):
        build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    assert not (folder / "01_good.ipynb").exists()


def test_figures_that_cannot_be_kept_are_a_record_error(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be kept"):
        build.keep_figures("01_good", tmp_path / "made", tmp_path / "file" / "figures")


def test_neighbouring_streams_are_joined_and_widgets_dropped():
    widget = new_output("display_data", data={"application/vnd.jupyter.widget-view+json": {}, "text/plain": "bar"})
    raw = executed(stream("a"), stream("b"), widget)
    clean = build.strip_machine(raw, executed(), "hash").cells[0].outputs
    assert [output.get("text", "") for output in clean] == ["ab", ""]
    assert list(clean[1].data) == ["text/plain"]


# -- checks ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("check", "output", "word"),
    [
        (checks.no_progress_residue, stream("loading\rloaded"), "progress bar"),
        (checks.no_progress_residue, stream(" 50%|#####     | 5/10"), "progress bar"),
        (checks.no_progress_residue, stream("10/10 [00:01, 3.2it/s]"), "progress bar"),
        (checks.no_machine_paths, stream("saved to /home/ada/x.json"), "path of one machine"),
        (checks.no_machine_paths, stream("'/Users/ada/x'"), "path of one machine"),
        (checks.no_machine_paths, stream("see /tmp/abc/log"), "path of one machine"),
        (checks.no_machine_paths, stream("see /workspace/course/x"), "path of one machine"),
        (checks.no_machine_paths, stream(f"see {build.NOTEBOOKS}/x"), "path of one machine"),
        (checks.no_error_outputs, new_output("error", ename="E", evalue="", traceback=[]), "error: E"),
        (checks.output_sizes, stream("x" * 200_001), "200 kB"),
        (checks.output_sizes, new_output("display_data", data={"image/png": "A" * 200_001}), "200 kB"),
    ],
)
def test_a_bad_output_is_found(check, output, word):
    (finding,) = check(executed(output))
    assert finding[0] == 1
    assert word in finding[1]


def test_good_outputs_pass_every_check():
    good = executed(
        stream("ratio 3.2x, 50 % of 10, https://example.org/home/page, a/tmp/b, 12 tokens/s\n"),
        new_output("display_data", data={"image/png": "A" * 100_000, "text/plain": "<Figure>"}),
    )
    assert [item for check in checks.BUILT_CHECKS for item in check(good)] == []


def test_unexecuted_and_disordered_cells_are_found():
    notebook = new_notebook(cells=[new_code_cell("a"), new_code_cell("b", execution_count=1)])
    assert checks.everything_executed(notebook) == [(1, "was not executed")]
    notebook.cells[0].execution_count = 2
    assert "first to last" in checks.everything_executed(notebook)[0][1]


def test_long_cells_are_found_by_their_kind():
    lines = "\n".join(["x = 1"] * 42)
    assert checks.cell_lengths(executed(source=lines, tags=["algorithm"]))
    assert not checks.cell_lengths(executed(source=lines))
    assert checks.cell_lengths(executed(source=lines + "\nx = 2" * 4))


PARTS = ["PROFILE = SEED = OUT = None", "import helpers\nrun = helpers.start('x', PROFILE, SEED, OUT)", "run.finish()"]


def parts(*sources: str, tagged: int = 0) -> NotebookNode:
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])
    notebook.cells[tagged].metadata["tags"] = ["parameters"]
    return notebook


def test_required_parts():
    assert checks.required_parts(parts(*PARTS)) == []
    assert "parameters" in checks.required_parts(parts(*PARTS, tagged=1))[0][1]
    assert "helpers.start" in checks.required_parts(parts(PARTS[0], "x = 1", PARTS[2]))[0][1]
    assert "run.finish" in checks.required_parts(parts(PARTS[0], PARTS[1], "# run.finish()"))[0][1]


def test_drift_names_the_first_cell_that_differs(folder, add):
    add("01_good")
    entry = build.find(["01"], folder)[0]
    source, built = build.read_source(entry), build.read_source(entry)
    assert checks.drift(built, source) == []
    built.cells[2].source += "\n# edited by hand"
    ((cell, what),) = checks.drift(built, source)
    assert (cell, "text differs" in what) == (3, True)
    del built.cells[2:]
    assert "cells" in checks.drift(built, source)[0][1]


def test_a_notebook_as_a_whole(folder, add, tmp_path):
    add("01_good")
    entry = build.find(["01"], folder)[0]
    assert "does not exist" in checks.check_notebook(entry)[0].what
    build.build([], folder=folder, out=tmp_path / "out", say=lambda _: None)
    found = [str(finding) for finding in checks.check_notebook(entry)]
    assert any("helpers.start" in text for text in found)
    assert not any("differs" in text or "executed" in text for text in found)
    notebook = build.read_notebook(entry.built)
    notebook.cells[2].outputs = [stream("y" * 1_100_000)]
    build.write_notebook(notebook, entry.built)
    assert any("MB; the limit is 1" in str(finding) for finding in checks.check_notebook(entry))
