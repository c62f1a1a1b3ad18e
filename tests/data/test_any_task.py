"""Tasks, groups and tags of lm-eval by their names: found, given their rows, run as lm-eval runs them, or refused."""
# ruff: noqa: F811, the fixture `loaded` is imported

import socket
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from harness.data import tasks
from harness.data.tasks import load_suite, plan
from harness.errors import UserError
from harness.model.load import LoadedModel
from harness.results import inputs
from harness.results.samples import clustered_stderr
from harness.run.compose import load
from harness.run.runner import Run
from harness.scoring.evaluation import Repeat, joined, run_tasks
from harness.settings.config import AIME_TASKS, RunConfig, SamplingConfig
from methods.h2o import H2O
from tests.conftest import refused
from tests.data.test_tasks import ANSWERED, loaded, refuse, settings, write_rows, write_yaml  # noqa: F401, a fixture
from tests.runs import without
from tests.tokens import byte_tokenizer

CHOICE = {
    "task": "toy_colours", "tag": "toy_tag", "dataset_path": "org/toy", "dataset_name": "colours",
    "output_type": "multiple_choice", "test_split": "test", "fewshot_split": "dev", "doc_to_text": "{{question}}",
    "doc_to_choice": "{{options}}", "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
SHAPES = CHOICE | {"task": "toy_shapes", "dataset_name": "shapes"}
SUMS = ANSWERED | {"task": "toy_sums", "dataset_path": "org/sums", "doc_to_text": "Q: {{question}}\nA:"}
GROUP = {
    "group": "toy",
    "task": ["toy_colours", "toy_shapes"],
    "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
}


def question(number: int) -> dict[str, Any]:
    return {"question": f"What is number {number}?", "options": ["red", "a blue one", "it"], "label": number % 3}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's own folder of task YAML."""
    return write_yaml(tmp_path / "own", CHOICE, SHAPES, SUMS, GROUP)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Rows as JSON lines and as parquet, named as on the hub; no cache of data sets outside the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    root = tmp_path / "data"
    numbers = {
        "org/toy/colours/test.jsonl": range(7),
        "org/toy/colours/dev.jsonl": range(20, 24),
        "toy/shapes/data/test-00000-of-00002.parquet": range(30, 32),
        "toy/shapes/data/test-00001-of-00002.parquet": range(32, 33),
    }
    for file, of_file in numbers.items():
        write_rows(root / file, [question(number) for number in of_file])
    write_rows(root / "toy_sums/test.json", [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(3)])
    return root


def stock(config: RunConfig, loaded: LoadedModel, **options) -> dict[str, Any]:
    """What lm-eval's own `HFLM` makes of the same tasks and groups."""
    lm = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    tasks = load_suite(config, loaded)._asdict()
    return evaluate(lm, tasks, limit=config.num_samples, bootstrap_iters=100, **options)


# Names


OFFLINE = "data=offline has kv_recall, .*, aime26 alone; needs data=hub"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("toy_color", "hub", "tasks=toy_color: did you mean 'toy_colours'"),
        ("toy_meant", "hub", r"tasks=toy_meant: is unknown, and \S+broken.yaml cannot be read"),
        ("arc_easy", "offline", f"tasks=arc_easy: {OFFLINE}, or data=local data.root=DIR with test"),
        ("own/toy.yaml", "hub", r"tasks=own/toy.yaml: is a file; tasks .*: include_path=own tasks=\[NAME\]$"),
    ],
)
def test_a_name_is_refused_in_one_line(name, data, message, folder):
    if name == "toy_meant":
        (folder / "broken.yaml").write_text("task: toy_meant\ntag: [")
    with refused(f"^{message}"):
        Run.of(load(["experiment=tasks", f"tasks=[{name}]", f"include_path={folder}", f"data={data}"]))


# Rows


@pytest.mark.parametrize(
    "place",
    [
        "cais/mmlu/{part}/{split}.jsonl",
        "mmlu/{part}/data/{split}-00000-of-00001.parquet",
        "{part}/{split}.parquet",
        "mmlu_{part}/{split}.jsonl",
    ],
)
def test_rows_lie_where_the_hub_has_them(place, root, monkeypatch):
    row = {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1}
    for split, count in (("test", 3), ("dev", 4)):
        rows = [row | {"question": f"{number} + 1?"} for number in range(count)]
        write_rows(root / place.format(part="abstract_algebra", split=split), rows)
    task = load_suite(settings("mmlu_abstract_algebra", root=root, num_fewshot=2), None).tasks["mmlu_abstract_algebra"]
    task.build_all_requests()
    assert len(task.instances) == 3 * 4
    assert task.instances[0].args[0].count("Answer:") == 3
    assert task.instances[0].args[0].startswith("The following are multiple choice questions")


def test_examples_follow_lm_evals_rule(folder, root):
    write_yaml(folder, CHOICE | {"task": "toy_zero", "num_fewshot": 0}, CHOICE | {"task": "toy_two", "num_fewshot": 2})
    write_yaml(folder, CHOICE | {"task": "toy_same", "fewshot_split": "test"})
    names = ("toy_zero", "toy_two", "toy_colours")
    for given, expected in ((None, [0, 2, 0]), (3, [0, 3, 3]), (1, [0, 1, 1])):
        tasks = load_suite(settings(*names, folder=folder, root=root, num_fewshot=given), None).tasks
        assert [tasks[name].config.num_fewshot for name in names] == expected
    for name, split, most in (("toy_two", "dev", 4), ("toy_same", "test", 6)):
        task = load_suite(settings(name, folder=folder, root=root, num_fewshot=most), None).tasks[name]
        task.build_all_requests(limit=1)
        more = settings(name, folder=folder, root=root, num_fewshot=most + 1)
        with refused(
            rf"^num_fewshot={most + 1}: {name} has no rows for so many .* split {split} of .*; at most {most}$"
        ):
            load_suite(more, None)


def test_examples_that_stand_in_the_yaml_need_no_split(root):
    write_rows(root / "gsm8k/test.jsonl", [{"question": "What is 1 + 2?", "answer": "#### 3"}])
    task = load_suite(settings("gsm8k_cot", root=root), None).tasks["gsm8k_cot"]
    task.build_all_requests()
    assert task.instances[0].args[0].count("Q:") == 9


def test_rows_that_python_makes_are_the_same_in_every_run(folder, loaded):
    (folder / "made.py").write_text(
        "import random, numpy, datasets\n"
        "def rows(tokenizer, size=2, **others):\n"
        "    made = [{'q': tokenizer, 'a': f'{random.random()} {numpy.random.rand()}'} for _ in range(size)]\n"
        "    return {'test': datasets.Dataset.from_list(made)}\n"
    )
    (folder / "made.yaml").write_text(
        "task: toy_made\ncustom_dataset: !function made.rows\ntest_split: test\noutput_type: loglikelihood\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\nmetric_list: [{metric: acc}]\n"
    )
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = "org/model"
    loaded = replace(loaded, tokenizer=tokenizer)

    def docs(metadata=None, **changes):
        config = settings("toy_made", folder=folder, task={"metadata": metadata or {}}, **changes)
        return load_suite(config, loaded).tasks["toy_made"].eval_docs

    assert docs()["a"][:] == docs()["a"][:] != docs(seed=1)["a"][:]
    assert docs()["q"][:] == ["org/model"] * 2
    assert docs({"size": 3, "tokenizer": "org/other"})["q"][:] == ["org/other"] * 3


@pytest.mark.parametrize("task", AIME_TASKS)
def test_a_year_of_aime_has_the_packages_rows_under_lm_evals_prompt(task, tmp_path, monkeypatch):
    """A stand-in of the package, which is optional."""
    problems = [{"id": f"{task}-{n}", "problem": f"What is {n} + 1?", "expected_answer": str(n + 1)} for n in range(30)]
    asked = ["experiment=tasks", f"tasks=[{task}]"]
    with monkeypatch.context() as patch:
        patch.setattr(tasks.importlib.metadata, "version", without("sgl-eval"))
        with refused(rf"^tasks={task}: needs the Python package sgl-eval, .* installed: {tasks.AIME_INSTALL}$"):
            inputs.tasks(load(asked))
    write_rows(tmp_path / tasks.AIME_ROWS.format(task=task), problems)
    (tmp_path / "sgl_eval-0.1.3.dist-info").mkdir()
    (tmp_path / "sgl_eval-0.1.3.dist-info/METADATA").write_text("Name: sgl-eval\nVersion: 0.1.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    made = load_suite(load(asked), None).tasks[task]
    made.build_all_requests()
    prompts = [request.args[0] for request in sorted(made.instances, key=lambda request: request.doc_id)]
    assert prompts == [f"Question: {row['problem']}\nAnswer:" for row in problems]
    assert made.instances[0].args[1]["max_gen_toks"] == 32768
    doc = made.eval_docs[4]
    assert made.process_results(doc, [r"So $x = 1$, and the sum is \boxed{5}."]) == {"exact_match": 1}
    assert made.process_results(doc, [r"\boxed{1000}"]) == {"exact_match": 0}
    before = inputs.tasks(load(asked))
    write_rows(tmp_path / tasks.AIME_ROWS.format(task=task), problems[1:])
    assert inputs.tasks(load(asked)) != before, "files that a task's YAML names count"
    shorter = load_suite(load([*asked, "metadata.max_gen_toks=9"]), None).tasks[task]
    shorter.build_all_requests(limit=1)
    assert shorter.instances[0].args[1]["max_gen_toks"] == 9


# Runs


def test_groups_and_tags(folder, root, loaded):
    """A group counts as lm-eval counts it; a task that is named twice runs once."""
    about = {"folder": folder, "root": root, "num_fewshot": 0}
    outcome = run_tasks(settings("toy", "toy_colours", "toy_tag", method=H2O(), prefill="dense", **about), loaded)
    assert list(outcome.metrics) == ["toy_colours", "toy_shapes", "toy"]
    assert list(outcome.samples) == list(outcome.methods) == ["toy_colours", "toy_shapes"]
    assert [metrics["num_samples"] for metrics in outcome.metrics.values()] == [7, 3, 10]
    assert outcome.metrics["toy"]["tasks"] == ["toy_colours", "toy_shapes"]
    one, two, group = (metrics["budget"] for metrics in outcome.metrics.values())
    assert min(one, two) <= group <= max(one, two) < 1
    config = settings("toy", **about)
    own, theirs = run_tasks(config, loaded).metrics, stock(config, loaded)["results"]
    for name in ("toy", "toy_colours", "toy_shapes"):
        assert own[name]["acc"] == pytest.approx(theirs[name]["acc,none"])
        assert own[name]["acc_stderr"] == pytest.approx(theirs[name]["acc_stderr,none"])
    assert own["toy_shapes"]["acc_norm"] == pytest.approx(theirs["toy_shapes"]["acc_norm,none"])


def test_a_folder_comes_first_and_its_groups_may_hold_tasks(folder, root):
    inline = {name: value for name, value in SHAPES.items() if name not in ("task", "tag")} | {"task": "inside"}
    outer = GROUP | {"group": "outer", "task": ["toy_colours", inline, "toy"]}
    write_yaml(folder, CHOICE | {"task": "copa"}, CHOICE | {"task": "gsm8k"}, outer)
    planned = plan(settings("copa", "gsm8k", "outer", folder=folder, root=root))
    assert list(planned.tasks) == ["copa", "gsm8k", "toy_colours", "outer::inside", "toy_shapes"]
    assert list(planned.groups) == ["outer", "toy"]
    assert all(leaf.config["dataset_path"] == "org/toy" for leaf in planned.tasks.values())


@pytest.mark.parametrize("multiturn", [False, True, None])
def test_chat_templates_as_with_hflm(multiturn, folder, root, loaded):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    loaded = replace(loaded, tokenizer=tokenizer)
    chat = {"apply_chat_template": True, "fewshot_as_multiturn": multiturn, "system_instruction": "Be brief."}
    config = settings("toy_colours", folder=folder, root=root, task=chat, num_fewshot=2, num_samples=2)
    by_command = chat | {"fewshot_as_multiturn": multiturn is not False}  # lm-eval's, where none is given
    theirs = stock(config, loaded, **by_command)
    own = run_tasks(config, loaded).samples["toy_colours"]
    for mine, other in zip(own, theirs["samples"]["toy_colours"], strict=True):
        assert other["arguments"][0][0].startswith("[system] Be brief.\n[user] What is")
        assert other["arguments"][0][0].count("[user]") == (1 if multiturn is False else 3)
        assert mine["log_likelihoods"] == pytest.approx([answer[0] for answer in other["filtered_resps"]], abs=1e-3)


def test_gsm8k_as_with_hflm(root, loaded):
    rows = [{"question": f"What is {n} + 2?", "answer": f"It is more.\n#### {n + 2}"} for n in range(6)]
    for split, examples in (("train", rows[2:]), ("test", rows)):
        write_rows(root / f"gsm8k/{split}.jsonl", examples)
    config = settings("gsm8k", root=root, num_samples=2, num_fewshot=2, prefill="question")
    outcome, theirs = run_tasks(config, loaded), stock(config, loaded)
    metrics, samples = outcome.metrics["gsm8k"], outcome.samples["gsm8k"]
    for name in ("strict-match", "flexible-extract"):
        expected = [sample for sample in theirs["samples"]["gsm8k"] if sample["filter"] == name]
        texts = [sample["resps"][0][0] for sample in expected]
        assert [sample["text"] for sample in samples] == texts and all(texts)
        assert [sample["filtered"][name] for sample in samples] == [each["filtered_resps"][0] for each in expected]
        name = f"exact_match,{name}"
        assert metrics[name] == theirs["results"]["gsm8k"][name]
        assert all(name in sample for sample in samples) and f"{name}_stderr" in metrics
    assert samples[0]["target"] == rows[0]["answer"]
    own = [len(f"Question: {row['question']}\nAnswer:") for row in rows[:2]]
    assert [sample["context_tokens"] - sample["prefill_len"] for sample in samples] == own


def test_how_many_questions_were_truncated(folder, root, loaded):
    refusing = settings("toy_sums", folder=folder, root=root)
    cutting = settings("toy_sums", folder=folder, root=root, task={"too_long": "truncate"})
    short = replace(loaded, max_length=16)
    for config, model, expected in ((refusing, loaded, None), (cutting, loaded, 0), (cutting, short, 3)):
        assert run_tasks(config, model).metrics["toy_sums"].get("num_truncated") == expected


def test_a_class_of_lm_eval_makes_its_own_rows(folder):
    (folder / "own.py").write_text("from lm_eval.tasks.swde.task import SWDE as Mine\n")
    (folder / "mine.yaml").write_text("task: mine\nclass: !function own.Mine\n")
    assert plan(settings("mine", folder=folder)).tasks["mine"].makes_rows


# Sampled answers


def repeat_of(**scores: Sequence[float]) -> Repeat:
    """A repeat in which the questions have these scores; two questions share a context."""
    logged = [{"doc_id": number, "doc": {"context_id": number // 2}} for number in range(4)]
    means = {f"{name},none": sum(values) / 4 for name, values in scores.items()}
    return Repeat(logged, means | dict.fromkeys([f"{name}_stderr,none" for name in scores]), {
        f"{name},none": dict(enumerate(values)) for name, values in scores.items()
    })  # fmt: skip


def test_metrics_over_repeats_by_hand():
    runs = [
        repeat_of(right=[1, 0, 0, 1], share=[0.5, 0, 0, 0]),
        repeat_of(right=[1, 0, 1, 0], share=[0.5, 0, 0, 1]),
        repeat_of(right=[1, 0, 0, 0], share=[0.5, 0, 0, 1]),
    ]
    metrics, by_question = joined(runs)
    assert metrics["right,none"] == pytest.approx(5 / 12)
    assert metrics["right_repeats_stderr,none"] == pytest.approx(statistics.stdev([0.5, 0.5, 0.25]) / 3**0.5)
    means = [1, 0, 1 / 3, 1 / 3]
    assert list(by_question["right,none"].values()) == pytest.approx(means)
    assert metrics["right_stderr,none"] == pytest.approx(clustered_stderr(means, [0, 0, 1, 1]))
    assert metrics["share,none"] == pytest.approx((0.125 + 0.375 + 0.375) / 3)
    assert joined(runs[:1]) == (runs[0].metrics, runs[0].by_question)
    runs[1].metrics["right,none"] = None
    assert joined(runs)[0]["right,none"] is None


def test_answers_of_several_repeats(folder, root, loaded):
    """Each repeat has random numbers of its own, and the metrics are means over repeats."""
    sampling = SamplingConfig(temperature=1.0, repeats=3)
    config = settings("toy_sums", folder=folder, root=root, method=H2O(), sampling=sampling, prefill="dense")
    outcome = run_tasks(config, loaded)
    metrics, samples = outcome.metrics["toy_sums"], outcome.samples["toy_sums"]
    texts = [[repeat["text"] for repeat in sample["repeats"]] for sample in samples]
    assert [len(set(each)) for each in texts] == [3] * 3 and len({text for each in texts for text in each}) > 6
    for name in ("exact_match", "generated_tokens", "at_limit"):
        means = [statistics.mean(repeat[name] for repeat in sample["repeats"]) for sample in samples]
        assert metrics[name] == pytest.approx(statistics.mean(means))
        assert [sample[name] for sample in samples] == pytest.approx(means)
    assert 0 < metrics["generated_tokens"] <= 6 and metrics["num_samples"] == 3
    again = run_tasks(config, loaded)
    assert again.samples == outcome.samples and again.metrics == outcome.metrics

    def first_of(changed: RunConfig) -> list[str]:
        return [sample["text"] for sample in run_tasks(changed, loaded).samples["toy_sums"]]

    firsts = [each[0] for each in texts]
    alone = replace(config, sampling=replace(sampling, repeats=1))
    assert [sample["text"] for sample in samples] == firsts == first_of(alone), "the first repeat is a run of one"
    assert first_of(replace(alone, seed=1)) != firsts


def test_a_task_that_samples_by_its_own_yaml(folder, root, loaded):
    """Its settings hold where the project's are not given; several answers to a question go through its own filters."""
    kwargs = SUMS["generation_kwargs"] | {"do_sample": True, "temperature": 1.0}
    last = {"name": "last-of-3", "filter": [{"function": "take_first_k", "k": 3}, {"function": "majority_vote"},
                                            {"function": "take_first"}]}  # fmt: skip
    own = SUMS | {"task": "toy_sampled", "generation_kwargs": kwargs, "repeats": 3, "filter_list": [last]}
    write_yaml(folder, own, SUMS | {"task": "toy_warm", "generation_kwargs": kwargs})
    about = {"folder": folder, "root": root, "prefill": "dense"}
    (root / "toy_sums").rename(root / "sums")
    samples = run_tasks(settings("toy_sampled", **about), loaded).samples["toy_sampled"]
    assert [len({sample["text"], *sample["more_texts"]}) for sample in samples] == [3] * 3
    warm = run_tasks(settings("toy_warm", **about), loaded).samples["toy_warm"]
    assert [sample["text"] for sample in warm] == [sample["text"] for sample in samples], "the same random numbers"
    cold = run_tasks(settings("toy_warm", **about, sampling=SamplingConfig(temperature=0.0)), loaded)
    greedy = run_tasks(settings("toy_sums", **about), loaded)
    assert cold.metrics["toy_warm"] == greedy.metrics["toy_sums"], "temperature=0 comes before the task's"


def test_settings_of_sampling_where_nothing_is_generated(loaded):
    with pytest.raises(UserError, match="^repeats=2: no answer of kv_recall is generated; leave it out"):
        run_tasks(settings("kv_recall", sampling=SamplingConfig(repeats=2)), loaded)


# Refusals

CANNOT_RUN = {
    "executes the code that a model writes": {"unsafe_code": True},
    "needs images or sound": {"doc_to_image": "picture"},
    "needs images or sound; models here read text$": "class Seen:\n    MULTIMODAL = True",
    "its YAML cannot be read .ModuleNotFoundError: No module named": "import nowhere_to_be_found",
}
"""What a task's YAML, or the Python beside it, says."""


@pytest.mark.parametrize("reason", CANNOT_RUN)
def test_what_cannot_run_says_why_before_a_model_loads(reason, folder, root):
    bad = CANNOT_RUN[reason]
    task = CHOICE | {"task": "toy_bad"} | (bad if isinstance(bad, dict) else {})
    write_yaml(folder, task, GROUP | {"group": "mixed", "task": ["toy_colours", "toy_bad"]})
    if isinstance(bad, str):
        (folder / "beside.py").write_text(f"{bad}\n")
        with (folder / "toy_bad.yaml").open("a") as file:
            file.write("class: !function beside.Seen\n" if "class" in bad else "process_docs: !function beside.rows\n")
    for name, place in (("toy_bad", ""), ("mixed", "its task toy_bad: ")):
        with refused(f"^tasks={name}: {place}{reason}"):
            inputs.tasks(settings(name, folder=folder, root=root))


# Identity


def test_what_decides_a_tasks_numbers_is_in_its_digest(folder, root, tmp_path, monkeypatch):
    def digests(folder=folder, root=root, **changes) -> dict[str, str]:
        return inputs.tasks(settings("toy", folder=folder, root=root, **changes))

    first = digests()
    assert set(first) == {"toy_colours", "toy_shapes", "toy", "include_path"}
    assert first == digests() != digests(num_fewshot=1)
    assert digests(folder.rename(tmp_path / "elsewhere"), root.rename(tmp_path / "moved")) == first
    (tmp_path / "elsewhere").rename(folder), (tmp_path / "moved").rename(root)
    write_rows(root / "toy/shapes/data/test-00000-of-00002.parquet", [question(1)])
    assert {name for name, digest in digests().items() if digest != first[name]} == {"toy_shapes"}
    (folder / "notes.py").write_text("# beside the YAML\n")
    assert digests()["include_path"] != first["include_path"]
    packaged = tasks.packaged()
    monkeypatch.setattr(tasks, "packaged", lambda: packaged)
    monkeypatch.setattr(tasks, "version", lambda: "0.0.0")
    assert digests()["toy_colours"] != first["toy_colours"], "lm-eval's version"
