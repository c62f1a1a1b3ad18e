// DataTables, of the script above, sorts a table by a click on a heading and searches a long one, once it is in sight. A
// cell sorts by its first number, as in "0.5 (0.4 to 0.6)"; a missing one, "-", comes last.
const { DataTable } = $.fn;
const number = cell => parseFloat(cell.replaceAll(",", ""));
const missingLast = order => (a, b) => Number.isNaN(a) - Number.isNaN(b) || order * (a - b) || 0;
DataTable.type("first number", {
  className: "dt-type-numeric",
  detect: cell => cell === "-" || !Number.isNaN(number(cell)),
  order: { pre: number, asc: missingLast(1), desc: missingLast(-1) },
});
const observer = new IntersectionObserver(seen => {
  for (const { target } of seen.filter(each => each.isIntersecting)) {
    observer.unobserve(target);
    const isLong = target.tBodies[0].rows.length > 12;
    $(target).DataTable({ autoWidth: false, info: false, order: [], paging: false, searching: isLong });
  }
}, { rootMargin: "500px" });
document.querySelectorAll("table").forEach(table => observer.observe(table));
