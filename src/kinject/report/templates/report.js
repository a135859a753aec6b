"use strict";
// Sorts tables by their headings, and marks those that are wider than the screen. Nothing is read from elsewhere, kept or sent.
(() => {
  // Turn headings into buttons: the first press sorts upwards, the second downwards, the third as it was. `sort` does it.
  function makeSortable(line, sort) {
    [...line.children].forEach((head, column) => {
      const button = document.createElement("button");
      button.textContent = head.textContent;
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

  const SECONDS = { h: 3600, min: 60, s: 1 };

  // The number that a cell begins with ("−0.3", "< 0.001", "1e-05", "1,800 of 2,000"), the seconds of a time
  // ("3 h 20 min"), else its text; null for nothing. What is set small below does not count.
  function valueOf(cell) {
    const text = (cell.firstChild?.textContent ?? "").trim();
    if (text === "" || text === "–") return null;
    if (/^(\d+ (h|min|s)\b ?)+$/.test(text)) {
      const parts = [...text.matchAll(/(\d+) (h|min|s)/g)];
      return parts.reduce((sum, [, n, unit]) => sum + n * SECONDS[unit], 0);
    }
    const plain = text.replaceAll(",", "").replace("−", "-");
    const found = plain.match(/^([<+]?) ?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)/);
    return found ? Number(found[2]) * (found[1] === "<" ? 0.999 : 1) : text;
  }

  function sortTable(table) {
    const collator = new Intl.Collator("en", { numeric: true });
    const asWritten = [...table.tBodies[0].rows];
    makeSortable(table.tHead.rows[0], (column, direction) => {
      const values = asWritten.map((line) => valueOf(line.cells[column]));
      const count = (kind) => values.filter((value) => typeof value === kind).length;
      const numbers = count("number") > count("string");  // then a text among them ("base") comes last
      const rows = asWritten.map((line, order) => {
        const text = values[order] === null ? null : line.cells[column].firstChild.textContent;
        return { line, order, value: !numbers ? text : typeof values[order] === "number" ? values[order] : null };
      });
      rows.sort((one, other) => {
        const [a, b] = [one.value, other.value];
        if (!direction || (a === null && b === null)) return one.order - other.order;
        if (a === null || b === null) return (a === null) - (b === null);
        return direction * (numbers ? a - b : collator.compare(a, b)) || one.order - other.order;
      });
      table.tBodies[0].append(...rows.map(({ line }) => line));
    });
  }

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
