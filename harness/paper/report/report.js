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

// The explorer: the choices above it go into its specification, which is drawn anew. The library and the specification
// lie packed in the page (base64 of gzip) until the explorer is first seen. `ast` has expressions interpreted, since the
// page's policy allows no code made of text.
for (const explorer of document.querySelectorAll("#explorer")) {  // a block, since the library has global names
  const options = { ast: true, renderer: "svg", actions: false, mode: "vega-lite" };
  const target = explorer.querySelector(".chart"), selects = [...explorer.querySelectorAll("select")];
  const unpacked = name => {
    const text = atob(document.querySelector(`[data-packed=${name}]`).textContent);
    const bytes = Uint8Array.from(text, letter => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const load = async () => {
    const [library, spec] = await Promise.all(["library", "explorer"].map(unpacked));
    const script = document.createElement("script");
    script.textContent = library;
    document.body.append(script);
    return JSON.parse(spec);
  };
  let loaded;
  const draw = async () => {
    loaded ??= load();
    const spec = structuredClone(await loaded), { axes, fronts } = spec.usermeta;
    const chosen = Object.fromEntries(selects.map(each => [each.name, each.value]));
    const points = spec.data.values;
    const axis = (own, other) => {  // a task has a size of its own
      const field = `${other}_${own}`;
      return field in points[0] && own === "size" ? { ...axes[own], field } : axes[own];
    };
    const x = axis(chosen.x, chosen.y), y = axis(chosen.y, chosen.x);
    const drawn = { x, y };
    const fits = each => axes.kl_nats.field === each.field ? point => point[each.field] > 1e-6
      : each.scale.type === "log" ? point => point[each.field] > 0 : point => point[each.field] !== null;
    spec.data.values = points.filter(point => point.model === chosen.model
      && (!chosen.size || point.asked === chosen.size) && Object.values(drawn).every(each => fits(each)(point)));
    const front = chosen.y === "kl_nats" && fronts[chosen.x];
    const bars = Object.entries(drawn).filter(([, each]) => `${each.field}_low` in points[0]).slice(-1);
    const layers = Object.fromEntries(spec.layer.map(layer => [layer.name, layer]));
    layers.front.data = { values: spec.data.values.filter(point => front && point.front.split(", ").includes(front)) };
    for (const [channel, each] of bars) {
      layers.error.data = { values: spec.data.values.filter(point => point[`${each.field}_low`] !== null) };
      layers.error.encoding[channel] = { ...each, field: `${each.field}_low` };
      layers.error.encoding[`${channel}2`] = { field: `${each.field}_high` };
    }
    if (!bars.length) spec.layer = spec.layer.filter(layer => layer !== layers.error);
    if (!Object.values(chosen).includes("step_s")) layers.point.encoding.fillOpacity = { value: 0.9 };
    for (const [channel, each] of Object.entries(drawn)) {
      const names = bars.some(([barred]) => barred === channel) ? ["", "_low", "_high"] : [""];
      const values = names.flatMap(name => spec.data.values.map(point => point[each.field + name] ?? point[each.field]));
      if (values.length) each.scale = { ...each.scale, domain: [Math.min(...values), Math.max(...values)] };
    }
    spec.encoding = drawn;
    await vegaEmbed(target, spec, options);
  };
  const redraw = () => draw().catch(console.error);
  selects.forEach(each => each.addEventListener("change", redraw));
  const seen = new IntersectionObserver(entries => {
    if (entries.some(entry => entry.isIntersecting)) {
      seen.disconnect();
      redraw();
    }
  }, { rootMargin: "300px" });
  seen.observe(explorer);
}
