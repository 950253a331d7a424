"""Write the prompts of this report: python prompts.py DATA > prompts.jsonl

DATA holds GSM8K's training questions, T0's training prompts (a sample), self-instruct's tasks, OpenAssistant's
evaluation set (English first questions) and Spec-Bench, whose questions are left out. To these come questions made from
topics and templates. Kinds take turns, so that any beginning of the file has the same mix.
"""

import gzip
import json
import re
import sys
from pathlib import Path
from random import Random

TOPICS = (
    """
photosynthesis;inflation;black holes;the water cycle;machine learning;the French Revolution;democracy;vaccines;
climate change;the stock market;supply and demand;neural networks;DNA replication;gravity;plate tectonics;
the Roman Empire;Buddhism;blockchain;renewable energy;meditation;chess;jazz;impressionism;
object-oriented programming;recursion;sorting algorithms;databases;the internet;electric cars;coffee;gardening;
personal finance;time management;public speaking;job interviews;healthy eating;sleep;exercise;stress;remote work;
travel in Japan;a trip to Italy;a weekend in Paris;hiking;camping;cooking pasta;baking bread;photography;
learning a language;learning the guitar;parenting;friendship;loneliness;artificial intelligence in medicine;
self-driving cars;space exploration;Mars;the Moon landing;the Cold War;World War II;the Industrial Revolution;
the Renaissance;Shakespeare;Homer's Odyssey;existentialism;stoicism;utilitarianism;free will;ethics of AI;privacy;
social media;online education;small businesses;marketing;entrepreneurship;project management;teamwork;leadership;
negotiation;taxes;insurance;mortgages;probability;linear algebra;calculus;prime numbers;fractions;
the Pythagorean theorem;quantum mechanics;relativity;entropy;chemical bonds;acids and bases;evolution;ecosystems;
the immune system;the human heart;the brain;antibiotics;cancer;diabetes;allergies;nutrition;yoga;cycling;football;
basketball;the Olympics;movies;classical music;dance;theatre;architecture;city planning;agriculture;bees;whales;
dogs;cats;birds;rainforests;deserts;oceans;rivers;volcanoes;earthquakes;hurricanes;recycling;plastic;water scarcity;
poverty;education;gender equality;immigration;globalisation;trade;the United Nations;human rights;law;courts;
elections;journalism;books;libraries;poetry;comics;video games;robots;drones;3D printing;nanotechnology;batteries;
nuclear power;wind turbines;solar panels;trains;bridges;ships;aeroplanes
""".strip()
    .replace("\n", "")
    .split(";")
)
ASKED = """
Write a blog post about {}.
Write a short story about {}.
Explain {} to a ten-year-old.
Write a professional email about {}.
Write a poem about {}.
What are the most important facts about {}?
Give me five tips about {}.
Compare the advantages and disadvantages of {}.
Write a persuasive essay about {}.
Pretend you are an expert on {}. Introduce yourself and answer the most common question.
Outline a lecture about {}.
How does {} affect our daily lives?
Describe a scene that has to do with {}, with vivid details.
What is the history of {}?
Write a dialogue between two friends who talk about {}.
Summarize what is known about {} in one paragraph.
Write a review of a book about {}.
Discuss the ethical questions raised by {}.
Make a list of ten questions that a beginner asks about {}.
What are common misconceptions about {}?
""".strip().split("\n")
PROGRAMS = (
    """
reads a file and counts the words;checks whether a string is a palindrome;computes the Fibonacci numbers;
sorts a list of numbers;finds the largest element of a list;reverses a linked list;
computes the factorial of a number;finds the prime numbers below n;merges two sorted lists;
removes duplicates from a list;parses a CSV file;downloads a web page;computes the mean and the median;
implements a stack;implements a queue;implements binary search;traverses a binary tree;
finds the shortest path in a graph;counts the vowels of a string;converts Celsius to Fahrenheit;
validates an email address;generates a random password;multiplies two matrices;finds the longest common prefix;
computes the greatest common divisor;prints a multiplication table;simulates rolling two dice;
implements tic-tac-toe;converts a number to binary;sums the digits of a number;finds anagrams in a list of words;
implements bubble sort;implements quicksort;flattens a nested list;groups words by their first letter;
checks for balanced brackets;implements a simple calculator;rotates an array by k steps;
finds the missing number in a range;implements an LRU cache
""".strip()
    .replace("\n", "")
    .split(";")
)
GERMAN = (
    """
Die Regierung hat am Montag ein neues Gesetz vorgestellt .;Der Präsident sagte , dass die Wirtschaft wächst .;
Viele Menschen in der Stadt haben kein Geld für die Miete .;Die Polizei sucht nach Zeugen des Unfalls .;
Das Unternehmen will im nächsten Jahr neue Arbeitsplätze schaffen .;
Die Mannschaft gewann das Spiel mit drei zu eins .;Der Minister traf sich mit Vertretern der Gewerkschaften .;
Die Preise für Lebensmittel sind stark gestiegen .;In Berlin fand gestern eine große Demonstration statt .;
Die Ärzte warnen vor einer neuen Grippewelle .;Er kaufte ein Haus am Rande des Dorfes .;
Sie arbeitet seit zehn Jahren als Lehrerin .;Das Wetter bleibt am Wochenende sonnig und warm .;
Die Universität bietet neue Studiengänge an .;Der Film erhielt gute Kritiken .;
Die Bank senkte den Zinssatz um ein Viertel Prozent .;Wissenschaftler haben eine neue Art entdeckt .;
Der Zug nach München hatte zwei Stunden Verspätung .;Die Wahl findet im Herbst statt .;
Das Gericht verurteilte den Mann zu drei Jahren Haft .;Die Kinder spielen im Garten hinter dem Haus .;
Der Bürgermeister eröffnete die neue Schule .;Die Zahl der Touristen ist im Sommer gesunken .;
Er hat sein ganzes Leben in diesem Ort verbracht .;Die Firma verkauft ihre Produkte in der ganzen Welt .
""".strip()
    .replace("\n", "")
    .split(";")
)
LANGUAGES = (
    ("Write a Python function", ""),
    ("Write a C++ program", ""),
    ("Write a JavaScript function", ""),
    ("Implement a Java method", ""),
    ("Write a Python program", "and explain it"),
)
COUNT = 9000
# T0's templates: left out (classes, several articles), with short answers, summaries, questions.
LEFT_OUT = re.compile(
    "multi_news_(distill|summ|synth|what)|wiki_hop|paws_labeled_final_(?!para)|glue_(?!mrpc_gen)|_id$|wiqa_(does|effect)|"
    "to_answer_index|answer_index|Show_choices_and_generate_index|Check_if"
)
SHORT = re.compile(
    "imdb|yelp|amazon|rotten|ag_news|app_reviews_c|quartz|quarel|dbpedia|ropes|qasc|commonsense|"
    "wiki_qa_(De|Is|au|ex|fo)"
)
SUMMARY = re.compile("cnn_dailymail.*(sent|news|sum|tldr|outline)|xsum|samsum|gigaword_(TL|gen|in_a)|duorc.*(title)")
QUESTION = re.compile("adversarial_qa|duorc|quoref|sciq|kilt|wiki_qa|cosmos|dream|social")
ENGLISH = re.compile(r"\b(the|a|is|of|to|and|how|what|you|me)\b", re.IGNORECASE)
ASKS = re.compile(
    r'(?:^|\n|Question: ?|question: ?)((?:who|what|when|where|why|how|which)\b[^\n?"]{15,120}\?)', re.IGNORECASE
)
NAME = re.compile(r"(?<=[a-z,] )((?:[A-Z][a-z]{3,} ){1,2}[A-Z][a-z]{3,})\b")


def read(file: Path) -> list[dict]:
    """Return the rows of a JSONL file."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        return [json.loads(line) for line in lines]


def tasks(data: Path, random: Random) -> dict[str, list[str]]:
    """Return the prompts of the data sets by kind, each kind in random order."""
    pools: dict[str, list[str]] = {name: [] for name in ("summaries", "questions", "other", "short", "oasst")}
    for row in read(data / "sft_t0_train" / "t0_train.jsonl.gz"):
        template, prompt = row["template"], row["prompt"].replace("\\n", "\n").replace('\\"', '"').strip()
        if LEFT_OUT.search(template) or not 20 <= len(prompt) <= 3200:
            continue
        kinds = {"summaries": SUMMARY, "questions": QUESTION, "short": SHORT}
        pools[next((kind for kind, names in kinds.items() if names.search(template)), "other")].append(prompt)
    for row in read(data / "sft_oasst_guanaco_eval" / "openassistant_best_replies_eval.jsonl"):
        question = row["text"].split("### Human:")[1].split("### Assistant:")[0].strip()
        if question.isascii() and ENGLISH.search(question):
            pools["oasst"].append(question)
    pools["self-instruct"] = []
    for name in ("seed_tasks", "user_oriented_instructions"):
        for row in read(data / "sft_self_instruct" / f"{name}.jsonl"):
            given = row["instances"][0]["input"]
            pools["self-instruct"].append(row["instruction"] + (f"\n\n{given}" if given else ""))
    pools["gsm8k"] = [row["question"] for row in read(data / "gsm8k" / "train.jsonl.gz")]
    for prompts in pools.values():
        random.shuffle(prompts)
    return pools


def distinct(found: list[str], random: Random) -> list[str]:
    once = list(dict.fromkeys(found))
    random.shuffle(once)
    return once


def kinds(pools: dict[str, list[str]], random: Random) -> dict[str, tuple[list[str], float]]:
    """Return the prompts of every kind, and its share."""
    questions, texts = pools["questions"], pools["summaries"]
    asked = distinct(
        [q[0].upper() + q[1:] for prompt in questions + pools["short"] for q in ASKS.findall(prompt)], random
    )
    names = distinct(
        [n for prompt in pools["other"] + questions + pools["short"] for n in NAME.findall(prompt)], random
    )
    code = [f"{verb} {more} that {task}." for task in PROGRAMS for verb, more in LANGUAGES]
    chat = [question.format(topic) for question in ASKED for topic in TOPICS]
    random.shuffle(chat)
    random.shuffle(code)
    about = ("Who is {}?", "Tell me about {}.", "What is {} known for?", "Where is {} from?")
    people = [about[n % 4].format(name) for n, name in enumerate(names)]
    german = [
        f"Translate German to English: {first} {second}".strip()
        for first in GERMAN
        for second in ["", *random.sample(GERMAN, 11)]
    ]
    random.shuffle(german)
    long = [p for p in questions if 900 <= len(p) < 2600 and not p.startswith("I am trying")]
    return {
        "gsm8k": (pools["gsm8k"], 0.20),
        "chat": (chat, 0.24),
        "questions": (asked, 0.16),
        "people": (people, 0.04),
        "code": (code, 0.04),
        "german": (german, 0.04),
        "self-instruct": (pools["self-instruct"], 0.05),
        "oasst": (pools["oasst"], 0.03),
        "summaries": ([p for p in texts if len(p) < 1200], 0.06),
        "long summaries": ([p for p in texts if 1200 <= len(p) < 2600], 0.03),
        "reading": ([p for p in questions if len(p) < 900], 0.05),
        "long reading": (long, 0.03),
        "other": (pools["other"], 0.06),
    }


def main(data: Path) -> None:
    seen = {turn.strip() for row in read(data / "spec_bench" / "question.jsonl") for turn in row["turns"]}
    sources = kinds(tasks(data, Random(0)), Random(1))
    streams = {kind: iter(prompts) for kind, (prompts, _) in sources.items()}
    due = dict.fromkeys(sources, 0.0)
    written = 0
    while written < COUNT:
        for kind, (_, share) in sources.items():
            due[kind] += share
        kind = max(due, key=lambda name: due[name])
        due[kind] -= 1
        prompt = next(streams[kind], None)
        if prompt is None:
            due[kind] = float("-inf")
        elif (prompt := prompt.strip()) not in seen:
            seen.add(prompt)
            written += 1
            print(json.dumps({"prompt": prompt, "completion": "-"}, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
