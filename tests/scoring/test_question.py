"""Where a context ends: no word of an unknown question is in the dense prompt, whatever the template, or the run is
refused."""
# ruff: noqa: F811, the fixture `loaded` is imported

from dataclasses import replace
from typing import Any

import jinja2
import pytest

from harness.scoring.evaluation import KNOWN, UNKNOWN, run_tasks, run_turns
from harness.scoring.planning import QuestionFinder
from tests.data.test_tasks import ANSWERED, loaded, settings, write_rows, write_yaml  # noqa: F401, a fixture
from tests.tokens import byte_tokenizer

STORY = "Mira keeps a cup in the attic.\n\nTom keeps a bag in the garden."
DOC = {"story": STORY, "question": "Where is the cup?", "options": ["attic", "garden"], "answer": "attic"}
TWICE = "Question: {{question}}\n\n{{story}}\n\nQuestion: {{question}}\nAnswer:"


def finder(template: str, **options: Any) -> QuestionFinder:
    made = jinja2.Template(template)
    return QuestionFinder(options.pop("marker", None), lambda doc: made.render(doc), **options)


@pytest.mark.parametrize(
    ("template", "doc", "around", "question"),
    [
        ("{{story}}\n\nQuestion: {{question}}\nAnswer:", DOC, "{}", "Where is the cup?\nAnswer:"),
        ("{{story}}\n\nQuestion: {{question}}\n\nAnswer:", DOC, "{}", "Where is the cup?\n\nAnswer:"),
        ("{{story}} {{question}}", DOC, "<user>\n\n{}<end><model>\n\n", "Where is the cup?<end><model>\n\n"),
        (" {{story}}\n{{question | upper}} ", DOC, "{}", "WHERE IS THE CUP?"),
        ("{{story}}\n{{question}}\n(a) {{options[0]}}", DOC, "{}", "Where is the cup?\n(a) attic"),
        ("{{story}}\n{{Question}}", {"story": STORY, "Question": "Who?"}, "{}", "Who?"),
        ("{{story}}\n{{input}}", {"story": STORY, "input": "Who is it?", "id": "a"}, "{}", "Who is it?"),
        ("{{story | join(' ')}}: {{question}}", DOC | {"story": ["It is.", "So it is."]}, "{}", "Where is the cup?"),
        ("{{input}}\n{{question}}", {"input": STORY, "question": "Who?"}, "{}", "Who?"),
    ],
)
def test_a_question_begins_where_its_task_writes_it(template, doc, around, question):
    prompt = around.format(jinja2.Template(template).render(doc).strip())
    place = finder(template).find(prompt, doc)
    assert prompt[place:] == question
    assert finder(template).split(prompt, doc) == (prompt[:place], question)


@pytest.mark.parametrize(
    ("template", "doc"),
    [
        ("Question: {{question}}\nAnswer:", DOC),  # no text of the document is before its question
        ("{{question}}\n{{story}}", DOC),
        ("{{premise}} therefore", {"premise": "The effect is small", "question": "effect"}),
        ("{{sentence}} Is it so?", {"sentence": "It is late."}),
    ],
)
def test_all_of_a_document_is_the_question_where_nothing_of_it_comes_before(template, doc):
    own = jinja2.Template(template).render(doc)
    assert finder(template, has_preface=True).split("An example.\n\n" + own, doc) == ("An example.\n\n", own)
    with pytest.raises(ValueError, match="nothing but the question is in the prompt"):
        finder(template).find("<user>\n\n" + own, doc)


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (TWICE, {}, "the prompt has its field question 2 times"),
        (TWICE, {"marker": "Question:"}, "the text of its field question stands before that place: 'Where is"),
        ("{{story}}\n{{question}}\nAnswer:", {"marker": "Answer:"}, "the text of its field question stands before"),
        ("{{story}}\n{{question}}", {"marker": "Now:"}, "'Now:', with which the question begins, is not there"),
    ],
)
def test_a_question_that_cannot_be_kept_apart_is_refused(template, options, said):
    prompt = jinja2.Template(template).render(DOC)
    with pytest.raises(ValueError, match=said):
        finder(template, **options).find(prompt, DOC)
    assert finder(template, **options).split(prompt, DOC) == ("", prompt)


def test_a_marker_may_be_inside_the_field_and_needs_no_task():
    doc = {"input": f"{STORY}\nWhat is it?"}
    assert QuestionFinder("\nWhat").split(doc["input"], doc) == (STORY, "\nWhat is it?")
    with pytest.raises(ValueError, match="lm-eval does not say here where a question begins"):
        QuestionFinder().find(doc["input"], doc)
    with pytest.raises(ValueError, match="the task asks by its choices"):
        QuestionFinder(make_text=lambda doc: 1).find("a", doc)
    with pytest.raises(ValueError, match="own text is not in the prompt as it is"):
        QuestionFinder(make_text=lambda doc: "b").find("a", doc)


# Runs

ASKED = ANSWERED | {"task": "toy_asked", "dataset_path": "org/asked"}
QUESTIONS = ["Where is the cup?", "Where is the bag?", "Who has a cup?"]


@pytest.fixture
def asked(tmp_path, loaded):
    """A task of three questions to one story, and a model whose chat template ends its header with an empty line."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>\n\n{{ m.content | trim }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n\n{% endif %}"
    )
    write_rows(tmp_path / "data/toy_asked/test.jsonl", [DOC | {"question": question} for question in QUESTIONS])

    def of(template: str, of_task: dict[str, Any] | None = None, **changes: Any):
        folder = write_yaml(tmp_path / "own", ASKED | {"doc_to_text": template} | (of_task or {}))
        return settings("toy_asked", folder=folder, root=tmp_path / "data", num_samples=3, **changes)

    return of, replace(loaded, tokenizer=tokenizer)


@pytest.mark.parametrize("end", ["\nAnswer:", "\n\nAnswer:"])
@pytest.mark.parametrize("chat", [False, True])
def test_no_word_of_an_unknown_question_is_in_the_dense_prompt(chat, end, asked, capsys):
    of, loaded = asked
    template = {"apply_chat_template": chat}
    config = of("{{story}}\n\nQuestion: {{question}}" + end, task=template, prefill="question")
    header, suffix = ("<user>\n\n", "<end><assistant>\n\n") if chat else ("", "")
    context = f"{header}{STORY}\n\nQuestion: "
    whole = [f"{context}{question}{end}{suffix}" for question in QUESTIONS]
    num_tokens = [len(loaded.tokenizer(text)["input_ids"]) for text in whole]
    dense = len(loaded.tokenizer(context)["input_ids"])
    samples = run_tasks(config, loaded).samples["toy_asked"]
    assert [(each["prefill_len"], each["context_tokens"]) for each in samples] == [(dense, n) for n in num_tokens]
    said = "toy_asked: the dense prompt ends before the question; in question 0 before 'Where is"
    assert said in capsys.readouterr().err
    assert samples[1]["question_text"].startswith("Where is the bag? Answer:")
    assert samples[1]["context_text"].endswith("Tom keeps a bag in the garden. Question:")

    turns = replace(config, kind="turns", experiment="turns", prefill="auto")
    outcome = run_turns(turns, loaded)
    assert outcome.metrics["toy_asked"]["num_contexts"] == 1
    both = [(each[UNKNOWN]["prefill_len"], each[KNOWN]["prefill_len"]) for each in outcome.samples["toy_asked"]]
    assert both == [(dense, n) for n in num_tokens]
