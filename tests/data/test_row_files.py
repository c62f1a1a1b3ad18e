"""Values of a file of rows: each stands in the prompt as it stands in its file, or is refused by its field."""
# ruff: noqa: F811, the fixture `loaded` is imported

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from harness.data.tasks import load_suite
from harness.errors import UserError
from tests.data.test_tasks import ANSWERED, loaded, settings, write_yaml  # noqa: F401, a fixture

KEPT: dict[str, list[Any]] = {
    "rows": ["a", "b", "c", "d"],
    "whole and other numbers": [12, 7.5, 9.0, 1e22],
    "a null among whole numbers": [12, None, 7, 8],
    "large numbers": [2**62 + 1, 2**64 - 1, 0, 1],
    "dates": ["2019-03-04", "2021-11-30", "2019-03-04", "2020-01-01"],
    "times": ["2019-03-04T10:00:00", "2021-11-30T10:00:00Z", "2019-03-04T10:00:00", "2021-11-30T10:00:00Z"],
    "numbers as text": ["007", "12", "{}", "null"],
    "true and false": [True, False, None, True],
    "many digits": [0.12345678901234567, 1.0, 2.5, 3.0],
    "a list of several kinds": [[1, 2.5, "3", None, True], [[4]], [], [5]],
    "objects with other fields": [{"x": 12}, {"y": {"z": [1, 7.5]}}, {"y": None, "x": 1}, {"x": 2}],
    "objects in another order": [{"x": 1, "y": 2}, {"y": 2, "x": 1}, {"x": 1, "y": 2}, {"x": 1, "y": 2}],
}
"""The values of each column."""
CHANGED = {
    "more digits than JSON's reader has": [0.12345678901234567, 1],
    "a number beyond 64 bits": [1, 2**64],
    "half a letter": ["a", "\ud800"],
}
PLACES = ("data=local", "a named file", "a list", "a field", "a folder")


def config_of(place: str, columns: dict[str, list[Any]], folder: Path):
    """A task whose prompts are these columns' values, in a file that is given in one of several ways."""
    fields = {name.replace(" ", "_"): values for name, values in columns.items()}
    rows = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    text = "{% if true %}" + "|".join(f"{{{{{name}}}}}" for name in fields) + "{% endif %}"  # where null is allowed
    lines = "\n".join(map(json.dumps, rows)) + "\n\n"
    task = ANSWERED | {"task": "mine", "doc_to_text": text, "doc_to_target": next(iter(fields))}
    (folder / "rows").mkdir()
    path = folder / "rows" / ("test.jsonl" if place in ("data=local", "a folder") else "rows.json")
    text = {"a list": json.dumps(rows, indent=1), "a field": json.dumps({"of": 1, "data": rows})}.get(place, lines)
    path.write_text(text)
    if place == "data=local":
        return settings("mine", root=folder, folder=write_yaml(folder / "own", task | {"dataset_path": "rows"}))
    named: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}}}
    if place == "a field":
        named["dataset_kwargs"]["field"] = "data"
    if place == "a folder":
        named = {"dataset_path": str(folder / "rows"), "dataset_kwargs": None}
    return settings("mine", folder=write_yaml(folder / "own", task | named))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def prompts(config, loaded) -> list[str]:
    task = load_suite(config, loaded).tasks["mine"]
    task.build_all_requests()
    return [request.args[0] for request in task.instances]


@pytest.mark.parametrize("place", PLACES)
def test_values_of_json_stand_in_the_prompt_as_in_the_file(place, loaded, tmp_path):
    asked = prompts(config_of(place, KEPT, tmp_path), loaded)
    assert asked == ["|".join(map(str, values)) for values in zip(*KEPT.values(), strict=True)]


@pytest.mark.parametrize("case", CHANGED)
@pytest.mark.parametrize("place", PLACES[:2])
def test_a_value_that_would_change_is_refused_by_its_field(place, case, loaded, tmp_path):
    config = config_of(place, {"value": CHANGED[case]}, tmp_path)
    with pytest.raises(UserError, match=r"/rows/\w+\.jsonl?: field 'value' holds a value that changes on its way"):
        load_suite(config, loaded)


def test_a_column_of_csv_has_a_type_where_that_writes_it_as_the_file_does(loaded, tmp_path):
    columns = {
        "mixed": ["12", "7.5", "48"],
        "padded": ["007", "1", "2"],
        "words": ["NA", "None", "x"],
        "day": ["2019-03-04", "2021-11-30", "2020-01-01"],
        "truth": ["true", "false", "true"],
        "empty": ["12", "", "7"],
        "label": ["0", "2", "1"],
    }
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]) + "\n")
    text = "|".join(f"{{{{{name}}}}}" for name in columns)
    task = ANSWERED | {"task": "mine", "doc_to_text": text, "doc_to_target": "label"}
    task |= {"dataset_path": "csv", "dataset_kwargs": {"data_files": {"test": str(path)}}}
    config = settings("mine", folder=write_yaml(tmp_path / "own", task))
    written = ["|".join(row) for row in zip(*columns.values(), strict=True)]
    assert prompts(config, loaded) == [row.replace("||", "|None|") for row in written]
    docs = load_suite(config, loaded).tasks["mine"].eval_docs
    assert docs["label"][:] == [0, 2, 1] and docs["empty"][:] == [12, None, 7]


def test_a_value_of_parquet_has_the_type_that_the_file_says(loaded, tmp_path):
    (tmp_path / "rows").mkdir()
    values = {"question": ["a", "b"], "value": [12, None], "nested": [{"x": 1, "y": "1"}, {"x": 2, "y": "07"}]}
    datasets.Dataset.from_dict(values).to_parquet(tmp_path / "rows" / "test.parquet")
    task = ANSWERED | {"task": "mine", "dataset_path": "rows", "doc_to_target": "question"}
    task["doc_to_text"] = "{% if true %}{{question}}: {{value}} {{nested}}{% endif %}"
    config = settings("mine", root=tmp_path, folder=write_yaml(tmp_path / "own", task))
    assert prompts(config, loaded) == ["a: 12 {'x': 1, 'y': '1'}", "b: None {'x': 2, 'y': '07'}"]
