{  // a block, since the library has global names
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

// The explorer: the choices above it make its Vega-Lite specification, which is drawn anew. The library and the points
// lie packed in the page (base64 of gzip) until the explorer is first seen. `ast` has expressions interpreted, since the
// page's policy allows no code made of text.
const HEIGHT = 420, NARROW = 400;  // pixels: of the chart, and where it is a phone's
const LETTER = 5.6, LINE = 11, BESIDE = 8, DOT = 4;  // pixels: of names and of points
// The points that can be named without a name upon another name or point: those of the front first, then the lowest. On
// the side where there is room.
const named = (points, x, y, width) => {
  const place = (value, { scale: { type, domain: [least, most] } }) => {
    const along = type === "log" ? Math.log : number => number;
    return most > least ? (along(value) - along(least)) / (along(most) - along(least)) : .5;
  };
  const dots = points.map(point => {
    const left = place(point[x.field], x) * width, top = (1 - place(point[y.field], y)) * HEIGHT;
    return { left: left - DOT, top: top - DOT, width: 2 * DOT, height: 2 * DOT };
  });
  const isFree = box => taken.every(other => box.left > other.left + other.width || other.left > box.left + box.width
    || box.top > other.top + other.height || other.top > box.top + box.height);
  const taken = [...dots], found = { left: [], right: [] };
  points.forEach((point, number) => {
    const { left, top } = dots[number], length = LETTER * point.label.length;
    for (const [side, begin] of [["left", left + DOT + BESIDE], ["right", left + DOT - BESIDE - length]]) {
      const box = { left: begin, top: top + DOT - LINE - 2, width: length, height: LINE };
      if (begin < 0 || begin + length > width || !isFree(box)) continue;
      taken.push(box);
      found[side].push(point);
      break;
    }
  });
  return found;
};
const specification = ({ points, axes, tooltip, fronts, families }, chosen, width) => {
  const quantity = field => {
    const [title, type] = axes[field], least = type === "log" ? 0 : -Infinity;
    return { field, least, type: "quantitative", title, scale: { type, nice: false, padding: 12 } };
  };
  const x = quantity(chosen.x), y = quantity(chosen.y);
  const values = points.filter(point => point.over === chosen.over && point.windows === chosen.windows
    && (!chosen.budget || point.asked === chosen.budget)
    && [x, y].every(({ field, least }) => point[field] !== null && point[field] > least));
  for (const { field, scale } of [x, y]) {
    const numbers = values.flatMap(point => [point[field], point[`${field}_low`], point[`${field}_high`]]);
    const finite = numbers.filter(Number.isFinite);
    if (finite.length) scale.domain = [Math.min(...finite), Math.max(...finite)];
  }
  const front = values.filter(point => chosen.y === "kl_nats" && point.front.split(", ").includes(fronts[chosen.x]));
  const error = (name, { field, ...each }) => ({
    data: { values: values.filter(point => Number.isFinite(point[`${field}_low`])) },
    mark: { type: "rule", opacity: .4 },
    encoding: { [name]: { ...each, field: `${field}_low` }, [`${name}2`]: { field: `${field}_high` }, stroke: color },
  });
  const look = name => ({ field: "family", type: "nominal",
    scale: { domain: Object.keys(families), range: Object.values(families).map(each => each[name]) } });
  const color = look("color"), page = "currentColor";
  const either = (test, value, otherwise) => ({ condition: { test, value }, value: otherwise });
  const pale = either({ field: "modelled", equal: true }, .25, .9);
  const others = values.filter(point => !front.includes(point)).sort((a, b) => a[y.field] - b[y.field]);
  const names = named([...front, ...others], x, y, width);
  const unlessChosen = [{ filter: { and: [{ param: "method" }, { not: { param: "method", empty: false } }] } }];
  const text = align => ({ type: "text", align, dx: (align === "left" ? 1 : -1) * BESIDE, dy: -6, fontSize: 11, fill: page });
  const label = { text: { field: "label", type: "nominal" } };
  const ofChosen = [{ filter: { param: "method", empty: false } }];
  return {
    width: "container", height: HEIGHT, background: null, data: { values }, encoding: { x, y },
    layer: [
      { data: { values: front }, mark: { type: "line", stroke: page, strokeWidth: 1, opacity: .5 } },
      { transform: ofChosen, mark: { type: "line", strokeDash: [4, 3], stroke: page, strokeWidth: 1.5 },
        encoding: { detail: { field: "name" } } },
      error("x", x), error("y", y),
      { params: [
          { name: "method", select: { type: "point", fields: ["name"], toggle: "event.shiftKey" } },
          { name: "family", select: { type: "point", fields: ["family"] }, bind: "legend" }],
        mark: { type: "point", size: 70, cursor: "pointer" },
        encoding: {
          stroke: color, fill: color, shape: look("shape"),
          fillOpacity: [chosen.x, chosen.y].includes("step_s") ? pale : { value: .9 },
          opacity: either({ and: [{ param: "method" }, { param: "family" }] }, 1, .12),
          tooltip: Object.entries(tooltip).map(([field, title]) => ({ field, title, type: "nominal" })) } },
      { transform: ofChosen, mark: text("left"), encoding: label },
      ...Object.entries(names).map(([align, each]) => ({ data: { values: each }, transform: unlessChosen,
        mark: { ...text(align), fontSize: 10, opacity: .75 }, encoding: label })),
    ],
    config: {
      font: "system-ui, sans-serif", view: { stroke: null },
      axis: { labelColor: page, titleColor: page, domainColor: page, tickColor: page, gridColor: page, gridOpacity: .15,
        titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 11, format: "~g" },
      legend: { labelColor: page, orient: "top", labelFontSize: 12, symbolOpacity: 1, title: null,
        columns: width < NARROW ? 3 : 0 },
    },
  };
};
const unpacked = async name => {
  const text = atob(document.querySelector(`[data-packed=${name}]`).textContent);
  const bytes = Uint8Array.from(text, letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
const whenSeen = (element, begin) => {
  const observer = new IntersectionObserver(entries => {
    if (entries.some(entry => entry.isIntersecting)) {
      observer.disconnect();
      begin();
    }
  }, { rootMargin: "300px" });
  observer.observe(element);
};
for (const explorer of document.querySelectorAll("#explorer")) {
  const options = { ast: true, renderer: "svg", actions: false, mode: "vega-lite" };
  const target = explorer.querySelector(".chart"), selects = [...explorer.querySelectorAll("select")];
  const load = async () => {
    const [library, data] = await Promise.all(["library", "explorer"].map(unpacked));
    const script = document.createElement("script");
    script.textContent = library;
    document.body.append(script);
    return JSON.parse(data);
  };
  let loaded;
  const draw = async () => {
    loaded ??= load();
    const chosen = Object.fromEntries(selects.map(each => [each.name, each.value]));
    const spec = specification(await loaded, chosen, target.clientWidth - 70);  // which brings the library as well
    await vegaEmbed(target, spec, options);
  };
  const redraw = () => draw().catch(console.error);
  selects.forEach(each => each.addEventListener("change", redraw));
  whenSeen(explorer, redraw);
}
}
