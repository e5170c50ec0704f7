"use strict";
(() => {
  // Figures name colours "@name"; the stylesheet knows what they are in this theme. Names of ops are never looked at.
  const COLOURS = new Set(["color", "fgcolor", "bgcolor", "fillcolor", "gridcolor", "linecolor", "tickcolor",
    "spikecolor", "bordercolor", "paper_bgcolor", "plot_bgcolor"]);
  const figures = JSON.parse(document.getElementById("figures").textContent);

  function themed(node, style, key) {
    if (typeof node === "string") {
      return COLOURS.has(key) && node.startsWith("@") ? style.getPropertyValue("--" + node.slice(1)).trim() : node;
    }
    if (Array.isArray(node)) return node.map((child) => themed(child, style, key));
    if (node === null || typeof node !== "object") return node;
    return Object.fromEntries(Object.entries(node).map(([k, child]) => [k, themed(child, style, k)]));
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const div of document.querySelectorAll("[data-figure]")) {
      const { data, layout } = themed(figures[div.dataset.figure], style, "");
      Plotly.react(div, data, layout, {
        responsive: true, displaylogo: false, doubleClick: "reset",
        displayModeBar: div.dataset.figure.startsWith("timelines") ? "hover" : false,
        modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
      });
    }
  }

  function sort(button) {
    const th = button.closest("th"), table = th.closest("table"), column = th.cellIndex;
    const down = th.getAttribute("aria-sort") === "ascending";
    const key = (row) => row.cells[column].dataset.sort;
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // what nobody knows stands last, either way
      const difference = Number(x) - Number(y), order = Number.isNaN(difference) ? x.localeCompare(y) : difference;
      return down ? -order : order;
    });
    for (const other of th.parentElement.cells) other.removeAttribute("aria-sort");
    th.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  }

  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => sort(button));
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
