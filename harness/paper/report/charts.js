// The drawings become charts that answer a hover, each when it is first seen: its page or pane may never be. The library
// and the specifications lie packed in the page (base64 of gzip) until the first one is; the page's policy names the
// library, as any script. `ast` has expressions interpreted, as the policy allows no code made of text.
{
  const options = { ast: true, renderer: "svg", actions: false, mode: "vega-lite" };
  const unpacked = name => {
    const text = atob(document.querySelector(`[data-packed=${name}]`).textContent);
    const bytes = Uint8Array.from(text, letter => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const load = async () => {
    const [library, charts] = await Promise.all(["library", "charts"].map(unpacked));
    const script = document.createElement("script");
    script.textContent = library;
    document.body.append(script);
    return JSON.parse(charts);
  };
  const figures = [...document.querySelectorAll("figure.chart")];
  let specs;
  const bring = async figure => {
    specs ??= load();
    const spec = (await specs)[figures.indexOf(figure)];
    await vegaEmbed(figure.querySelector(".live"), { ...spec, width: "container" }, options);
    figure.classList.add("alive");
  };
  const seen = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        bring(entry.target).catch(console.error);  // the drawing stays
      }
    }
  }, { rootMargin: "300px" });
  figures.forEach(figure => seen.observe(figure));
}
