// The drawings become charts that answer a hover, each when it is first seen: its page or pane may never be.
// `ast` has expressions interpreted, as the page's policy allows no code made of text.
{
  const options = { ast: true, renderer: "svg", actions: false, mode: "vega-lite" };
  const bring = async figure => {
    const spec = JSON.parse(figure.querySelector("script").textContent);
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
  document.querySelectorAll("figure.chart").forEach(figure => seen.observe(figure));
}
