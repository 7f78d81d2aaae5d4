"""The notebooks run from top to bottom in a kernel of their own, made small by their parameters."""

import re

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted((ROOT / "launch" / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("ignore")  # of Jupyter's libraries
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path):
    reason = "pip install -e '.[notebooks]'"
    nbformat, nbclient = (pytest.importorskip(name, reason=reason) for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    (place,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    small = f"RUNS = {str(tmp_path)!r}\nSTEPS = 200\nPROBLEMS = 8"
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(small))
    client = nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(ROOT)}})
    client.execute()  # raises what a cell raises
    assert all(cell.outputs for cell in notebook.cells if re.search(r"^ *run\(", cell.source, re.MULTILINE))
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"first_hour": {"answer.html", "exported"}, "your_own_objective": {"holes", "ar"}}[path.stem]
