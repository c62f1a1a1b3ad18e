// A click on a heading sorts its table: numbers by value, words by letter, missing cells last.
for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("th").forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const down = heading.getAttribute("aria-sort") === "ascending";
      table.querySelectorAll("th").forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
      const text = row => row.cells[column].textContent;
      const number = row => parseFloat(text(row).replaceAll(",", ""));
      const order = (a, b) => {
        const missing = (text(a) === "-") - (text(b) === "-");
        if (missing) return missing;
        const difference = number(a) - number(b);
        const result = Number.isNaN(difference) ? text(a).localeCompare(text(b)) : difference;
        return down ? -result : result;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(order));
    });
  });
}
