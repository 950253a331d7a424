"""One model of a document, and its renderers.

An experiment has one function, results -> `Document`. A document has a title, a first sentence (`lead`) and sections; a
section has blocks: `Table`, `Figure`, `Pairs` (facts), `Notes` (how to read it), `Text`, `Points` (a list), `Beside`
(blocks in a row) and `Part` (blocks under a heading of their own). A `Verdict` is a word with its reason and tone.

    def document(results: Results) -> Document:
        rows = [Row(arm.name, [Entry(seconds(arm.time_s), interval(bounds(arm)), arm.verdict)]) for arm in results.arms]
        table = Table([("time", "wall time of the prompt")], rows, caption="95% intervals in brackets")
        lead = f"{results.fastest} is fastest."
        return Document("How long does a prompt take?", lead, sections=[Section("Times", [table])])

    write(directory, "times", document)   # html_page: times.html (returned), times.md, figures/*.svg and *.png
    show(document, console)               # terminal: tables and verdicts, the first sentence last

The blocks are in `model`. `html_page` and `markdown_text` return a document as text, `latex_table` a table for a paper.
Every text of a document is untrusted input: each renderer escapes it. `plots` is the common style of the figures.
"""
