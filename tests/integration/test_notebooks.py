"""The notebooks run from top to bottom on the recorded study, and are what their text says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import nbclient
import nbformat
import pytest

from tests.contract.test_imports import OURS, imports

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARAMETERS = {  # by name of the notebook; {study}: the folder of the recorded study
    "01_one_run": 'SOURCE = "{study}/replace/seed0"',
    "02_pr6046_study": 'SOURCE = "{study}"\nPLAN = "../analysis/plans/pr6046.yaml"',
    "03_merge_error": 'SOURCE = "{study}"\nTRAINED_WITH = "slice_concat"',
}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def test_every_notebook_is_here() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(PARAMETERS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_and_its_text_agree_and_hold_no_output(path: Path) -> None:
    def content(notebook: Any) -> list[tuple[str, str, list[str]]]:
        return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]

    notebook = read(path)
    text = jupytext.read(path.with_suffix(".md"))
    assert content(notebook) == content(text), f"run: uv run jupytext --sync {path.relative_to(ROOT)}"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_tells_a_story_over_analysis_alone(path: Path) -> None:
    code = [cell.source.replace("%matplotlib inline\n", "") for cell in read(path).cells if cell.cell_type == "code"]
    tops = {name.split(".")[0] for source in code for name, _ in imports(source)}
    assert tops & OURS == {"analysis"}
    assert tops - OURS <= {"sys", "pathlib"}
    assert not any(word in source for source in code for word in ("def ", "class ", "lambda"))
    assert read(path).cells[0].cell_type == "markdown"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_on_the_recorded_study(path: Path, study_folder: Path) -> None:
    notebook = read(path)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = PARAMETERS[path.stem].format(study=study_folder)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = [kind for output in outputs for kind in output.get("data", {})]
    shown = sum(source.count("figure(") for source in (c.source for c in notebook.cells if c.cell_type == "code"))
    assert kinds.count("image/png") == shown
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
