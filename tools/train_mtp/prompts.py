"""What the model is asked to continue: scripts of given text and parts that it writes, drawn by seed.

A head learns what it sees, so width counts more than length: every form meets every topic; the model also invents questions and
openings of its own (written at temperature 1, then answered); code starts come from the standard library of the running Python.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tools.train_mtp.topics import TOPICS


@dataclass(frozen=True)
class Part:
    """Given ``text``, or, where ``limit`` > 0, up to so many tokens that the model writes at ``temperature``.

    ``learn``: the head is to foresee these tokens.
    """

    text: str = ""
    limit: int = 0
    temperature: float = 0.0
    learn: bool = False


SYSTEMS = (
    "You are a helpful assistant.", "You are a concise assistant. Answer in one or two sentences.", "You are a patient teacher.",
    "You are an experienced Python programmer. Answer with code.", "You are a friendly travel guide.", "Answer like a pirate.",
    "You are a customer support agent of a small shop.", "Reply only with JSON.", "You are a storyteller for children.",
    "You are a careful editor who improves texts.", "You are a doctor. Explain things simply.", "Use bullet points in every answer.",
    "You are a strict but fair reviewer.", "You translate what the user writes into German.", "You are a chef.",
)
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTIONS = (
    "What is {t}?", "Explain {t} to a child.", "Explain {t} in detail.", "Tell me about {t}.", "Why does {t} matter?",
    "How does {t} work?", "Give me five facts about {t}.", "Write a short story about {t}.", "Write a poem about {t}.",
    "List the pros and cons of {t}.", "What should a beginner know about {t}?", "Summarize the history of {t}.",
    "Write a blog post introduction about {t}.", "Give me ten ideas related to {t}.", "What are common mistakes with {t}?",
    "Compare {t} and {u}.", "How are {t} and {u} related?", "Write an email to a colleague about {t}.",
    "Write a dialogue between two friends about {t}.", "Make a quiz with three questions about {t}.",
    "Write a step-by-step guide about {t}.", "Make a table about {t}.", "What is the best way to learn about {t}?",
    "hi, can you help me with {t}?", "Write a JSON object that describes {t}.", "Describe {t} in one sentence.",
    "What questions should I ask about {t}?", "i dont understand {t}", "Write a product description inspired by {t}.",
    "Who is famous for {t}?", "What is the future of {t}?", "Write a speech about {t}.", "Argue for and against {t}.",
    "Write a letter to the editor about {t}.", "Create a lesson plan about {t}.", "Name three books about {t}.",
    "Tell me a joke about {t}.", "Write a tweet about {t}.", "What would happen without {t}?", "How has {t} changed over time?",
    "Rewrite this more politely: I do not care about {t}.", "Translate to French: I like {t}.",
    "Translate to Spanish: {t} is interesting.", "Fix the grammar: me and him was talking about {t} yesterday.",
    "Summarize: {t} has been discussed for years, and {u} even longer.", "Give me a outline for an essay on {t}.",
    "Write a dictionary entry for {t}.", "What is a good metaphor for {t}?", "Is {t} dangerous?", "How much does {t} cost?",
    "Write a song about {t}.", "Write a scene where someone discovers {t}.", "Plan a weekend around {t}.",
    "Classify the sentiment: I was really disappointed by {t}.", "Extract the keywords: {t}, {u} and their effects on people.",
    "Write a review about {t}.", "What are the different types of {t}?", "Continue the story: Nobody had told her about {t}.",
)
CODE = (
    "reverses a string", "checks whether a number is prime", "sorts a list", "counts words in a text", "reads a CSV file",
    "writes a log file", "computes the factorial", "computes Fibonacci numbers", "finds the longest word", "merges two dictionaries",
    "removes duplicates from a list", "downloads a web page", "parses JSON", "converts Celsius to Fahrenheit", "finds the maximum",
    "computes the average", "checks for a palindrome", "implements binary search", "implements a stack", "implements a queue",
    "implements a linked list", "draws a triangle of stars", "validates an email", "generates a random password", "counts vowels",
    "sums the digits of a number", "multiplies two matrices", "finds common elements of two lists", "flattens a nested list",
    "measures the time of a call", "sends an email", "lists files in a folder", "renames files", "solves FizzBuzz",
    "computes the greatest common divisor", "converts a number to binary", "splits a text into sentences", "plays tic-tac-toe",
    "tosses a coin", "tracks expenses", "simulates a bank account", "describes a car as a class", "queries a database",
    "starts a web server", "reads user input",
)
CODE_FORMS = (
    "Write a Python function that {c}.", "Write a JavaScript function that {c}.", "Write code in C that {c}.",
    "Write a Java method that {c}.", "Write a Python program that {c} and explain it.", "Show me how to write a bash script that {c}.",
    "Write unit tests for a function that {c}.", "python code that {c}", "Write a class in Python that {c}.",
    "What is the time complexity of code that {c}?", "Write Rust code that {c}.",
)
FOLLOW_UPS = (
    "Tell me more.", "Can you give an example?", "Make it shorter.", "Explain that in simpler words.", "Thanks! What else should I know?",
    "Why?", "Now write it as a list.", "Translate your answer to Spanish.", "Are you sure?", "What about {t}?",
    "How does this relate to {t}?", "Write the same in a formal tone.", "Summarize it in one sentence.", "Continue.",
    "Give me three more.", "Rewrite it for children.", "ok and then?",
)
OPENINGS = (
    "The history of {t}", "{t} is", "One of the most important things about {t} is", "In recent years, {t}", "Many people think that {t}",
    "# {t}\n\n", "Once upon a time there was a girl who loved {t}.", "The relationship between {t} and {u}", "Introduction to {t}\n\n",
    "There are many kinds of {t}", "Question: What is {t}?\nAnswer:", "Q: How does {t} work?\nA:", "Chapter 1: {t}\n\n",
    "Dear Sir or Madam,\n\nI am writing to you about {t}", "The old man looked at the sky and thought about {t}.",
    "According to experts, {t}", "To understand {t}, we first need to", "Abstract. We study {t}", "Top 10 facts about {t}:\n1.",
    "- {t}\n- {u}\n-", "Lesson: {t}\n\nObjectives:", "\"I never believed in {t},\" she said", "Recipe inspired by {t}\n\nIngredients:",
    "The scientist had spent her life studying {t}, but", "Today we will talk about {t}.", "{t} and {u}:",
    "Hello everyone, and welcome to our course on {t}.", "From: Anna\nTo: Ben\nSubject: {t}\n\nHi Ben,\n", "## What is {t}?\n\n",
    "| Name | Description |\n|---|---|\n| {t} |", "In the year 1923, {t}", "{{\n  \"title\": \"{t}\",\n  \"description\":",
    "How to learn about {t}:\n\nStep 1:", "Review: I tried {t} for a month. Here is what", "def {i}(", "class {I}:\n    \"\"\"",
    "import os\n\n# {t}\ndef", "function {i}(items) {{\n", "SELECT * FROM {i} WHERE", "<html>\n<head>\n<title>{t}</title>",
    "#include <stdio.h>\n\nint {i}(", "News: {t}\n\nLONDON -", "User: tell me about {t}\nAssistant:", "The word \"{t}\" means",
    "English: {t}\nFrench:", "To-do list for {t}:\n[ ]",
)
FIRST_WORDS = (
    "The", "In", "A", "It", "When", "I", "We", "This", "There", "If", "For", "She", "He", "As", "After", "On", "How", "What", "Many",
    "My", "To", "An", "At", "By", "With", "One", "You", "They", "First", "Our", "No", "All", "import", "def", "class", "//", "#", "1.",
    "*", "\"",
)
SHAPES = (("chat", 34), ("invented question", 16), ("code question", 10), ("opening", 22), ("invented opening", 9), ("library code", 9))
TEMPERATURES = ((0.0, 50), (0.7, 30), (1.0, 20))
ANY = 1 << 20


def weighted(draw: random.Random, items: tuple[tuple[object, int], ...]) -> object:
    return draw.choices([item for item, _ in items], [weight for _, weight in items])[0]


def filled(draw: random.Random, form: str) -> str:
    """The form with topics put in; now and then in another case."""
    topic, other = draw.sample(TOPICS, 2)
    word = "".join(letter if letter.isalnum() else "_" for letter in topic.lower())
    text = form.format(t=topic, u=other, i=word, I=word.title().replace("_", ""))
    return text[0].upper() + text[1:] if form.startswith("{t}") else text


def chat_opening(draw: random.Random) -> str:
    system = DEFAULT_SYSTEM if draw.random() < 0.75 else draw.choice(SYSTEMS)
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n"


def script(seed: int, number: int) -> Iterator[Part]:
    """The parts of text ``number`` of ``seed``, without end: whoever reads it stops when the text is long enough."""
    draw = random.Random(f"{seed}/{number}")
    shape, temperature = weighted(draw, SHAPES), float(str(weighted(draw, TEMPERATURES)))
    answer = Part(limit=ANY, temperature=temperature, learn=True)
    if shape in ("chat", "code question", "invented question"):
        yield Part(chat_opening(draw))
        if shape == "invented question":
            yield Part(draw.choice(FIRST_WORDS[:32]) if draw.random() < 0.3 else "")
            yield Part(limit=40, temperature=1.0)
        elif shape == "chat":
            yield Part(filled(draw, draw.choice(QUESTIONS)))
        else:
            yield Part(draw.choice(CODE_FORMS).format(c=draw.choice(CODE)))
        while True:
            yield Part("<|im_end|>\n<|im_start|>assistant\n")
            yield answer
            yield Part("<|im_end|>\n<|im_start|>user\n" + filled(draw, draw.choice(FOLLOW_UPS)))
    elif shape == "opening":
        yield Part(filled(draw, draw.choice(OPENINGS)))
    elif shape == "invented opening":
        yield Part(draw.choice(FIRST_WORDS))
        yield Part(limit=draw.randint(4, 16), temperature=1.0)
    else:
        yield Part(library_code(draw))
    yield answer


@cache
def library_files() -> tuple[Path, ...]:
    return tuple(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))


def library_code(draw: random.Random) -> str:
    """A few lines of a file of Python's standard library, from a random place on."""
    lines = draw.choice(library_files()).read_text(encoding="utf-8", errors="replace").splitlines()
    start = draw.randrange(max(len(lines) - 8, 1))
    return "\n".join(lines[start : start + draw.randint(2, 6)])[:240] or "import sys"
