"use strict";
// The answers that changed, from the page's own data: sorted, filtered, searched, a hundred at a time. Other tables are sorted.
// Every text is set as text (textContent); nothing is read from elsewhere, kept or sent.
(() => {
  const ON_SCREEN = 100, ON_PAPER = 20;
  const started = performance.now();

  function make(tag, text = "", kind = "") {
    const element = document.createElement(tag);
    if (text !== "") element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  const count = (n) => n.toLocaleString("en");
  const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(2).replace("-", "−"));

  // How much likelier the correct choice is than the best wrong one, as a difference of log-probs; null without both.
  function margin(logProbs, gold) {
    const wrong = logProbs.filter((value, index) => index !== gold && value !== null);
    if (!wrong.length || typeof logProbs[gold] !== "number") return null;
    return logProbs[gold] - Math.max(...wrong);
  }

  function readRows(data) {
    const questions = data.questions.map(([set, doc, text, choices, gold, about]) => ({ set, doc, text, choices, gold, about }));
    return data.rows.map(([question, arm, prompt, change, chosen, baseChosen, logProbs, baseLogProbs, passages, notes], order) => {
      const asked = questions[question];
      const was = margin(baseLogProbs, asked.gold);
      const now = margin(logProbs, asked.gold);
      return {
        order, question, asked, passages, notes, chosen, baseChosen, logProbs, baseLogProbs, was, now,
        set: asked.set, doc: asked.doc, arm: data.arms[arm], prompt: data.prompts[prompt], change: data.changes[change], good: data.good[change],
        text: asked.text, before: asked.choices[baseChosen] ?? "–", after: asked.choices[chosen] ?? "–",
        moved: was === null || now === null ? null : now - was,
        written: logProbs.concat(baseLogProbs).every((value) => value === null), // then the choices are the accepted, and both
        accepted: asked.choices.slice(0, baseChosen ?? 0).join(" | "),
      };
    });
  }

  // Return what tells whether a row holds every word of a query. Texts are lower-cased once.
  function makeSearch(data) {
    const asked = data.questions.map(([set, doc, text, choices, , about]) =>
      [set, doc, text, ...choices, about].join("\n").toLowerCase());
    const texts = data.texts.map((text) => text.toLowerCase());
    return (query) => {
      const words = query.toLowerCase().split(/\s+/).filter(Boolean);
      const found = words.map((word) => [asked.map((text) => text.includes(word)), texts.map((text) => text.includes(word))]);
      return (row) => found.every(([inAsked, inTexts]) => inAsked[row.question] || row.passages.some((text) => inTexts[text]));
    };
  }

  function detailsOf(row, data) {
    const details = make("details");
    details.append(make("summary", row.text));
    details.addEventListener("toggle", () => {
      if (details.childElementCount > 1) return;
      const choices = make("ol", "", "choices");
      const scored = row.logProbs.concat(row.baseLogProbs).some((value) => value !== null);
      row.asked.choices.forEach((text, index) => {
        const item = make("li", text);
        const marks = [[row.asked.gold, "correct"], [row.baseChosen, "base"], [row.chosen, "this arm"]];
        for (const [marked, mark] of marks) {
          if (marked === index) item.append(" ", make("span", mark, mark === "correct" ? "mark right" : "mark"));
        }
        if (scored) item.append(" ", make("small", `${number(row.baseLogProbs[index])} → ${number(row.logProbs[index])}`));
        choices.append(item);
      });
      details.append(make("p", scored ? "Choices, each with its log-prob: base → this arm." : "Accepted, and both answers.", "sub"), choices);
      row.passages.forEach((text, index) => {
        details.append(make("p", `Context, passage ${index + 1} of ${row.passages.length}`, "sub"));
        details.append(make("blockquote", data.texts[text]));
      });
      details.append(make("p", [row.prompt, row.asked.about, row.notes].filter(Boolean).join(", "), "sub"));
    });
    return details;
  }

  function cell(label, content) {
    const element = make("td");
    element.dataset.label = label;
    element.append(content);
    return element;
  }

  function lineOf(row, data) {
    const line = make("tr");
    const tag = make("span", row.change, row.good ? "tag good" : "tag bad");
    const moved = row.moved === null ? "–" : `${number(row.was)} → ${number(row.now)}`;
    line.append(
      cell("change", tag), cell("arm", row.arm), cell("set", row.set), cell("document", row.doc || "–"),
      cell("question", detailsOf(row, data)), cell("base answered", row.before), cell("arm answered", row.after),
      row.written ? cell("accepted", row.accepted) : cell("margin", moved),
    );
    return line;
  }

  const COLUMNS = [["change", "change"], ["arm", "arm"], ["set", "set"], ["document", "doc"], ["question", "text"],
    ["base answered", "before"], ["arm answered", "after"], ["margin, base → arm", "moved"]];
  const ACCEPTED = ["accepted", "accepted"]; // instead of the margin, where all answers are written

  // Return how two rows compare by one column. Texts are compared by their rank: few are different, so each is ranked once.
  function compare(rows, key, direction) {
    const values = [...new Set(rows.map((row) => row[key]))].filter((value) => typeof value === "string");
    const ranks = new Map(values.sort(new Intl.Collator("en", { numeric: true }).compare).map((value, rank) => [value, rank]));
    const rankOf = (value) => ranks.get(value) ?? value;
    return (one, other) => {
      const [a, b] = [rankOf(one[key]), rankOf(other[key])];
      if (a === null || b === null) return (a === null) - (b === null) || one.order - other.order;
      return direction * (a - b) || one.order - other.order;
    };
  }

  // Turn headings into buttons: the first press sorts upwards, the second downwards, the third as it was. `sort` does it.
  function makeSortable(line, sort) {
    [...line.children].forEach((head, column) => {
      const button = make("button", head.textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        const direction = { ascending: -1, descending: 0 }[head.getAttribute("aria-sort")] ?? 1;
        for (const other of line.children) other.removeAttribute("aria-sort");
        if (direction) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
        sort(column, direction);
      });
      head.replaceChildren(button);
    });
  }

  // The number that a cell begins with ("−0.3", "< 0.001", "1,800 of 2,000"), else its text; null for nothing.
  // What is set small below does not count.
  function valueOf(cell) {
    const text = (cell.firstChild?.textContent ?? "").trim();
    if (text === "" || text === "–") return null;
    const found = text.replaceAll(",", "").replace("−", "-").match(/^([<+]?) ?(-?\d+(?:\.\d+)?)/);
    return found ? Number(found[2]) * (found[1] === "<" ? 0.999 : 1) : text;
  }

  function sortTable(table) {
    const asWritten = [...table.tBodies[0].rows];
    makeSortable(table.tHead.rows[0], (column, direction) => {
      const values = asWritten.map((line) => valueOf(line.cells[column]));
      const count = (kind) => values.filter((value) => typeof value === kind).length;
      const numbers = count("number") > count("string");  // then a text among them ("base") comes last
      const rows = asWritten.map((line, order) => {
        const text = values[order] === null || numbers ? null : line.cells[column].firstChild.textContent;
        return { line, order, value: numbers && typeof values[order] === "number" ? values[order] : text };
      });
      if (direction) rows.sort(compare(rows, "value", direction));
      table.tBodies[0].append(...rows.map(({ line }) => line));
    });
  }

  function explore(root, data) {
    const rows = readRows(data);
    const search = makeSearch(data);
    const state = { rows, sort: "", direction: 1, page: 0, size: ON_SCREEN };
    const controls = make("div", "", "controls");
    const query = make("input");
    const selects = {};
    const status = make("p", "", "sub status");
    const body = make("tbody");
    const buttons = {};

    function render() {
      const last = Math.max(0, Math.ceil(state.rows.length / state.size) - 1);
      state.page = Math.min(Math.max(state.page, 0), last);
      const from = state.page * state.size;
      const shown = state.rows.slice(from, from + state.size);
      body.replaceChildren(...shown.map((row) => lineOf(row, data)));
      const of = state.rows.length < rows.length ? `${count(state.rows.length)} found of ${count(rows.length)}` : count(rows.length);
      status.textContent = shown.length ? `${count(from + 1)} to ${count(from + shown.length)} of ${of}` : `0 found of ${count(rows.length)}`;
      buttons.previous.setAttribute("aria-disabled", String(state.page === 0));  // disabled, it would lose the keyboard's focus
      buttons.next.setAttribute("aria-disabled", String(state.page === last));
    }

    function update() {
      const before = performance.now();
      const found = search(query.value);
      const wanted = Object.entries(selects).filter(([, select]) => select.value !== "");
      state.rows = rows.filter((row) => wanted.every(([key, select]) => row[key] === select.value) && found(row));
      if (state.sort) state.rows.sort(compare(state.rows, state.sort, state.direction));
      state.page = 0;
      render();
      root.dataset.filterMs = String(Math.round(performance.now() - before));
    }

    function addSelect(label, key) {
      const counts = new Map();
      for (const row of rows) counts.set(row[key], (counts.get(row[key]) ?? 0) + 1);
      counts.delete("");
      if (counts.size < 2) return;
      const names = [...counts.keys()];
      if (key === "doc") names.sort(new Intl.Collator("en", { numeric: true }).compare);
      const select = make("select");
      for (const [value, text] of [["", `all ${count(names.length)}`], ...names.map((name) => [name, `${name} (${count(counts.get(name))})`])]) {
        const option = make("option", text);
        option.value = value;
        select.append(option);
      }
      select.addEventListener("change", update);
      selects[key] = select;
      const wrapper = make("label", label);
      wrapper.append(select);
      controls.append(wrapper);
    }

    function heading() {
      const line = make("tr");
      const columns = rows.every((row) => row.written) ? [...COLUMNS.slice(0, -1), ACCEPTED] : COLUMNS;
      for (const [label] of columns) {
        const head = make("th", label);
        head.scope = "col";
        line.append(head);
      }
      makeSortable(line, (column, direction) => {
        state.sort = direction ? columns[column][1] : "";
        state.direction = direction;
        update();
      });
      return line;
    }

    function turn(label, step) {
      const button = make("button", label);
      button.type = "button";
      button.addEventListener("click", () => { state.page += step; render(); });
      return button;
    }

    query.type = "search";
    let waiting = 0;
    query.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(update, 150); });
    const wrapper = make("label", "search in questions, choices, contexts");
    wrapper.append(query);
    controls.append(wrapper);
    addSelect("change", "change");
    addSelect("arm", "arm");
    addSelect("question set", "set");
    addSelect("asked", "prompt");
    addSelect("document", "doc");

    status.setAttribute("aria-live", "polite");
    const head = make("thead");
    head.append(heading());
    const table = make("table", "", rows.every((row) => row.written) ? "changes texts" : "changes");
    table.append(head, body);
    const pager = make("div", "", "pager");
    buttons.previous = turn("← previous", -1);
    buttons.next = turn("next →", 1);
    pager.append(buttons.previous, status, buttons.next);
    render();
    const about = rows.some((row) => !row.written)
      ? "Margin: how much likelier the correct choice is than the best wrong one, as a difference of log-probs."
      : "Both answers stand side by side; a question opens to the accepted ones and to the passages before it.";
    root.replaceChildren(controls, pager, make("p", about, "sub"), table);
    for (const [event, size] of [["beforeprint", ON_PAPER], ["afterprint", ON_SCREEN]]) {
      addEventListener(event, () => {
        state.page = Math.floor(state.page * state.size / size);
        state.size = size;
        render();
      });
    }
    root.dataset.rows = String(rows.length);
    root.dataset.loadMs = String(Math.round(performance.now() - started));
  }

  const source = document.getElementById("changed-answers");
  const root = document.getElementById("explorer");
  if (source && root) explore(root, JSON.parse(source.textContent));

  for (const table of document.querySelectorAll(".scroll table")) {
    if (table.tHead && table.tBodies[0].rows.length > 2) sortTable(table);
  }

  // Above a table that is wider than the screen: a line telling that it scrolls.
  const scrolled = [...document.querySelectorAll(".scroll")];
  const mark = () => scrolled.forEach((box) => box.classList.toggle("more", box.scrollWidth > box.clientWidth + 2));
  addEventListener("resize", mark);
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", mark);
  mark();
})();
