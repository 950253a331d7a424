"use strict";
(() => {
  const holder = document.getElementById("viewer-data");
  if (!holder) return;
  const { groups } = JSON.parse(holder.textContent);
  const DARKEST = 8;
  const at = (id) => document.getElementById(id);
  const group = at("viewer-group"), item = at("viewer-item"), differ = at("viewer-differ"), marked = at("viewer-marked");
  const filters = [differ, marked].filter(Boolean);
  const previous = at("viewer-previous"), next = at("viewer-next");
  const hidden = new Set();
  at("viewer-controls").addEventListener("submit", (event) => event.preventDefault());

  // The text of a model goes into the page as text, never as markup.
  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
  const scores = (entry) => entry.answers.filter((a) => a && a.score !== null).map((a) => a.score);

  const isMarked = (a) => a && (a.unread || (a.by_value !== null && a.by_value !== a.score));
  const differs = (entry) => new Set(scores(entry)).size > 1;

  const shadeClass = (count) => `f f${Math.min(Math.max(count, 1), DARKEST)}`;

  const pieces = (answer) => answer.pieces || [answer.text];
  const tokens = (answer, from, to, into) => {
    for (let i = from; i < to; i += 1) {
      const letters = Array.from(pieces(answer)[i]);
      const before = (place) => i < place[0] ? letters.length : i === place[0] ? place[1] : 0;
      const begin = answer.begins ? before(answer.begins) : 0;
      const end = Math.max(begin, answer.cut ? before(answer.cut) : letters.length);
      const token = element("span", answer.special.includes(i) ? "t special" : "t");
      const add = (className, part) => part.length && token.append(element("span", className, part.join("")));
      add("reasoning", letters.slice(0, begin));
      if (answer.begins && i === answer.begins[0]) token.append(element("span", "part", "Answer"));
      add("", letters.slice(begin, end));
      add("cut", letters.slice(end));
      into.append(token);
    }
  };

  const textOf = (answer) => {
    const text = element("div", "text");
    text.tabIndex = 0;
    text.setAttribute("aria-label", "Answer");
    if (answer.begins) text.append(element("span", "part", "Reasoning"));
    if (!answer.pieces || !answer.commits) {
      tokens(answer, 0, pieces(answer).length, text);
      return text;
    }
    let start = 0;
    answer.commits.forEach((count, forward) => {
      if (!count) return;
      const made = element("span", shadeClass(count));
      made.title = `forward ${forward + 1}: ${plural(count, "token")}`;
      tokens(answer, start, start + count, made);
      text.append(made);
      start += count;
    });
    return text;
  };

  const endings = { end: "ended with an end token", stop: "ended at a stop string", length: "cut by the token budget" };

  const countsOf = (answer) => {
    const counts = element("p", "counts");
    const judged = (score, by) => {
      const [className, mark] =
        score === 1 ? ["mark-right", "✓ correct"] : score === 0 ? ["mark-wrong", "✗ wrong"] : ["", `scored ${score.toFixed(2)}`];
      counts.append(element("span", className, mark), `${by} · `);
    };
    if (answer.score !== null) judged(answer.score, "");
    if (answer.by_value !== null) judged(answer.by_value, " by value");
    if (answer.unread) counts.append(element("span", "mark-wrong", `unread: ${answer.unread}`), " · ");
    if (answer.forwards) {
      counts.append(element("b", "", plural(answer.forwards, "forward")), ", ");
      counts.append(element("b", "", `${(answer.tokens / answer.forwards).toFixed(2)} tokens per forward`), ", ");
    }
    if (answer.tokens !== null) counts.append(`${plural(answer.tokens, "token")}, `);
    counts.append(endings[answer.finish] || "");
    const idle = answer.commits ? answer.commits.filter((count) => !count).length : 0;
    if (idle) counts.append(`; ${plural(idle, "forward")} committed nothing`);
    if (!answer.commits) counts.append("; this engine hides its forwards, so there are no shades");
    const against = answer.against;
    if (against) {
      counts.append(against.same === null ? `; same tokens as ${against.arm}` : `; differs from ${against.arm} after ${plural(against.same, "token")}`);
    }
    return counts;
  };

  const show = () => {
    const chosen = groups[group.value], entry = chosen.items[item.value];
    const prompt = at("viewer-prompt-box");
    prompt.hidden = entry.prompt === null;
    at("viewer-prompt").textContent = entry.prompt;
    at("viewer-prompt").scrollTop = at("viewer-prompt").scrollHeight;
    const answers = at("viewer-answers");
    answers.replaceChildren();
    chosen.arms.forEach((arm, index) => {
      if (hidden.has(arm.arm)) return;
      const answer = entry.answers[index];
      const card = element("article", isMarked(answer) ? "answer marked" : "answer");
      const heading = element("h3");
      const who = element("span", "name", arm.name);
      if (arm.name !== arm.arm) who.append(element("span", "arm id", arm.arm));
      heading.append(element("span", "number", arm.number), who);
      card.append(heading);
      if (answer) card.append(countsOf(answer), textOf(answer));
      else card.append(element("p", "counts", "no answer is stored for this item"));
      answers.append(card);
    });
    const place = Array.from(item.options).findIndex((option) => option.value === item.value);
    previous.disabled = place <= 0;
    next.disabled = place >= item.options.length - 1;
    const all = chosen.of > chosen.items.length ? ` This page has the first ${chosen.items.length} of ${chosen.of} items.` : "";
    at("viewer-status").textContent = `Item ${place + 1} of ${item.options.length}: ${entry.item}.${all}`;
  };

  const fillItems = () => {
    const chosen = groups[group.value];
    const before = item.selectedIndex < 0 ? null : item.options[item.selectedIndex].dataset.item;
    item.replaceChildren();
    const add = (entry, index) => {
      const scored = scores(entry);
      const right = scored.filter((score) => score === 1).length;
      const mark = entry.marked ? ", unread or readings differ" : "";
      const option = new Option(scored.length ? `${entry.item} (${right} of ${scored.length} correct${mark})` : entry.item, index);
      option.dataset.item = entry.item;
      item.add(option);
    };
    chosen.items.forEach((entry, index) => {
      if ((!differ.checked || differs(entry)) && (!marked?.checked || entry.marked)) add(entry, index);
    });
    if (!item.options.length) {
      filters.forEach((box) => { box.checked = false; });
      chosen.items.forEach(add);
    }
    const kept = Array.from(item.options).findIndex((option) => option.dataset.item === before);
    item.selectedIndex = Math.max(kept, 0);
    differ.disabled = !chosen.items.some(differs);
    if (marked) marked.disabled = !chosen.items.some((entry) => entry.marked);
    differ.parentElement.hidden = !chosen.items.some((entry) => scores(entry).length);
  };

  const fillArms = () => {
    const box = at("viewer-arms");
    box.replaceChildren();
    groups[group.value].arms.forEach((arm) => {
      const label = element("label"), check = element("input");
      check.type = "checkbox";
      check.checked = !hidden.has(arm.arm);
      check.addEventListener("change", () => {
        if (check.checked) hidden.delete(arm.arm);
        else hidden.add(arm.arm);
        show();
      });
      label.append(check, element("span", "number", arm.number), element("span", "", arm.name));
      box.append(label);
    });
  };

  const fillLegend = () => {
    const legend = at("viewer-legend");
    const counts = new Set();
    groups[group.value].items.forEach((entry) =>
      entry.answers.forEach((a) => a && a.commits && a.commits.forEach((count) => count && counts.add(Math.min(count, DARKEST)))));
    legend.replaceChildren(element("span", "", "tokens from the same forward:"));
    Array.from(counts).sort((a, b) => a - b).forEach((count) =>
      legend.append(element("span", shadeClass(count), count === DARKEST ? `${count} or more` : String(count))));
    legend.hidden = !counts.size;
  };

  const changeGroup = () => { fillItems(); fillArms(); fillLegend(); show(); };
  const step = (by) => { item.selectedIndex += by; show(); };

  groups.forEach((one, index) => group.add(new Option(`${one.suite}, batch size ${one.batch_size}${one.batching === "static" ? "" : `, ${one.batching}`}`, index)));
  group.selectedIndex = groups.reduce((best, one, index) => (one.suite === groups[0].suite && one.batch_size > groups[best].batch_size ? index : best), 0);
  group.parentElement.hidden = groups.length === 1;
  group.addEventListener("change", changeGroup);
  item.addEventListener("change", show);
  filters.forEach((box) => box.addEventListener("change", () => { fillItems(); show(); }));
  previous.addEventListener("click", () => step(-1));
  next.addEventListener("click", () => step(1));
  changeGroup();
})();
